"""The flight recorder's events of the segments that backward passes run here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrpc.core.autograd.functions import CrossingId
from asyncrpc.core.autograd.state import Pass
from asyncrpc.core.ids import MessageId
from asyncrpc.core.trace.events import MESSAGES_MAX, OK
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.trace.ring import plain


class SegmentEvents:
    """Notes the segments of this worker."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.now_s = recorder.now_s
        self._segments = recorder.segments

    def note(
        self,
        backward_pass: Pass,
        nodes: int,
        began_s: float,
        entered: Sequence[CrossingId],
        sent: Sequence[CrossingId] = (),
        *,
        outcome: str = OK,
    ) -> None:
        """Record that a segment has ended."""
        ids = backward_pass.ids
        fed_by, feeds = _messages(entered), _messages(sent)
        left_out = 0
        if len(fed_by) > MESSAGES_MAX or len(feeds) > MESSAGES_MAX:
            left_out = len(fed_by) + len(feeds)
            fed_by, feeds = fed_by[:MESSAGES_MAX], feeds[:MESSAGES_MAX]
            left_out -= len(fed_by) + len(feeds)
        self._segments.record(
            (
                self.now_s(),
                began_s,
                plain(ids.context_id),
                backward_pass.root,
                ids.pass_id.number,
                nodes,
                fed_by,
                feeds,
                left_out,
                outcome,
            )
        )


def _messages(crossings: Sequence[CrossingId]) -> tuple[tuple[Any, ...], ...]:
    """Return the messages of tensors, each once; a root of a pass has no message."""
    if len(crossings) == 1:  # as a rule
        message, _ = crossings[0]
        return (plain(message),) if message.sender else ()
    messages: dict[MessageId, None] = {}
    for message, _ in crossings:
        if message.sender:
            messages[message] = None
    return tuple([plain(message) for message in messages])
