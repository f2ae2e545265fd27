"""PyTorch's tests of c10d and DDP: `python -m tests.conformance.c10d`.

The suite is the one inside the installed torch.  It asks for gloo, or for MPI in tests
of what gloo has not; `--impl asyncrpc`, the default, gives it the backend "asyncrpc" in
their place, `--impl torch` gloo itself.  torch's own DistributedDataParallel, its
communication hooks, ZeRO, Join and averagers run on it.

With `--ddp` only the tests of DDP, hooks, `join` and averagers run, with asyncrpc's in
the place of torch's, see `ddp`, and the host in the place of GPUs, see `hosted`.

The exit status is 0 if every test passes, skips itself, or is listed in
c10d_expected.toml or ddp_expected.toml, and no listed one passes.  A test that fails is
run again, alone.

    python -m tests.conformance.c10d --filter test_ddp --out results.json
    python -m tests.conformance.c10d --ddp --page
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import multiprocessing
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import cache, wraps
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any, Final
from unittest import TestCase, TestLoader

from tests.conformance.results import Report, Result, Status, summary

HERE: Final = Path(__file__).parent
EXPECTED: Final = HERE / "c10d_expected.toml"
DDP_EXPECTED: Final = HERE / "ddp_expected.toml"
PAGE: Final = HERE.parents[1] / "docs" / "how-to" / "data-parallel.md"
PART: Final = "pytorch"
FOLDER: Final = "torch.testing._internal"
RANKS: Final = "4"  # PyTorch runs it with 3, and skips some then
# The backends that the suite asks for, and the tests that run so: on gloo some skip
# themselves that do not on MPI.
# They take minutes or hours where the host plays GPUs: not run.
LONG: Final = ("test_ddp_profiling_torch_profiler", "test_ddp_uneven_inputs")
STAND_INS: Final = {"gloo": "", "mpi": "(all_to_all|_group)(?!.*cuda)"}
MARKS: Final = "CONFORMANCE_MARKS"  # `child` sets it; nothing here leaves any


def put_in_place(backend: str = "asyncrpc", names: Iterable[str] = STAND_INS) -> None:
    """Let whatever asks torch for one of these backends have another one."""
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    dist: Any = importlib.import_module("torch.distributed")
    importlib.import_module("asyncrpc.torch_backend")

    def ours(value: Any) -> Any:
        is_named = isinstance(value, str) and value.lower() in names
        return backend if is_named else value

    def asked(function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            values = [ours(arg) for arg in args]
            return function(*values, **{name: ours(v) for name, v in kwargs.items()})

        return call

    for name in ("init_process_group", "new_group"):
        setattr(c10d, name, asked(getattr(c10d, name)))
        setattr(dist, name, getattr(c10d, name))


@cache
def _suite(stand_in: str) -> type[TestCase]:
    """Import the suite, which reads from the environment what backend to ask for."""
    os.environ["BACKEND"] = stand_in
    name = f"{FOLDER}.distributed.distributed_test"
    sys.modules.pop(name, None)
    raw: Any = importlib.import_module(name)

    class Ranks(raw.TestDistBackend):  # type: ignore[misc]  # torch ships no types
        """Starts a process for each rank, by fork: no thread runs here."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    bases = (Ranks, raw.DistributedTest._DistTestBase)  # noqa: SLF001
    return type(stand_in, bases, {"__module__": __name__})


def case(name: str) -> TestCase:
    """Return the test "BACKEND.TEST"; `child` calls this."""
    stand_in, _, test = name.partition(".")
    os.environ["BACKEND"] = stand_in
    suite = _suite(stand_in)
    suite.setUpClass()
    return suite(test)


def _names() -> list[str]:
    loader = TestLoader()
    return [
        f"{stand_in}.{test}"
        for stand_in, pattern in STAND_INS.items()
        for test in loader.getTestCaseNames(_suite(stand_in))
        if re.search(pattern, test)
    ]


def _ddp_names() -> list[str]:
    """Return the tests that use what `ddp` replaces, in the order of `_names`."""
    from tests.conformance.ddp import NAMES  # noqa: PLC0415  (late, as in `main`)

    suite = _suite("gloo")

    def uses(name: str, seen: set[str]) -> bool:
        code = getattr(inspect.unwrap(getattr(suite, name, len)), "__code__", None)
        if name in seen or code is None:
            return False
        names = _names_in(code)
        return bool(NAMES & names) or any(uses(n, {*seen, name}) for n in names)

    tests = TestLoader().getTestCaseNames(suite)
    return [f"gloo.{test}" for test in tests if test not in LONG and uses(test, set())]


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def set_environment(suites: str, timeout_s: int) -> None:
    """Tell torch and `child` what they read from the environment."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["CONFORMANCE_SUITES"] = suites
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(timeout_s)


def _prepare(args: argparse.Namespace) -> None:
    set_environment("tests.conformance.c10d", args.timeout)
    os.environ["WORLD_SIZE"] = RANKS
    os.environ["TEMP_DIR"] = os.environ.get("TMPDIR", "/tmp")  # noqa: S108  (the suite asks)
    if args.impl == "asyncrpc":
        put_in_place()
    if args.ddp:
        from tests.conformance import ddp, hosted  # noqa: PLC0415  (late, as in `main`)

        if args.impl == "asyncrpc":
            ddp.put_in_place()
        hosted.put_in_place()


def expected() -> dict[str, str]:
    """Return the tests that need not pass, with the reason of each."""
    written: dict[str, str] = tomllib.loads(EXPECTED.read_text("utf-8"))
    return written


def ddp_expected() -> dict[str, str]:
    """Return the same of asyncrpc's DDP."""
    written = tomllib.loads(DDP_EXPECTED.read_text("utf-8"))
    return {f"gloo.{test}": why for why, tests in written.items() for test in tests}


def table(results: Mapping[str, Result], listed: Mapping[str, str]) -> str:
    """Return how many tests pass, and how many do not for each reason."""
    rows = [("pass", sum(result.status is Status.PASS for result in results.values()))]
    rows += Counter(f"do not: they {why}" for why in listed.values()).items()
    skipped = [
        result.message for result in results.values() if result.status is Status.SKIP
    ]
    rows += [("skip themselves, for known issues of PyTorch's", len(skipped))]
    lines = [f"| {what} | {count} |" for what, count in rows]
    return "\n".join(["| tests | |", "| --- | ---: |", *lines])


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.c10d")
    add = parser.add_argument
    add("--impl", choices=["torch", "asyncrpc"], default="asyncrpc")
    add("--filter", default="", help="a regular expression, found in the test's name")
    add("--jobs", type=int, default=2, help="tests at a time")
    add("--timeout", type=int, default=120, help="seconds that a test may take")
    add("--ddp", action="store_true", help="only what asyncrpc's DDP stands for")
    add("--page", action="store_true", help="write the table of --ddp into its page")
    add("--out", type=Path, metavar="FILE.json", help="write the results")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run tests; return the exit status."""
    args = _parsed(arguments)
    _prepare(args)
    # Now the environment is prepared.
    from tests.conformance import running  # noqa: PLC0415

    of_suite = _ddp_names() if args.ddp else _names()
    names = [name for name in of_suite if re.search(args.filter, name)]
    results: dict[str, Any] = {}
    known = ddp_expected() if args.ddp else expected()
    listed = {} if args.impl == "torch" else known
    for jobs, some in ((args.jobs, names), (1, None)):
        again = [
            n for n, test in results.items() if not test.is_good and n not in listed
        ]
        options = running.Options(jobs, args.timeout)
        with closing(running.run(again if some is None else some, options)) as ended:
            for name, result in ended:
                results[name] = result
                print(f"{result.status:<8}{name}  {result.message[:200]}", flush=True)
                if args.out is not None:
                    about = {"implementation": args.impl, "torch": version("torch")}
                    Report(about, results).write(args.out)
    poor = [n for n, test in results.items() if not test.is_good and n not in listed]
    outdated = [n for n in listed if n in results and results[n].status is Status.PASS]
    print(json.dumps(summary(results.values())))
    print(f"did not pass, and must: {poor}; listed, and passed: {outdated}")
    if args.page and not poor and names == of_suite:
        from tests.bench.pages import replaced  # noqa: PLC0415

        text = table(results, listed)
        PAGE.write_text(replaced(PAGE.read_text("utf-8"), PART, text), "utf-8")
    return 1 if poor or outdated else 0


if __name__ == "__main__":
    sys.exit(main())
