"""The findings of all workers of a group, as one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from asyncrpc.tools.checkup.machine.findings import CheckFinding, CheckState

_LATE_S: Final = (
    0.1  # of a wall's clock: logs of two hosts do not fit together any more
)
# Checks whose facts should be the same on all workers, and why.
_SAME: Final[Mapping[str, str]] = {
    "asyncrpc": "the workers differ: install the same version everywhere",
    "Python": "the workers differ: functions pickled by one may fail on another",
    "torch": "the workers differ: what one sends may mean something else to another",
    "event loop": "the workers differ: start all by asyncrpc.run(main())",
    "MTU": "the workers differ: large packets may be lost on the way; set the same",
    "time-outs": "the workers differ: pass the same Options everywhere",
}


class GroupFinding(NamedTuple):
    """A finding of some workers.

    Attributes:
        found: the facts, in a few words.
        advice: what to do; empty: nothing.
        workers: by name, in order.
    """

    check: str
    state: CheckState
    found: str
    advice: str
    workers: tuple[str, ...]


def together(findings: Mapping[str, Sequence[CheckFinding]]) -> list[GroupFinding]:
    """Return the findings of the workers of a group, equal findings as one.

    If a check is well on several workers with different facts, those of the first stand
    for all, unless the facts should be the same everywhere.
    """
    checks = dict.fromkeys(
        finding.check for each in findings.values() for finding in each
    )
    return [row for check in checks for row in _of_check(check, findings)]


def _of_check(
    check: str, findings: Mapping[str, Sequence[CheckFinding]]
) -> Iterator[GroupFinding]:
    alike: dict[CheckFinding, list[str]] = {}
    for name, each in findings.items():
        for finding in each:
            if finding.check == check:
                alike.setdefault(finding, []).append(name)
    well = {
        finding: names
        for finding, names in alike.items()
        if finding.state is CheckState.OK
    }
    if len(well) > 1 and check in _SAME:
        for finding, names in well.items():
            yield _row(
                finding._replace(state=CheckState.NOTE, advice=_SAME[check]), names
            )
    elif well:
        first = next(iter(well))
        names = [
            name for name in findings if any(name in each for each in well.values())
        ]
        if len(well) > 1:
            first = first._replace(found=f"{first.found} (the first; all: --json)")
        yield _row(first, names)
    for finding, names in alike.items():
        if finding not in well:
            yield _row(finding, names)


def _row(finding: CheckFinding, names: Sequence[str]) -> GroupFinding:
    return GroupFinding(
        finding.check, finding.state, finding.found, finding.advice, tuple(names)
    )


def check_walls(clocks: Mapping[str, tuple[float, float]]) -> list[GroupFinding]:
    """Check the wall clocks of workers on other hosts against that of this one.

    Args:
        clocks: seconds that the clock of each worker is ahead, and the error of this;
            0: it is the clock of this host.
    """
    rows = []
    for name, (ahead_s, error_s) in clocks.items():
        if not error_s:
            continue
        way = "ahead of" if ahead_s > 0 else "behind"
        words = f"{abs(ahead_s):.3g} s {way} this host's, to within {error_s:.2g} s"
        is_late = abs(ahead_s) > _LATE_S + error_s
        state = CheckState.NOTE if is_late else CheckState.OK
        advice = "times in logs and of tokens differ: synchronise it (chronyd)"
        rows.append(
            GroupFinding(
                "clock offset", state, words, advice if is_late else "", (name,)
            )
        )
    return rows
