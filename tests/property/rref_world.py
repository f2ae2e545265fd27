"""A world of workers that share RRefs, on the worst network the protocol must survive.

Per pair and direction messages arrive in order; different pairs are unordered; the body
of a large message is decoded any time after it was delivered.  Workers die and start
again as another incarnation, and each survivor notices when it notices.  Two that live
may be cut off for so long that each declares the other lost, and meet again later.

`World` carries out the machines' effects and keeps the books that no worker has: who
really lives, what was really freed, which loans are out.  Every `check_…` compares the
machines with these books.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.rref.machine import (
    Effect,
    FindOwner,
    Freed,
    HandlesApart,
    HandlesLost,
    LossCause,
    NotWanted,
    OwnerTable,
    SendGone,
    SendLoanReturned,
    SendProbe,
    SendRegister,
    SendRegistered,
    SendRelease,
    SendSettled,
    UserTable,
    ValueGone,
)

Pair = frozenset[Incarnation]
GIVES_FORK = frozenset({"fork", "confirmed", "registered"})
BODIES = frozenset({"create", "refused_create", "fork", "loan", "result", "home"})


class Message(NamedTuple):
    src: Incarnation
    dst: Incarnation
    kind: str
    rref_id: RRefId | None = None
    number: int = 0  # a token, or forks
    is_large: bool = False

    @property
    def about(self) -> RRefId:
        assert self.rref_id is not None
        return self.rref_id


class Node:
    """One life of a worker: its tables, its handles, and what it has yet to do."""

    def __init__(
        self,
        incarnation: Incarnation,
        tables: tuple[type[OwnerTable], type[UserTable]] = (OwnerTable, UserTable),
    ) -> None:
        self.id = incarnation
        self.owned = tables[0](incarnation)
        self.held = tables[1]()
        self.handles: Counter[RRefId] = Counter()  # the owner's own ones too
        self.lost: set[RRefId] = set()
        self.decoding: list[Message] = []
        self.calls: list[tuple[RRefId, Incarnation, int]] = []
        self.noticed: set[Incarnation] = set()  # whom it has declared lost
        self.serial = 0

    def new_id(self) -> RRefId:
        self.serial += 1
        return RRefId(self.id, self.serial)


class World:
    def __init__(
        self,
        workers: int,
        tables: tuple[type[OwnerTable], type[UserTable]] = (OwnerTable, UserTable),
    ) -> None:
        self.tables = tables
        self.alive: dict[Incarnation, Node] = {}
        self.dead: list[Incarnation] = []
        self.links: dict[tuple[Incarnation, Incarnation], deque[Message]] = {}
        self.unnoticed: list[tuple[Incarnation, Incarnation]] = []  # survivor, lost
        self.cuts: dict[Pair, set[Incarnation]] = {}  # and who has still to notice
        self.searches: list[tuple[Incarnation, Incarnation]] = []  # who, for whom
        self.held_back: list[Message] = []  # until its receiver is found
        self.owner_of: dict[RRefId, Incarnation] = {}
        self.created: set[RRefId] = set()
        self.refused: set[RRefId] = set()  # or lost on the way: never made
        self.freed: set[RRefId] = set()
        self.loans: dict[tuple[Incarnation, int], tuple[RRefId, Incarnation]] = {}
        self.exposed: set[tuple[Incarnation, RRefId]] = set()
        self.counted: Counter[str] = Counter()  # messages by kind
        self.incarnations = 0
        for _ in range(workers):
            self.start()

    def start(self) -> Node:
        self.incarnations += 1
        node = Node(Incarnation(self.incarnations), self.tables)
        self.alive[node.id] = node
        self.unnoticed += [(node.id, dead) for dead in self.dead]  # membership tells it
        return node

    # What workers do.

    def remote(
        self, src: Node, dst: Incarnation, *, is_large: bool, is_refused: bool = False
    ) -> RRefId:
        rref_id = src.new_id()
        self.owner_of[rref_id] = dst
        src.handles[rref_id] += 1
        if is_refused:
            self.refused.add(rref_id)
        src.held.create(rref_id, dst)
        if dst in src.noticed:  # the call fails, before it is sent
            self.refused.add(rref_id)
            self.carry_out(src, src.held.refused(rref_id))
            return rref_id
        kind = "refused_create" if is_refused else "create"
        self.send(Message(src.id, dst, kind, rref_id, is_large=is_large))
        return rref_id

    def own(self, node: Node) -> RRefId:
        rref_id = node.new_id()
        self.owner_of[rref_id] = node.id
        self.created.add(rref_id)
        node.handles[rref_id] += 1
        self.carry_out(node, node.owned.create(rref_id))
        return rref_id

    def share(
        self,
        src: Node,
        dst: Incarnation,
        rref_id: RRefId,
        *,
        is_large: bool = False,
        is_result: bool = False,
    ) -> None:
        owner = self.owner_of[rref_id]
        if owner == src.id:
            src.owned.hand_out(rref_id, dst)
            self.send(Message(src.id, dst, "fork", rref_id, is_large=is_large))
            return
        token = src.held.lend(rref_id, dst)
        if token:
            self.loans[src.id, token] = rref_id, dst
        kind = "home" if dst == owner else "result" if is_result else "loan"
        self.send(Message(src.id, dst, kind, rref_id, token, is_large=is_large))

    def share_in_vain(self, src: Node, dst: Incarnation, rref_id: RRefId) -> None:
        if self.owner_of[rref_id] == src.id:
            src.owned.hand_out(rref_id, dst)
            self.carry_out(src, src.owned.undo_hand_out(rref_id, dst))
        else:
            self.carry_out(src, src.held.undo_lend(src.held.lend(rref_id, dst)))

    def drop(self, node: Node, rref_id: RRefId) -> None:
        node.handles[rref_id] -= 1
        if not node.handles[rref_id]:
            node.lost.discard(rref_id)
            del node.handles[rref_id]
        if self.owner_of[rref_id] == node.id:
            self.carry_out(node, node.owned.local_release(rref_id))
        else:
            self.carry_out(node, node.held.drop_handle(rref_id))

    def end_call(self, node: Node, which: int) -> None:
        rref_id, lender, token = node.calls.pop(which)
        self.carry_out(node, node.held.settle(rref_id, lender, token))

    def crash(self, node: Node) -> None:
        """Kill a worker; what it has sent is still on its way."""
        del self.alive[node.id]
        self.dead.append(node.id)
        self.unnoticed = [pair for pair in self.unnoticed if node.id not in pair]
        self.unnoticed += [(other, node.id) for other in self.alive]
        for pair in [pair for pair in self.cuts if node.id in pair]:
            del self.cuts[pair]
        for link in self.links:
            if link[1] == node.id:
                self.links[link].clear()
        self.note_exposed()

    def cut(self, first: Incarnation, other: Incarnation) -> None:
        """Part two that live, for good as far as this session of theirs goes."""
        self.cuts[Pair((first, other))] = {first, other}
        self.unnoticed += [(first, other), (other, first)]
        for link in ((first, other), (other, first)):
            self.never_arrive(self.links.pop(link, ()))
        self.note_exposed()

    def never_arrive(self, messages: Iterable[Message]) -> None:
        self.refused.update(
            message.about for message in messages if message.kind == "create"
        )

    def notice(self, which: int) -> None:
        survivor, lost = self.unnoticed.pop(which)
        self.lose(self.alive[survivor], lost)

    def lose(self, node: Node, lost: Incarnation) -> None:
        """Let a worker declare another one lost."""
        node.noticed.add(lost)
        self.links.pop((lost, node.id), None)
        if lost in self.alive:  # whose link is closed: nobody reads on
            self.never_arrive(
                message for message in node.decoding if message.src == lost
            )
            node.decoding = [
                message for message in node.decoding if message.src != lost
            ]
            self.cuts.get(Pair((node.id, lost)), set()).discard(node.id)
        for loan, (_, borrower) in list(self.loans.items()):
            if loan[0] == node.id and borrower == lost:
                del self.loans[loan]
        self.carry_out(node, node.owned.worker_lost(lost))
        self.carry_out(node, node.held.worker_lost(lost))

    def parted(self) -> list[tuple[Incarnation, ...]]:
        """Return the pairs that have lost each other, and live."""
        return [tuple(sorted(pair)) for pair, who in self.cuts.items() if not who]

    def meet_again(self, first: Incarnation, other: Incarnation) -> None:
        """Begin a new session, of two that have declared each other lost."""
        del self.cuts[Pair((first, other))]
        for here, there in ((first, other), (other, first)):
            node = self.alive[here]
            node.noticed.discard(there)
            node.owned.forgive(there)
            self.carry_out(node, node.held.forgive(there))
        held_back, self.held_back = self.held_back, []
        for message in held_back:
            if message.src in self.alive:
                self.send(message)

    def find(self, which: int) -> None:
        """End a search for an owner that was lost: it is there, or lost once more."""
        here, there = self.searches.pop(which)
        if here not in self.alive:
            return
        if there not in self.alive:
            self.lose(self.alive[here], there)
            return
        for pair in ((here, there), (there, here)):
            if pair in self.unnoticed:  # the other end refuses the session that was
                self.notice(self.unnoticed.index(pair))
        if Pair((here, there)) in self.cuts:
            self.meet_again(here, there)

    # What the network does.

    def send(self, message: Message) -> None:
        self.counted[message.kind] += 1
        if message.dst not in self.alive:
            return
        link = message.src, message.dst
        if message.dst in self.alive[message.src].noticed:
            if message.kind == "register":  # the service looks for the owner
                self.held_back.append(message)
        elif Pair(link) in self.cuts:
            self.never_arrive([message])
        else:
            self.post(message)

    def post(self, message: Message) -> None:
        self.links.setdefault((message.src, message.dst), deque()).append(message)

    def busy_links(self) -> list[tuple[Incarnation, Incarnation]]:
        return [link for link, queue in self.links.items() if queue]

    def deliver(self, link: tuple[Incarnation, Incarnation]) -> None:
        self.arrive(self.links[link].popleft())

    def arrive(self, message: Message) -> None:
        node = self.alive[message.dst]
        if message.kind in BODIES and message.is_large:
            node.decoding.append(message)
        elif message.kind in BODIES:
            self.decode(node, message)
        else:
            self.carry_out(node, self.receive(node, message))

    def receive(  # noqa: PLR0911  # one return a message
        self, node: Node, message: Message
    ) -> list[Effect]:
        match message.kind:
            case "register":
                return node.owned.register(message.about, message.src)
            case "release":
                return node.owned.release(message.about, message.src, message.number)
            case "settled":
                return node.owned.settled(message.about, message.src)
            case "confirmed":
                return node.held.confirmed(message.about)
            case "refused":
                return node.held.refused(message.about)
            case "registered":
                return node.held.registered(message.about)
            case "gone":
                return node.held.gone(message.about)
            case "probe":
                return node.held.probe(message.about, message.src)
            case _:
                self.loans.pop((node.id, message.number), None)
                return node.held.loan_returned(message.number, message.src)

    def decode(self, node: Node, message: Message) -> None:
        rref_id = message.about
        if message.kind == "create":
            self.decode_create(node, message)
        elif message.kind == "refused_create":
            self.send(Message(node.id, message.src, "refused", rref_id))
        elif message.kind == "home":
            self.check_homecoming(message)
            node.handles[rref_id] += 1
            self.carry_out(node, node.owned.came_home(rref_id))
            if message.src not in node.noticed:
                back = Message(node.id, message.src, "returned", None, message.number)
                self.send(back)
        elif message.kind == "fork":
            node.handles[rref_id] += 1
            self.carry_out(node, node.held.receive_fork(rref_id, message.src))
        else:
            self.decode_loan(node, message)

    def decode_create(self, node: Node, message: Message) -> None:
        effects = node.owned.create(message.about, message.src)
        if Freed(message.about) in effects:
            return  # the creator has died: the value is not even computed
        self.created.add(message.about)
        self.send(Message(node.id, message.src, "confirmed", message.about))
        self.carry_out(node, effects)

    def decode_loan(self, node: Node, message: Message) -> None:
        rref_id, lender, token = message.about, message.src, message.number
        owner = self.owner_of[rref_id]
        node.handles[rref_id] += 1
        self.carry_out(node, node.held.borrow(rref_id, owner, lender, token))
        holding = node.held.get(rref_id)
        is_cut = Pair((node.id, lender)) in self.cuts
        is_void = (lender, token) not in self.loans  # its owner was lost meanwhile
        if holding and (is_cut or is_void or self.is_exposed(lender, rref_id)):
            self.note_exposed()
        if message.kind == "result":
            self.carry_out(node, node.held.settle(rref_id, lender, token))
        else:
            node.calls.append((rref_id, lender, token))

    def carry_out(self, node: Node, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Freed(rref_id):
                    self.freed.add(rref_id)
                case NotWanted(rref_id):
                    assert rref_id not in self.created - self.freed
                case HandlesLost(rref_id, cause):
                    self.check_loss(node, rref_id, cause)
                    node.lost.add(rref_id)
                case HandlesApart(rref_id):
                    node.handles.pop(rref_id, None)
                    node.lost.discard(rref_id)
                    for loan, (about, _) in list(self.loans.items()):
                        if loan[0] == node.id and about == rref_id:
                            del self.loans[loan]
                case FindOwner(owner):
                    self.searches.append((node.id, owner))
                case ValueGone(rref_id):
                    self.check_gone(rref_id)
                case _:
                    self.send(self.message(node, effect))

    def message(  # noqa: PLR0911  # one return an effect
        self, node: Node, effect: Effect
    ) -> Message:
        match effect:
            case SendRegister(to, rref_id):
                return Message(node.id, to, "register", rref_id)
            case SendRegistered(to, rref_id):
                return Message(node.id, to, "registered", rref_id)
            case SendGone(to, rref_id):
                self.check_gone(rref_id)
                return Message(node.id, to, "gone", rref_id)
            case SendRelease(to, rref_id, forks):
                return Message(node.id, to, "release", rref_id, forks)
            case SendProbe(to, rref_id):
                return Message(node.id, to, "probe", rref_id)
            case SendSettled(to, rref_id):
                return Message(node.id, to, "settled", rref_id)
            case SendLoanReturned(to, token):
                return Message(node.id, to, "returned", None, token)
            case _:
                raise AssertionError(effect)

    def settle_down(self) -> None:
        """Let everything that is under way arrive, and every call end."""
        while self.unnoticed:
            self.notice(0)
        while True:
            while self.searches:
                self.find(0)
            for link in self.busy_links():
                self.deliver(link)
            for node in self.alive.values():
                if node.decoding:
                    self.decode(node, node.decoding.pop())
                elif node.calls:
                    self.end_call(node, 0)
            self.check()
            is_busy = any(n.decoding or n.calls for n in self.alive.values())
            if not is_busy and not self.busy_links() and not self.searches:
                return

    # What must hold.
    def check(self) -> None:
        self.forget_exposed()
        self.spread_exposed()
        self.check_no_live_handle_lost_its_value()
        self.check_loans_are_pinned()
        self.check_counts_add_up()
        self.check_borrowers_are_grounded()

    def forget_exposed(self) -> None:
        """Forget who is counted now, or lets go: it is exposed no more."""
        for worker, rref_id in tuple(self.exposed):
            node = self.alive.get(worker)
            holding = node.held.get(rref_id) if node else None
            if holding is None or self.is_counted(worker, rref_id):
                self.exposed.remove((worker, rref_id))

    def spread_exposed(self) -> None:
        """Note who relies on nobody but lenders that have lost the owner or it."""
        for node in self.alive.values():
            for rref_id in self.owner_of:
                lenders = self.lenders(node, rref_id)
                lost = (self.is_adrift(lender, node, rref_id) for lender in lenders)
                if lenders and all(lost) and not self.is_counted(node.id, rref_id):
                    self.exposed.add((node.id, rref_id))

    def is_adrift(self, lender: Incarnation, of: Node, rref_id: RRefId) -> bool:
        if self.is_exposed(lender, rref_id) or Pair((lender, of.id)) in self.cuts:
            return True
        holding = self.alive[lender].held.get(rref_id)
        return holding is not None and holding.state.name == "LOST"

    def note_exposed(self) -> None:
        """Note borrowers whose every lender is lost: they may lose their race."""
        for node in self.alive.values():
            for rref_id in self.owner_of:
                if node.held.get(rref_id) and not self.is_grounded(node.id, rref_id):
                    self.exposed.add((node.id, rref_id))

    def is_counted(self, worker: Incarnation, rref_id: RRefId) -> bool:
        """Say whether the owner counts a worker, or is about to count its remote()."""
        owner = self.owner_of[rref_id]
        if owner not in self.alive or Pair((worker, owner)) in self.cuts:
            return False
        holding = self.alive[worker].held.get(rref_id)
        if holding is None:
            return False
        if holding.forks or holding.state.name == "PENDING":
            return True
        return any(
            message.dst == worker and message.about == rref_id
            for message in self.messages()
            if message.kind in GIVES_FORK
        )

    def is_grounded(self, worker: Incarnation, rref_id: RRefId) -> bool:
        """Say whether a chain of loans leads from a counted holder to this one."""
        grounded: set[Incarnation] = set()
        while True:
            more = {
                node.id
                for node in self.alive.values()
                if node.id not in grounded
                and (node.id, rref_id) not in self.exposed
                and (
                    self.is_counted(node.id, rref_id)
                    or any(
                        lender in grounded and Pair((lender, node.id)) not in self.cuts
                        for lender in self.lenders(node, rref_id)
                    )
                )
            }
            if not more or worker in grounded:
                return worker in grounded
            grounded |= more

    def lenders(self, node: Node, rref_id: RRefId) -> list[Incarnation]:
        holding = node.held.get(rref_id)
        return [debt.lender for debt in holding.debts] if holding else []

    def is_exposed(self, worker: Incarnation, rref_id: RRefId) -> bool:
        if worker not in self.alive or (worker, rref_id) in self.exposed:
            return True
        return Pair((worker, self.owner_of[rref_id])) in self.cuts

    def check_no_live_handle_lost_its_value(self) -> None:  # I1
        for node in self.alive.values():
            for rref_id in self.freed & (node.handles.keys() - node.lost):
                is_gone = self.owner_of[rref_id] == node.id
                assert is_gone or self.is_exposed(node.id, rref_id), (node.id, rref_id)

    def check_homecoming(self, message: Message) -> None:  # I1
        """Check that an RRef finds its value when it comes back to the owner."""
        if message.about in self.freed:
            assert self.is_exposed(message.src, message.about), message

    def check_gone(self, rref_id: RRefId) -> None:
        """Check that GONE is said only of what was freed or can never be made."""
        is_orphan = rref_id.creator not in self.alive
        assert rref_id in self.freed | self.refused or is_orphan, rref_id

    def check_loss(self, node: Node, rref_id: RRefId, cause: LossCause) -> None:
        if cause is LossCause.OWNER_LOST:
            assert self.owner_of[rref_id] in node.noticed
        else:
            self.check_gone(rref_id)

    def check_loans_are_pinned(self) -> None:  # G2
        for (lender, token), (rref_id, _) in self.loans.items():
            if lender in self.alive:
                assert self.alive[lender].held.get(rref_id) is not None, (lender, token)

    def check_borrowers_are_grounded(self) -> None:  # G2, from the other side
        """Check that whoever relies on loans relies on a holder that is counted."""
        values = [
            rref_id
            for rref_id in self.owner_of.keys() - self.refused
            if self.owner_of[rref_id] in self.alive
        ]
        for node in self.alive.values():
            for rref_id in values:
                holding = node.held.get(rref_id)
                if holding is not None and holding.state.name == "BORROWED":
                    is_excused = self.is_exposed(node.id, rref_id)
                    assert is_excused or self.is_grounded(node.id, rref_id), node.id

    def check_counts_add_up(self) -> None:  # G1
        """Compare the owner's count with the forks at the holder and on the way."""
        way = Counter(self.forks_on_the_way())
        for rref_id, owner in self.owner_of.items():
            if owner not in self.alive:
                continue
            holders = self.alive[owner].owned.holders(rref_id)
            for user, node in self.alive.items():
                if self.cuts.get(Pair((owner, user))):
                    continue  # they do not agree on what is over
                holding = node.held.get(rref_id)
                forks = holding.forks if holding else 0
                total = forks + way[user, rref_id]
                assert holders.get(user, 0) == total, (rref_id, user)

    def forks_on_the_way(self) -> Iterator[tuple[Incarnation, RRefId]]:
        for message in self.messages():
            if message.kind in GIVES_FORK:
                yield message.dst, message.about
            elif message.kind == "release":
                yield from [(message.src, message.about)] * message.number

    def messages(self) -> list[Message]:
        """Return what is on its way, and what has arrived and is not decoded."""
        messages = [message for queue in self.links.values() for message in queue]
        for node in self.alive.values():
            messages += node.decoding
        return messages

    def check_quiet(self) -> None:  # I2
        """Check that just what is held is here, now that nothing is under way."""
        for node in self.alive.values():
            users = [
                other_node
                for other_node in self.alive.values()
                if other_node is not node
            ]
            wanted = {
                rref_id
                for rref_id, owner in self.owner_of.items()
                if owner == node.id
                and (
                    node.handles[rref_id]
                    or any(rref_id in user.handles.keys() - user.lost for user in users)
                )
            }
            assert len(node.owned) == len(wanted), (node.id, wanted)
            for rref_id in (wanted & self.created) - self.freed:
                assert node.owned.state(rref_id).name == "LIVE"
            theirs = [
                handle for handle in +node.handles if self.owner_of[handle] != node.id
            ]
            for rref_id in theirs:
                assert self.owner_of[rref_id] in self.alive or rref_id in node.lost
            assert len(node.held) == len(theirs)

    def check_empty(self) -> None:  # I3
        """Check that no table and no index has anything left, of dead or living."""
        for node in self.alive.values():
            for table in (node.owned, node.held):
                for name, value in vars(table).items():
                    if hasattr(value, "__len__"):
                        assert not len(value), (node.id, name, value)
