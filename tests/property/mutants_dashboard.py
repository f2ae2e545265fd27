"""Errors that the tests of the dashboard's machines must find.

Each mutant is one replacement in the source of a machine, made in memory; the machine's
tests run against it in a process of their own.

    $ python -m tests.property.mutants_dashboard                 # all, as a table
    $ python -m tests.property.mutants_dashboard ties no-limit   # some, by name
"""

# ruff: noqa: T201  # a table is what this program is for

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from tests.property.machines.mutants import do_tests_fail
from tests.property.machines.spec import Guard, guards

MACHINES: Final = "asyncrpc.serving.dashboard.machine"
TESTS: Final = "tests/unit/serving/dashboard/machine"

# By module: what is wrong in it.
MUTANTS: Final[dict[str, tuple[Guard, ...]]] = {
    "answers": guards(r"""
nan-is-known: value if math.isfinite(value) else => value if True else
no-age-below-zero: and value >= 0 else None => else None
left-out: max(0, len(names) - SILENT_MAX) => 0
order: "up" if query.is_up => "up" if not query.is_up
all-at-once: if done >= VALUES_MAX => if False
no-nan: allow_nan=False => allow_nan=True
no-comma: before = ", "\n        yield "}" => yield "}"
"""),
    "overview": guards("""
a-clock-set-back: self._moments.pop() => break
too-old: moment.at_s - HISTORY_S => moment.at_s - 2 * HISTORY_S
memory-counts-twice: row["host"], row["pid"]] => row["worker"], 0]
busy: summary.lag_s >= BUSY_S => summary.lag_s > BUSY_S
matrix-of-all: shown[:MATRIX_MAX] => shown
itself: if link.peer != name} => }
"""),
    "calls": guards(r"""
twice: if key in outgoing:\n                continue =>
kept-back: if call.state == KEPT_BACK: => if False:
silent-caller: CALLER_SILENT if call.other not in answers => '' if True
"""),
    "references": guards("""
told-by-both: elif reference.owner not in answers: => else:
oldest: oldest = max( => oldest = min(
"""),
    "collectives": guards("""
beyond: or known > entry.number => or known >= entry.number
closed: name in answers and known != CLOSED => name in answers
no-such-group: if collective.group >= len(ranks): => if False:
under-way: is_under_way = any( => is_under_way = all(
"""),
    "training": guards("""
newest: return _age_of(row, math.inf) => return -_age_of(row, 0.0)
pruned: self._rows = self.rows => self._rows = self.rows[1:]
clocks: answer.came_s - answer.seen.now_s => 0.0
times: if _has_times(step, began_s): => if True:
"""),
    "hangs": guards("""
no-limit: + len(new) > NODES_MAX => + len(new) > 10 * NODES_MAX
left-out-twice: self._left_out - self._ids.keys() => self._left_out
cycle: hang.nodes[begin:-1] => hang.nodes[begin:]
"""),
    "worker": guards("""
longest-first: -task.wait.for_s) => task.wait.for_s)
innermost: actor.frames[-FRAMES_MAX:] => actor.frames[:FRAMES_MAX]
events-left-out: count - len(rows) => 0
"""),
    "paging": guards("""
ties: bool(other.value == self.value) => False
cut-too-short: del run[end:] => del run[begin:]
unknown-first: return True, 0 => return False, 0
"""),
    "query": guards("""
page-zero: not 1 <= int(value) => not 0 <= int(value)
order-of-another: is_other or not is_up => not is_up
"""),
    "sessions": guards(r"""
a-ticket-twice: _ticket = None\n        return => _ticket\n        return
secret-is-sent: token_of(key).encode() for => key for
no-end: if used_s < now_s - SESSION_S: => if False:
attempts: < FAILURES_MAX: => <= FAILURES_MAX:
"""),
}


def is_killed(module: str, guard: Guard) -> bool:
    """Return whether the tests of a machine notice a mutant."""
    return do_tests_fail(f"{MACHINES}.{module}", guard, f"{TESTS}/test_{module}.py")


def main(names: Sequence[str]) -> int:
    survivors = []
    for module, mutants in MUTANTS.items():
        wanted = [mutant for mutant in mutants if not names or mutant.name in names]
        killed = [mutant for mutant in wanted if is_killed(module, mutant)]
        survivors += [
            f"{module}: {mutant.name}" for mutant in wanted if mutant not in killed
        ]
        if wanted:
            print(f"{module:<12} {len(wanted):>3} mutants, {len(killed):>3} killed")
            sys.stdout.flush()
    for mutant in survivors:
        print(f"survives: {mutant}")
    return len(survivors)


if __name__ == "__main__":
    raise SystemExit(bool(main(sys.argv[1:])))
