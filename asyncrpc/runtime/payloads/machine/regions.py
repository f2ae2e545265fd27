"""Which regions of shared memory a worker keeps, and what it knows of them at peers.

Both ends must have a region before one refers to it in a message.  So a worker *asks* a
peer first, and a peer that has answered counts on it likewise; from then on either end
may refer to the region without a question.  A worker lets go of a region that has been
idle from one sweep to the next: it *tells* each peer that may count on it, and waits
until all of them know.  The invariant, for each region and peer:

    A worker that refers to a region without asking is one that the peer will tell,
    and wait for, before it lets go.

Messages between two workers come in order, and each end's answers are in order with its
own messages.  But an answer is *taken* later than it came: whatever came after it may
have been taken before.  Three rules follow:

- An answer says nothing of a region if a `gone` was taken after the question: the peer
  may have answered before it said so.  Then it must be asked again.
- A peer that is being told must be asked before the next use, not only once it knows.
- A peer that did not answer a question may have heard it: it is told, as those are that
  have answered.

Sans-IO; `P` is a peer and `R` a region, neither of which is looked into.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Generic, TypeVar

from asyncrpc.errors import LocalProtocolError, Outcome, RejectedError

P = TypeVar("P")
R = TypeVar("R")

# Each has a descriptor, of which a process often may have 1,024.
REGIONS_MAX: Final = 4096


class RegionState(enum.Enum):
    """What a worker knows of one region at one peer."""

    UNSHARED = "neither counts on the other to have it"
    SHARED = "each counts on the other to have it"
    DOUBTED = "the peer may count on this worker, and must be asked before the next use"


class RegionEvent(enum.Enum):
    """What happens to one region at one peer."""

    CONFIRMED = "the peer was asked, and has it now"
    ASKED = "the peer asks for it, and it is here"
    FAILED = "the peer was asked, and there is no answer"
    TELL = "the peer is told that this worker lets go of it"
    TOLD = "the peer knows that"
    GONE = "the peer says that it lets go of it"


UNSHARED, SHARED, DOUBTED = RegionState
_E = RegionEvent

TRANSITIONS: Final[Mapping[RegionState, Mapping[RegionEvent, RegionState]]] = {
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
}


class RegionQuestion(Generic[P]):
    """Regions that a peer is asked for, and must have before a message is sent.

    Attributes:
        peer: that one.
        keys: all that it is asked for.
        left: the keys that it has not confirmed.
        is_over: whether answers count no more: the peer is lost.
    """

    __slots__ = ("_void", "is_over", "keys", "left", "peer")

    def __init__(self, peer: P, keys: list[bytes]) -> None:
        self.peer = peer
        self.keys = keys
        self.left = dict.fromkeys(keys)  # in order
        self.is_over = False
        self._void: set[bytes] = set()

    def ask(self) -> list[bytes]:
        """Return what to ask for now: answers count from here on."""
        self._void.clear()
        return list(self.left)

    def void(self, keys: Iterable[bytes]) -> None:
        """Answers about these that are under way say nothing."""
        self._void.update(keys)

    def answer(self, key: bytes) -> bool:
        """Take the answer that the peer has a region; return whether it counts."""
        if self.is_over or key in self._void or key not in self.left:
            return False
        del self.left[key]
        return True


class KeptRegions(Generic[P, R]):
    """The regions that one worker keeps.

    Attributes:
        regions: by key.
        used: the keys that have been referred to since the last sweep.
    """

    def __init__(self, has_users: Callable[[R], bool]) -> None:
        """Begin without any.

        Args:
            has_users: returns whether something here is over a region.
        """
        self.regions: dict[bytes, R] = {}
        self.used: set[bytes] = set()
        self._has_users = has_users
        # By messages that wait until a peer has it: how many each.
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
        """Return what is known of a region at a peer."""
        return self._at_peers.get(peer, {}).get(key, UNSHARED)

    def keep(self, key: bytes, region: R) -> None:
        """Keep a region that is referred to.

        Raises:
            RejectedError: there are too many.  Nothing changed.
        """
        if key not in self.regions:
            if len(self.regions) >= REGIONS_MAX:
                raise RejectedError(
                    f"at most {REGIONS_MAX} shared storages can be in use",
                    outcome=Outcome.NOT_EXECUTED,
                )
            self.regions[key] = region
        self.used.add(key)

    def find(self, key: bytes) -> R | None:
        """Return a region that a peer refers to; None if it is not here."""
        region = self.regions.get(key)
        if region is not None:
            self.used.add(key)
        return region

    # --- making sure that a peer has it ----------------------------------------------

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
        """The peer has a region, it says; return whether that counts."""
        if not question.answer(key):
            return False
        self.on(question.peer, key, RegionEvent.CONFIRMED)
        return True

    def end(self, question: RegionQuestion[P]) -> None:
        """Ask no more; what has not been confirmed may have been heard all the same."""
        self._awaited -= Counter(question.keys)
        if question.is_over:
            return
        questions = self._questions[question.peer]
        questions.remove(question)
        if not questions:
            del self._questions[question.peer]
        for key in question.left:
            self.on(question.peer, key, RegionEvent.FAILED)

    # --- what peers say --------------------------------------------------------------

    def on_asked(self, peer: P, key: bytes) -> None:
        """A peer asks for a region that has been found here, and counts on it."""
        self.on(peer, key, RegionEvent.ASKED)

    def on_gone(self, peer: P, keys: Iterable[bytes]) -> None:
        """A peer lets go of regions."""
        keys = list(keys)
        for question in self._questions.get(peer, ()):
            question.void(keys)
        for key in keys:
            self.on(peer, key, RegionEvent.GONE)

    def on_lost(self, peer: P) -> None:
        """A peer is gone, and counts on nothing."""
        self._at_peers.pop(peer, None)
        for question in self._questions.pop(peer, ()):
            question.is_over = True

    # --- letting go ------------------------------------------------------------------

    def sweep(self) -> list[bytes]:
        """Return the regions to let go of: all that have been idle since the last time.

        None, while those of the last time are being let go of: `let_go` ends that.
        """
        used, self.used = self.used, set()
        if self._is_letting_go:
            return []
        idle = [key for key in self.regions if key not in used and self._is_idle(key)]
        self._is_letting_go = bool(idle)
        return idle

    def tell(self, peer: P, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of which a peer must be told, at once: what it may count on."""
        at_peer = self._at_peers.get(peer, {})
        told = [key for key in keys if key in at_peer and self._is_idle(key)]
        for key in told:
            self.on(peer, key, RegionEvent.TELL)
        return told

    def on_told(self, peer: P, keys: Iterable[bytes]) -> None:
        """A peer knows of what it was told; without its answer it is told again."""
        if peer in self._at_peers:
            for key in keys:
                self.on(peer, key, RegionEvent.TOLD)

    def let_go(self, keys: Iterable[bytes]) -> None:
        """Drop what is still idle and what no peer counts on."""
        self._is_letting_go = False
        for key in keys:
            is_counted_on = any(key in one for one in self._at_peers.values())
            if not is_counted_on and self._is_idle(key):
                self.regions.pop(key, None)

    def _is_idle(self, key: bytes) -> bool:
        """Return whether nobody uses a region, nor waits for a peer to have it."""
        region = self.regions.get(key)
        return (
            region is not None
            and key not in self.used
            and key not in self._awaited
            and not self._has_users(region)
        )

    def on(self, peer: P, key: bytes, event: RegionEvent) -> None:
        """Let an event happen to a region at a peer.

        Raises:
            LocalProtocolError: it cannot happen now.  Nothing changed.
        """
        state = self.state(peer, key)
        after = TRANSITIONS[state].get(event)
        if after is None:
            raise LocalProtocolError(f"{event.value}: but {state.value}")
        # What is not shared is not kept: `missing` and `tell` look at what is.
        if after is not UNSHARED:
            self._at_peers.setdefault(peer, {})[key] = after
        elif state is not UNSHARED:
            del self._at_peers[peer][key]

    def clear(self) -> None:
        """Forget everything."""
        self.regions.clear()
        for peer in {*self._at_peers, *self._questions}:
            self.on_lost(peer)
