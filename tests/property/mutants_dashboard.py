"""Errors that the tests of the dashboard's machines must find.

Each mutant is one replacement in the source of a machine, made in memory; the machine's
tests run against it in a process of their own.

    $ python -m tests.property.mutants_dashboard                 # all, as a table
    $ python -m tests.property.mutants_dashboard ties no-limit   # some, by name
"""

# ruff: noqa: T201  # a table is what this program is for

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from tests.property.machines.drawing import ROOT
from tests.property.machines.mutated_source import MUTANT, as_text
from tests.property.machines.spec import Guard

MACHINES: Final = "asyncrpc.serving.dashboard.machine"
TESTS: Final = "tests/unit/serving/dashboard/machine"
LIMIT_S: Final = 600.0

# By module: what is wrong in it.
MUTANTS: Final[dict[str, tuple[Guard, ...]]] = {
    "answers": (
        Guard(
            "nan-is-known", "value if math.isfinite(value) else", "value if True else"
        ),
        Guard("no-age-below-zero", " and value >= 0 else None", " else None"),
        Guard("left-out", "max(0, len(names) - SILENT_MAX)", "0"),
        Guard("order", '"up" if query.is_up', '"up" if not query.is_up'),
        Guard("all-at-once", "if done >= VALUES_MAX", "if False"),
        Guard("no-nan", "allow_nan=False", "allow_nan=True"),
        Guard("no-comma", 'before = ", "\n        yield "}"', 'yield "}"'),
    ),
    "overview": (
        Guard("a-clock-set-back", "self._moments.pop()", "break"),
        Guard("too-old", "moment.at_s - HISTORY_S", "moment.at_s - 2 * HISTORY_S"),
        Guard("memory-counts-twice", 'row["host"], row["pid"]]', 'row["worker"], 0]'),
        Guard("busy", "summary.lag_s >= BUSY_S", "summary.lag_s > BUSY_S"),
        Guard("matrix-of-all", "shown[:MATRIX_MAX]", "shown"),
        Guard("itself", "if link.peer != name}", "}"),
    ),
    "calls": (
        Guard(
            "twice", "            if key in outgoing:\n                continue\n", ""
        ),
        Guard("kept-back", "if call.state == KEPT_BACK:", "if False:"),
        Guard(
            "silent-caller", "CALLER_SILENT if call.other not in answers", "'' if True"
        ),
    ),
    "references": (
        Guard("told-by-both", "elif reference.owner not in answers:", "else:"),
        Guard("oldest", "oldest = max(", "oldest = min("),
    ),
    "collectives": (
        Guard("beyond", "or known > entry.number", "or known >= entry.number"),
        Guard("closed", "name in answers and known != CLOSED", "name in answers"),
        Guard("no-such-group", "if collective.group >= len(ranks):", "if False:"),
        Guard("under-way", "is_under_way = any(", "is_under_way = all("),
    ),
    "training": (
        Guard("newest", "return _age_of(row, math.inf)", "return -_age_of(row, 0.0)"),
        Guard("pruned", "self._rows = self.rows", "self._rows = self.rows[1:]"),
        Guard("clocks", "answer.came_s - answer.seen.now_s", "0.0"),
        Guard("times", "if _has_times(step, began_s):", "if True:"),
    ),
    "hangs": (
        Guard("no-limit", "+ len(new) > NODES_MAX", "+ len(new) > 10 * NODES_MAX"),
        Guard("left-out-twice", "self._left_out - self._ids.keys()", "self._left_out"),
        Guard("cycle", "hang.nodes[begin:-1]", "hang.nodes[begin:]"),
    ),
    "worker": (
        Guard("longest-first", "-task.wait.for_s)", "task.wait.for_s)"),
        Guard("innermost", "actor.frames[-FRAMES_MAX:]", "actor.frames[:FRAMES_MAX]"),
        Guard("events-left-out", "count - len(rows)", "0"),
    ),
    "paging": (
        Guard("ties", "bool(other.value == self.value)", "False"),
        Guard("cut-too-short", "del run[end:]", "del run[begin:]"),
        Guard("unknown-first", "return True, 0", "return False, 0"),
    ),
    "query": (
        Guard("page-zero", "not 1 <= int(value)", "not 0 <= int(value)"),
        Guard("order-of-another", "is_other or not is_up", "not is_up"),
    ),
    "sessions": (
        Guard(
            "a-ticket-twice",
            "_ticket = None\n        return",
            "_ticket\n        return",
        ),
        Guard("secret-is-sent", "token_of(key).encode() for", "key for"),
        Guard("no-end", "if used_s < now_s - SESSION_S:", "if False:"),
        Guard("attempts", "< FAILURES_MAX:", "<= FAILURES_MAX:"),
    ),
}


def is_killed(module: str, guard: Guard) -> bool:
    """Return whether the tests of a machine fail, or never end, with a mutant."""
    tests = f"{TESTS}/test_{module}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", "tests.property.machines.mutated_source", "--randomly-seed=1"]
    try:
        ended = subprocess.run(
            [*command, tests],
            cwd=ROOT,
            env={**os.environ, MUTANT: as_text(f"{MACHINES}.{module}", guard)},
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return True
    if ended.returncode not in (0, 1):
        raise RuntimeError(ended.stdout.decode() + ended.stderr.decode())
    return ended.returncode == 1


def main(names: Sequence[str]) -> int:
    survivors = []
    for module, guards in MUTANTS.items():
        wanted = [mutant for mutant in guards if not names or mutant.name in names]
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
