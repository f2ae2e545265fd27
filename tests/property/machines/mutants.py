"""Machines that are wrong on purpose: somebody must notice.

A mutant of a table has one transition less, one that leads elsewhere, or one more.  It
is made in memory, and stories, the walk, checks and the drawing look at it, in this
order.  A mutant of a guard has one text of the source replaced; if they do not notice,
the machine's other tests run against it, in a process of their own.

    $ python -m tests.property.machines.mutants                # all, as a table
    $ python -m tests.property.machines.mutants A\\ dial        # of some machines
"""

from __future__ import annotations

import enum
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Final

from asyncrpc.core.state_table import StateTable
from tests.commands import run_to_end
from tests.property.machines.catalog import CATALOG
from tests.property.machines.drawing import section
from tests.property.machines.mutated_source import MUTANT, as_text
from tests.property.machines.spec import Guard, Machine, Part, Table, build_of, table_of
from tests.property.machines.stories import play, stories_of
from tests.property.machines.walk import walk

TESTS_LIMIT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class TableMutant:
    """A table with one transition changed; `after` is None if it is left out."""

    state: enum.Enum
    event: enum.Enum
    after: enum.Enum | None

    def __str__(self) -> str:
        after = "nowhere" if self.after is None else self.after.name
        return f"{self.state.name} by {self.event.name} to {after}"

    def table(self, table: Table) -> Table:
        """Return the changed table."""
        changed = {state: dict(row) for state, row in table.items()}
        if self.after is None:
            del changed[self.state][self.event]
        else:
            changed[self.state][self.event] = self.after
        return StateTable(table.subject, changed, late=table.late, error=table.error)


def table_mutants(machine: Machine, build: ModuleType) -> Iterator[TableMutant]:
    """Yield all mutants of a machine's table that would be another machine."""
    for state, row in table_of(build).items():
        for event in machine.events_in(build):
            listed = row.get(event)
            if listed is not None and (machine.refusal or listed is not state):
                yield TableMutant(state, event, None)
            for after in machine.states_in(build):
                # What is ignored stays in its state, listed or not.
                stays = listed or (None if machine.refusal else state)
                if after is not stays:
                    yield TableMutant(state, event, after)


def killer_of_table(
    machine: Machine, build: ModuleType, mutant: TableMutant
) -> str | None:
    """Return who notices a mutant of the table; None: nobody."""
    right = table_of(build)
    vars(build)["TRANSITIONS"] = mutant.table(right)
    try:
        return _noticed(machine, build)
    finally:
        vars(build)["TRANSITIONS"] = right


def killer_of_guard(machine: Machine, part: Part, guard: Guard) -> str | None:
    """Return who notices a mutant of a guard, without further tests; None: nobody."""
    with build_of(part.source, guard) as build:
        if part.source is machine.source:
            return _noticed(machine, build)
        try:
            for check in part.checks:
                check(build)
        except Exception:  # noqa: BLE001  # whatever it is, the mutant is dead
            return "checks"
    return None


def _play_all(machine: Machine, build: ModuleType) -> None:
    for story in stories_of(machine):
        play(machine, build, story)


def _check_all(machine: Machine, build: ModuleType) -> None:
    for check in machine.checks:
        check(build)


def _look_at_the_drawing(machine: Machine, build: ModuleType) -> None:
    assert section(machine, build) == _right_drawing(machine.name)


@functools.cache
def _right_drawing(name: str) -> str:
    (machine,) = [machine for machine in CATALOG if machine.name == name]
    return section(machine, machine.source)


_LOOKS: Final[Mapping[str, Callable[[Machine, ModuleType], object]]] = {
    "stories": _play_all,
    "walk": walk,
    "checks": _check_all,
    "drawing": _look_at_the_drawing,
}
KILLERS: Final = (*_LOOKS, "tests")


def _noticed(machine: Machine, build: ModuleType) -> str | None:
    for name, look in _LOOKS.items():
        try:
            look(machine, build)
        except Exception:  # noqa: BLE001  # whatever it is, the mutant is dead
            return name
    return None


def is_killed_by_tests(machine: Machine, part: Part, guard: Guard) -> bool:
    """Return whether the machine's further tests notice a mutant."""
    name = part.source.__name__
    return bool(machine.tests) and do_tests_fail(name, guard, *machine.tests)


def do_tests_fail(module: str, guard: Guard, *tests: str) -> bool:
    """Return whether tests fail, or never end, with a mutant of a module.

    They run in the order of the file, so that a mutant fares the same each time.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--randomly-dont-reorganize", "--randomly-seed=1"]
    command += ["-p", "tests.property.machines.mutated_source"]
    try:
        ended = run_to_end(
            [*command, *tests],
            timeout_s=TESTS_LIMIT_S,
            environ={MUTANT: as_text(module, guard)},
        )
    except subprocess.TimeoutExpired:
        return True
    if ended.returncode not in (0, 1):
        raise RuntimeError(ended.stdout + ended.stderr)
    return ended.returncode == 1


def guards_of(machine: Machine) -> list[tuple[Part, Guard]]:
    """Return all mutants of a machine's guards, and where they are."""
    return [(part, guard) for part in machine.all_parts for guard in part.guards]


# --- all, as a table -----------------------------------------------------------------


def count(machine: Machine) -> tuple[Counter[str], list[str]]:
    """Return how many mutants of a machine each look has killed, and who survives."""
    killed: Counter[str] = Counter()
    survivors: list[str] = []
    with build_of(machine.source) as build:
        for mutant in table_mutants(machine, build):
            killer = killer_of_table(machine, build, mutant)
            if killer is None:
                survivors.append(str(mutant))
            else:
                killed[killer] += 1
    for part, guard in guards_of(machine):
        killer = killer_of_guard(machine, part, guard)
        if killer is None and is_killed_by_tests(machine, part, guard):
            killer = "tests"
        if killer is None:
            survivors.append(guard.name)
        else:
            killed[killer] += 1
    return killed, survivors


def main(names: list[str]) -> int:
    # ruff: noqa: T201  # a table is what this program is for
    known = [machine.name for machine in CATALOG]
    for name in names:
        if name not in known:
            raise SystemExit(f"there is no machine {name!r}; there are {known}")
    by = " ".join(f"{name:>8}" for name in KILLERS)
    print(f"{'machine':<30} {'mutants':>8} {'killed':>8}    by {by}")
    all_survivors: list[str] = []
    for machine in CATALOG:
        if names and machine.name not in names:
            continue
        killed, survivors = count(machine)
        by = " ".join(f"{killed[name]:>8}" for name in KILLERS)
        total = killed.total() + len(survivors)
        print(
            f"{machine.name:<30} {total:>8} {killed.total():>8}       {by}", flush=True
        )
        all_survivors += [f"{machine.name}: {mutant}" for mutant in survivors]
    for survivor in all_survivors:
        print(f"survives: {survivor}")
    return len(all_survivors)


if __name__ == "__main__":
    raise SystemExit(bool(main(sys.argv[1:])))
