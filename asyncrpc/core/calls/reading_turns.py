"""How long one connection may keep the loop with what it has read.

A read brings up to 256 KiB, which may be thousands of messages: other tasks run between
them.  And a message that takes long to be read holds those behind it: see
`calls.long_messages`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from asyncrpc.core.transport.byte_stream import ByteStream
from asyncrpc.core.wire.reader import FrameReader
from asyncrpc.errors import MalformedError, RemoteProtocolError

logger = logging.getLogger("asyncrpc")

TURN_S: Final = 0.005  # other connections and tasks have turns, too
# What a message sets off in the next turn may take ten times as long as to take it: the
# task of a call that is cancelled runs once more.
TURN_MESSAGES: Final = 512


def logged(error: Exception, where: str) -> RemoteProtocolError:
    """Log what ends a connection; return the error for its calls and the peer."""
    if isinstance(error, RemoteProtocolError):
        logger.warning("%s broke the protocol: %s", where, error)
        return error
    # Whatever a message of a peer sets off must not stop the loop.
    logger.error("a message from %s could not be handled", where, exc_info=error)
    return MalformedError(f"a message could not be handled: {error!r}")


class ReadingTurns:
    """The turns in which one connection takes its messages."""

    __slots__ = ("_fail", "_frames", "_holds", "_loop", "_stream")

    def __init__(
        self,
        frames: FrameReader,
        stream: ByteStream,
        loop: asyncio.AbstractEventLoop,
        fail: Callable[[Exception], None],
    ) -> None:
        self._frames = frames
        self._stream = stream
        self._loop = loop
        self._fail = fail
        self._holds = 0
        frames.begin_turn = self._begin_turn

    def hold(self) -> None:
        """Parse and read no further message, until `resume` is called as often."""
        self._holds += 1
        if self._holds == 1:
            self._frames.hold()
            self._stream.pause_reading()

    def resume(self) -> None:
        """Go on with what has arrived, then with reading."""
        self._holds -= 1
        if self._holds:
            return
        try:
            self._frames.go_on()
        except Exception as error:  # noqa: BLE001  (whatever a message sets off)
            self._fail(error)
        if not self._holds:
            self._stream.resume_reading()

    def _begin_turn(self) -> Callable[[], bool]:
        time, ends_s = self._loop.time, self._loop.time() + TURN_S
        messages_left = TURN_MESSAGES

        def is_over() -> bool:
            nonlocal messages_left
            messages_left -= 1
            if messages_left and time() < ends_s:
                return False
            self.hold()
            self._loop.call_soon(self.resume)
            return True

        return is_over
