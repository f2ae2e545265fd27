"""Dialling: one connection to a peer that published several addresses.

The addresses are raced, in the order in which the peer published them; see `race`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncrpc.core.transport.abc import Connector, StreamHandler, Transport
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.race import Race
from asyncrpc.errors import (
    AuthenticationError,
    ConnectError,
    RefusedError,
    UnansweredError,
)

HandlerT = TypeVar("HandlerT", bound=StreamHandler)


@dataclass(frozen=True, slots=True)
class Dialled(Generic[HandlerT]):
    """The connection that won: its address, its transport and its handler."""

    address: Address
    transport: Transport
    handler: HandlerT


async def connect_any(
    addresses: Sequence[Address],
    handler_factory: Callable[[], HandlerT],
    connectors: Mapping[str, Connector],
    *,
    limit_s: float | None = None,
) -> Dialled[HandlerT]:
    """Connect to the first of `addresses` that answers.

    Args:
        connectors: by scheme; addresses of other schemes are skipped.
        limit_s: seconds for all of it; None: no limit but those of the transports.
    """

    async def connect(address: Address) -> Dialled[HandlerT]:
        connector = connectors.get(address.scheme)
        if connector is None:
            known = ", ".join(sorted(connectors)) or "none"
            raise ConnectError(f"no connector for this scheme; there are: {known}")
        handler = handler_factory()
        transport = await connector.connect(address, handler)
        return Dialled(address, transport, handler)

    race = Race(connect, lambda late: late.transport.close())
    winner = await race.run(addresses, limit_s=limit_s)
    if winner is None:
        raise _none_answers(addresses, race.errors, limit_s)
    return winner


def _none_answers(
    addresses: Sequence[Address],
    failures: Mapping[Address, OSError],
    limit_s: float | None,
) -> ConnectError:
    if not addresses:
        return ConnectError("none of its addresses can be used here")
    silent = UnansweredError(f"silent: no answer in {limit_s or 0.0:g} s")
    errors = {address: failures.get(address, silent) for address in addresses}
    reasons = "; ".join(
        f"{address}: {_reason(address, errors[address])}" for address in addresses
    )
    kind: type[ConnectError] = ConnectError
    if all(isinstance(error, RefusedError) for error in errors.values()):
        kind = RefusedError
    if silent in errors.values():
        kind = UnansweredError
    if any(isinstance(error, AuthenticationError) for error in errors.values()):
        kind = AuthenticationError
    error = kind(f"cannot connect to any of {len(addresses)}: {reasons}")
    error.__cause__ = errors[addresses[0]]
    return error


def _reason(address: Address, error: OSError) -> str:
    """Return why an attempt failed; the caller adds its address."""
    return str(error).removeprefix(f"cannot connect to {address}: ")
