"""What kinds of programs there were: a test that draws none of a kind tests nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.table import Table

from tests.numerics.programs import language as steps
from tests.numerics.programs.language import Program
from tests.numerics.programs.running import Facts

MESSAGES = (
    steps.Fetch,
    steps.Send,
    steps.Relay,
    steps.Remote,
    steps.Share,
    steps.ToHere,
    steps.Method,
)


class Tally:
    """Counts programs by kind."""

    def __init__(self) -> None:
        self.programs: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()

    def add(self, program: Program, facts: Facts) -> None:
        self.programs.update(kinds(program, facts))
        self.sums["steps"] += len(program.steps)
        self.sums["backward passes"] += program.count(steps.Pass)
        self.sums["tensors in messages that require a gradient"] += facts.crossed
        self.sums["gradients that travelled"] += facts.travelled
        self.sums["times a hook fired"] += facts.fired

    def table(self, count: int, took_s: float) -> Table:
        table = Table(title=f"{count:,} programs in {took_s:.0f} s")
        table.add_column("programs that")
        table.add_column("", justify="right")
        for name, number in self.programs.most_common():
            table.add_row(name, f"{number:,}")
        table.add_section()
        for name, number in self.sums.items():
            table.add_row(name, f"{number:,}")
        return table


def kinds(program: Program, facts: Facts) -> Iterator[str]:
    """Say what may be said of a program."""
    yield f"have {program.workers} workers"
    yield from (f"use {kind.__name__}" for kind in MESSAGES if program.count(kind))
    yield from (name for name, is_so in _properties(program, facts) if is_so)


def _properties(program: Program, facts: Facts) -> Iterator[tuple[str, bool]]:
    text = repr(program)
    changing = sum(
        program.count(steps.Hook, how=how) for how in ("double", "clamp", "halve")
    )
    yield "send gradients", facts.travelled > 0
    yield "send gradients that come back to a worker", facts.comes_back
    yield "have crossings that take no part", facts.crossed > facts.travelled
    yield "go backward more than once", program.count(steps.Pass) > 1
    yield (
        "have several roots",
        any(
            len(step.roots) > 1
            for step in program.steps
            if isinstance(step, steps.Pass)
        ),
    )
    yield "have hooks that fire", facts.fired > 0
    yield "have hooks that change gradients", changing > 0
    yield "have sparse gradients", program.count(steps.Rows) > 0
    yield "have nil gradients", program.count(steps.Deaf) > 0
    yield "have complex numbers", "complex" in text
    yield "have bfloat16", program.is_rounded
    yield "have views", program.count(steps.View) > 0
    yield "change tensors in place", program.count(steps.Change) > 0
