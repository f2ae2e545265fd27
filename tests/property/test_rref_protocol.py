"""The RRef protocol under Hypothesis, which plays every worker and the network.

I1: a value is never freed while a live worker, which the owner has not declared lost,
has a handle.  A borrower all of whose lenders were lost before the owner counted it is
excused, but must be told.  I2: freed once no handle is left and the network is quiet.
I3: no table remembers the lost.

The lemmas are invariants too.  G1: the owner's counts add up with the forks that are at
the holders and on the way.  G2: what lies behind a loan stays while the loan is out.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.rref.machine import OwnerTable, UserTable
from tests.property.rref_world import Node, World

WORKERS = 4
RREFS_MAX = 2
CRASHES_MAX = 3
CUTS_MAX = 3
STEPS = 50


class RRefProtocol(RuleBasedStateMachine):
    tables: tuple[type[OwnerTable], type[UserTable]] = (OwnerTable, UserTable)

    def __init__(self) -> None:
        super().__init__()
        self.world = World(WORKERS, self.tables)
        self.crashes = 0
        self.cuts = 0

    def draw_node(self, data: st.DataObject, label: str = "worker") -> Node:
        ids = sorted(self.world.alive)
        return self.world.alive[data.draw(st.sampled_from(ids), label=label)]

    def draw_peer(self, data: st.DataObject, node: Node) -> Incarnation:
        """Draw another worker; it may be lost, and `node` may know."""
        alive = sorted(self.world.alive.keys() - {node.id})
        others = alive + self.world.dead[-1:]
        return data.draw(st.sampled_from(others), label="to")

    def draw_handle(self, data: st.DataObject) -> tuple[Node, RRefId]:
        handles = [
            (node.id, rref_id)
            for node in self.world.alive.values()
            for rref_id in sorted(+node.handles)
        ]
        worker, rref_id = data.draw(st.sampled_from(handles), label="handle")
        return self.world.alive[worker], rref_id

    def is_shareable(self, node: Node, rref_id: RRefId) -> bool:
        if self.world.owner_of[rref_id] == node.id:
            return node.owned.state(rref_id).name != "GONE"
        return rref_id not in node.lost

    def has_room(self) -> bool:
        """Say whether to make another RRef: few, shared much, meet more trouble."""
        nodes = self.world.alive.values()
        return len({handle for node in nodes for handle in node.handles}) < RREFS_MAX

    def any_handle(self) -> bool:
        return any(node.handles for node in self.world.alive.values())

    @precondition(has_room)
    @rule(data=st.data(), is_large=st.booleans(), is_refused=st.integers(0, 7))
    def remote(self, data: st.DataObject, *, is_large: bool, is_refused: int) -> None:
        src = self.draw_node(data)
        dst = self.draw_peer(data, src)
        self.world.remote(src, dst, is_large=is_large, is_refused=is_refused == 7)

    @precondition(has_room)
    @rule(data=st.data(), is_refused=st.booleans(), is_home=st.booleans())
    def remote_overtaken(
        self, data: st.DataObject, *, is_refused: bool, is_home: bool
    ) -> None:
        """Let the owner hear of an RRef from another worker before its remote()."""
        src = self.draw_node(data)
        peers = sorted(self.world.alive.keys() - {src.id})
        owner, third = data.draw(st.permutations(peers), label="owner, third")[:2]
        if src.noticed & {owner, third}:
            return
        rref_id = self.world.remote(src, owner, is_large=True, is_refused=is_refused)
        links = [(src.id, third), (third, owner)]
        self.world.share(src, third, rref_id, is_result=True)
        if is_home:
            self.world.share(src, owner, rref_id)
            links.insert(0, (src.id, owner))
        for link in links:
            while self.world.links.get(link):
                self.world.deliver(link)
                self.world.check()

    @precondition(has_room)
    @rule(data=st.data())
    def own(self, data: st.DataObject) -> None:
        self.world.own(self.draw_node(data))

    @precondition(any_handle)
    @rule(data=st.data(), is_large=st.booleans(), is_result=st.booleans())
    def share(self, data: st.DataObject, *, is_large: bool, is_result: bool) -> None:
        src, rref_id = self.draw_handle(data)
        dst = self.draw_peer(data, src)
        is_parted = dst in src.noticed and dst in self.world.alive
        if self.is_shareable(src, rref_id) and not is_parted:
            self.world.share(src, dst, rref_id, is_large=is_large, is_result=is_result)

    @precondition(any_handle)
    @rule(data=st.data())
    def share_in_a_circle(self, data: st.DataObject) -> None:
        """Lend on what was borrowed, and have it lent back."""
        src, rref_id = self.draw_handle(data)
        owner = self.world.owner_of[rref_id]
        peers = sorted(self.world.alive.keys() - {src.id, owner})
        if len(peers) > 1:
            first, other = data.draw(st.permutations(peers), label="circle")[:2]
            for link in ((src.id, first), (first, other), (other, first)):
                self.share_at_once(*link, rref_id)

    def share_at_once(self, src: Incarnation, dst: Incarnation, about: RRefId) -> None:
        node = self.world.alive[src]
        if not node.handles[about] or dst in node.noticed:
            return
        if self.is_shareable(node, about):
            self.world.share(node, dst, about)
            while self.world.links.get((src, dst)):
                self.world.deliver((src, dst))
                self.world.check()

    @precondition(any_handle)
    @rule(data=st.data())
    def share_in_vain(self, data: st.DataObject) -> None:
        src, rref_id = self.draw_handle(data)
        dst = self.draw_peer(data, src)
        if self.is_shareable(src, rref_id):
            self.world.share_in_vain(src, dst, rref_id)

    @precondition(any_handle)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.world.drop(*self.draw_handle(data))

    @precondition(lambda self: self.world.busy_links())
    @rule(data=st.data(), count=st.integers(1, 4))
    def deliver(self, data: st.DataObject, count: int) -> None:
        link = data.draw(st.sampled_from(self.world.busy_links()), label="link")
        for _ in range(min(count, len(self.world.links[link]))):
            self.world.deliver(link)
            self.world.check()

    @precondition(lambda self: any(n.decoding for n in self.world.alive.values()))
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        bodies = [
            (node.id, index)
            for node in self.world.alive.values()
            for index in range(len(node.decoding))
        ]
        worker, index = data.draw(st.sampled_from(bodies), label="body")
        node = self.world.alive[worker]
        self.world.decode(node, node.decoding.pop(index))

    @precondition(lambda self: any(n.calls for n in self.world.alive.values()))
    @rule(data=st.data(), is_kept=st.booleans())
    def end_call(self, data: st.DataObject, *, is_kept: bool) -> None:
        busy = [node.id for node in self.world.alive.values() if node.calls]
        node = self.world.alive[data.draw(st.sampled_from(busy), label="worker")]
        rref_id = node.calls[0][0]
        if not is_kept and node.handles[rref_id]:
            self.world.drop(node, rref_id)
        self.world.end_call(node, 0)

    @precondition(lambda self: self.crashes < CRASHES_MAX)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.crashes += 1
        self.world.crash(self.draw_node(data))
        self.world.start()

    @precondition(lambda self: self.cuts < CUTS_MAX)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """Part two workers for longer than their lease."""
        pairs = [
            (first, other)
            for first in sorted(self.world.alive)
            for other in sorted(self.world.alive)
            if first < other and frozenset((first, other)) not in self.world.cuts
        ]
        if pairs:
            self.cuts += 1
            self.world.cut(*data.draw(st.sampled_from(pairs), label="pair"))

    @precondition(lambda self: self.world.parted())
    @rule(data=st.data())
    def meet_again(self, data: st.DataObject) -> None:
        first, other = data.draw(st.sampled_from(self.world.parted()), label="pair")
        self.world.meet_again(first, other)

    @precondition(lambda self: self.world.searches)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        last = len(self.world.searches) - 1
        self.world.find(data.draw(st.integers(0, last), label="which"))

    @precondition(lambda self: self.world.unnoticed)
    @rule(data=st.data())
    def notice(self, data: st.DataObject) -> None:
        last = len(self.world.unnoticed) - 1
        self.world.notice(data.draw(st.integers(0, last), label="which"))

    @rule()
    def settle_down(self) -> None:
        self.world.settle_down()
        self.world.check_quiet()

    @invariant()
    def references_add_up(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle_down()
        self.world.check_quiet()
        for node in self.world.alive.values():
            for rref_id in list(node.handles.elements()):
                self.world.drop(node, rref_id)
        self.world.settle_down()
        self.world.check_empty()


TestRRefProtocol = RRefProtocol.TestCase
TestRRefProtocol.settings = settings(
    max_examples=150,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
