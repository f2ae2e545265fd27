"""Requests whose payload is made smaller by a codec before they are sent.

Large payloads are packed in a thread; until then the call has not been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncrpc.core.calls.common_arguments import CommonArguments
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.preparation import PACK_HERE_BYTES_MAX
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.serde import Encoded

if TYPE_CHECKING:
    from asyncrpc.core.calls.ports import CallHost


class RequestPacking:
    """The requests of one link that are packed before they are sent."""

    __slots__ = ("_host",)

    def __init__(self, host: CallHost) -> None:
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
            send: sends what is packed; what it raises fails the call.
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
        """Pack a call's arguments, then send it; any error fails the call."""
        try:
            with self._host.unsent.waiting(call, deadline, "the call was sent"):
                end_s = None if deadline is None else deadline.at_s
                async with asyncio.timeout_at(end_s):
                    if encoded.copies:
                        await self._host.devices.fetched(encoded.copies)
                    packed = await pack()
                call.begun = None
                if not call.done():
                    send(packed)
        finally:
            if call.link is None:
                undo_pins(call)


def undo_pins(call: CallFuture[Any]) -> None:
    """Take back the counts of a request that will never be sent."""
    if call.pins is not None:
        call.pins.undo()
        call.pins = None
