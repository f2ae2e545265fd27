"""Starts, their reports and their failures, with real processes that only report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bench import comparing, harness, pages
from tests.bench import workloads as w
from tests.bench.__main__ import chosen
from tests.bench.comparing import Comparison
from tests.bench.harness import Figure, Result, Row
from tests.bench.processes import reports

BEGIN, END = "<!-- measured: table: begin -->", "<!-- measured: table: end -->"
MODULE = "reporter"
REPORTER = """
import json, os, sys
for word in sys.argv[5:]:
    if sys.argv[2] == "0":
        if word == "die":
            os._exit(3)
        print("noise", flush=True)
        print(json.dumps([word, 1]), flush=True)
"""


@pytest.fixture
def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / f"{MODULE}.py").write_text(REPORTER, "utf-8")
    return {"PYTHONPATH": str(tmp_path)}


def test_reports_of_rank_0_alone_are_read(reporter: dict[str, str]) -> None:
    heard = list(reports(MODULE, ["a", "b"], world_size=3, environ=reporter))
    assert heard == [("a", [1]), ("b", [1])]


def test_dead_process_is_an_error_after_its_reports(reporter: dict[str, str]) -> None:
    heard: list[tuple[str, list[Any]]] = []
    with pytest.raises(RuntimeError, match="status 3"):
        heard.extend(reports(MODULE, ["a", "die", "b"], environ=reporter))
    assert heard == [("a", [1])]


def test_hanging_process_is_killed(tmp_path: Path) -> None:
    (tmp_path / f"{MODULE}.py").write_text("import time\ntime.sleep(600)", "utf-8")
    environ = {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(RuntimeError, match="status"):
        list(reports(MODULE, [], world_size=1, limit_s=0.2, environ=environ))


Reported = tuple[str, list[Any]] | Exception


class Script:
    """What the processes report, start by start: each start of a side is one list."""

    def __init__(self, starts: Sequence[list[Reported]]) -> None:
        self.starts = list(starts)
        self.asked: list[list[str]] = []

    def __call__(
        self, _module: str, arguments: list[str], **_rest: object
    ) -> Iterator[tuple[str, list[Any]]]:
        self.asked.append(arguments[4:])
        for item in self.starts.pop(0):
            if isinstance(item, Exception):
                raise item
            yield item


def compared(
    monkeypatch: pytest.MonkeyPatch, names: list[str], *starts: list[Reported]
) -> tuple[list[Result], Script]:
    script = Script(starts)
    monkeypatch.setattr(comparing, "reports", script)
    comparison = Comparison(names, seconds=0.1)
    comparison.run(1)
    return comparison.results(), script


def test_workload_that_kills_its_process_costs_itself_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ok: Reported = ("many_async", [[5.0], ""])
    results, script = compared(
        monkeypatch,
        ["many_async", "many_def", "rref"],
        [ok, RuntimeError("it died")],
        [("rref", [[7.0], ""])],
        [ok, ("many_def", [[1.0], ""]), ("rref", [[2.0], ""])],
    )
    assert script.asked[1] == ["rref"]
    ours = [result.figures["asyncrpc"] for result in results]
    assert ours == [Figure((5.0,)), None, Figure((7.0,))]
    assert [result.failure for result in results] == ["", "it died", ""]


def test_start_that_never_begins_fails_its_workloads_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, script = compared(
        monkeypatch,
        ["many_async", "rref"],
        [("", [[], "no such option"])],
        [],
    )
    assert len(script.asked) == 2
    assert [result.failure for result in results] == ["no such option"] * 2


def test_polling_choice_of_asyncrpc_reaches_the_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script([[("send_1", [[1.0], ""])]] * 2)
    monkeypatch.setattr(comparing, "reports", script)
    Comparison(["send_1"], seconds=0.1, spin="off").run(1)
    assert script.asked == [["send_1", "--spin", "off"]] * 2


def test_row_is_measured_with_the_row_of_its_asyncrpc_figure() -> None:
    assert chosen("sockets_16")[0] == ["tcp_16", "sockets_16"]
    assert chosen("huge")[0] == ["send_256", "huge_256"]
    assert chosen("rref_method")[0] == ["rref_method"]


def test_sides_take_turns_to_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([[("send_1", [[1.0], ""])] for _ in range(2 * 3)])
    modules: list[str] = []

    def recording(module: str, arguments: list[str], **rest: object) -> Any:
        modules.append(module.rpartition(".")[2])
        return script(module, arguments, **rest)

    monkeypatch.setattr(comparing, "reports", recording)
    Comparison(["send_1"], seconds=0.1, sides=["torch", "pyzmq", "ray"]).run(2)
    assert modules == [
        *("torch_side", "pyzmq_side", "ray_side"),
        *("pyzmq_side", "ray_side", "torch_side"),
    ]


def test_failures_of_each_side_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[list[Reported]] = [
        [("rref_method", [[5.0], ""])],
        [("rref_method", [[], "no such actor"])],
    ]
    monkeypatch.setattr(comparing, "reports", Script(starts))
    comparison = Comparison(["rref_method"], seconds=0.1, sides=["torch", "ray"])
    comparison.run(1)
    (row,) = w.rows_of(["rref_method"])
    assert comparison.failures == {"torch": {}, "ray": {row.name: "no such actor"}}
    assert comparison.figure("torch", row) == Figure((5.0,))
    assert comparison.figure("ray", row) is None


def test_workloads_have_starts_and_rows_unique_names() -> None:
    rows = w.rows_of(list(w.WORKLOADS))
    assert len({row.name for row in rows}) == len(rows)
    for name, workload in w.WORKLOADS.items():
        assert set(workload.sides) <= set(w.KINDS[workload.kind].sides), name


def test_row_is_compared_with_an_existing_row() -> None:
    rows = w.rows_of(list(w.WORKLOADS))
    names = {row.name for row in rows}
    assert {row.against[1] for row in rows if row.against} <= names
    assert {row.ours for row in rows if row.ours} <= names


RATE = Row("calls", "1/s", higher_is_better=True, target=4.0)


def written() -> dict[str, Any]:
    rows = [Row("call", "us", target=2.0), RATE]
    starts = {
        "asyncrpc": [{"call": 10.0, "calls": 5.0}, {"call": 12.0, "calls": 4.0}],
        "torch": [{"call": 40.0, "calls": 9.0}, {"call": 60.0, "calls": 3.0}],
    }
    results = harness.collect(rows, starts)
    return {
        "date": "2026-01-01",
        "machine": "a machine",
        "load": 7.5,
        "starts": 2,
        "seconds": 0.5,
        "rows": harness.as_json(results),
    }


def test_page_keeps_its_text_around_the_new_table() -> None:
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nrest\n"
    text = pages.section(written())
    renewed = pages.replaced(page, "table", text)
    assert "old" not in renewed
    assert renewed.startswith("# Title\n")
    assert renewed.endswith("\n\nrest\n")
    assert "before the run:\n7.5." in text
    assert "1 of 2 targets are reached." in text
    assert "Short of theirs: calls." in text
    assert pages.replaced(renewed, "table", text) == renewed


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_page_without_its_markers_is_left_alone(page: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        pages.replaced(page, "table", "text")


@pytest.mark.parametrize(
    "part",
    [
        *("table", "table, not polling", "peers", "call path"),
        *("call path, not polling", "spin", "busy"),
    ],
)
def test_page_of_this_repository_has_its_markers(part: str) -> None:
    page = pages.PAGE.read_text("utf-8")
    assert "made for a test" in pages.replaced(page, part, "made for a test")


def test_saved_run_is_shown_and_drawn_again(tmp_path: Path) -> None:
    run, picture = tmp_path / "run.json", tmp_path / "ratios.png"
    run.write_text(json.dumps(written()), "utf-8")
    options = ["--from", str(run), "--plot", str(picture)]
    command = [sys.executable, "-m", "tests.bench", *options]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "11.0 (10.0-12.0)  50.0 (40.0-60.0)   4.55  >= 2.00  ok" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rival_runs_in_processes_without_asyncrpc() -> None:
    program = (
        "import sys, tests.bench.sides.torch_side;"
        "print([name for name in ('asyncrpc', 'uvloop') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
