"""The findings of many workers are one table, in which differences stand out."""

from __future__ import annotations

from asyncrpc.tools.checkup.machine.findings import (
    CheckFinding,
    CheckState,
    note,
    ok,
    wrong,
)
from asyncrpc.tools.checkup.machine.together import GroupFinding, check_walls, together

OK, NOTE, WRONG = CheckState


def shown(rows: list[GroupFinding]) -> list[tuple[str, CheckState, str, str]]:
    return [(row.check, row.state, row.found, " ".join(row.workers)) for row in rows]


def test_equal_findings_are_one_row() -> None:
    findings = {name: [ok("Python", "3.11"), ok("uvloop", "1")] for name in "abc"}
    assert shown(together(findings)) == [
        ("Python", OK, "3.11", "a b c"),
        ("uvloop", OK, "1", "a b c"),
    ]


def test_failing_findings_name_their_workers() -> None:
    bad = wrong("secret file", "mode 0644", "chmod 600")
    small = note("memory", "1 GiB", "use less")
    findings: dict[str, list[CheckFinding]] = {
        "a": [ok("memory", "9 GiB")],
        "b": [small, bad],
        "c": [ok("memory", "8 GiB")],
    }
    rows = together(findings)
    assert shown(rows) == [
        ("memory", OK, "9 GiB (the first; all: --json)", "a c"),
        ("memory", NOTE, "1 GiB", "b"),
        ("secret file", WRONG, "mode 0644", "b"),
    ]
    assert rows[-1].advice == "chmod 600"


def test_differing_versions_are_a_note() -> None:
    findings = {"a": [ok("torch", "2.6")], "b": [ok("torch", "2.7")]}
    rows = together(findings)
    assert shown(rows) == [("torch", NOTE, "2.6", "a"), ("torch", NOTE, "2.7", "b")]
    assert "the workers differ" in rows[0].advice


def test_empty_findings_give_empty_tables() -> None:
    assert together({}) == []
    assert check_walls({}) == []


def test_clocks_of_other_hosts_are_compared_within_their_error() -> None:
    rows = check_walls(
        {
            "here": (0.0, 0.0),
            "near": (0.05, 0.001),
            "unsure": (0.3, 0.25),
            "late": (-3.0, 0.001),
        }
    )
    near, unsure, late = rows
    assert (near.state, near.workers) == (OK, ("near",))
    assert near.found == "0.05 s ahead of this host's, to within 0.001 s"
    assert (unsure.state, unsure.workers) == (OK, ("unsure",))
    assert (late.state, late.workers) == (NOTE, ("late",))
    assert late.found == "3 s behind this host's, to within 0.001 s"
    assert [bool(row.advice) for row in rows] == [False, False, True]
