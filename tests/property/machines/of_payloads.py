"""The ways of large payloads: lanes and shared memory."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any, Final

from asyncrpc.core.payloads.machine import lanes, regions
from tests.property.machines.regions_world import KEY, Bounds, visit
from tests.property.machines.spec import Machine, guards, table_of


class _Follower:
    """What a service does that follows a table: an event not listed changes nothing."""

    def __init__(self, build: ModuleType, state: enum.Enum) -> None:
        self.table = table_of(build)
        self.state = state

    def on(self, event: enum.Enum) -> None:
        self.state = self.table[self.state].get(event, self.state)


LANES: Final = Machine(
    name="The lanes of a link",
    about="Whether payloads leave over lanes, or over the connection of small "
    "messages.",
    source=lanes,
    states="LanesState",
    starts=("NONE", "OFF"),
    begin=lambda build, start: _Follower(build, build.LanesState[start]),
    stories="""
a payload opens them: NONE -WANT-> OPENING -OPENED-> UP -WANT-> UP
the peer opens one: NONE -OPENED-> UP -OPENED-> UP
they open late: NONE -WANT-> OPENING -WAITED-> LATE -OPENED-> UP
they cannot be opened: OPENING -FAILED-> OFF -WANT-> OFF
they cannot be opened, which takes long: LATE -FAILED-> OFF -WAITED-> OFF
the peer cannot open them: NONE -FAILED-> OFF
the last one ends: UP -LOST-> OFF -OPENED-> UP
what fails later changes nothing: UP -FAILED-> UP -WAITED-> UP
the link ends before anybody needs them: NONE -CLOSE-> CLOSED -WANT-> CLOSED
the link ends meanwhile: OPENING -CLOSE-> CLOSED -OPENED-> CLOSED
the link ends while they are late: LATE -CLOSE-> CLOSED -FAILED-> CLOSED
the link ends with its lanes: UP -CLOSE-> CLOSED -LOST-> CLOSED
the link ends without lanes: OFF -CLOSE-> CLOSED
""",
    tests=("tests/unit/core/payloads/machine/test_lanes.py",),
    guards=guards("""
a-turn-is-never-quiet: if self._turns >= QUIET_TURNS: => if False:
messages-do-not-end-the-quiet: if self._turns < QUIET_TURNS: => if False:
single-message-ends-the-quiet: if self._turns < QUIET_TURNS: => if True:
turns-are-not-counted-anew:
    self._messages, self._turns = messages, 0 => self._messages = messages
messages-are-forgotten: self._messages, self._turns = messages, 0 => self._turns = 0
acks-count-as-messages: messages = reads - self._acks => messages = reads
two-acks-of-one-read-count-twice: if reads != self._last_ack: => if True:
"""),
)

# --- shared memory -------------------------------------------------------------------


class _OneRegion:
    """A worker with one region, and what it knows of it at one peer."""

    def __init__(self, build: ModuleType) -> None:
        self.kept: Any = build.KeptRegions(has_users=bool)
        self.kept.keep(KEY, "region")

    @property
    def state(self) -> enum.Enum:
        """What is known of it at the peer."""
        current: enum.Enum = self.kept.state("b", KEY)
        return current

    def on(self, event: enum.Enum) -> None:
        self.kept.on("b", KEY, event)


def _references_lead_only_to_present_regions(build: ModuleType) -> None:
    for bounds in (Bounds(1, 1, 1), Bounds(1, 2, 0)):
        assert visit(build, bounds) > 100


REGION: Final = Machine(
    name="A region of shared memory",
    about="The knowledge of a worker about one region at one peer: whether a message "
    "may refer to the region without asking first, and whether the peer must be told "
    "before the region is let go.",
    source=regions,
    states="RegionState",
    starts=("UNSHARED",),
    begin=lambda build, _: _OneRegion(build),
    stories="""
this worker shares it and lets go:
    UNSHARED -CONFIRMED-> SHARED -TELL-> DOUBTED -TOLD-> UNSHARED
the peer shares it and lets go: UNSHARED -ASKED-> SHARED -GONE-> UNSHARED
both refer to it: UNSHARED -CONFIRMED-> SHARED -ASKED-> SHARED -CONFIRMED-> SHARED
it is used again while the peer is told:
    SHARED -TELL-> DOUBTED -CONFIRMED-> SHARED -TOLD-> SHARED
the peer uses it again while it is told:
    SHARED -TELL-> DOUBTED -ASKED-> SHARED -TOLD-> SHARED
both let go at the same time: SHARED -TELL-> DOUBTED -GONE-> UNSHARED -TOLD-> UNSHARED
the peer does not answer that it knows, and is told again:
    SHARED -TELL-> DOUBTED -TELL-> DOUBTED -TOLD-> UNSHARED
the peer does not answer a question, and may have heard it:
    UNSHARED -FAILED-> DOUBTED -FAILED-> DOUBTED -TELL-> DOUBTED
the peer does not answer one more question: SHARED -FAILED-> DOUBTED
the peer lets go of what it has not: UNSHARED -GONE-> UNSHARED
nobody is told who counts on nothing: UNSHARED -TELL-x
""",
    checks=(_references_lead_only_to_present_regions,),
    tests=("tests/unit/core/payloads/machine/test_regions.py",),
    guards=guards(r"""
an-answer-from-before-a-gone-counts:
    if self.is_over or key in self._void or key not in self.unconfirmed: =>
    if self.is_over or key not in self.unconfirmed:
gone-message-voids-no-question: question.void(keys) => question.void(())
an-answer-of-the-next-question-does-not-count: self._void.clear() =>
failed-question-is-not-withdrawn:
    self.on(question.peer, key, RegionEvent.FAILED) => pass
asking-peer-is-not-noted: self.on(peer, key, RegionEvent.ASKED) =>
told-regions-are-not-asked-for:
    return [key for key in keys if at_peer.get(key) is not SHARED] =>
    return [key for key in keys if key not in at_peer]
awaited-regions-go: and key not in self._awaited =>
used-regions-go: and key not in self.used =>
regions-with-users-go: and not self._has_users(region) =>
regions-of-counting-peers-go:
    if not is_counted_on and self._is_idle(key): => if self._is_idle(key):
regions-used-again-go:
    if not is_counted_on and self._is_idle(key): => if not is_counted_on:
a-sweep-begins-before-the-last-has-ended: if self._is_letting_go: => if False:
a-sweep-never-ends:
    self._is_letting_go = False\n        for key in keys: => for key in keys:
regions-are-never-idle: used, self.used = self.used, set() => used = self.used
an-answer-of-a-lost-peer-counts: question.is_over = True => pass
a-lost-peer-counts-on-it: self._at_peers.pop(peer, None) =>
regions-exceed-their-limit:
    if len(self.regions) >= REGIONS_MAX: => if len(self.regions) > REGIONS_MAX:
absent-regions-are-used:
    if region is not None:\n            self.used.add(key) => self.used.add(key)
"""),
)
