"""Random programs over one to five workers have the gradients of one process.

Compared are values, which gradients there are, what each hook saw and how often, and
how many gradients travelled: one for every crossing that the roots depend on, as
torch's own engine finds in one process, and none for the others.  A program that fails
is made as short as it can be, and printed as the expression that makes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from asyncrpc import Worker
from asyncrpc.api import add_services
from asyncrpc.compat.nodes import RememberingAutograd
from tests.numerics.programs.drawing import programs
from tests.numerics.programs.language import Fetch, Mix, Parameter, Pass, Program
from tests.numerics.programs.running import Comparison, in_one_process, kinds

PROGRAMS_EACH = 60
DRAWN = 150

# As in the facade's worker.
_with_nodes = partial(add_services, autograd_class=RememberingAutograd)


def check_programs(workers: int) -> None:
    with Comparison(workers) as comparison:

        @settings(
            max_examples=PROGRAMS_EACH,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(programs(workers))
        def check(program: Program) -> None:
            comparison.check(program)

        check()


@pytest.mark.slow
@pytest.mark.timeout(400)  # what fails is shrunk, for 300 s at most
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_random_programs_have_the_gradients_of_one_process(workers: int) -> None:
    check_programs(workers)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_random_programs_with_facade_nodes_match_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Worker, "_extend", staticmethod(_with_nodes))
    check_programs(workers=3)


def test_unused_tensors_of_a_forwarded_message_take_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Worker, "_extend", staticmethod(_with_nodes))
    steps = (
        Parameter(on="a", to=0, kind="double"),
        Parameter(on="a", to=1, kind="double"),
        Fetch(on="b", to=(2, 3), source="a", of=(1, 0)),
        Fetch(on="a", to=(4,), source="b", of=(3,)),
        Mix(on="a", to=5, of=(4,)),
        Pass(on="a", roots=((5, True),), retain_graph=False),
    )
    with Comparison(2) as comparison:
        assert comparison.check(Program(2, steps)).travelled == 2


@pytest.mark.slow
def test_random_programs_cover_all_kinds() -> None:
    counts: Counter[str] = Counter()

    @settings(
        max_examples=DRAWN,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def draw(program: Program) -> None:
        _, facts = asyncio.run(in_one_process(program))
        counts.update(kinds(program, facts))

    draw()
    assert len(counts) == KINDS
    assert min(counts.values()) >= DRAWN // 20, counts


KINDS = 25
