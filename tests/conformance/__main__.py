"""PyTorch's own RPC suites against the facade: `python -m tests.conformance`.

The suites are those inside the installed torch; `--impl torch` runs them against torch
itself, which must pass all.  The exit status is 0 if every test of class a passes, and
every other passes or is listed in expected.toml.  A few that fail are run again, alone.

    python -m tests.conformance --classes a --filter rref --out results.json
    python -m tests.conformance --page results.json
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.conformance import lists, running, showing
from tests.conformance.lists import Known
from tests.conformance.results import Report, Result, Status
from tests.conformance.verdict import judge

WRITE_TESTS = 10  # between two versions of the results' file
AGAIN_TESTS_MAX = 20  # classes a and b first; where more fail, it is for a reason
LOG_CHARACTERS = 100  # of a line, where there is no terminal that has a width


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--impl", choices=["torch", "asyncrpc"], default="asyncrpc")
    add("--classes", default="a,b,c", help="of tests: see lists.py")
    add("--filter", default="", help="a regular expression, found in the test's name")
    add("--only", type=Path, metavar="FILE", help="run those it names, one a line")
    add("--jobs", type=int, default=2, help="tests at a time")
    add("--timeout", type=int, default=90, help="seconds that a test may take")
    add("--retries", type=int, default=2, help="of a test that fails")
    add("--start", choices=["fork", "spawn"], default="fork", help="of the ranks")
    add("--out", type=Path, metavar="FILE.json", help="write the results")
    add("--logs", type=Path, metavar="DIR", help="keep what every test prints")
    add("--list", action="store_true", help="print the tests' names, and stop")
    add("--page", type=Path, metavar="FILE.json", help="renew the page, and stop")
    args = parser.parse_args(arguments)
    if args.jobs < 1 or args.timeout < 1 or args.retries < 0:
        parser.error("--jobs and --timeout are 1 or more, --retries 0 or more")
    return args


def chosen(known: Mapping[str, Known], args: argparse.Namespace) -> list[str]:
    """Return the tests that are asked for, in the order of a run."""
    only = known.keys() if args.only is None else set(lists.names_in(args.only))
    if unknown := only - known.keys():
        raise ValueError(f"{args.only}: {len(unknown)} unknown, first {min(unknown)!r}")
    classes = set(args.classes.split(","))
    names = [
        name
        for name, test in known.items()
        if name in only and test.of_class in classes and re.search(args.filter, name)
    ]
    if not names:
        raise ValueError("no test is of these classes and has such a name")
    return names


class Run:
    """Tests once, then those that fail again; the results as far as there are any."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.results: dict[str, Result] = {}
        self.noticed: Mapping[str, list[str]] = {}
        self._args = args
        self._console = console
        self._begun_s = time.monotonic()

    def all(
        self,
        names: Sequence[str],
        known: Mapping[str, Known],
        listed: Mapping[str, str],
    ) -> Report:
        """Run tests; those that are listed once only."""
        self._check_threads()
        args, bar = self._args, showing.Bar(self._console)
        try:
            with bar.progress:
                self._some("tests", names, args.jobs, bar)
                for number in range(1, args.retries + 1):
                    poor = [
                        name
                        for name in sorted(names, key=lambda test: known[test].of_class)
                        if name not in listed and running.again(self.results[name])
                    ]
                    if poor:
                        self._some(f"retry {number}", poor[:AGAIN_TESTS_MAX], 1, bar)
        finally:  # what there is, also if it is interrupted
            report = self._report()
        return report

    def _some(
        self, title: str, names: Sequence[str], jobs: int, bar: showing.Bar
    ) -> None:
        args = self._args
        options = running.Options(jobs, args.timeout, args.logs)
        bar.begin(title, len(names))
        with closing(running.run(names, options, bar.poll)) as results:
            for name, result in results:
                old = self.results.get(name)
                self.results[name] = running.rerun(old, result) if old else result
                bar.ended(name, result)
                if not len(self.results) % WRITE_TESTS:
                    self._report()

    def _report(self) -> Report:
        args = self._args
        about: dict[str, Any] = {
            "implementation": args.impl,
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "torch": version("torch"),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "jobs": args.jobs,
            "timeout_s": args.timeout,
            "retries": args.retries,
            "start": args.start,
            "seconds": round(time.monotonic() - self._begun_s, 1),
            **self.noticed,
        }
        report = Report(about, dict(self.results))
        if args.out is not None:
            report.write(args.out)
        return report

    def _check_threads(self) -> None:
        count = running.threads()
        if count > 1:
            self._console.print(
                f"{count} threads in the process that forks: an implementation must "
                "start none when it is imported"
            )


def import_suites(
    args: argparse.Namespace, known: Mapping[str, Known]
) -> Mapping[str, list[str]]:
    """Import torch and the test modules, with the implementation in torch's place."""
    # Before torch is imported: its libraries start no threads here, where tests fork.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # Asking for GPUs must not start CUDA, which a fork of this process could not use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["CONFORMANCE_IMPL"] = args.impl
    os.environ["CONFORMANCE_START"] = args.start
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(args.timeout)
    from tests.conformance import suites  # noqa: PLC0415  (now it is prepared)

    return suites.noticed(known)


def run(names: Sequence[str], args: argparse.Namespace, console: Console) -> int:
    """Run tests, say what they found, and return the exit status."""
    known = lists.classified()
    listed = {} if args.impl == "torch" else lists.not_expected(known)
    test_run = Run(args, console)
    try:
        test_run.noticed = import_suites(args, known)
    except ImportError as error:
        why = Result(Status.FAIL, f"{args.impl} does not import: {error}")
        test_run.results.update(dict.fromkeys(names, why))
        names = ()
    report = test_run.all(names, known, listed)
    verdict = judge(report.results, known, listed)
    showing.conclude(report, known, listed, verdict, console)
    return 0 if verdict.is_good else 1


def main() -> int:
    """Do what is asked for; a run that is told to end ends its tests, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args, console = parsed(), Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_CHARACTERS
    known = lists.classified()
    if args.page is not None:
        from tests.conformance import page  # noqa: PLC0415  (imports torch)

        page.renew(Report.read(args.page), known, lists.not_expected(known))
        return 0
    try:
        names = chosen(known, args)
    except ValueError as error:
        sys.exit(f"conformance: {error}")
    if args.list:
        for name in names:
            console.print(known[name].of_class, name, soft_wrap=True)
        return 0
    return run(names, args, console)


if __name__ == "__main__":
    sys.exit(main())
