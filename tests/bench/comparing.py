"""Runs the starts of the sides in turn, and gathers what they report.

A round is one start of each kind and side.  The sides take turns in who is first, so
that a change in the machine's mood meets both.  A workload that fails, or that takes
its process along, costs that workload only: the start goes on, or is repeated, without
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tests.bench import harness
from tests.bench import workloads as w
from tests.bench.harness import short
from tests.bench.processes import reports, say

START_LIMIT_S: Final = 150.0


class Comparison:
    """The figures of all starts so far, and why some are missing."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        seconds: float,
        sides: Sequence[str] = harness.SIDES,
        spin: str = "",
    ) -> None:
        """Begin with nothing.

        Args:
            spin: asyncrpc's `NetworkOptions.spin`; empty: its default.
        """
        self._names = names
        self._seconds = seconds
        self._spin = spin
        self._found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        # By side and row name, why the first start that failed did.
        self.failures: dict[str, dict[str, str]] = {side: {} for side in sides}

    def run(self, starts: int) -> None:
        for start in range(starts):
            sides = list(self._found)
            first = start % len(sides)
            for kind, setup in w.KINDS.items():
                for side in sides[first:] + sides[:first]:
                    names = w.of_kind(self._names, kind, side)
                    if names and side in setup.sides:
                        say(f"start {start + 1} of {starts}: {kind}, {side}")
                        self._run_start(side, kind, names)

    def results(self) -> list[harness.Result]:
        """Return the rows as they are now."""
        failures = self.failures[harness.SIDES[0]]
        return harness.collect(w.rows_of(self._names), self._found, failures)

    def figure(self, side: str, row: harness.Row) -> harness.Figure | None:
        """Return what the starts of a side gave for a row; None if nothing."""
        return harness.figure_of(self._found[side], row.name)

    def _run_start(self, side: str, kind: str, names: Sequence[str]) -> None:
        values: dict[str, float] = {}
        missing = list(names)
        while missing:
            before = len(missing)
            try:
                self._hear(side, kind, missing, values)
                reason = "it was not reported"
            except RuntimeError as error:
                reason = str(error)
                if missing and len(missing) < before:
                    # It took its process along; the others get another start.
                    self._fail(side, missing.pop(0), reason)
                    continue
            for name in missing:
                self._fail(side, name, reason)
            break
        self._found[side].append(values)

    def _hear(
        self, side: str, kind: str, missing: list[str], values: dict[str, float]
    ) -> None:
        arguments = ["--kind", kind, "--seconds", str(self._seconds), *missing]
        if self._spin:
            arguments += ["--spin", self._spin]
        heard = reports(
            w.KINDS[kind].module_of(side),
            arguments,
            world_size=w.KINDS[kind].processes,
            environ=w.KINDS[kind].environ,
            limit_s=START_LIMIT_S,
        )
        for name, (figures, failure) in heard:
            if not name:
                raise RuntimeError(failure)
            missing.remove(name)
            if failure:
                self._fail(side, name, failure)
                continue
            rows = w.WORKLOADS[name].rows
            values |= {
                row.name: value for row, value in zip(rows, figures, strict=True)
            }
            shown = ", ".join(
                f"{short(value)} {row.unit}"
                for row, value in zip(rows, figures, strict=True)
            )
            say(f"  {side:>8}  {name:<12} {shown}")

    def _fail(self, side: str, name: str, reason: str) -> None:
        say(f"  {side:>8}  {name:<12} failed: {reason}")
        for row in w.WORKLOADS[name].rows:
            self.failures[side].setdefault(row.name, reason)
