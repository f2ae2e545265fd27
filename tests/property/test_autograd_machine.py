"""Backward passes of machines alone: Hypothesis draws the program and every delay.

A forward program sends tensors between workers.  Each depends on tensors that its
sender has received, so the crossings are a graph; the gradient of one is the number of
ways from it to the root.  The backward pass runs on a `PassMachine` for each worker,
with messages delivered, and engine calls ended, in any order.  It must always end, with
exactly one gradient for each crossing that takes part, of the right value; a worker
that the pass goes through once makes one engine call.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import event, given, settings
from hypothesis import strategies as st

from asyncrpc.autograd.machine import Mode, PassMachine, workers_in_cycles

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
        found, todo = {ROOT}, [ROOT]
        while todo:
            new = self.made_of[todo.pop()] - found
            found |= new
            todo += new
        return [ROOT, *sorted(found - {ROOT}, reverse=True)]

    def gradients(self) -> dict[int, int]:
        """Return the gradient of each crossing that takes part."""
        found = Counter({ROOT: 1})
        for start in self.starts():
            for leaf in self.made_of[start]:
                found[leaf] += found[start]
        return dict(found)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program()
    received: dict[int, list[int]] = {worker: [] for worker in range(WORKERS)}

    def draw_sources(worker: int) -> frozenset[int]:
        known = received[worker]
        if not known:
            return frozenset()
        chosen = draw(st.integers(1, (1 << len(known)) - 1))
        return frozenset(one for bit, one in enumerate(known) if chosen >> bit & 1)

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


class Backward:
    """One pass over a program, with nothing delivered or ended by itself."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.machines: dict[int, PassMachine[int, int]] = {}
        self.mine: dict[int, list[int]] = {}
        edges = set()
        for start in program.starts():
            worker = program.source[start]
            machine = self.machines.setdefault(worker, PassMachine())
            machine.add_start(start)
            self.mine.setdefault(worker, []).append(start)
            edges |= {(worker, program.source[leaf]) for leaf in program.made_of[start]}
        self.cyclic = workers_in_cycles(edges)
        for worker in self.cyclic:
            reach = {start: program.made_of[start] for start in self.mine[worker]}
            self.machines[worker].set_reach(reach)
        self.sums: Counter[int] = Counter()
        self.arrived: dict[int, int] = {}
        self.runs: Counter[int] = Counter()
        self.messages: list[tuple[int, dict[int, int]]] = [(0, {ROOT: 1})]
        self.in_hand: list[tuple[int, list[int]]] = []

    def deliver(self, index: int) -> None:
        worker, gradients = self.messages.pop(index)
        assert not gradients.keys() & self.arrived.keys()
        self.arrived |= gradients
        mode = Mode.PARTIAL if worker in self.cyclic else Mode.WHOLE
        batch = self.machines[worker].arrive(gradients, mode)
        if batch:
            self.runs[worker] += 1
            self.in_hand.append((worker, batch))

    def end(self, index: int) -> None:
        """End an engine call, and send on what is complete."""
        worker, batch = self.in_hand.pop(index)
        machine = self.machines[worker]
        for start in batch:
            for leaf in self.program.made_of[start]:
                self.sums[leaf] += self.arrived[start]
        is_last = machine.is_last(batch)
        complete = machine.ran(batch)
        assert machine.is_done is is_last
        if worker not in self.cyclic:
            assert complete == []
            complete = [leaf for leaf in self.sums if self.is_reached_on(worker, leaf)]
        by_sender: dict[int, dict[int, int]] = {}
        for leaf in complete:
            by_sender.setdefault(self.program.source[leaf], {})[leaf] = self.sums[leaf]
        self.messages += by_sender.items()

    def is_reached_on(self, worker: int, leaf: int) -> bool:
        return any(leaf in self.program.made_of[start] for start in self.mine[worker])


@given(programs(), st.data())
@settings(max_examples=200)
def test_every_pass_ends_with_the_right_gradients(
    program: Program, data: st.DataObject
) -> None:
    backward = Backward(program)
    while backward.messages or backward.in_hand:
        pending = len(backward.messages)
        what = data.draw(st.integers(0, pending + len(backward.in_hand) - 1))
        if what < pending:
            backward.deliver(what)
        else:
            backward.end(what - pending)
    event(f"{len(backward.cyclic)} workers in cycles")
    assert all(machine.is_done for machine in backward.machines.values())
    assert backward.arrived == program.gradients()
    for worker in backward.machines.keys() - backward.cyclic:
        assert backward.runs[worker] == 1
