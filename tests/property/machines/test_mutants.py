"""Whoever changes a machine by mistake is told: mutants of each one are noticed.

`make mutants` shows all of them, as a table.
"""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.property.machines.catalog import CATALOG
from tests.property.machines.mutants import (
    guards_of,
    is_killed_by_tests,
    killer_of_guard,
    killer_of_table,
    table_mutants,
)
from tests.property.machines.spec import Guard, Machine, Part, build_of, source_of

QUICK_MUTANTS = 25  # of each table: all of them take half a minute

each = pytest.mark.parametrize("machine", CATALOG, ids=lambda machine: machine.name)
each_guard = pytest.mark.parametrize(
    ("machine", "part", "guard"),
    [
        pytest.param(machine, part, guard, id=f"{machine.name}: {guard.name}")
        for machine in CATALOG
        for part, guard in guards_of(machine)
    ],
)


def survivors(machine: Machine, mutants_max: int | None = None) -> list[str]:
    with build_of(machine.source) as build:
        chosen = list(table_mutants(machine, build))
        if mutants_max is not None and mutants_max < len(chosen):
            chosen = random.Random(machine.name).sample(chosen, mutants_max)
        return [
            str(mutant)
            for mutant in chosen
            if killer_of_table(machine, build, mutant) is None
        ]


@each
def test_quick_table_mutants_are_noticed(machine: Machine) -> None:
    assert survivors(machine, QUICK_MUTANTS) == []


@pytest.mark.slow
@each
def test_every_table_mutant_is_noticed(machine: Machine) -> None:
    assert survivors(machine) == []


@each_guard
def test_guard_mutant_fits_the_source(
    machine: Machine, part: Part, guard: Guard
) -> None:
    assert part in machine.all_parts
    assert source_of(part.source, guard) != source_of(part.source)


def test_a_mutant_is_in_place_before_the_package() -> None:
    program = (
        "import sys; import tests.property.machines.mutated_source;"
        "assert not any(name.split('.')[0] == 'asyncrpc' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
@each_guard
def test_guard_mutant_is_noticed(machine: Machine, part: Part, guard: Guard) -> None:
    noticed = killer_of_guard(machine, part, guard) is not None
    assert noticed or is_killed_by_tests(machine, part, guard)
