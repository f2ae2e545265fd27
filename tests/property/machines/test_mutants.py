"""Whoever changes a machine by mistake is told: mutants of each one are noticed.

`make mutants` shows all of them, as a table.
"""

from __future__ import annotations

import random

import pytest

from tests.property.machines.catalog import CATALOG
from tests.property.machines.mutants import (
    is_killed_by_tests,
    killer_of_guard,
    killer_of_table,
    table_mutants,
)
from tests.property.machines.spec import Guard, Machine, build_of, source_of

QUICK_MUTANTS = 25  # of each table: all of them take half a minute

each = pytest.mark.parametrize("machine", CATALOG, ids=lambda one: one.name)
each_guard = pytest.mark.parametrize(
    ("machine", "guard"),
    [
        pytest.param(one, guard, id=f"{one.name}: {guard.name}")
        for one in CATALOG
        for guard in one.guards
    ],
)


def survivors(machine: Machine, mutants_max: int | None = None) -> list[str]:
    with build_of(machine.source) as build:
        chosen = list(table_mutants(machine, build))
        if mutants_max is not None and mutants_max < len(chosen):
            chosen = random.Random(machine.name).sample(chosen, mutants_max)
        return [
            str(one) for one in chosen if killer_of_table(machine, build, one) is None
        ]


@each
def test_some_changes_of_the_table_are_noticed(machine: Machine) -> None:
    assert survivors(machine, QUICK_MUTANTS) == []


@pytest.mark.slow
@each
def test_every_change_of_the_table_is_noticed(machine: Machine) -> None:
    assert survivors(machine) == []


@each_guard
def test_a_mutant_of_a_guard_fits_the_source(machine: Machine, guard: Guard) -> None:
    assert source_of(machine.source, guard) != source_of(machine.source)


@pytest.mark.slow
@each_guard
def test_a_mutant_of_a_guard_is_noticed(machine: Machine, guard: Guard) -> None:
    noticed = killer_of_guard(machine, guard) is not None
    assert noticed or is_killed_by_tests(machine, guard)
