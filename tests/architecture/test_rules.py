"""Rules of the house that neither ruff, mypy nor the import contracts can state."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from tests.architecture.sources import (
    PACKAGE,
    TESTS,
    dotted_uses,
    name_of,
    parse,
    python_files,
)

# Names that say nothing of what is in the file.
EMPTY_NAMES = {
    "common",
    "data",
    "helper",
    "helpers",
    "info",
    "manager",
    "misc",
    "utils",
}
# Spelled apart, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(TO" + "DO|FIX" + "ME|X" + r"XX)\b")
# Where the environment may be read: the command line, what a program is started with,
# and the defaults of arguments that a caller can give instead.
MAY_READ_ENVIRONMENT = {
    "asyncrpc/clusters/kept.py",  # the place of runs
    "asyncrpc/clusters/lives.py",  # workers get the program's
    "asyncrpc/clusters/remote/slurm.py",  # a job tells of itself
    "asyncrpc/clusters/worker.py",
    "asyncrpc/parallel/collectives/torch_backend/call_hooks.py",  # as torch's
    "asyncrpc/tools/inspection/service.py",  # it checks what a worker was given
    "asyncrpc/tools/inspection/run_note.py",  # names the directory of `asyncrpc run`
    "asyncrpc/core/multiprocessing/child.py",
    "asyncrpc/core/devices/pjrt.py",  # torch_xla is configured by it
    "asyncrpc/core/host/run_entry.py",  # the place of runs
    "asyncrpc/core/options.py",
    "asyncrpc/core/membership/launched_store.py",  # for torch's own rendezvous
    "asyncrpc/core/membership/rendezvous.py",
    "asyncrpc/serving/model_host/slot.py",  # the place of runs
}

# What torch makes on its default device, which is the program's, if no device is given.
FACTORIES = {f"torch.{constructor.__name__}" for constructor in _device_constructors()}
# Of these, what is of the default dtype if no dtype is given.
BY_DEFAULT_DTYPE = {"torch.empty", "torch.full", "torch.ones", "torch.zeros"}

PACKAGE_FILES = python_files(PACKAGE)
ALL_FILES = python_files(PACKAGE, TESTS)


@pytest.mark.parametrize("path", ALL_FILES, ids=name_of)
def test_file_has_no_unfinished_part(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert UNFINISHED.findall(text) == []
    raised = {
        ast.unparse(node.exc).partition("(")[0]
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Raise) and node.exc is not None
    }
    assert "NotImplementedError" not in raised


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_module_has_a_meaningful_name(path: Path) -> None:
    parts = set(path.relative_to(PACKAGE).with_suffix("").parts)
    assert parts & EMPTY_NAMES == set()


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_environment_is_read_at_the_edge_only(path: Path) -> None:
    if "cli" in path.parts or name_of(path) in MAY_READ_ENVIRONMENT:
        return
    assert {"os.environ", "os.getenv"} & set(dotted_uses(parse(path))) == set()


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_devices_are_used_in_a_single_package(path: Path) -> None:
    """In the runtime's package for them, and above all others in the public one."""
    if "devices" in path.relative_to(PACKAGE).parts[:2]:
        return
    uses = set(dotted_uses(parse(path)))
    assert [use for use in uses if use.startswith(("torch.cuda", "torch_xla"))] == []


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_finalizers_do_no_work(path: Path) -> None:
    """`__del__` runs at any time, in any thread: `weakref.finalize` queues instead."""
    names = {
        node.name for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)
    }
    assert "__del__" not in names


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_time_is_read_through_the_clock(path: Path) -> None:
    # The kit for tests watches real processes and descriptors, in real time.
    if name_of(path) == "asyncrpc/core/loop/clock.py" or "testing" in path.parts:
        return
    readings = {
        *("time.time", "time.time_ns", "time.monotonic", "time.perf_counter"),
        *("dt.datetime.now", "datetime.now", "datetime.utcnow", "time.localtime"),
    }
    assert readings & set(dotted_uses(parse(path))) == set()


# It may jump by an hour at any time: who reads it, and why that does no harm.
READS_WALL_CLOCK = {
    "clusters/discovery.py": "when it began, for `asyncrpc runs`",
    "core/multiprocessing/launcher.py": "when it began, for `asyncrpc runs`",
    "tools/cli/runs/command.py": "the age of a run that is shown, at least 0",
    "tools/cli/timeline.py": "lays events over a profile, which has wall time itself",
    "compat/rpc/gathering.py": "the same: ranges are moved to be within their call",
    "tools/inspection/group_answers.py": "measures by how much the clock is wrong",
    "tools/inspection/histories.py": "monotonic ages, as times for torch's dump",
    "tools/inspection/service.py": "is what is measured, shown, and for the timeline",
    "tools/inspection/summarizing.py": "shown",
    "tools/observability/spans.py": "spans have wall time; a jump draws one wrong",
    "serving/dashboard/look.py": "shown",
    "serving/debug_page.py": "an age that is shown, at least 0",
    "serving/model_host/process.py": "when it began, for `asyncrpc runs`",
}


def test_modules_with_effects_do_not_read_the_wall_clock() -> None:
    readers = {
        name_of(path).removeprefix("asyncrpc/")
        for path in PACKAGE_FILES
        if any(
            isinstance(node, ast.ImportFrom)
            and node.module == "asyncrpc.core.loop.clock"
            and any(alias.name == "wall_ns" for alias in node.names)
            for node in ast.walk(parse(path))
        )
    }
    assert readers == set(READS_WALL_CLOCK)


PRODUCTS = ("clusters", "parallel", "serving", "testing", "tools")
# `Worker.parts` is the core.  Which products use it beside `asyncrpc.extend`, and why.
REACHES_INTO_WORKERS = {
    "clusters": {
        "opening.py": "lets `code=` refuse a function whose module has changed",
    },
    "parallel": {
        "collectives/torch_backend/rank_runtime.py": "a facade, with its own worker",
        "pipeline/pipeline.py": "starts calls whose futures it waits for together",
        "pipeline/stage_run.py": "checks that a peer may call the loss function",
    },
    "serving": {
        "model_host/host.py": "dials a process again that has started anew",
        "replicas/call.py": "an attempt has the span of the whole call, a stream too",
        "worker_status.py": "reads figures, of a worker that may not run",
    },
    "testing": {
        "causes.py": "finds what keeps a simulation waiting",
        "cluster.py": "lets a seed make every choice of a worker",
    },
    "tools": {
        "inspection/polling.py": "the inspection reads every part",
        "observability/metrics.py": "reads figures, of a worker that may not run",
    },
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_that_reach_into_workers_are_listed(product: str) -> None:
    reaching = {
        name_of(path).removeprefix(f"asyncrpc/{product}/")
        for path in python_files(PACKAGE / product)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr == "parts"
    }
    assert reaching == set(REACHES_INTO_WORKERS[product])


# What unpacks bytes, and what bounds how much they become if others have sent them.
UNPACKS = {
    "parallel/collectives/shared.py": "a note on a board has 16 KiB at most",
    "compat/rpc/internal.py": "TorchScript, in calls that Policy.STRICT refuses",
    "compat/rpc/starting.py": "of this program, by a file",
    "core/host/run_entry.py": "a file of this user",
    "tools/cli/timeline.py": "a profile that the user names",
    "parallel/ddp/elastic.py": "a checkpoint of the program, weights only",
    "parallel/ddp/initial.py": "what the ranks have gathered, in equal lengths",
    "parallel/ddp/optimizers/sharded_state.py": "a checkpoint of the program",
    "tools/inspection/beside.py": "the door of a worker of this user, bounded",
    "tools/inspection/run_note.py": "a file of this user",
    "core/multiprocessing/arguments.py": "from the parent, or for its own child",
    "core/multiprocessing/child.py": "from the parent",
    "core/multiprocessing/outcome.py": "from our own child",
    "core/multiprocessing/packing.py": "from a process of the program",
    "clusters/local/fork_server.py": "from the program that started it",
    "clusters/local/processes.py": "from our own child",
    "clusters/kept.py": "a file of this user",
    "clusters/remote/frames.py": "a frame has 256 KiB at most",
    "clusters/remote/server.py": "from its own starter",
    "clusters/worker.py": "from the program that started it",
    "clusters/ray/references.py": "from Ray's own store",
    "core/links/observers.py": "a question has 64 KiB at most",
    "core/members.py": "the record of a worker, in HELLO or at the meeting point",
    "core/membership/stores.py": "the records at the meeting point",
    "core/serde/code_pickle.py": "code of a member, refused by Policy.STRICT",
    "core/serde/bounds.py": "counts before it unpacks",
    "core/serde/decoding.py": "within `serde.bounds`, if it came from a peer",
    "core/serde/lossless.py": "gets the length that a block must have",
    "core/serde/pickling.py": "under Policy.TRUSTED alone",
    "core/serde/quick.py": "8 KiB at most, or what this worker has packed itself",
    "serving/dashboard/access.py": "a sign-in, of a bounded length",
    "serving/model_host/process.py": "from its own starter",
    "serving/model_host/slot.py": "a file of this user",
    "core/wire/frames.py": "a head has 64 KiB at most",
}
UNPACKERS = {
    *("unpackb", "Unpacker", "Unpickler", "load", "loads"),
    *("decompress", "literal_eval"),
}
PARSERS = {
    *("msgpack", "json", "pickle", "cloudpickle", "torch", "ast"),
    *("module", "decompressor"),
}


def test_modules_that_unpack_bytes_are_listed_with_their_bound() -> None:
    unpacking = {
        name_of(path).removeprefix("asyncrpc/")
        for path in PACKAGE_FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
        and node.attr in UNPACKERS
        and ast.unparse(node.value).split(".")[-1] in PARSERS
    }
    assert unpacking == set(UNPACKS)


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=name_of)
def test_tensors_of_the_package_ignore_program_defaults(path: Path) -> None:
    """`torch.set_default_device` and `set_default_dtype` are for the program's own."""
    calls = [
        (ast.unparse(node.func), {keyword.arg for keyword in node.keywords})
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
    ]
    assert [
        name for name, has in calls if name in FACTORIES and "device" not in has
    ] == []
    assert [
        name for name, has in calls if name in BY_DEFAULT_DTYPE and "dtype" not in has
    ] == []
