"""Dialling: one connection to a peer that published several addresses.

The addresses are raced, best first: a later one starts when the one before it has
failed, or has not succeeded within the stagger.  A dead route therefore costs a quarter
of a second, and not the two minutes of a TCP timeout.

Source: RFC 8305 (Happy Eyeballs), section 5; we take the publisher's order as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncrpc.errors import (
    AuthenticationError,
    ConnectError,
    RefusedError,
    TransportError,
)
from asyncrpc.transport.abc import Connector, StreamHandler, Transport
from asyncrpc.transport.address import Address
from asyncrpc.transport.endpoints import STAGGER_S

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
    stagger_s: float = STAGGER_S,
    limit_s: float | None = None,
) -> Dialled[HandlerT]:
    """Connect to the first of `addresses` that answers.

    Args:
        addresses: where the peer can be reached, best first.
        handler_factory: makes a handler for each attempt.  Handlers of attempts that
            lose may see `connection_made` and then `connection_lost`.
        connectors: by scheme; addresses of other schemes are skipped.
        stagger_s: seconds after which the next attempt joins one that still runs.
        limit_s: seconds for all of it; None: no limit but those of the transports.

    Raises:
        RefusedError: no process listens at any of the addresses.
        AuthenticationError: no address answered, and at one of them a certificate was
            refused, at either end.
        ConnectError: no address answered; the message lists each with its reason.

    Cancellation:
        Every attempt is given up and its socket closed.
    """
    race = _Race(handler_factory, connectors, stagger_s)
    try:
        with contextlib.suppress(TimeoutError):  # then some have not answered
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                race.run(addresses, tasks)
    except BaseException as error:
        if race.winner is not None:
            race.winner.transport.abort()
        if isinstance(error, BaseExceptionGroup):  # a bug: show it, not its wrapping
            raise error.exceptions[0] from error
        raise
    if race.winner is None:
        raise race.lost(addresses, limit_s)
    return race.winner


class _Attempt:
    """One address in a race."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.error: TransportError | None = None


class _Race(Generic[HandlerT]):
    def __init__(
        self,
        handler_factory: Callable[[], HandlerT],
        connectors: Mapping[str, Connector],
        stagger_s: float,
    ) -> None:
        self.winner: Dialled[HandlerT] | None = None
        self._handler_factory = handler_factory
        self._connectors = connectors
        self._stagger_s = stagger_s
        self._lanes: list[_Attempt] = []
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, addresses: Sequence[Address], tasks: asyncio.TaskGroup) -> None:
        before: _Attempt | None = None
        for address in addresses:
            lane = _Attempt(address)
            self._lanes.append(lane)
            name = f"asyncrpc-dial-{address}"
            self._tasks.append(
                tasks.create_task(self._attempt(lane, before), name=name)
            )
            before = lane

    def lost(self, addresses: Sequence[Address], limit_s: float | None) -> ConnectError:
        if not addresses:
            return ConnectError("none of its addresses can be used here")
        for lane in self._lanes:
            if lane.error is None:
                lane.error = ConnectError(f"silent: no answer in {limit_s or 0.0:g} s")
        reasons = "; ".join(f"{lane.address}: {_reason(lane)}" for lane in self._lanes)
        refused = all(isinstance(lane.error, RefusedError) for lane in self._lanes)
        kind: type[ConnectError] = RefusedError if refused else ConnectError
        if any(isinstance(lane.error, AuthenticationError) for lane in self._lanes):
            kind = AuthenticationError
        error = kind(f"cannot connect to any of {len(addresses)}: {reasons}")
        error.__cause__ = self._lanes[0].error
        return error

    async def _attempt(self, lane: _Attempt, before: _Attempt | None) -> None:
        if before is not None:
            await self._wait_turn(before)
        lane.started.set()
        try:
            await self._connect(lane.address)
        except TransportError as error:
            lane.error = error
        lane.ended.set()

    async def _wait_turn(self, before: _Attempt) -> None:
        await before.started.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stagger_s):
                await before.ended.wait()

    async def _connect(self, address: Address) -> None:
        connector = self._connectors.get(address.scheme)
        if connector is None:
            known = ", ".join(sorted(self._connectors)) or "none"
            raise ConnectError(f"no connector for this scheme; there are: {known}")
        handler = self._handler_factory()
        transport = await connector.connect(address, handler)
        if self.winner is not None:  # both came up in one turn of the loop
            transport.close()
            return
        self.winner = Dialled(address, transport, handler)
        me = asyncio.current_task()
        for task in self._tasks:
            if task is not me:
                task.cancel()


def _reason(attempt: _Attempt) -> str:
    """Return why an attempt failed; the caller adds its address."""
    return str(attempt.error).removeprefix(f"cannot connect to {attempt.address}: ")
