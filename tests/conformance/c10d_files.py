"""PyTorch's test files of c10d: `python -m tests.conformance.c10d_files PYTORCH`.

PYTORCH is a checkout of PyTorch: these files are not in its wheel.  Each file runs with
torch's own gloo and DDP, and again with asyncrpc's backend, or its DDP, in their place.
What a file's version asks of another torch than the installed one fails both times.

The exit status is 0 if each test that passes on torch passes on asyncrpc, or is listed
in c10d_files_expected.toml.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest import TestCase, TestLoader

from tests.conformance import c10d

# Each file, and what stands for what it asks for: see `ddp` and `hosted`.
FILES: Final = {
    "algorithms/ddp_comm_hooks/test_ddp_hooks.py": ("ddp", "hosted"),
    "algorithms/test_join.py": (),
    "optim/test_apply_optimizer_in_backward.py": (),
    "optim/test_zero_redundancy_optimizer.py": ("hosted",),
    "test_c10d_common.py": (),
    "test_c10d_gloo.py": (),
    "test_c10d_object_collectives.py": (),
    "test_c10d_spawn_gloo.py": (),
}
EXPECTED: Final = Path(__file__).parent / "c10d_files_expected.toml"
FOLDER: Final = Path("test") / "distributed"
MARKS: Final = c10d.MARKS  # `child` asks for it
PASSES: Final = "pass"
TIMEOUT_S: Final = 60

_cases: Final[dict[str, TestCase]] = {}  # of this process, which runs one file


def case(name: str) -> TestCase:
    """Return the test "CLASS.TEST"; `child` calls this."""
    test_case = _cases[name]
    type(test_case).setUpClass()
    return test_case


def _run_file(args: argparse.Namespace, file: str) -> int:
    """Run one file, and write how each of its tests ended."""
    _prepare(args.impl, FILES[file])
    from tests.conformance import running  # noqa: PLC0415  (after the environment is set)

    module = _module(args.pytorch, file)
    kinds = [
        var
        for var in vars(module).values()
        if isinstance(var, type) and issubclass(var, TestCase)
    ]
    for kind in kinds:
        if kind.__module__ == module.__name__:
            for test in TestLoader().getTestCaseNames(kind):
                _cases[f"{kind.__name__}.{test}"] = kind(test)
    ended: dict[str, str] = {}
    options = running.Options(args.jobs, TIMEOUT_S)
    with closing(running.run(_cases, options)) as results:
        for name, result in results:
            ended[name] = str(result.status)
            print(f"{result.status:<8}{name}  {result.message[:200]}", flush=True)
    args.out.write_text(json.dumps(ended), "utf-8")
    return 0


def _module(pytorch: Path, file: str) -> ModuleType:
    path = pytorch / FOLDER / file
    sys.path[:0] = [str(path.parent), str(pytorch / FOLDER)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is no file of Python")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _prepare(impl: str, stand_ins: tuple[str, ...]) -> None:
    c10d.set_environment(__name__, TIMEOUT_S)  # "__main__", in the forks too
    is_hosted = "hosted" in stand_ins
    backend = "gloo" if impl == "torch" else "asyncrpc"
    c10d.put_in_place(backend, {"gloo", "nccl"} if is_hosted else {"gloo"})
    if impl == "asyncrpc":
        _make_groups()
    if "ddp" in stand_ins and impl == "asyncrpc":
        importlib.import_module("tests.conformance.ddp").put_in_place()
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    if is_hosted:
        importlib.import_module("tests.conformance.hosted").put_in_place()
        common.requires_nccl = lambda *_: lambda test: test
    fork = multiprocessing.get_context("fork").Process
    for name in ("_spawn_processes", "_fork_processes"):
        setattr(common.MultiProcessTestCase, name, lambda it: it._start_processes(fork))  # noqa: SLF001
    _put_back_names(common)


def _put_back_names(common: Any) -> None:
    """Give files of earlier versions the names that they import, and torch dropped."""
    if not hasattr(common, "skip_if_rocm"):
        common.skip_if_rocm = lambda test: test
    spmd = "torch.distributed._spmd"
    if importlib.util.find_spec(spmd) is None:
        module: Any = ModuleType(f"{spmd}.comm_tensor")
        module.CommTensor = module._wait_comm = None  # noqa: SLF001
        sys.modules |= {spmd: ModuleType(spmd), module.__name__: module}


def _make_groups() -> None:
    """Let what makes a ProcessGroupGloo itself have a process group of asyncrpc."""
    c10d_names: Any = importlib.import_module("torch.distributed.distributed_c10d")
    dist: Any = importlib.import_module("torch.distributed")
    backend: Any = importlib.import_module("asyncrpc.torch_backend")
    gloo = dist.ProcessGroupGloo

    def make(
        store: Any, rank: int, size: int, options: Any = None, timeout: Any = None
    ) -> Any:
        limit = timeout or getattr(options, "_timeout", None) or TIMEOUT_S
        asked = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            global_ranks_in_group=[],
            group_id="0",
            timeout=limit if isinstance(limit, timedelta) else timedelta(seconds=limit),
        )
        return backend._create(asked, None)  # noqa: SLF001  (what torch calls)

    for name in ("_Options", "create_device", "create_default_device"):
        if hasattr(gloo, name):
            setattr(make, name, getattr(gloo, name))
    dist.ProcessGroupGloo = c10d_names.ProcessGroupGloo = make


def expected() -> dict[str, str]:
    """Return the tests that need not pass, with the reason of each."""
    written = tomllib.loads(EXPECTED.read_text("utf-8"))
    return {test: why for why, tests in written.items() for test in tests}


def _ended(args: argparse.Namespace, file: str, impl: str) -> Mapping[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ended.json"
        command = [sys.executable, "-m", "tests.conformance.c10d_files"]
        command += [str(args.pytorch), "--file", file, "--impl", impl]
        command += ["--jobs", str(args.jobs), "--out", str(out)]
        subprocess.run(command, check=True)
        ended: dict[str, str] = json.loads(out.read_text("utf-8"))
        return ended


def _compare(args: argparse.Namespace) -> int:
    listed, poor = expected(), []
    rows: list[tuple[str, Any, int]] = []
    for file in FILES:
        if args.filter not in file:
            continue
        torchs, ours = (_ended(args, file, impl) for impl in ("torch", "asyncrpc"))
        passed = [name for name, status in torchs.items() if status == PASSES]
        short = [name for name in passed if ours[name] != PASSES]
        poor += [name for name in short if name not in listed]
        poor += [name for name in passed if name in listed and name not in short]
        rows.append((file, len(passed), len(passed) - len(short)))
        rows += [
            (f"- do not: they {why}", "", count)
            for why, count in Counter(listed.get(name, "?") for name in short).items()
        ]
    print("| file | pass on torch | of these on asyncrpc |\n| --- | ---: | ---: |")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    print(f"did not pass, and must, or passed and are listed: {poor}")
    return 1 if poor else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the files, or one with one implementation; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.c10d_files")
    add = parser.add_argument
    add("pytorch", type=Path, help="a checkout of PyTorch")
    add("--filter", default="", help="a part of the files' names")
    add("--jobs", type=int, default=2, help="tests at a time")
    add("--file", help=argparse.SUPPRESS)
    add("--impl", default="asyncrpc", help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    return _run_file(args, args.file) if args.file else _compare(args)


if __name__ == "__main__":
    sys.exit(main())
