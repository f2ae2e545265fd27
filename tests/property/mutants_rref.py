"""Errors that the RRef protocol's property test must find.

Each mutant is one replacement in the source of a machine, made in memory.

    $ python -m tests.property.mutants_rref            # all, as a table
    $ python -m tests.property.mutants_rref no-pin     # some, by name
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from asyncrpc.core.rref.machine import owner, user
from tests.property.machines.spec import Guard, guards, source_of
from tests.property.test_rref_protocol import STEPS, RRefProtocol

SOURCES = {"owner": owner, "user": user}
EXAMPLES_MAX = 3000  # the hardest mutants take about 2,000


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    guard: Guard


_GUARDS: Final = {
    "user": guards(r"""
no-pin: holding.pins += 1 => holding.pins += 0
home-is-no-loan:
    if to in self._dead:\n            return 0 =>
    if to in self._dead or to == holding.owner:\n            return 0
first-loan-is-not-kept: if holding.pins and ended and ended[0] == first: => if False:
lost-reference-is-revived:
    if self._holdings[rref_id].state is LOST:
    \n                self._held_from.discard(incarnation, rref_id)
    \n                del self._holdings[rref_id]
    \n                effects.append(HandlesApart(rref_id)) =>
    self._holdings[rref_id].state = CONFIRMED
    \n            self._holdings[rref_id].cause = None
lost-reference-stays-in-the-table:
    if self._holdings[rref_id].state is LOST:\n                self._held_from =>
    if False:\n                self._held_from
old-loans-unpin-the-new:
    if self._holdings.get(rref_id) is not holding:\n            return [] =>
    holding = self._holdings[rref_id]
lost-owner-is-not-looked-for: effects = [FindOwner(owner)] => effects = []
forgiven-by-name-only:
    self._dead.discard(incarnation)\n        effects: list => effects: list
fork-overwrites:
    holding.forks += 1\n        if holding.state is CONFIRMED =>
    holding.forks = 1\n        if holding.state is CONFIRMED
release-one:
    return [SendRelease(holding.owner, rref_id, holding.forks)] =>
    return [SendRelease(holding.owner, rref_id, 1)]
return-while-lent-on:
    if not is_wanted:\n            effects = self._return_debts =>
    if not holding.handles:\n            effects = self._return_debts
return-on-register:
    return [SendRegister(holding.owner, rref_id)] =>
    return [SendRegister(holding.owner, rref_id), *self._return_debts(rref_id, holding)]
return-all-while-a-call-runs:
    ended = [debt for debt, runs in holding.debts.items() if not runs] =>
    ended = [debt for debt, runs in holding.debts.items()]
keep-debts-when-registered:
    effects = self._return_debts(rref_id, holding)
    \n        return effects + self._review(rref_id, holding) =>
    return self._review(rref_id, holding)
release-while-pending:
    if is_wanted or state is PENDING or state is REGISTERING: =>
    if is_wanted or state is REGISTERING:
lender-lost-ignored: effects += self._review(rref_id, orphan) => pass
borrower-lost-ignored: for token in self._lent_to.pop(incarnation): => for token in ():
owner-dead-is-forgotten:
    if owner in self._dead:  # sent before => if owner in ():  # sent before
settled-too-soon: or holding.state is not PENDING or holding.owner != from_: => or True:
probe-forgotten: holding.is_probed = True => holding.is_probed = False
lost-keeps-forks: if holding.forks and holding.owner not in self._dead: => if False:
lost-keeps-late-fork: return [lost, SendRelease(owner, rref_id, 1)] => return [lost]
"""),
    "owner": guards(r"""
register-not-counted:
    self._count(rref_id, entry, holder)\n            effects.append( => effects.append(
home-is-not-counted:
    return bool(self.holders or self.waiting or self.local or self.pins) =>
    return bool(self.holders or self.waiting or self.pins)
unborn-is-gone: if creator == self._me or creator in self._dead or is_full: => if True:
no-probe: effects.append(SendProbe(creator, rref_id)) => pass
waiting-not-counted:
    for holder in waiting:\n            self._count(rref_id, entry, holder) =>
holder-lost-ignored: entry.holders.pop(incarnation, None) => pass
unborn-of-the-dead-waits:
    for rref_id in self._unborn_of.pop(incarnation, at_most): => for rref_id in ():
create-by-the-dead: if for_holder in self._dead: => if for_holder in ():
hand-out-to-the-dead: if to not in self._dead: => if True:
never-forgiven: self._dead.discard(incarnation) => pass
lease-never-ends:
    for rref_id in self._held_by.pop(incarnation, at_most): => for rref_id in ():
undo-forgotten: return self._uncount(rref_id, entry, to, 1) => return []
"""),
}
MUTANTS: Final = tuple(
    Mutant(guard.name, file, guard)
    for file, those in _GUARDS.items()
    for guard in those
)


def tables_of(mutant: Mutant) -> tuple[type[Any], type[Any]]:
    """Build both tables, one of them from the mutated source."""
    modules: dict[str, ModuleType] = dict(SOURCES)
    module = ModuleType(f"mutant_{mutant.file}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    text = source_of(modules[mutant.file], mutant.guard)
    exec(compile(text, mutant.name, "exec"), vars(module))  # noqa: S102  # our own source
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
