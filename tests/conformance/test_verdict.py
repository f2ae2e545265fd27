"""The runner's own decisions: what is enough, and what is said of a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import lists, page, tables
from tests.conformance.child import last_line
from tests.conformance.placeholders import (
    MISSING,
    LeakedError,
    Marks,
    Missing,
    NotProvidedError,
    read_marks,
)
from tests.conformance.proxies import Proxy
from tests.conformance.results import Report, Result, Status
from tests.conformance.running import again, rerun
from tests.conformance.verdict import judge

KNOWN = lists.classified()
A = "RpcTest.test_add"
B = "RpcTest.test_wait_all"
C = "DistAutogradTest.test_backward_unused_send_function"
PASS, FAIL, SKIP = (
    Result(status) for status in (Status.PASS, Status.FAIL, Status.SKIP)
)
LISTED = {B: "a reason", C: "another"}


def test_lists_name_existing_tests() -> None:
    names = lists.names_in(lists.CI)
    assert set(names) <= KNOWN.keys()
    assert len(set(names)) == len(names)
    assert lists.not_expected(KNOWN).keys() <= KNOWN.keys()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f'[a]\n"{A}" = "why"', "only tests of classes b, c and g"),
        (f'[b]\n"{C}" = "why"', "no test of class b"),
        ('[c]\n"x" = "why"', "no test of class c"),
        (f'[b]\n"{B}" = " "', "no reason"),
    ],
)
def test_list_that_would_hide_a_test_is_refused(
    text: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "expected.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=why):
        lists.not_expected(KNOWN, path)


@pytest.mark.parametrize(
    ("name", "result", "is_good"),
    [
        *((A, PASS, True), (A, FAIL, False), (A, SKIP, False), (B, SKIP, True)),
        *((B, FAIL, True), (B, PASS, False), (C, FAIL, True), (C, PASS, True)),
    ],
)
def test_result_is_judged_by_the_lists(
    name: str, result: Result, *, is_good: bool
) -> None:
    assert judge({name: result}, KNOWN, LISTED).is_good is is_good


def test_unlisted_tests_must_pass_and_outdated_ones_are_named() -> None:
    assert judge({C: FAIL}, KNOWN, {}).unexpected == (C,)
    assert judge({C: FAIL}, KNOWN, LISTED).excused == (C,)
    assert judge({C: PASS}, KNOWN, LISTED).outdated == (C,)


def test_second_run_repeats_flaky_tests_only() -> None:
    assert again(FAIL)
    assert not again(Result(Status.FAIL, missing=("torch.distributed.rpc.x",)))
    assert not again(SKIP)
    assert rerun(FAIL, PASS).flaky
    assert not rerun(FAIL, FAIL).flaky


def test_failure_is_described_by_the_error_of_the_first_rank() -> None:
    text = (
        "Traceback (most recent call last):\n  File ...\nRuntimeError: "
        "Process 1 exited with error code 10 and exception:\n"
        'Traceback (most recent call last):\n  File "x.py", line 1\n    y()\n'
        "ValueError: no y\nException raised from z\nframe #0: w\n\n"
        "Process 3 exited with error code 10 and exception:\n"
        "Traceback (most recent call last):\nKeyError: 0\n"
        "\nTo execute this test, run the following from the base repo dir:\n"
    )
    assert last_line(text) == "ValueError: no y"


def test_traceback_of_a_callee_is_not_the_failure() -> None:
    trace = "Traceback (most recent call last):\n  File ...\n"
    first = f"{trace}KeyError: 0\n"
    also = "\nDuring handling of the above exception, another exception occurred:\n\n"
    text = f"{first}{also}{trace}RuntimeError: on 'b':\n{trace}ValueError: far away\n"
    assert last_line(text).startswith("RuntimeError: on 'b': Traceback")


def test_results_are_read_back_unchanged(tmp_path: Path) -> None:
    result = Result(Status.FAIL, "x", 1.5, (10, None), missing=("y",), flaky=False)
    report = Report({"implementation": "asyncrpc"}, {A: result, B: PASS})
    report.write(tmp_path / "out.json")
    assert Report.read(tmp_path / "out.json") == report


def test_passes_are_counted_by_suite_and_class() -> None:
    rows = list(tables.rows({A: PASS, B: SKIP, C: FAIL}, KNOWN))
    assert rows == [
        ("RpcTest", "1 of 1", "", "", "1 of 1", "1"),
        ("DistAutogradTest", "", "", "0 of 1", "0 of 1", ""),
        ("all", "1 of 1", "", "0 of 1", "1 of 2", "1"),
    ]


def test_a_page_is_written_from_a_whole_run_of_the_facade_only(tmp_path: Path) -> None:
    about = {
        "implementation": "asyncrpc",
        "date": "2026-01-01",
        "torch": "2",
        "python": "3",
        "cpus": 2,
        "seconds": 300.0,
    }
    results = {name: FAIL if name == C else PASS for name in KNOWN}
    path = tmp_path / "page.md"
    path.write_text(page.PAGE.read_text("utf-8"), "utf-8")
    page.renew(Report(about, results), KNOWN, LISTED, path)
    assert f"| `{C}` | c (asserts-a-limitation) | another |" in path.read_text("utf-8")
    for wrong in (
        Report(about, {A: PASS}),
        Report({**about, "implementation": "torch"}, results),
    ):
        with pytest.raises(ValueError, match=r"not"):
            page.renew(wrong, KNOWN, LISTED, path)


def test_missing_name_fails_at_its_first_use(tmp_path: Path) -> None:
    marks = Marks(lambda: str(tmp_path))
    proxies: dict[str, Proxy] = {}
    proxy = proxies["torch.x"] = Proxy("torch.x", [], proxies, marks)
    missing = proxy.absent
    assert isinstance(missing("used", "as")("a decorator"), Missing)
    assert isinstance(missing["of an annotation"], Missing)
    marks.importing = False
    assert isinstance(missing.also, Missing)
    for use in (missing, lambda: missing[0], lambda: isinstance(0, missing)):
        with pytest.raises(NotProvidedError, match=r"torch\.x\.absent"):
            use()
    with pytest.raises(NotProvidedError):
        missing.also()
    assert read_marks(tmp_path, MISSING) == ("torch.x.absent", "torch.x.absent.also")
    with pytest.raises(LeakedError):
        marks.leaked("torch.y")
