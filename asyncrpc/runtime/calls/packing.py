"""Requests whose payload is made smaller by a codec before they are sent.

What is large is packed in a thread; until then the call has not been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from asyncrpc.clock import Deadline
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    DeadlineExceededError,
    Outcome,
    WorkerLostError,
)
from asyncrpc.runtime.calls.common_arguments import CommonArguments
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.preparation import PACK_HERE_BYTES_MAX
from asyncrpc.runtime.ports import Scheduler
from asyncrpc.serde import Copy, Encoded


class FetchesCopies(Protocol):
    """Devices, as far as what is sent from them goes."""

    async def fetched(self, copies: Sequence[Copy]) -> None:
        """Wait until host memory has been filled."""


class PackingHost(Scheduler, Protocol):
    """What a worker packs requests with.

    Attributes:
        beginning: calls that have been started and have no link yet.
    """

    beginning: int

    @property
    def devices(self) -> FetchesCopies:
        """The worker's devices."""

    def run_on_host(self, job: Callable[[], Encoded]) -> asyncio.Future[Encoded]:
        """Run `job`, which touches no device, in a thread."""


class RequestPacking:
    """The requests of one link that are packed before they are sent."""

    __slots__ = ("_host",)

    def __init__(self, host: PackingHost) -> None:
        self._host = host

    def pack(
        self,
        call: CallFuture[Any],
        encoded: Encoded,
        common: CommonArguments,
        *,
        codec: str,
        send: Callable[[Encoded], None],
        deadline: Deadline | None,
    ) -> None:
        """Apply a codec to a call's arguments, here or in a thread; then send them.

        Args:
            call: whose arguments these are.
            encoded: the arguments, not packed yet.
            common: keeps what is packed for several peers.
            codec: its name.
            send: sends what is packed; what it raises fails the call.
            deadline: of the call.
        """
        if encoded.payload_bytes > PACK_HERE_BYTES_MAX or encoded.copies:
            pack = partial(common.packed, self._host.run_on_host, codec, encoded)
            packing = self._pack_in_thread(call, encoded, pack, send, deadline)
            call.begun = self._host.start_task(packing)
            return
        try:
            send(encoded.pack())
        except BaseException:
            undo_pins(call)
            raise

    async def _pack_in_thread(
        self,
        call: CallFuture[Any],
        encoded: Encoded,
        pack: Callable[[], Awaitable[Encoded]],
        send: Callable[[Encoded], None],
        deadline: Deadline | None,
    ) -> None:
        """Pack a call's arguments, then send it; whatever goes wrong, it fails."""
        self._host.beginning += 1
        try:
            async with asyncio.timeout_at(None if deadline is None else deadline.at_s):
                if encoded.copies:
                    await self._host.devices.fetched(encoded.copies)
                packed = await pack()
            call.begun = None
            if not call.done():
                send(packed)
        except AsyncRpcError as error:
            if isinstance(error, CallError):
                error.function, error.to = call.function, call.to
            call.fail(error)
        except TimeoutError:
            allowed_s = 0.0 if deadline is None else deadline.allowed_s
            call.fail(never_sent(call.function, call.to, allowed_s))
        except asyncio.CancelledError:
            call.fail(_cut_off(call))
            raise
        except Exception as error:  # noqa: BLE001  (no memory, say; the caller's)
            call.fail(error)
        finally:
            self._host.beginning -= 1
            if call.link is None:
                undo_pins(call)


def undo_pins(call: CallFuture[Any]) -> None:
    """Take back what a request counted that will never be sent."""
    if call.pins is not None:
        call.pins.undo()
        call.pins = None


def never_sent(function: str, to: str, allowed_s: float) -> DeadlineExceededError:
    """Return the error about a call whose deadline passed before it was sent."""
    return DeadlineExceededError(
        function=function, to=to, outcome=Outcome.NOT_EXECUTED, timeout_s=allowed_s
    )


def _cut_off(call: CallFuture[Any]) -> WorkerLostError:
    return WorkerLostError(
        "this worker was shut down before the call was sent",
        function=call.function,
        to=call.to,
        outcome=Outcome.NOT_EXECUTED,
    )
