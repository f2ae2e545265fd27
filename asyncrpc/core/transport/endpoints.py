"""Endpoints: the IP addresses behind a name, and the first of them that answers.

Names are looked up in threads of our own, never in the loop's executor: a name service
that is silent holds a thread for half a minute, and the loop would wait for it at its
end.  A lookup that is given up goes on alone; the next caller that asks for the name
joins it.
An answer is never kept: a name that does not resolve now may resolve in a second.

The addresses of one name are raced, as those of one peer are in `dial`; see `race`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import ipaddress
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.transport.race import Race

LOOKUPS_MAX: Final = 16  # threads that wait for the name service
_NO_ROUTE: Final = (
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN),
)
_CUT: Final = (errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)
_WORDS: Final = dict.fromkeys(_NO_ROUTE, "no route") | dict.fromkeys(_CUT, "cut off")


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """An IP address and a port.

    Attributes:
        host: the address in digits; of link-local IPv6, with its scope.
    """

    host: str
    port: int

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The address without its scope."""
        return ipaddress.ip_address(self.host.partition("%")[0])

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Resolver:
    """Looks names up."""

    def __init__(self) -> None:
        self._under_way: dict[str, concurrent.futures.Future[list[str]]] = {}

    async def resolve(self, host: str, port: int) -> list[Endpoint]:
        """Return the endpoints that a name stands for now, best first."""
        if is_numeric(host):
            return [Endpoint(host, port)]
        while True:
            lookup = self._under_way.get(host)
            if lookup is not None or len(self._under_way) < LOOKUPS_MAX:
                break
            waiting = [
                asyncio.wrap_future(other_lookup)
                for other_lookup in self._under_way.values()
            ]
            # Each ends when the name service has answered, or its time has passed.
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        hosts = await asyncio.wrap_future(lookup or self._begin(host))
        return [Endpoint(address, port) for address in hosts]

    def _begin(self, host: str) -> concurrent.futures.Future[list[str]]:
        lookup: concurrent.futures.Future[list[str]] = concurrent.futures.Future()
        lookup.set_running_or_notify_cancel()  # a waiter cannot cancel it for others
        self._under_way[host] = lookup

        def look_up() -> None:
            try:
                addresses = _addresses_of(host)
            except (OSError, UnicodeError) as error:
                self._under_way.pop(host, None)
                lookup.set_exception(_not_resolved(host, error))
            else:
                self._under_way.pop(host, None)
                lookup.set_result(addresses)

        threading.Thread(target=look_up, name="asyncrpc-lookup", daemon=True).start()
        return lookup


def is_numeric(host: str) -> bool:
    """Return whether a host is an IP address in digits."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _addresses_of(host: str) -> list[str]:
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _not_resolved(host: str, error: Exception) -> OSError:
    if isinstance(error, UnicodeError):  # not a DNS name: a label is empty or too long
        return socket.gaierror(socket.EAI_NONAME, f"{host!r} is not a host name")
    assert isinstance(error, OSError)
    return error


class NoneAnswersError(OSError):
    """None of several endpoints can be reached; the text gives each with its reason."""


class AllRefusedError(ConnectionRefusedError):
    """No process listens at any of several endpoints; the text lists them."""


def reason_of(error: BaseException) -> str:
    """Return in words why a connection could not be made."""
    if isinstance(error, (NoneAnswersError, AllRefusedError)):
        return str(error.strerror)
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "refused: no process listens there"
    if isinstance(error, TimeoutError):
        return "silent: no answer"
    if not isinstance(error, OSError):
        return str(error)
    reason = shortage_of(error) or error.strerror or str(error)
    words = _WORDS.get(error.errno or 0)
    return f"{words} ({reason})" if words else reason


async def connected_socket(endpoints: Sequence[Endpoint]) -> socket.socket:
    """Connect to the first of several endpoints that answers.

    Args:
        endpoints: in the order in which they are tried; at least one.
    """
    race = Race(_connect, socket.socket.close)
    winner = await race.run(endpoints)
    if winner is None:
        raise _none_answers(race.errors)
    return winner


async def _connect(endpoint: Endpoint) -> socket.socket:
    loop = asyncio.get_running_loop()
    version = endpoint.address.version
    family = socket.AF_INET if version == 4 else socket.AF_INET6  # noqa: PLR2004
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(0)
        # A loop takes the address as the kernel does, scope and all.
        info = socket.getaddrinfo(
            endpoint.host, endpoint.port, family, flags=socket.AI_NUMERICHOST
        )
        await loop.sock_connect(sock, info[0][4])
    except BaseException:
        sock.close()
        raise
    return sock


def _none_answers(errors: dict[Endpoint, OSError]) -> OSError:
    reasons = "; ".join(
        f"{endpoint}: {reason_of(error)}" for endpoint, error in errors.items()
    )
    if len(errors) == 1:
        return next(iter(errors.values()))
    if all(isinstance(error, ConnectionRefusedError) for error in errors.values()):
        return AllRefusedError(errno.ECONNREFUSED, reasons)
    return NoneAnswersError(errno.EHOSTUNREACH, reasons)
