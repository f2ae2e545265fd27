"""What the flight recorder keeps of the segments that backward passes run here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from asyncrpc.autograd.functions import CrossingId, Received
from asyncrpc.autograd.state import Pass
from asyncrpc.ids import MessageId
from asyncrpc.trace import OK, FlightRecorder
from asyncrpc.trace.events import MESSAGES_MAX


class SegmentEvents:
    """Notes the segments of this worker."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder

    def begin(
        self, one: Pass, nodes: int, entering: Mapping[CrossingId, torch.Tensor | None]
    ) -> SegmentEvent:
        """Note that a segment begins: all of its gradients are there.

        Args:
            one: the pass.
            nodes: of the segment.
            entering: gradients, by what was sent; None: there is none.
        """
        began_s = self._recorder.now_s()
        fed_by = _messages(key for key, found in entering.items() if found is not None)
        return SegmentEvent(self._recorder, one, nodes, fed_by, began_s)


class SegmentEvent:
    """One segment that runs."""

    __slots__ = ("_began_s", "_fed_by", "_nodes", "_pass", "_recorder")

    def __init__(
        self,
        recorder: FlightRecorder,
        one: Pass,
        nodes: int,
        fed_by: tuple[MessageId, ...],
        began_s: float,
    ) -> None:
        self._recorder = recorder
        self._pass = one
        self._nodes = nodes
        self._fed_by = fed_by
        self._began_s = began_s

    def end(self, leaving: Iterable[Received], outcome: str = OK) -> None:
        """Note that it has ended.

        Args:
            leaving: the received tensors whose gradients leave.
            outcome: how it ended.
        """
        recorder, ids = self._recorder, self._pass.ids
        fed_by, feeds = self._fed_by, _messages(one.crossing for one in leaving)
        recorder.segments.record(
            (
                recorder.now_s(),
                self._began_s,
                ids.context_id,
                self._pass.root,
                ids.pass_id.number,
                self._nodes,
                fed_by[:MESSAGES_MAX],
                feeds[:MESSAGES_MAX],
                _beyond(fed_by) + _beyond(feeds),
                outcome,
            )
        )


def _messages(crossings: Iterable[CrossingId]) -> tuple[MessageId, ...]:
    """Return the messages of tensors, each once; a root of a pass is in none."""
    found = dict.fromkeys(one.message for one in crossings)
    return tuple(one for one in found if one.sender)


def _beyond(messages: tuple[MessageId, ...]) -> int:
    return max(0, len(messages) - MESSAGES_MAX)
