"""The regions of shared memory that a worker keeps, and their state at its peers.

Both ends must have a region before one end refers to it in a message.  So a worker
*asks* a peer first.  A peer that has answered counts on the worker in turn; from then
on either end may refer to the region without asking.  A worker lets go of a region that
has been idle from one sweep to the next: it *tells* each peer that may count on it, and
waits until all of them know.  The invariant, for each region and peer:

    Before a worker lets go of a region, it tells every peer that may refer to the
    region without asking, and waits for its answer.

Messages between two workers come in order, and each end's answers are in order with its
own messages.  But an answer is *handled* some time after it came: a message that came
later may have been handled before.  Three rules follow:

- An answer about a region does not count if a `gone` was handled after the question:
  the peer may have answered before it sent the `gone`.  Then it must be asked again.
- A peer that is being told must be asked before the next use, not only once it knows.
- A peer that did not answer a question may have received it: it is told like a peer
  that has answered.

Sans-IO; `P` is a peer and `R` a region; both are opaque here.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from asyncrpc.core.state_table import StateTable
from asyncrpc.errors import Outcome, RejectedError

P = TypeVar("P")
R = TypeVar("R")

# Each region has a descriptor, and many processes are limited to 1,024 descriptors.
REGIONS_MAX: Final = 4096
PEER_REGIONS_MAX: Final = REGIONS_MAX // 2


class RegionState(enum.Enum):
    """The state of one region at one peer, as far as a worker knows."""

    UNSHARED = "neither end counts on the other to have the region"
    SHARED = "each end counts on the other to have the region"
    DOUBTED = "the peer may count on this worker, and must be asked before the next use"


class RegionEvent(enum.Enum):
    """An event of one region at one peer."""

    CONFIRMED = "the peer was asked, and has the region now"
    ASKED = "the peer asks for the region, and this worker has it"
    FAILED = "the peer was asked, and has not answered"
    TELL = "the peer is told that this worker lets go of the region"
    TOLD = "the peer has answered that it knows"
    GONE = "the peer lets go of the region"


UNSHARED, SHARED, DOUBTED = RegionState
_E = RegionEvent

TRANSITIONS: Final = StateTable(
    "a region at a peer",
    {
        UNSHARED: {
            _E.CONFIRMED: SHARED,
            _E.ASKED: SHARED,
            _E.FAILED: DOUBTED,
            _E.TOLD: UNSHARED,  # the peer has said the same meanwhile
            _E.GONE: UNSHARED,
        },
        SHARED: {
            _E.CONFIRMED: SHARED,
            _E.ASKED: SHARED,
            _E.FAILED: DOUBTED,
            _E.TELL: DOUBTED,
            _E.TOLD: SHARED,  # one of the two has asked meanwhile
            _E.GONE: UNSHARED,
        },
        DOUBTED: {
            _E.CONFIRMED: SHARED,
            _E.ASKED: SHARED,
            _E.FAILED: DOUBTED,
            _E.TELL: DOUBTED,
            _E.TOLD: UNSHARED,
            _E.GONE: UNSHARED,
        },
    },
)


class RegionQuestion(Generic[P]):
    """Regions that a peer is asked for, and must have before a message is sent.

    Attributes:
        keys: all keys that the peer is asked for.
        unconfirmed: the keys that the peer has not confirmed.
        is_over: whether the peer is lost, so that answers do not count any more.
    """

    __slots__ = ("_void", "is_over", "keys", "peer", "unconfirmed")

    def __init__(self, peer: P, keys: list[bytes]) -> None:
        self.peer = peer
        self.keys = keys
        self.unconfirmed = dict.fromkeys(keys)  # in order
        self.is_over = False
        self._void: set[bytes] = set()

    def ask(self) -> list[bytes]:
        """Return the keys to ask for now: answers count from here on."""
        self._void.clear()
        return list(self.unconfirmed)

    def void(self, keys: Iterable[bytes]) -> None:
        """Ignore answers about these keys that are under way."""
        self._void.update(keys)

    def answer(self, key: bytes) -> bool:
        """Take the answer that the peer has a region; return whether it counts."""
        if self.is_over or key in self._void or key not in self.unconfirmed:
            return False
        del self.unconfirmed[key]
        return True


class KeptRegions(Generic[P, R]):
    """The regions that one worker keeps.

    Attributes:
        regions: by key.
        used: the keys that have been referred to since the last sweep.
    """

    def __init__(self, has_users: Callable[[R], bool]) -> None:
        self.regions: dict[bytes, R] = {}
        self.used: set[bytes] = set()
        self._has_users = has_users
        # For each key: the number of messages that wait until a peer has the region.
        self._awaited: Counter[bytes] = Counter()
        self._at_peers: dict[P, dict[bytes, RegionState]] = {}
        self._questions: dict[P, list[RegionQuestion[P]]] = {}
        self._is_letting_go = False

    def __len__(self) -> int:
        return len(self.regions)

    def __iter__(self) -> Iterator[P]:
        """Iterate over the peers with which regions have been shared."""
        return iter(tuple(self._at_peers))

    def state(self, peer: P, key: bytes) -> RegionState:
        """Return the state of a region at a peer."""
        return self._at_peers.get(peer, {}).get(key, UNSHARED)

    def keep(self, key: bytes, region: R) -> None:
        """Keep a region that is referred to."""
        if key not in self.regions:
            if len(self.regions) >= REGIONS_MAX:
                raise RejectedError(
                    f"at most {REGIONS_MAX} shared storages can be in use",
                    outcome=Outcome.NOT_EXECUTED,
                )
            self.regions[key] = region
        self.used.add(key)

    def check_part(self, peer: P) -> None:
        """Refuse a further region of a peer that has its part."""
        if len(self._at_peers.get(peer, ())) >= PEER_REGIONS_MAX:
            raise RejectedError(
                f"one peer can share at most {PEER_REGIONS_MAX} storages with this"
                " worker at a time",
                outcome=Outcome.NOT_EXECUTED,
            )

    def find(self, key: bytes) -> R | None:
        """Return a region that a peer refers to; None if this worker lacks it."""
        region = self.regions.get(key)
        if region is not None:
            self.used.add(key)
        return region

    # --- asking a peer ---------------------------------------------------------------

    def missing(self, peer: P, keys: Iterable[bytes]) -> list[bytes]:
        """Return the regions that a peer must be asked for before they are used."""
        at_peer = self._at_peers.get(peer)
        if at_peer is None:
            return list(keys)
        return [key for key in keys if at_peer.get(key) is not SHARED]

    def begin(self, peer: P, keys: list[bytes]) -> RegionQuestion[P]:
        """Begin to ask a peer for regions, which are kept until `end`."""
        question = RegionQuestion(peer, keys)
        self._awaited.update(keys)
        self._questions.setdefault(peer, []).append(question)
        return question

    def confirm(self, question: RegionQuestion[P], key: bytes) -> bool:
        """Take the answer that the peer has a region; return whether it counts."""
        if not question.answer(key):
            return False
        self.on(question.peer, key, RegionEvent.CONFIRMED)
        return True

    def end(self, question: RegionQuestion[P]) -> None:
        """End a question; the peer may have received unanswered parts of it."""
        self._awaited -= Counter(question.keys)
        if question.is_over:
            return
        questions = self._questions[question.peer]
        questions.remove(question)
        if not questions:
            del self._questions[question.peer]
        for key in question.unconfirmed:
            self.on(question.peer, key, RegionEvent.FAILED)

    # --- messages of peers -----------------------------------------------------------

    def on_asked(self, peer: P, key: bytes) -> None:
        """Record that a peer asked for a kept region, and now counts on it."""
        self.on(peer, key, RegionEvent.ASKED)

    def on_gone(self, peer: P, keys: Iterable[bytes]) -> None:
        """Record that a peer lets go of regions."""
        keys = list(keys)
        for question in self._questions.get(peer, ()):
            question.void(keys)
        for key in keys:
            self.on(peer, key, RegionEvent.GONE)

    def on_lost(self, peer: P) -> None:
        """Forget a lost peer, which counts on no region any more."""
        self._at_peers.pop(peer, None)
        for question in self._questions.pop(peer, ()):
            question.is_over = True

    # --- letting go ------------------------------------------------------------------

    def sweep(self) -> list[bytes]:
        """Return the regions that have been idle since the last sweep.

        The list is empty until `let_go` has ended the previous sweep.
        """
        used, self.used = self.used, set()
        if self._is_letting_go:
            return []
        idle = [key for key in self.regions if key not in used and self._is_idle(key)]
        self._is_letting_go = bool(idle)
        return idle

    def tell(self, peer: P, keys: Iterable[bytes]) -> list[bytes]:
        """Return the regions that a peer may count on; it must be told at once."""
        at_peer = self._at_peers.get(peer, {})
        counted = [key for key in keys if key in at_peer and self._is_idle(key)]
        for key in counted:
            self.on(peer, key, RegionEvent.TELL)
        return counted

    def on_told(self, peer: P, keys: Iterable[bytes]) -> None:
        """Record a peer's answer; without an answer the peer is told again later."""
        if peer in self._at_peers:
            for key in keys:
                self.on(peer, key, RegionEvent.TOLD)

    def let_go(self, keys: Iterable[bytes]) -> None:
        """Drop the regions that are still idle and that no peer counts on."""
        self._is_letting_go = False
        for key in keys:
            is_counted_on = any(
                key in peer_regions for peer_regions in self._at_peers.values()
            )
            if not is_counted_on and self._is_idle(key):
                self.regions.pop(key, None)

    def _is_idle(self, key: bytes) -> bool:
        """Return whether a region has no user here, and no message waits for it."""
        region = self.regions.get(key)
        return (
            region is not None
            and key not in self.used
            and key not in self._awaited
            and not self._has_users(region)
        )

    def on(self, peer: P, key: bytes, event: RegionEvent) -> None:
        """Take an event of a region at a peer."""
        state = self.state(peer, key)
        after = TRANSITIONS.after(state, event)
        # UNSHARED is not stored: `missing` and `tell` look only at stored states.
        if after is not UNSHARED:
            self._at_peers.setdefault(peer, {})[key] = after
        elif state is not UNSHARED:
            del self._at_peers[peer][key]

    def clear(self) -> None:
        """Forget everything."""
        self.regions.clear()
        for peer in {*self._at_peers, *self._questions}:
            self.on_lost(peer)
