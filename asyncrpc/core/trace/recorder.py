"""The flight recorder: the last events of all kinds of one worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from asyncrpc.core.arguments import check_count, check_flag, wrong
from asyncrpc.core.ids import ContextId, MessageId, RRefId, WorkerId
from asyncrpc.core.loop.clock import Clock
from asyncrpc.core.trace.events import (
    KINDS,
    BackwardPassEnded,
    BackwardSegmentEnded,
    BucketReduced,
    CallEnded,
    CallServed,
    CollectiveEnded,
    LinkChanged,
    MembershipChanged,
    MemoryChanged,
    OptimizerStepEnded,
    ReferenceChanged,
    StreamReceived,
    StreamSent,
)
from asyncrpc.core.trace.ring import EventRing
from asyncrpc.core.trace.stage_steps import STAGE_STEPS_MAX, StageStep
from asyncrpc.core.trace.subscription import Subscription

EVENTS_MAX: Final = 10_000_000  # may wait for one subscriber

E = TypeVar("E", bound=tuple[Any, ...])


def _messages(noted: Iterable[tuple[Any, ...]]) -> tuple[MessageId, ...]:
    return tuple(map(MessageId._make, noted))


class FlightRecorder:
    """The events of one worker, of all kinds.

    Attributes:
        now_s: reads the clock; a simulation replaces it.
        calls: calls that this worker made.
        served: calls that it served.
        received: streams that it consumed.
        sent: streams that it produced.
        references: values here that are referenced remotely.
        passes: backward passes.
        segments: parts of this worker's graph that ran in them.
        steps: of optimizers.
        collectives: over groups.
        buckets: of gradients.
        links: connections to peers.
        membership: the members of its group.
        memory: for payloads.
        stage_steps: of pipelines, far fewer.
    """

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = Clock().now_s
        self.calls = EventRing(CallEnded, {2: WorkerId._make})
        self.served = EventRing(CallServed, {3: WorkerId._make})
        self.received = EventRing(StreamReceived, {2: WorkerId._make})
        self.sent = EventRing(StreamSent, {2: WorkerId._make})
        self.references = EventRing(ReferenceChanged, {1: RRefId._make})
        self.passes = EventRing(BackwardPassEnded, {2: ContextId._make})
        self.segments = EventRing(
            BackwardSegmentEnded, {2: ContextId._make, 6: _messages, 7: _messages}
        )
        self.steps = EventRing(OptimizerStepEnded)
        self.collectives = EventRing(CollectiveEnded)
        self.buckets = EventRing(BucketReduced)
        self.links = EventRing(LinkChanged)
        self.membership = EventRing(MembershipChanged)
        self.memory = EventRing(MemoryChanged)
        self.stage_steps: deque[StageStep] = deque(maxlen=STAGE_STEPS_MAX)
        self._rings: dict[type[Any], EventRing[Any]] = {
            ring.kind: ring
            for ring in vars(self).values()
            if isinstance(ring, EventRing)
        }
        self._subscriptions: list[Subscription[Any]] = []
        assert set(self._rings) == set(KINDS)  # each has one

    def subscribe(
        self, kinds: Sequence[type[E]], items_max: int, *, with_recent: bool
    ) -> Subscription[E]:
        """Return the events of some kinds from now on; see `Worker.subscribe`.

        Raises:
            UsageError: a kind is not a class of events, or an argument has the wrong
                type or is out of range.
        """
        for kind in kinds:
            if not any(kind is known for known in KINDS):
                names = ", ".join(known.__name__ for known in KINDS)
                raise wrong("kinds", f"classes of asyncrpc.trace ({names})", kind)
        check_count("items_max", items_max, at_least=1, at_most=EVENTS_MAX)
        check_flag("with_recent", with_recent)
        rings = [self._rings[kind] for kind in kinds or KINDS]
        subscription = Subscription(rings, items_max, with_recent=with_recent)
        still_open = [
            existing for existing in self._subscriptions if not existing.is_closed
        ]
        self._subscriptions = [*still_open, subscription]
        return subscription

    def close(self) -> None:
        """End all subscriptions."""
        for subscription in self._subscriptions:
            subscription.close()
        self._subscriptions.clear()
