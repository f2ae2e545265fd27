"""Credit: how many bytes of large requests may be on their way to a worker, and whose.

A worker accepts large requests up to a limit of bytes, over all peers; peers with more
to send wait.  Each request counts against the limit from the moment that it is promised
room until its call has ended.  Small requests take no part, and no answer does: so an
answer never waits for a request.

The callee (`InboundBudget`) gives credit in two forms:

    a window     bytes that a peer may send without asking, given anew as its calls end;
                 all windows together are at most an eighth of the limit
    a ticket     room for one request, which the peer has asked for by its call id

The caller (`WaitingRequests`) sends what its window has room for, and asks for tickets
for the rest, in the order of the calls.

    caller                                callee
      WANT call 7, 16 MiB        -->        no room
      WANT call 8, 16 MiB        -->
                                 <--      CREDIT call 7, 16 MiB     (a call has ended)
      REQUEST 7                  -->
      CANCEL 8                   -->        is not wanted any more

Whole requests are granted, never parts: two peers that hold half of what each needs
would wait for ever.  The peers take turns, so one that has asked for much delays
another by one request; smaller requests that would fit do not pass the first in turn,
so it is not starved.  Requests made by a function that is itself running for a call are
*nested*: the end of the calls that fill the limit may depend on them.  They go first,
`PASSED_MAX` of them before one that is not nested, and if nothing has ended for
`BEYOND_AFTER_S`, one of them is granted beyond the limit: so a chain of calls through
the same workers always goes on.

Invariants: the books add up (`held + promised` is what was granted and has not ended);
without nested and oversized requests they never exceed the limit; whatever is granted
comes back, by the end of the call, its cancellation, or the end of the peer.

Sans-IO; `P` is the service's peer, `R` its record of a request; neither is looked into.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from asyncrpc.errors import MalformedError

P = TypeVar("P")
R = TypeVar("R")

# What windows may take of the limit, all together and each; with those, 100 peers that
# send large requests have windows that are worth having.
WINDOWS_PART: Final = 8
WINDOW_PART: Final = 64
WINDOW_PART_OF_REST: Final = 16
# The window that a peer has before it has sent anything: most never send much.
WELCOME_PART: Final = 1024
WINDOW_BYTES_MAX: Final = 64 << 20
# A smaller window would hold few of the requests that need one.
WINDOW_BYTES_MIN: Final = 64 << 10

# Wants of one kind that a peer may have here at once; the others it keeps to itself.
WANTS_MAX: Final = 64

# Nested requests that go before one that is not.
PASSED_MAX: Final = 16

# Most calls end within it, and a chain of calls that waits for itself is as slow.
BEYOND_AFTER_S: Final = 1.0

# After it, a warning is logged.
STALLED_AFTER_S: Final = 10.0

WINDOW: Final = 0  # in place of a call id


class Why(enum.Enum):
    """Why credit was granted."""

    FITS = "there is room"
    ALONE = "it needs more than the limit, and nothing else is here"
    BEYOND = "what fills the limit may wait for it"


@dataclass(frozen=True, slots=True)
class Grant(Generic[P]):
    """Credit for a peer.

    Attributes:
        call_id: of the request that it is for; `WINDOW`: for any.
    """

    peer: P
    call_id: int
    nbytes: int
    why: Why = Why.FITS


class _WaitingRequest:
    """A request that a peer waits to send."""

    __slots__ = ("nbytes", "since_s")

    def __init__(self, nbytes: int, since_s: float) -> None:
        self.nbytes = nbytes
        self.since_s = since_s


class Account(Generic[P]):
    """The share of one peer in a worker's budget.

    Attributes:
        window: bytes that it may send without asking.
        tickets: bytes granted to requests that have not arrived, by call.
        arriving: bytes of requests that are arriving, or are here and do not run yet.
    """

    __slots__ = ("arriving", "is_open", "peer", "tickets", "wants", "window")

    def __init__(self, peer: P) -> None:
        self.peer = peer
        self.is_open = True
        self.window = 0
        self.tickets: dict[int, int] = {}
        self.arriving: dict[int, int] = {}
        # By call, the oldest first: those that are not nested, and those that are.
        self.wants: tuple[dict[int, _WaitingRequest], dict[int, _WaitingRequest]] = (
            {},
            {},
        )


class InboundBudget(Generic[P]):
    """The callee's side: the bytes of large requests that a worker takes in.

    Attributes:
        limit_bytes: the limit of the sum of the following.
        held_bytes: of requests that are here, or have begun to arrive.
        tickets_bytes: granted to single requests that have not begun to arrive.
        windows_bytes: what peers may send without asking.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.tickets_bytes = 0
        self.windows_bytes = 0
        # Peers that wait, the next first: with requests not nested, and nested.
        self._turns: tuple[deque[Account[P]], deque[Account[P]]] = (deque(), deque())
        self._passed = 0  # nested grants since the last of the others, if one waits
        self._released_s = float("-inf")
        self._beyond_s = float("-inf")

    # --- what there is ---------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Return the bytes that can be granted; negative above the limit."""
        promised = self.tickets_bytes + self.windows_bytes
        return self.limit_bytes - self.held_bytes - promised

    @property
    def has_waiting(self) -> bool:
        """Return whether a request waits."""
        return bool(self._turns[False] or self._turns[True])

    @property
    def waiting(self) -> int:
        """How many requests are known to wait."""
        return sum(
            len(wants)
            for nested in (False, True)
            for account in self._turns[nested]
            for wants in (account.wants[nested],)
        )

    @property
    def due_s(self) -> float | None:
        """Return when to call `on_time`, if nothing else happens before."""
        nested = self._first(nested=True)
        if nested is None:
            return None
        since_s = max(nested[2].since_s, self._released_s, self._beyond_s)
        return since_s + BEYOND_AFTER_S

    @property
    def stalled_s(self) -> float | None:
        """Return when a request will have waited for long without a call ending."""
        firsts = [self._first(nested=False), self._first(nested=True)]
        since_s = [first[2].since_s for first in firsts if first is not None]
        if not since_s:
            return None
        return max(min(since_s), self._released_s, self._beyond_s) + STALLED_AFTER_S

    # --- peers -----------------------------------------------------------------------

    def open(self, peer: P) -> Account[P]:
        """Open an account for a peer; nothing is in it."""
        return Account(peer)

    def welcome(self, account: Account[P]) -> list[Grant[P]]:
        """Give a new peer a window for its first requests."""
        full = min(self._window_of(account), self.limit_bytes // WELCOME_PART)
        return self._fill(account, full)

    def close(self, account: Account[P], now_s: float) -> list[Grant[P]]:
        """Take back all that a peer had, except what its calls that run here hold."""
        account.is_open = False
        for nested in (False, True):
            account.wants[nested].clear()
            if account in self._turns[nested]:
                self._turns[nested].remove(account)
        self.windows_bytes -= account.window
        account.window = 0
        self.tickets_bytes -= sum(account.tickets.values())
        account.tickets.clear()
        self.held_bytes -= sum(account.arriving.values())
        account.arriving.clear()
        self._released_s = now_s
        return self._grant()

    def want(
        self,
        account: Account[P],
        call_id: int,
        nbytes: int,
        now_s: float,
        *,
        nested: bool,
    ) -> list[Grant[P]]:
        """Take a peer's demand for credit for a request."""
        if call_id <= 0 or nbytes <= 0:
            raise MalformedError(f"call {call_id} wants credit for {nbytes} bytes")
        wants = account.wants[nested]
        is_known = any(call_id in table for table in (*account.wants, account.tickets))
        if is_known or call_id in account.arriving:
            raise MalformedError(f"call {call_id} wants credit twice")
        if len(wants) >= WANTS_MAX:
            raise MalformedError(f"more than {WANTS_MAX} calls want credit at once")
        if not wants:
            self._turns[nested].append(account)
        wants[call_id] = _WaitingRequest(nbytes, now_s)
        return self._grant() + self._fill(account, self._window_of(account))

    def cancel(
        self, account: Account[P], call_id: int, unsent_bytes: int, now_s: float
    ) -> list[Grant[P]]:
        """Take back the credit of a request that the peer gave up before it arrived."""
        for nested in (False, True):
            if account.wants[nested].pop(call_id, None) is not None:
                if not account.wants[nested]:
                    self._turns[nested].remove(account)
                return self._grant()  # the next in turn may fit
        if call_id in account.tickets or (
            unsent_bytes > 0 and call_id not in account.arriving
        ):
            self.begin(account, call_id, account.tickets.get(call_id, unsent_bytes))
        nbytes = account.arriving.pop(call_id, 0)
        return self.release(account, nbytes, now_s) if nbytes else []

    # --- requests --------------------------------------------------------------------

    def begin(self, account: Account[P], call_id: int, nbytes: int) -> None:
        """Count a request that begins to arrive against the limit."""
        ticket = account.tickets.get(call_id)
        credit = account.window if ticket is None else ticket
        if nbytes > credit or call_id in account.arriving:
            raise MalformedError(
                f"a request of {nbytes} bytes came with a credit of {credit} bytes"
            )
        if ticket is None:
            account.window -= nbytes
            self.windows_bytes -= nbytes
        else:
            del account.tickets[call_id]
            self.tickets_bytes -= ticket
        account.arriving[call_id] = nbytes
        self.held_bytes += nbytes

    def take(self, account: Account[P], call_id: int) -> int:
        """Take an arrived request; return the bytes to `release` when its call ends."""
        return account.arriving.pop(call_id, 0)

    def release(self, account: Account[P], nbytes: int, now_s: float) -> list[Grant[P]]:
        """Release the bytes of a call that has ended.

        Args:
            account: of the peer that made it; it may be closed.
        """
        self.held_bytes -= nbytes
        self._released_s = now_s
        return self._grant() + self._fill(account, self._window_of(account))

    def on_time(self, now_s: float) -> list[Grant[P]]:
        """Grant one nested request beyond the limit if no call has ended for long."""
        first = self._first(nested=True)
        if first is None or self.due_s is None or now_s < self.due_s:
            return []
        self._beyond_s = now_s
        return [self._take_first(nested=True, why=Why.BEYOND)]

    # --- deciding --------------------------------------------------------------------

    def _first(self, *, nested: bool) -> tuple[Account[P], int, _WaitingRequest] | None:
        """Return the account whose turn it is, and its first request."""
        if not self._turns[nested]:
            return None
        account = self._turns[nested][0]
        call_id, want = next(iter(account.wants[nested].items()))
        return account, call_id, want

    def _grant(self) -> list[Grant[P]]:
        """Grant what fits, in turn."""
        grants: list[Grant[P]] = []
        while self.has_waiting:
            others_wait = bool(self._turns[False])
            nested = bool(self._turns[True]) and not (
                others_wait and self._passed >= PASSED_MAX
            )
            first = self._first(nested=nested)
            assert first is not None
            nbytes = first[2].nbytes
            is_alone = not self.held_bytes and not self.tickets_bytes
            if nbytes > self.free_bytes and not is_alone:
                break
            why = Why.FITS if nbytes <= self.limit_bytes else Why.ALONE
            grants.append(self._take_first(nested=nested, why=why))
            self._passed = self._passed + 1 if nested and others_wait else 0
        return grants

    def _take_first(self, *, nested: bool, why: Why) -> Grant[P]:
        """Give the first in turn a ticket; its peer goes to the end of the line."""
        turns = self._turns[nested]
        account = turns.popleft()
        wants = account.wants[nested]
        call_id = next(iter(wants))
        nbytes = wants.pop(call_id).nbytes
        if wants:
            turns.append(account)
        account.tickets[call_id] = nbytes
        self.tickets_bytes += nbytes
        return Grant(account.peer, call_id, nbytes, why)

    def _fill(self, account: Account[P], full: int) -> list[Grant[P]]:
        """Fill a peer's window, if it is half empty and no request waits for room."""
        missing = full - account.window
        is_needed = full >= WINDOW_BYTES_MIN and missing >= full >> 1
        if not is_needed or not account.is_open or self.has_waiting:
            return []
        if missing > self.free_bytes:
            return []
        account.window += missing
        self.windows_bytes += missing
        return [Grant(account.peer, WINDOW, missing)]

    def _window_of(self, account: Account[P]) -> int:
        """Return how large a peer's window is when it is full."""
        other_windows_bytes = self.windows_bytes - account.window
        rest = self.limit_bytes // WINDOWS_PART - other_windows_bytes
        full = min(self.limit_bytes // WINDOW_PART, WINDOW_BYTES_MAX)
        return max(0, min(full, rest // WINDOW_PART_OF_REST))


@dataclass(frozen=True, slots=True)
class CreditWanted:
    """A message for the callee: a request waits for so many bytes of credit.

    Attributes:
        nested: whether a call that runs here made it.
    """

    call_id: int
    nbytes: int
    nested: bool


class WaitingRequests(Generic[R]):
    """The caller's side: large requests to one peer that wait for its credit.

    Attributes:
        window: bytes that may be sent without asking.
    """

    __slots__ = ("_asked", "_asked_count", "_unasked", "window")

    def __init__(self) -> None:
        self.window = 0
        self._asked: dict[int, tuple[R, bool]] = {}
        self._asked_count = [0, 0]  # not nested, nested
        self._unasked: tuple[dict[int, tuple[R, int]], dict[int, tuple[R, int]]]
        self._unasked = ({}, {})

    def __len__(self) -> int:
        return len(self._asked) + len(self._unasked[0]) + len(self._unasked[1])

    def __contains__(self, call_id: int) -> bool:
        return call_id in self._asked or any(
            call_id in queue for queue in self._unasked
        )

    def __iter__(self) -> Iterator[int]:
        yield from self._asked
        for queue in self._unasked:
            yield from queue

    def spend(self, nbytes: int) -> bool:
        """Take a request's bytes from the window; return False if it must wait.

        It waits behind others even if it would fit.
        """
        if nbytes > self.window or self._asked:
            return False
        self.window -= nbytes
        return True

    def wait(
        self, call_id: int, nbytes: int, record: R, *, nested: bool
    ) -> list[CreditWanted]:
        """Keep a request until there is credit; return messages for the callee."""
        self._unasked[nested][call_id] = record, nbytes
        return self._ask(nested=nested)

    def on_credit(
        self, call_id: int, nbytes: int
    ) -> tuple[R | None, list[CreditWanted]]:
        """Take credit; return the request that may go, and messages for the callee."""
        if nbytes <= 0:
            raise MalformedError(f"a credit must be of at least 1 byte, not {nbytes}")
        if call_id == WINDOW:
            self.window += nbytes
            return None, []
        pending = self._asked.pop(call_id, None)
        if pending is None:  # given up meanwhile, which the callee has been told
            return None, []
        record, nested = pending
        self._asked_count[nested] -= 1
        return record, self._ask(nested=nested)

    def withdraw(self, call_id: int) -> tuple[bool, list[CreditWanted]]:
        """Give up a request; return whether the callee knows it, and messages for it.

        The request must wait here.
        """
        pending = self._asked.pop(call_id, None)
        if pending is None:
            for queue in self._unasked:
                queue.pop(call_id, None)
            return False, []
        nested = pending[1]
        self._asked_count[nested] -= 1
        return True, self._ask(nested=nested)

    def clear(self) -> set[int]:
        """Forget everything: the peer is gone.  Return the calls that waited."""
        waited = set(self)
        self._asked.clear()
        self._asked_count = [0, 0]
        for queue in self._unasked:
            queue.clear()
        self.window = 0
        return waited

    def _ask(self, *, nested: bool) -> list[CreditWanted]:
        queue = self._unasked[nested]
        wants: list[CreditWanted] = []
        while queue and self._asked_count[nested] < WANTS_MAX:
            call_id = next(iter(queue))
            record, nbytes = queue.pop(call_id)
            self._asked[call_id] = record, nested
            self._asked_count[nested] += 1
            wants.append(CreditWanted(call_id, nbytes, nested))
        return wants
