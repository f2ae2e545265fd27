"""Credit over a network that delays: the limit holds, nothing is lost, all get a turn.

Hypothesis plays three callers, the connections between them and one callee, the calls
that run there, and the clock.  Safety: what is granted and has not come back never
exceeds the limit, unless the callee says why; and both ends agree on every byte of it.
Liveness: once calls end and messages arrive, every request has been sent.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from asyncrpc.core.calls.machine.credit import (
    WINDOW,
    Account,
    CreditWanted,
    Grant,
    InboundBudget,
    WaitingRequests,
    Why,
)

KIB = 1 << 10
MIB = 1 << 20
LIMIT_BYTES = 64 * MIB
SIZES = (10 * KIB, 200 * KIB, 3 * MIB, 20 * MIB, 40 * MIB, 64 * MIB, 80 * MIB)


class State(enum.Enum):
    """How far a request has come, at its caller."""

    WAITING = "for credit"
    GRANTED = "has credit, and nothing of it was sent"
    BEGUN = "a part of it was sent"
    SENT = "all of it was sent"
    GIVEN_UP = "cancelled"


@dataclass
class Call:
    call_id: int
    nbytes: int
    nested: bool
    state: State = State.WAITING
    by_window: bool = False
    is_known: bool = False  # the callee has seen it begin, or its cancel


@dataclass
class Caller:
    """One caller, and the messages on their way between it and the callee."""

    account: Account[Caller]
    waiting: WaitingRequests[Call] = field(default_factory=WaitingRequests)
    calls: dict[int, Call] = field(default_factory=dict)
    out: deque[tuple[str, int, int, bool]] = field(default_factory=deque)
    back: deque[Grant[Caller]] = field(default_factory=deque)
    running: dict[int, int] = field(default_factory=dict)
    granted: list[Call] = field(default_factory=list)

    def __hash__(self) -> int:
        return id(self)

    def tell(self, wants: list[CreditWanted]) -> None:
        self.out += [("WANT", want.call_id, want.nbytes, want.nested) for want in wants]

    def in_state(self, *states: State) -> list[Call]:
        return [call for call in self.calls.values() if call.state in states]


class Credit(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget: InboundBudget[Caller] = InboundBudget(LIMIT_BYTES)
        self.callers: list[Caller] = []
        self.orphans: list[tuple[Account[Caller], int]] = []  # calls of lost peers
        self.now_s = 0.0
        self.excused = 0  # bytes that the callee has said go beyond the limit

    @initialize(count=st.integers(1, 3))
    def open(self, count: int) -> None:
        for _ in range(count):
            self.add_caller()

    def add_caller(self) -> None:
        account: Account[Caller] = Account.__new__(Account)
        caller = Caller(account)
        caller.account = self.budget.open(caller)
        self.callers.append(caller)
        self.give(self.budget.welcome(caller.account))

    def give(self, grants: list[Grant[Caller]]) -> None:
        for grant in grants:
            if grant.why is Why.BEYOND:
                self.excused += grant.nbytes
            grant.peer.back.append(grant)
            if grant.call_id != WINDOW:
                grant.peer.granted.append(grant.peer.calls[grant.call_id])

    # --- what callers do -------------------------------------------------------------

    @rule(data=st.data(), nbytes=st.sampled_from(SIZES), nested=st.booleans())
    def call(self, data: st.DataObject, nbytes: int, *, nested: bool) -> None:
        caller = data.draw(st.sampled_from(self.callers))
        call = Call(len(caller.calls) + 1, nbytes, nested)
        caller.calls[call.call_id] = call
        if caller.waiting.spend(nbytes):
            call.state, call.by_window = State.GRANTED, True
        else:
            caller.tell(caller.waiting.wait(call.call_id, nbytes, call, nested=nested))

    def callers_with(self, *states: State) -> list[Caller]:
        return [caller for caller in self.callers if caller.in_state(*states)]

    @precondition(lambda self: self.callers_with(State.GRANTED, State.BEGUN))
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        states = State.GRANTED, State.BEGUN
        caller = data.draw(st.sampled_from(self.callers_with(*states)))
        self.send_one(caller, data.draw(st.sampled_from(caller.in_state(*states))))

    def send_one(self, caller: Caller, call: Call) -> None:
        """Send the beginning of a request, or the rest of it."""
        is_begun = call.state is State.BEGUN
        call.state = State.SENT if is_begun else State.BEGUN
        what = "END" if is_begun else "BEGIN"
        caller.out.append((what, call.call_id, call.nbytes, False))

    @precondition(lambda self: self.callers_with(*list(State)[:4]))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        states = list(State)[:4]
        caller = data.draw(st.sampled_from(self.callers_with(*states)))
        call = data.draw(st.sampled_from(caller.in_state(*states)))
        was, call.state = call.state, State.GIVEN_UP
        if was is State.WAITING:
            was_asked, wants = caller.waiting.withdraw(call.call_id)
            if was_asked:
                caller.out.append(("CANCEL", call.call_id, 0, False))
            caller.tell(wants)
            return
        unsent = 0 if was is State.SENT else call.nbytes
        caller.out.append(("CANCEL", call.call_id, unsent, False))

    # --- the network -----------------------------------------------------------------

    @precondition(lambda self: any(caller.out for caller in self.callers))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.arrive_at(data.draw(st.sampled_from([o for o in self.callers if o.out])))

    def arrive_at(self, caller: Caller) -> None:
        what, call_id, nbytes, nested = caller.out.popleft()
        account, call = caller.account, caller.calls[call_id]
        if what == "WANT":
            grants = self.budget.want(
                account, call_id, nbytes, self.now_s, nested=nested
            )
            self.give(grants)
            return
        call.is_known = True
        if what == "BEGIN":
            self.budget.begin(account, call_id, nbytes)
        elif what == "END":
            caller.running[call_id] = self.budget.take(account, call_id)
        else:
            self.give(self.budget.cancel(account, call_id, nbytes, self.now_s))

    @precondition(lambda self: any(caller.back for caller in self.callers))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.answer_to(data.draw(st.sampled_from([o for o in self.callers if o.back])))

    def answer_to(self, caller: Caller) -> None:
        grant = caller.back.popleft()
        call, wants = caller.waiting.on_credit(grant.call_id, grant.nbytes)
        caller.tell(wants)
        if call is not None:
            call.state = State.GRANTED

    # --- the callee ------------------------------------------------------------------

    @precondition(lambda self: any(caller.running for caller in self.callers))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        caller = data.draw(st.sampled_from([o for o in self.callers if o.running]))
        call_id = data.draw(st.sampled_from(sorted(caller.running)))
        self.end_call(caller, call_id)

    def end_call(self, caller: Caller, call_id: int) -> None:
        nbytes = caller.running.pop(call_id)
        self.give(self.budget.release(caller.account, nbytes, self.now_s))

    @precondition(lambda self: self.orphans)
    @rule()
    def end_orphan(self) -> None:
        self.give(self.budget.release(*self.orphans.pop(), self.now_s))

    @precondition(lambda self: len(self.callers) > 1)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A peer is gone; its calls run on.  Another comes in its place."""
        caller = data.draw(st.sampled_from(self.callers))
        self.callers.remove(caller)
        self.orphans += [(caller.account, held) for held in caller.running.values()]
        assert caller.waiting.clear() <= set(caller.calls)
        self.give(self.budget.close(caller.account, self.now_s))
        self.add_caller()

    @rule(seconds=st.sampled_from([0.01, 0.5, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        due_s = self.budget.due_s
        grants = self.budget.on_time(self.now_s)
        assert bool(grants) == (due_s is not None and due_s <= self.now_s)
        self.give(grants)

    # --- what must hold --------------------------------------------------------------

    @invariant()
    def the_limit_holds(self) -> None:
        """But for one request that is larger than what can ever be free."""
        budget = self.budget
        used = budget.held_bytes + budget.tickets_bytes + budget.windows_bytes
        assert used == LIMIT_BYTES - budget.free_bytes
        alone = max(SIZES)
        assert used <= max(LIMIT_BYTES, alone + LIMIT_BYTES // 8) + self.excused
        assert 0 <= budget.windows_bytes <= LIMIT_BYTES // 8

    @invariant()
    def the_books_add_up(self) -> None:
        budget = self.budget
        accounts = [caller.account for caller in self.callers]
        arriving = sum(sum(account.arriving.values()) for account in accounts)
        running = sum(sum(caller.running.values()) for caller in self.callers)
        orphans = sum(nbytes for _, nbytes in self.orphans)
        assert budget.held_bytes == arriving + running + orphans
        assert budget.tickets_bytes == sum(sum(a.tickets.values()) for a in accounts)
        assert budget.windows_bytes == sum(a.window for a in accounts)

    @invariant()
    def both_ends_agree_on_every_window(self) -> None:
        for caller in self.callers:
            coming = sum(
                frame.nbytes for frame in caller.back if frame.call_id == WINDOW
            )
            spent = sum(
                call.nbytes
                for call in caller.calls.values()
                if call.by_window and not call.is_known
            )
            assert caller.waiting.window + coming + spent == caller.account.window

    @invariant()
    def requests_of_one_kind_go_in_order(self) -> None:
        for caller in self.callers:
            for nested in (False, True):
                ids = [c.call_id for c in caller.granted if c.nested is nested]
                assert ids == sorted(ids)

    def teardown(self) -> None:
        """Everybody does what they have to, but time stands still: all are served."""
        while any(self.step(caller) for caller in self.callers) or self.orphans:
            while self.orphans:
                self.end_orphan()
        for caller in self.callers:
            assert not caller.in_state(State.WAITING, State.GRANTED, State.BEGUN)
            assert not len(caller.waiting)
        assert self.budget.free_bytes == LIMIT_BYTES - self.budget.windows_bytes
        assert not self.budget.has_waiting

    def step(self, caller: Caller) -> bool:
        """Do whatever a caller, its network, or its calls have to do next."""
        for call in caller.in_state(State.GRANTED, State.BEGUN):
            self.send_one(caller, call)
            return True
        if caller.out:
            self.arrive_at(caller)
        elif caller.back:
            self.answer_to(caller)
        elif caller.running:
            self.end_call(caller, min(caller.running))
        else:
            return False
        return True


TestCredit = Credit.TestCase
