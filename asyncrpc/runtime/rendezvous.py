"""How workers find each other: a torch store, a list, or a dictionary in one process.

Each worker publishes one record: its name, rank, incarnation and addresses.  The last
one to arrive says so, the others wait for that word and read the records once: the
work at the store is linear in the number of workers, and connections are made later,
on demand.  After that the store is not needed; whoever hosts it waits until everyone
has read.  If some do not come in time, the first to notice says who; all fail alike.

Store calls block, so they run in a thread of their own, never on the loop.

Source: `env://` is the contract of torchrun (torch.distributed.run).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgpack
from torch.distributed import DistNetworkError, FileStore, TCPStore  # type: ignore[attr-defined]

from asyncrpc.clock import Clock
from asyncrpc.errors import RendezvousTimeoutError, UsageError
from asyncrpc.ids import Incarnation

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
PREFIX: Final = "asyncrpc/rpc"
UNKNOWN_INCARNATION: Final = Incarnation(0)
_WORD: Final = f"{PREFIX}/word"
_ALL: Final = "all"
_POLL_S: Final = 0.02
# How long a thread stays in one call of a store: so soon can it be called off.
_SLICE_S: Final = 0.25
_ATTEMPT_S: Final = 1.0
_now_s: Final = Clock().now_s


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of a worker before a connection to it is open.

    Attributes:
        name: of the worker.
        rank: of the worker; -1 if it has none.
        incarnation: 0 until it is known.
        addresses: where it can be reached, best first.
        host_id: host and network namespace; Unix sockets reach only the same one.
    """

    name: str
    rank: int
    incarnation: Incarnation
    addresses: tuple[str, ...]
    host_id: str = ""

    def encode(self) -> bytes:
        """Return the record that is published."""
        record = [self.name, self.rank, self.incarnation, self.addresses, self.host_id]
        packed: bytes = msgpack.packb(record)
        return packed

    @classmethod
    def decode(cls, packed: bytes) -> Member:
        """Read what `encode` wrote."""
        name, rank, incarnation, addresses, host_id = msgpack.unpackb(packed)
        return cls(name, rank, Incarnation(incarnation), tuple(addresses), host_id)


class Rendezvous(Protocol):
    """Where workers meet."""

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Publish `member`; return all members, once they are all there.

        Raises:
            RendezvousTimeoutError: some are missing; it names them.
            UsageError: the name or the rank is taken.
        """

    async def leave(self, timeout_s: float) -> None:
        """Let go of the meeting place; a host waits for those still reading."""


@dataclass(slots=True)
class StaticRendezvous:
    """A list that every worker is given: names and where they listen."""

    addresses: Mapping[str, str | Sequence[str]]

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Return the list; whether anybody is there shows when he is called."""
        if member.name not in self.addresses:
            raise UsageError(
                f"worker {member.name!r} is not in the static list; it has: "
                + ", ".join(repr(name) for name in self.addresses)
            )
        return [
            Member(
                name,
                rank,
                UNKNOWN_INCARNATION,
                (where,) if isinstance(where, str) else tuple(where),
            )
            for rank, (name, where) in enumerate(self.addresses.items())
        ]

    async def leave(self, timeout_s: float) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class LocalRendezvous:
    """A meeting place inside one process; all workers are given the same object."""

    world_size: int
    _members: dict[str, Member] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Publish the record in a dictionary, and wait for the others.

        Raises:
            RendezvousTimeoutError: some are missing; it names their ranks.
            UsageError: the name or the rank is taken.

        Cancellation:
            The record stays published.
        """
        _refuse_taken(member, self._members.values())
        self._members[member.name] = member
        self._changed.set()
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._members) < self.world_size:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            present = {one.rank for one in self._members.values()}
            missing = sorted(set(range(self.world_size)) - present)
            raise _timed_out(missing, self.world_size, timeout_s) from None
        return list(self._members.values())

    async def leave(self, timeout_s: float) -> None:
        """Do nothing: nothing is held.

        Raises:
            Nothing.

        Cancellation:
            There is nothing to undo.
        """


class StoreRendezvous:
    """A meeting at a torch store.

    One word ends the wait of all: that everyone is there, from the last to arrive, or
    who is missing, from the first whose time is up.
    """

    def __init__(
        self, open_store: Callable[[float], Store], rank: int, world_size: int
    ) -> None:
        """Prepare to meet.

        Args:
            open_store: opens the store within so many seconds; runs in a thread.
            rank: of this worker.
            world_size: how many workers there are.
        """
        self._open_store = open_store
        self.rank = rank
        self.world_size = world_size
        self._store: Store | None = None
        self._readers = 0  # who reads the store to the end
        self._given_up = threading.Event()
        self._thread = ThreadPoolExecutor(1, f"asyncrpc-rendezvous-{rank}")

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Publish the record and wait for the word.

        Raises:
            RendezvousTimeoutError: some are missing, or the store is; it says which.
            UsageError: the name or the rank is taken.

        Cancellation:
            The thread that waits is called off, and `leave` finds it free soon.  The
            record stays published.
        """
        try:
            return await self._in_thread(self._join, member, timeout_s)
        except asyncio.CancelledError:
            self._given_up.set()
            raise

    async def leave(self, timeout_s: float) -> None:
        """Wait until everyone has read, then let go of the store."""
        try:
            await self._in_thread(self._await_readers, timeout_s)
        finally:
            self._store = None
            self._thread.shutdown(wait=False)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *args)

    def _join(self, member: Member, timeout_s: float) -> list[Member]:
        end_s = _now_s() + timeout_s
        store = self._store = self._open(end_s, timeout_s)
        try:
            self._publish(store, member)
            missing = self._await_word(store, end_s)
            keys = [f"{PREFIX}/member/{rank}" for rank in range(self.world_size)]
            members = [] if missing else _get_all(store, keys)
            store.add(f"{PREFIX}/read", 1)
        except DistNetworkError as error:
            raise RendezvousTimeoutError(
                "the store for the rendezvous was closed while this worker waited "
                f"({_first_line(error)}); the worker of rank 0, or the launcher, ended",
                missing=(0,),
            ) from error
        self._readers = self.world_size - len(missing)
        if missing:
            raise _timed_out(missing, self.world_size, timeout_s)
        return [Member.decode(packed) for packed in members]

    def _open(self, end_s: float, timeout_s: float) -> Store:
        """Open the store, in short attempts so that this can be called off."""
        while True:
            left_s = max(_SLICE_S, end_s - _now_s())
            try:
                store = self._open_store(min(left_s, _ATTEMPT_S))
            except (RuntimeError, OSError) as error:
                is_over = self._given_up.wait(_SLICE_S) or _now_s() >= end_s
                if self.rank and not is_over:  # its host may come yet
                    continue
                raise RendezvousTimeoutError(
                    f"the store for the rendezvous cannot be reached in {timeout_s:g} s"
                    f" ({_first_line(error)}); is the worker of rank 0, or the "
                    "launcher, running?",
                    missing=(0,),
                ) from error
            store.set_timeout(timedelta(seconds=timeout_s))
            return store

    def _publish(self, store: Store, member: Member) -> None:
        if store.add(f"{PREFIX}/name/{member.name}", 1) > 1:
            raise UsageError(
                f"the name {member.name!r} is not unique: another worker of this group "
                "has it"
            )
        if store.add(f"{PREFIX}/rank/{self.rank}", 1) > 1:
            raise UsageError(f"two workers of this group have rank {self.rank}")
        store.set(f"{PREFIX}/member/{self.rank}", member.encode())  # type: ignore[arg-type]
        if store.add(f"{PREFIX}/joined", 1) == self.world_size:
            store.compare_set(_WORD, "", _ALL)

    def _await_word(self, store: Store, end_s: float) -> list[int]:
        """Return who is missing, as all are told; ask in short waits."""
        while (left_s := end_s - _now_s()) > 0 and not self._given_up.is_set():
            try:
                store.wait([_WORD], timedelta(seconds=min(left_s, _SLICE_S)))
            except DistNetworkError:
                raise
            except RuntimeError:  # what a store raises when the time is up
                continue
            return _missing_in(store.get(_WORD))
        return self._give_word(store)

    def _give_word(self, store: Store) -> list[int]:
        """Say who is missing, unless the word has been given just now."""
        absent = (
            str(rank)
            for rank in range(self.world_size)
            if not store.check([f"{PREFIX}/member/{rank}"])
        )
        word = ",".join(absent) or _ALL
        return _missing_in(store.compare_set(_WORD, "", word))

    def _await_readers(self, timeout_s: float) -> None:
        """Keep a store alive that this worker hosts until all have read it."""
        store = self._store
        end_s = _now_s() + timeout_s
        if store is None or self.rank != 0:
            return
        poll = threading.Event()  # never set: a way to wait
        while store.add(f"{PREFIX}/read", 0) < self._readers and _now_s() < end_s:
            poll.wait(_POLL_S)


def _missing_in(word: bytes) -> list[int]:
    text = word.decode()
    return [] if text == _ALL else [int(rank) for rank in text.split(",")]


def _first_line(error: BaseException) -> str:
    """Return what a store says, without the stack of its library."""
    return str(error).partition("\n")[0]


def _get_all(store: Store, keys: list[str]) -> list[bytes]:
    try:
        found: list[bytes] = store.multi_get(keys)
    except (RuntimeError, NotImplementedError):  # a store without it
        found = [store.get(key) for key in keys]
    return found


def _refuse_taken(member: Member, others: Any) -> None:
    for other in others:
        if other.name == member.name:
            raise UsageError(
                f"the name {member.name!r} is not unique: another worker of this group "
                "has it"
            )
        if other.rank == member.rank >= 0:
            raise UsageError(f"two workers of this group have rank {member.rank}")


def _timed_out(
    missing: Sequence[int], world_size: int, timeout_s: float
) -> RendezvousTimeoutError:
    named = ", ".join(str(rank) for rank in missing[:20])
    more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""  # noqa: PLR2004
    return RendezvousTimeoutError(
        f"{world_size - len(missing)} of {world_size} workers appeared within {timeout_s:g} s; "
        f"missing: rank {named}{more}",
        missing=missing,
    )


def open_rendezvous(
    where: str | Mapping[str, str | Sequence[str]] | Rendezvous,
    *,
    rank: int | None,
    world_size: int | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Rendezvous, int, int]:
    """Make the rendezvous that `where` describes.

    Args:
        where: `env://`, `tcp://host:port`, `file:///path`, a mapping from worker names
            to addresses, or a rendezvous.
        rank: of this worker; None takes it from the environment or the URL.
        world_size: likewise.
        environ: read by `env://`.

    Returns:
        The rendezvous, the rank and the world size.

    Raises:
        UsageError: something is missing; the message says what and where to give it.
    """
    if isinstance(where, Mapping):
        return StaticRendezvous(where), -1 if rank is None else rank, len(where)
    if not isinstance(where, str):
        size: int = world_size or getattr(where, "world_size", 0) or 0
        return where, -1 if rank is None else rank, size
    url = urlsplit(where)
    query = {key: values[0] for key, values in parse_qs(url.query).items()}
    is_env = url.scheme == "env"
    rank = _number("rank", rank, query, environ if is_env else {}, "RANK")
    world_size = _number(
        "world_size", world_size, query, environ if is_env else {}, "WORLD_SIZE"
    )
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not in a world of {world_size} workers")
    open_store = _store_opener(where, rank, environ)
    return StoreRendezvous(open_store, rank, world_size), rank, world_size


def _number(
    what: str,
    given: int | None,
    query: Mapping[str, str],
    environ: Mapping[str, str],
    variable: str,
) -> int:
    if given is not None:
        return given
    text = query.get(what, environ.get(variable))
    if text is None:
        raise UsageError(
            f"{what} is missing: pass {what}=..., or set {variable} and use env:// "
            "(torchrun and `asyncrpc run` do)"
        )
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{what} is no number: {text!r}") from None


def _store_opener(
    where: str, rank: int, environ: Mapping[str, str]
) -> Callable[[float], Store]:
    url = urlsplit(where)
    if url.scheme == "file":
        path = url.path
        if not path:
            raise UsageError(f"{where!r} names no file; use file:///path")
        return lambda _timeout_s: FileStore(path)
    if url.scheme == "env":
        host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
        if not host or not port:
            raise UsageError(
                "env:// needs MASTER_ADDR and MASTER_PORT; torchrun and `asyncrpc run` "
                "set them"
            )
        hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return _tcp_opener(host, int(port), is_master=rank == 0 and not hosted)
    if url.scheme == "tcp" and url.hostname and url.port:
        return _tcp_opener(url.hostname, url.port, is_master=rank == 0)
    raise UsageError(
        f"{where!r} is no rendezvous; use env://, tcp://host:port, file:///path, or a "
        "mapping from names to addresses"
    )


def _tcp_opener(host: str, port: int, *, is_master: bool) -> Callable[[float], Store]:
    def open_store(timeout_s: float) -> Store:
        return TCPStore(
            host,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )

    return open_store
