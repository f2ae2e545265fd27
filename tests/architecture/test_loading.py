"""What is loaded before a program uses it: the core, and nothing that stands on it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MODULES_MAX = 320  # of asyncrpc, after `import asyncrpc`
FACADE_MAX = 25  # of `asyncrpc.compat`, beside them
# What shows a worker to its host before anybody looks.
PRESENCE = {"", ".ages", ".local_socket", ".presence", ".run_note"}
ON_DEMAND = (
    *("compat", "parallel", "serving", "clusters", "testing"),
    *("core.multiprocessing", "core.nn", "core.optim"),
)


def loaded_by(program: str) -> set[str]:
    """Return the modules that a program has loaded at its end."""
    report = "; import json, sys; print(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", program + report],
        stdout=subprocess.PIPE,
        check=True,
    )
    return set(json.loads(ended.stdout.splitlines()[-1]))


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] == "asyncrpc"}


@pytest.fixture(scope="module")
def core() -> set[str]:
    return loaded_by("import asyncrpc")


def test_core_is_loaded_alone(core: set[str]) -> None:
    assert len(ours(core)) <= MODULES_MAX
    assert {part for part in ON_DEMAND if f"asyncrpc.{part}" in core} == set()
    tools = {name for name in core if name.startswith("asyncrpc.tools.")}
    assert tools == {f"asyncrpc.tools.inspection{name}" for name in PRESENCE}


@pytest.mark.parametrize(
    "name", ["aiohttp", "opentelemetry", "prometheus_client", "ray"]
)
def test_optional_package_is_not_loaded(core: set[str], name: str) -> None:
    assert name not in core


def test_import_leaves_no_full_collection_to_the_first_calls() -> None:
    """What is new makes the next one due; what the program has frozen stays frozen."""
    program = (
        "import gc; gc.freeze(); frozen = gc.get_freeze_count(); import asyncrpc;"
        "assert gc.get_freeze_count() >= frozen - 1000 > 0;"
        "gc.unfreeze(); from asyncrpc.core.on_demand import no_collection\n"
        "with no_collection(): kept = [[] for _ in range(100_000)]\n"
        "young = sum(len(gc.get_objects(generation)) for generation in (0, 1));"
        "assert gc.isenabled() and young < 10_000, young"
    )
    loaded_by(program)


def test_facade_loads_the_core_and_itself(core: set[str]) -> None:
    facade = ours(loaded_by("import asyncrpc.compat.rpc")) - core
    others = {name for name in facade if not name.startswith("asyncrpc.compat")}
    assert others <= {"asyncrpc.core.hosting"}  # its loop, in a thread
    assert len(facade) <= FACADE_MAX


def test_help_loads_no_command(core: set[str]) -> None:
    program = (
        "from asyncrpc.tools.cli.main import make_parser;"
        "make_parser(is_complete=False).format_help()"
    )
    assert ours(loaded_by(program)) - core == {
        "asyncrpc.tools.cli",
        "asyncrpc.tools.cli.main",
    }


def test_every_public_name_is_usable_and_listed() -> None:
    program = (
        "import asyncrpc, asyncrpc.inspection;"
        "assert set(asyncrpc.__all__) <= set(dir(asyncrpc));"
        "assert 'why' in dir(asyncrpc.inspection);"
        "[getattr(asyncrpc, name) for name in asyncrpc.__all__];"
        "assert asyncrpc.nn.RemoteModule and asyncrpc.inspection.why;"
        "assert not hasattr(asyncrpc, 'unheard_of')"
    )
    assert "asyncrpc.ddp" in loaded_by(program)
