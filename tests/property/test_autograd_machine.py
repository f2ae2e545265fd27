"""Backward passes of machines alone: Hypothesis draws the program and every delay.

A forward program sends tensors between workers.  Each depends on tensors that its
sender has received, so the crossings are a graph; the gradient of one is the number of
ways from it to the root.  The backward pass runs on a `LocalPass` and a `Wave` for each
worker, with messages and answers delivered, and segments ended, in any order.  The last
answer must come when nothing is under way; then, or once all have been told who takes
part, every crossing that takes part has had exactly one gradient, of the right value,
and each node has run once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import event, given, settings
from hypothesis import strategies as st

from asyncrpc.core.autograd.machine import LocalPass, PassReport, Segment, Wave

ROOT = -1
WORKERS = 3
MESSAGES_MAX = 9
TENSORS_MAX = 3


@dataclass
class Program:
    """Crossings by number, in the order they were made; the root is worker 0's."""

    source: dict[int, int] = field(default_factory=dict)
    target: dict[int, int] = field(default_factory=dict)
    made_of: dict[int, frozenset[int]] = field(default_factory=dict)

    def starts(self) -> list[int]:
        """Return what takes part: the root and all that it depends on, newest first."""
        reached, todo = {ROOT}, [ROOT]
        while todo:
            new = self.made_of[todo.pop()] - reached
            reached |= new
            todo += new
        return [ROOT, *sorted(reached - {ROOT}, reverse=True)]

    def gradients(self) -> dict[int, int]:
        """Return the gradient of each crossing that takes part."""
        totals = Counter({ROOT: 1})
        for start in self.starts():
            for leaf in self.made_of[start]:
                totals[leaf] += totals[start]
        return dict(totals)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program()
    received: dict[int, list[int]] = {worker: [] for worker in range(WORKERS)}

    def draw_sources(worker: int) -> frozenset[int]:
        known = received[worker]
        if not known:
            return frozenset()
        chosen = draw(st.integers(1, (1 << len(known)) - 1))
        return frozenset(start for bit, start in enumerate(known) if chosen >> bit & 1)

    for _ in range(draw(st.integers(0, MESSAGES_MAX))):
        source = draw(st.integers(0, WORKERS - 1))
        target = draw(st.integers(0, WORKERS - 1))  # a worker may send to itself
        message = []
        for _ in range(draw(st.integers(1, TENSORS_MAX))):
            number = len(program.source)
            program.source[number], program.target[number] = source, target
            program.made_of[number] = draw_sources(source)
            message.append(number)
        received[target] += message
    program.source[ROOT] = 0
    program.made_of[ROOT] = draw_sources(0)
    return program


Node = tuple[str, int]  # a start or a leaf, by the number of its crossing
Answer = list[PassReport]


@dataclass
class Message:
    """A request on its way, or, with an answer in it, on its way back.

    On its way back it may bring what would else be a request of its own.
    """

    source: int
    target: int
    asked: list[int] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)
    is_close: bool = False
    answer: Answer | None = None
    back: Message | None = None


class Here:
    """One worker's part in a pass."""

    def __init__(self, program: Program, me: int) -> None:
        self.program = program
        self.me = me
        mine = [
            start
            for start, who in program.source.items()
            if who == me and start != ROOT
        ]
        self.live: set[Node] = set()
        self.machine: LocalPass[int, Node] = LocalPass(
            self.following, self.live, {start: ("start", start) for start in mine}
        )
        self.wave = Wave()
        self.entering: Counter[Node] = Counter()
        self.gradients: dict[int, int] = {}
        self.new: list[int] = []
        self.onward: set[int] = set()
        self.owes: Message | None = None
        self.going_back: Message | None = None
        self.is_closed = False
        self.in_hand: Segment[int, Node] | None = None
        self.ran: Counter[Node] = Counter()

    def following(self, node: Node) -> list[tuple[Node | None, int]]:
        kind, number = node
        if kind == "leaf":
            return []
        return [(("leaf", leaf), 0) for leaf in sorted(self.program.made_of[number])]

    def take_part(self, starts: list[int]) -> None:
        for start in starts:
            self.live.add(("start", start))
            for leaf in self.program.made_of[start]:
                if ("leaf", leaf) not in self.live:
                    self.live.add(("leaf", leaf))
                    self.new.append(leaf)


class Backward:
    """One pass over a program, with nothing delivered or ended by itself."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.workers = [Here(program, me) for me in range(WORKERS)]
        self.messages: list[Message] = []
        self.travelled: Counter[int] = Counter()
        self.values: dict[int, int] = {}
        self.is_over = False
        self.came_back = 0  # gradients that came with answers
        root = self.workers[0]
        root.machine.add_root(ROOT, ("start", ROOT))
        root.take_part([ROOT])
        root.gradients[ROOT] = 1
        root.machine.arrive([ROOT])
        self.work(root, None)

    @property
    def running(self) -> list[Here]:
        return [worker for worker in self.workers if worker.in_hand is not None]

    def work(self, here: Here, message: Message | None) -> None:
        """As the service does: answer at once, or when all has ended."""
        if not here.wave.engage(None if message is None else message.source):
            if message is not None:
                self.answer(message, [])
        else:
            here.owes = message
        self.drive(here)

    def drive(self, here: Here) -> None:
        if here.wave.is_running:
            return
        segment = here.machine.next_segment()
        ready: set[Node] = set()
        if segment is not None:
            self.send_ahead(here)
            ready = self.nodes_of(here, segment)
            here.in_hand, here.wave.is_running = segment, True
        later = [leaf for leaf in here.new if ("leaf", leaf) not in ready]
        here.new = [leaf for leaf in here.new if leaf not in later]
        self.send(here, later, {})
        self.look_up(here)

    def nodes_of(self, here: Here, segment: Segment[int, Node]) -> set[Node]:
        return set(here.live if segment.is_whole else segment.nodes)

    def end(self, here: Here) -> None:
        """End a segment, and send on what is complete."""
        segment, here.in_hand = here.in_hand, None
        assert segment is not None
        nodes = self.nodes_of(here, segment)
        here.ran.update(nodes)
        for start in segment.starts:
            here.entering["start", start] += here.gradients[start]
        for node in sorted(nodes, reverse=True):  # starts before leaves
            for child, _ in here.following(node):
                assert child is not None
                here.entering[child] += here.entering[node]
        done = {
            leaf: here.entering["leaf", leaf] for kind, leaf in nodes if kind == "leaf"
        }
        here.new = [leaf for leaf in here.new if leaf not in done]
        self.send(here, [], done)
        here.wave.is_running = False
        self.drive(here)

    def send(self, here: Here, asked: list[int], gradients: dict[int, int]) -> None:
        by_sender: dict[int, Message] = {}
        for leaf in (*asked, *gradients):
            target = self.program.source[leaf]
            message = by_sender.setdefault(target, Message(here.me, target))
            if leaf in gradients:
                message.gradients[leaf] = gradients[leaf]
            else:
                message.asked.append(leaf)
        for message in by_sender.values():
            if here.wave.owes == message.target and here.going_back is None:
                here.going_back = message
            else:
                self.post(here, message)
        if here.wave.outstanding:
            self.send_ahead(here)

    def send_ahead(self, here: Here) -> None:
        back, here.going_back = here.going_back, None
        if back is not None:
            self.post(here, back)

    def post(self, here: Here, message: Message) -> None:
        here.onward.add(message.target)
        here.wave.outstanding += 1
        self.messages.append(message)

    def deliver(self, message: Message) -> None:
        if message.answer is not None:
            here = self.workers[message.source]
            here.wave.outstanding -= 1
            here.wave.receive(message.answer)
            if message.back is None:
                self.look_up(here)
            else:
                self.came_back += 1
                self.take(here, message.back)
                self.work(here, None)
            return
        here = self.workers[message.target]
        if message.is_close:
            self.close(here, message)
            return
        self.take(here, message)
        self.work(here, message)

    def take(self, here: Here, message: Message) -> None:
        here.take_part(here.machine.want([*message.asked, *message.gradients]))
        here.machine.arrive(message.gradients)
        here.gradients |= message.gradients
        self.travelled.update(message.gradients.keys())
        self.values |= message.gradients

    def close(self, here: Here, message: Message | None) -> None:
        if here.is_closed:
            assert message is not None
            self.answer(message, [])
            return
        here.is_closed = True
        here.machine.rule_out()
        for target in here.onward - {0, here.me}:
            self.post(here, Message(here.me, target, is_close=True))
        self.work(here, message)

    def answer(
        self, message: Message, answer: Answer, back: Message | None = None
    ) -> None:
        self.messages.append(
            Message(message.source, message.target, answer=answer, back=back)
        )

    def look_up(self, here: Here) -> None:
        if not here.wave.is_engaged or not here.wave.is_idle:
            return
        message, here.owes = here.owes, None
        answer = here.wave.disengage(here.me, is_done=here.machine.is_done)
        back, here.going_back = here.going_back, None
        if message is not None:
            self.answer(message, answer, back)
            return
        assert back is None
        assert here.me == 0  # who began hears the last answer when all is quiet
        assert not self.messages
        assert not self.running
        if here.wave.unfinished and not here.is_closed:
            self.close(here, None)
        else:
            self.is_over = True


@given(programs(), st.data())
@settings(max_examples=300)
def test_every_pass_ends_with_the_right_gradients(
    program: Program, data: st.DataObject
) -> None:
    backward = Backward(program)
    while backward.messages or backward.running:
        assert not backward.is_over
        pending, running = len(backward.messages), backward.running
        what = data.draw(st.integers(0, pending + len(running) - 1))
        if what < pending:
            backward.deliver(backward.messages.pop(what))
        else:
            backward.end(running[what - pending])
    root = backward.workers[0]
    event("closed" if root.is_closed else "in one wave")
    event("gradients came with answers" if backward.came_back else "none came so")
    assert backward.is_over
    assert not root.wave.unfinished
    wanted = program.gradients()
    assert backward.values | {ROOT: 1} == wanted
    assert backward.travelled == Counter(wanted.keys() - {ROOT})
    for here in backward.workers:
        assert set(here.ran) == here.live
        assert set(here.ran.values()) <= {1}


@given(programs())
@settings(max_examples=100)
def test_program_without_unused_parts_takes_one_wave(program: Program) -> None:
    """If no worker is passed through twice, and nothing is unused."""
    used = set(program.starts())
    ways = {
        (program.source[start], program.source[leaf])
        for start in used
        for leaf in program.made_of[start]
    }
    for _ in range(len(ways)):
        ways = {way for way in ways if any(way[1] == other[0] for other in ways)}
    is_whole = used == set(program.source) and not ways
    starts = Counter(program.source[start] for start in used)
    backward = Backward(program)
    while backward.messages or backward.running:
        if backward.running:
            backward.end(backward.running[0])
        else:
            backward.deliver(backward.messages.pop(0))
    if is_whole and max(starts.values()) == 1:
        assert not backward.workers[0].is_closed
