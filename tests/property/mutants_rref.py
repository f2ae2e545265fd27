"""Errors that the RRef protocol's property test must find.

Each mutant is one replacement in the source of a machine, made in memory.

    $ python -m tests.property.mutants_rref            # all, as a table
    $ python -m tests.property.mutants_rref no-pin     # some, by name
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from asyncrpc.core.rref.machine import owner, user
from tests.property.test_rref_protocol import STEPS, RRefProtocol

SOURCES = {"owner": owner, "user": user}
EXAMPLES_MAX = 3000  # the hardest mutants take about 2,000


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant("no-pin", "user", "holding.pins += 1", "holding.pins += 0"),
    Mutant(
        "home-is-no-loan",
        "user",
        "if to in self._dead:\n            return 0",
        "if to in self._dead or to == holding.owner:\n            return 0",
    ),
    Mutant(
        "first-loan-is-not-kept",
        "user",
        "if holding.pins and ended and ended[0] == first:",
        "if False:",
    ),
    Mutant(
        "lost-reference-is-revived",
        "user",
        "            if self._holdings[rref_id].state is LOST:\n"
        "                self._held_from.discard(incarnation, rref_id)\n"
        "                del self._holdings[rref_id]\n"
        "                effects.append(HandlesApart(rref_id))\n",
        "            self._holdings[rref_id].state = CONFIRMED\n"
        "            self._holdings[rref_id].cause = None\n",
    ),
    Mutant(
        "lost-reference-stays-in-the-table",
        "user",
        "if self._holdings[rref_id].state is LOST:\n                self._held_from",
        "if False:\n                self._held_from",
    ),
    Mutant(
        "old-loans-unpin-the-new",
        "user",
        "if self._holdings.get(rref_id) is not holding:\n            return []",
        "holding = self._holdings[rref_id]",
    ),
    Mutant(
        "lost-owner-is-not-looked-for",
        "user",
        "effects = [FindOwner(owner)]",
        "effects = []",
    ),
    Mutant(
        "forgiven-by-name-only",
        "user",
        "        self._dead.discard(incarnation)\n        effects: list",
        "        effects: list",
    ),
    Mutant(
        "fork-overwrites",
        "user",
        "holding.forks += 1\n        if holding.state is CONFIRMED",
        "holding.forks = 1\n        if holding.state is CONFIRMED",
    ),
    Mutant(
        "release-one",
        "user",
        "return [SendRelease(holding.owner, rref_id, holding.forks)]",
        "return [SendRelease(holding.owner, rref_id, 1)]",
    ),
    Mutant(
        "return-while-lent-on",
        "user",
        "if not is_wanted:\n            effects = self._return_debts",
        "if not holding.handles:\n            effects = self._return_debts",
    ),
    Mutant(
        "return-on-register",
        "user",
        "return [SendRegister(holding.owner, rref_id)]",
        "return [SendRegister(holding.owner, rref_id),"
        " *self._return_debts(rref_id, holding)]",
    ),
    Mutant(
        "return-all-while-a-call-runs",
        "user",
        "ended = [debt for debt, runs in holding.debts.items() if not runs]",
        "ended = [debt for debt, runs in holding.debts.items()]",
    ),
    Mutant(
        "keep-debts-when-registered",
        "user",
        "effects = self._return_debts(rref_id, holding)\n"
        "        return effects + self._review(rref_id, holding)",
        "return self._review(rref_id, holding)",
    ),
    Mutant(
        "release-while-pending",
        "user",
        "if is_wanted or state is PENDING or state is REGISTERING:",
        "if is_wanted or state is REGISTERING:",
    ),
    Mutant(
        "lender-lost-ignored",
        "user",
        "effects += self._review(rref_id, orphan)",
        "pass",
    ),
    Mutant(
        "borrower-lost-ignored",
        "user",
        "for token in self._lent_to.pop(incarnation):",
        "for token in ():",
    ),
    Mutant(
        "owner-dead-is-forgotten",
        "user",
        "if owner in self._dead:  # sent before",
        "if owner in ():  # sent before",
    ),
    Mutant(
        "settled-too-soon",
        "user",
        "or holding.state is not PENDING or holding.owner != from_:",
        "or True:",
    ),
    Mutant(
        "probe-forgotten",
        "user",
        "holding.is_probed = True",
        "holding.is_probed = False",
    ),
    Mutant(
        "lost-keeps-forks",
        "user",
        "if holding.forks and holding.owner not in self._dead:",
        "if False:",
    ),
    Mutant(
        "lost-keeps-late-fork",
        "user",
        "return [lost, SendRelease(owner, rref_id, 1)]",
        "return [lost]",
    ),
    Mutant(
        "register-not-counted",
        "owner",
        "self._count(rref_id, entry, holder)\n            effects.append(",
        "effects.append(",
    ),
    Mutant(
        "home-is-not-counted",
        "owner",
        "return bool(self.holders or self.waiting or self.local or self.pins)",
        "return bool(self.holders or self.waiting or self.pins)",
    ),
    Mutant(
        "unborn-is-gone",
        "owner",
        "if creator == self._me or creator in self._dead or is_full:",
        "if True:",
    ),
    Mutant("no-probe", "owner", "effects.append(SendProbe(creator, rref_id))", "pass"),
    Mutant(
        "waiting-not-counted",
        "owner",
        "for holder in waiting:\n            self._count(rref_id, entry, holder)",
        "",
    ),
    Mutant(
        "holder-lost-ignored", "owner", "entry.holders.pop(incarnation, None)", "pass"
    ),
    Mutant(
        "unborn-of-the-dead-waits",
        "owner",
        "for rref_id in self._unborn_of.pop(incarnation, at_most):",
        "for rref_id in ():",
    ),
    Mutant(
        "create-by-the-dead",
        "owner",
        "if for_holder in self._dead:",
        "if for_holder in ():",
    ),
    Mutant("hand-out-to-the-dead", "owner", "if to not in self._dead:", "if True:"),
    Mutant("never-forgiven", "owner", "self._dead.discard(incarnation)", "pass"),
    Mutant(
        "lease-never-ends",
        "owner",
        "for rref_id in self._held_by.pop(incarnation, at_most):",
        "for rref_id in ():",
    ),
    Mutant(
        "undo-forgotten",
        "owner",
        "return self._uncount(rref_id, entry, to, 1)",
        "return []",
    ),
)


def tables_of(mutant: Mutant) -> tuple[type[Any], type[Any]]:
    """Build both tables, one of them from the mutated source."""
    modules: dict[str, ModuleType] = dict(SOURCES)
    source = Path(str(modules[mutant.file].__file__)).read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(
            f"mutant {mutant.name!r} fits {source.count(mutant.old)} places in"
            f" {mutant.file}.py: bring it up to date"
        )
    module = ModuleType(f"mutant_{mutant.file}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    code = compile(source.replace(mutant.old, mutant.new), mutant.name, "exec")
    exec(code, vars(module))  # noqa: S102  # our own source, one text replaced
    modules[mutant.file] = module
    return modules["owner"].OwnerTable, modules["user"].UserTable


def killer(mutant: Mutant, examples_max: int = EXAMPLES_MAX) -> Exception | None:
    """Return what the property test raises on the mutant; None if it survives."""
    machine = type("Mutated", (RRefProtocol,), {"tables": tables_of(mutant)})
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples_max,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                print_blob=False,
            ),
        )
    except Exception as error:  # noqa: BLE001  # whatever it is, the mutant is dead
        return error
    return None


def main(names: list[str]) -> int:
    survivors = 0
    # ruff: noqa: T201  # a table is what this program is for
    print(f"{'mutant':<30} {'verdict':<10} {'seconds':>8}  killed by")
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        start = time.perf_counter()
        error = killer(mutant)
        seconds = time.perf_counter() - start
        survivors += error is None
        verdict = "survived" if error is None else "killed"
        why = f"{type(error).__name__} {where(error)}" if error else ""
        print(f"{mutant.name:<30} {verdict:<10} {seconds:>8.1f}  {why}", flush=True)
    return survivors


def where(error: Exception) -> str:
    """Name the innermost function of the test that failed."""
    trace, name = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.endswith(("rref_world.py", "test_rref_protocol.py")):
            name = code.co_name
        trace = trace.tb_next
    return name


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
