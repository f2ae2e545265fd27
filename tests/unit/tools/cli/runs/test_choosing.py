"""Which run is meant, and what is said if none or several are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrpc.core.host.run_places import RunPlace
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.errors import UsageError
from asyncrpc.tools.cli.runs.choosing import choose, others_in, table_of
from asyncrpc.tools.cli.runs.entry import RunRecord
from asyncrpc.tools.cli.runs.listing import LiveRun, RunListing
from asyncrpc.tools.inspection.run_note import RunNote

NOW_S = 1000.0


def a_run(name: str, pid: int, *, host_id: str = HOST_ID, age_s: float = 41) -> LiveRun:
    command = (f"{name}.py", "--data", "/a/long/path" * 9)
    record = RunRecord(pid, "node7", host_id, command, "/", 4, NOW_S - age_s)
    return LiveRun(Path(f"/r/{name}-{pid}"), record, ())


TRAIN, TEST = a_run("train", 17), a_run("test", 170)
THERE = a_run("there", 18, host_id="another")


def listed(*runs: LiveRun) -> RunListing:
    return RunListing(list(runs), [RunPlace(Path("/r"), "")], [])


def test_only_run_of_this_host_is_chosen() -> None:
    assert choose(listed(TRAIN, THERE), None, NOW_S) is TRAIN


@pytest.mark.parametrize(
    ("wanted", "run"),
    [
        ("train-17", TRAIN),
        ("17", TRAIN),  # and not the one whose process begins so
        ("170", TEST),
        ("te", TEST),
        ("tr", TRAIN),
        ("there", THERE),
    ],
)
def test_run_can_be_named_in_several_ways(wanted: str, run: LiveRun) -> None:
    assert choose(listed(TRAIN, TEST, THERE), wanted, NOW_S) is run


@pytest.mark.parametrize(
    ("listing", "wanted", "words"),
    [
        (listed(TRAIN, TEST), None, r"2 runs .*--run:\nrun .*\ntrain-17 .* 41 s "),
        (listed(TRAIN, TEST), "t", "'t' names more than one run; .*\nrun"),
        (listed(TRAIN, TEST), "x", "'x' names no run; .*\nrun"),
        (listed(TRAIN, THERE), "18", "'18' names no run"),
        (listed(), None, r"no run .* \(looked in /r\).*ADDRESS of any worker"),
        (listed(), "x", "there is no run 'x': no run of yours"),
        (listed(THERE), None, "there-18 is of another host or container"),
    ],
)
def test_ambiguous_choice_is_refused_with_the_known_runs(
    listing: RunListing, wanted: str | None, words: str
) -> None:
    with pytest.raises(UsageError) as raised:
        choose(listing, wanted, NOW_S)
    assert re.search(words, str(raised.value)), raised.value


def test_table_fits_the_width_and_keeps_names_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    longest = a_run("a" * 16, 4194304)
    lines = table_of([longest, TRAIN, THERE], NOW_S).splitlines()
    assert max(map(len, lines)) == 80
    assert lines[1].split()[:5] == ["a" * 16 + "-4194304", "4194304", "41", "s", "0/4"]
    assert "another host or" in lines[3]


def note(name: str, incarnation: int, *addresses: str) -> RunNote:
    return RunNote(name, 0, 7, 1, incarnation, addresses)


def test_workers_of_a_run_that_are_in_another_group_are_named() -> None:
    notes = [
        note("a", 1, "uds:///a"),
        note("b", 2),
        note("c", 3, "uds:///c", "tcp://c"),
    ]
    run = LiveRun(TRAIN.path, TRAIN.record, tuple(notes))
    assert others_in(run, {1, 2, 3, 4}) == ""
    assert others_in(TRAIN, {1}) == ""
    assert others_in(run, {1, 2}) == (
        "1 worker is of run train-17, but not in this group: c; to look at them: --run "
        "train-17 uds:///c"
    )
    assert others_in(run, {1, 3}) == (
        "1 worker is of run train-17, but not in this group: b"
    )
    many = tuple(note(f"w{number}", number) for number in range(9))
    assert others_in(LiveRun(TRAIN.path, TRAIN.record, many), {0}) == (
        "8 workers are of run train-17, but not in this group: w1, w2, w3, w4 and 4 "
        "more"
    )
