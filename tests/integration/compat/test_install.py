"""Programs for torch's RPC, as they are, on asyncrpc: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[3]
LIMIT_S = 240.0  # only a failure reaches it

# Nothing here knows of asyncrpc.  Without arguments it is one of torchrun's processes.
PARAMETER_SERVER = """
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.rpc import RRef, rpc_sync


class Server(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x)

    def parameter_rrefs(self):
        return [RRef(one) for one in self.parameters()]


def forward(server, x):
    return server.local_value()(x)


def train():
    from torch.distributed.optim import DistributedOptimizer  # takes a second

    server = rpc.remote("ps", Server)
    parameters = server.rpc_sync().parameter_rrefs()
    optimizer = DistributedOptimizer(optim.SGD, parameters, lr=0.01)
    x, y = torch.ones(8, 4), torch.full((8, 1), 3.0)
    losses = []
    for _ in range(3):
        with dist_autograd.context() as context_id:
            out = rpc_sync("ps", forward, args=(server, x))
            loss = nn.functional.mse_loss(out, y)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0], losses


def run(rank, options=None):
    names = ("ps", "trainer")
    rpc.init_rpc(names[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        train()
        print("trained with", RRef.__module__)
    rpc.shutdown()


def run_spawned(rank, path):
    run(rank, rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        mp.spawn(run_spawned, args=sys.argv[1:], nprocs=2)
    else:
        import os
        run(int(os.environ["RANK"]))
"""
TRAINED = "trained with asyncrpc.compat.rpc.rref"

WAYS_TO_IMPORT = """
import sys
import asyncrpc.compat
import torch
import torch.distributed._shard.sharded_tensor.api

torchs = sys.modules["torch.distributed.rpc"].RRef
asyncrpc.compat.install()
asyncrpc.compat.install()

import asyncrpc.compat.autograd, asyncrpc.compat.nn, asyncrpc.compat.optim
import asyncrpc.compat.rpc as facade

assert torch.distributed.rpc.init_rpc is facade.init_rpc
import torch.distributed.rpc as rpc
import torch.distributed.rpc.api
from torch.distributed.rpc import RRef, api, backend_registry
from torch.distributed.rpc.api import _wait_all
from torch.distributed.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC
import torch.distributed.autograd as dist_autograd
from torch.distributed.autograd import context
from torch.distributed.optim import DistributedOptimizer
import torch.distributed.optim.optimizer
from torch.distributed.nn import RemoteModule
from torch.distributed.nn.api import remote_module
from torch.nn.parallel import distributed
from torch._C._distributed_rpc import PyRRef, _is_current_rpc_agent_set
from torch._C import _distributed_autograd
import torch.distributed.rpc.rref_proxy

for theirs, ours in (
    (RRef, facade.RRef),
    (distributed.RRef, facade.RRef),
    (PyRRef, facade.RRef),
    (torch._C._distributed_rpc.PyRRef, facade.RRef),
    (torch._jit_internal.PyRRef, facade.RRef),
    (torch.distributed._shard.sharded_tensor.api.rpc, rpc),
    (_is_current_rpc_agent_set, facade._is_current_rpc_agent_set),
    (_distributed_autograd._new_context, asyncrpc.compat.autograd._new_context),
    (rpc.rref_proxy.RRefProxy, facade.rref_proxy.RRefProxy),
    (rpc._utils._update_group_membership, facade.store_lock._update_group_membership),
    (rpc.api.rpc_sync, facade.rpc_sync),
    (_wait_all, facade._wait_all),
    (dist_autograd.context, asyncrpc.compat.autograd.context),
    (context, asyncrpc.compat.autograd.context),
    (DistributedOptimizer, asyncrpc.compat.optim.DistributedOptimizer),
    (torch.distributed.optim.optimizer.DistributedOptimizer, DistributedOptimizer),
    (RemoteModule, asyncrpc.compat.nn.RemoteModule),
    (remote_module._RemoteModule, asyncrpc.compat.nn._RemoteModule),
):
    assert theirs is ours, (theirs, ours)
star = {}
exec("from torch.distributed.rpc import *", star)
assert star["rpc_async"] is facade.rpc_async and "functions" not in star

# What is assigned reaches the facade, and the facade stays what it was.
api._ignore_rref_leak = False
assert facade.api._ignore_rref_leak is False
assert facade.api.__name__ == "asyncrpc.compat.rpc.api" and api is not facade.api

options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
assert not _is_current_rpc_agent_set()
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
assert _is_current_rpc_agent_set()
assert isinstance(rpc.RRef(1), torch._C._distributed_rpc.PyRRef)
assert rpc.rpc_sync("alone", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
try:
    asyncrpc.compat.uninstall()
except RuntimeError as error:
    print("refused:", error)
rpc.shutdown()

asyncrpc.compat.uninstall()
asyncrpc.compat.uninstall()
import torch.distributed.rpc as again
assert again.RRef is again.api.RRef is distributed.RRef is torchs
assert torch.distributed.rpc is again and facade.api is not again.api
assert torch.distributed._shard.sharded_tensor.api.rpc is again
assert torch._C._distributed_rpc is sys.modules["torch._C._distributed_rpc"]
assert torch._jit_internal.PyRRef is torch._C._distributed_rpc.PyRRef is not PyRRef
from torch.distributed.optim import DistributedOptimizer as own
assert own.__module__ == "torch.distributed.optim.optimizer", own.__module__
from torch.distributed.nn import RemoteModule
assert RemoteModule.__module__ == "torch.distributed.nn.api.remote_module"
"""

MISSING = """
import asyncrpc.compat
asyncrpc.compat.install()
import torch, torch.distributed.rpc as rpc
assert not hasattr(rpc, "nothing")
for code in (
    "rpc.nothing",
    "from torch.distributed.rpc import nothing",
    "from torch.distributed.rpc.api import nothing",
    "import torch.distributed.rpc.nothing",
    "from torch.distributed.autograd import nothing",
    "from torch._C._distributed_rpc import nothing",
    "torch._C._distributed_rpc.nothing",
):
    try:
        exec(code)
    except (AttributeError, ImportError) as error:
        assert "asyncrpc.compat" in str(error) and "'nothing'" in str(error), error
        assert "do without it" in str(error)
    else:
        raise AssertionError(code)
"""

TOO_LATE = """
import sys, warnings
import asyncrpc.compat
import torch.distributed.rpc as rpc
from torch.distributed.rpc import WorkerInfo, rpc_sync
from torch._C._distributed_rpc import PyRRef, get_rpc_timeout
if len(sys.argv) > 1:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        asyncrpc.compat.install()
    except RuntimeError as error:
        print(error)
    import torch.distributed.rpc
    assert torch.distributed.rpc is rpc
    rpc.shutdown()
else:
    with warnings.catch_warnings(record=True) as caught:
        asyncrpc.compat.install()
    assert caught[0].filename == __file__
    print(*(one.message for one in caught))
"""

# In each way to start a process, the first import of the main module is the facade's.
CHILDREN = """
import multiprocessing, os, sys
from torch.distributed.rpc import RRef

class Found:
    def __init__(self):
        self.module = RRef.__module__

def look(queue):
    queue.put(Found())

if __name__ == "__main__":
    print("arguments", *sys.argv[1:])
    print("path", sys.path[0])
    os.chdir("/")
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=look, args=(queue,))
        process.start()
        print(method, queue.get().module)
        process.join()
"""

LOOK = """
import sys
from torch.distributed.rpc import RRef
print(RRef.__module__, sys.argv)
"""


def run(
    *arguments: str, cwd: Path | None = None, python_path: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(python_path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def output_of(*arguments: str, **options: Path) -> list[str]:
    ended = run(*arguments, **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


@pytest.fixture
def meeting(tmp_path: Path) -> str:
    return str(tmp_path / "meeting")


@pytest.mark.slow  # three processes, each of which imports torch
def test_a_program_that_spawns_its_processes_runs_unchanged(
    script: Path, meeting: str
) -> None:
    script.write_text(PARAMETER_SERVER, encoding="utf-8")
    assert output_of("-m", "asyncrpc.compat", str(script), meeting) == [TRAINED]


@pytest.mark.slow  # likewise
def test_torchrun_starts_each_process_with_the_facade(script: Path) -> None:
    script.write_text(PARAMETER_SERVER, encoding="utf-8")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert output_of(*torchrun, "-m", "asyncrpc.compat", str(script)) == [TRAINED]


def test_imports_find_the_facade_until_uninstall(script: Path, meeting: str) -> None:
    script.write_text(WAYS_TO_IMPORT, encoding="utf-8")
    (refused,) = output_of(str(script), meeting)
    assert refused.startswith("refused: RPC is running: call torch.distributed.rpc.")


def test_missing_name_is_refused_with_the_reason(script: Path) -> None:
    script.write_text(MISSING, encoding="utf-8")
    assert output_of(str(script)) == []


def test_install_is_refused_while_torchs_agent_runs(script: Path, meeting: str) -> None:
    script.write_text(TOO_LATE, encoding="utf-8")
    (line,) = output_of(str(script), meeting)
    assert line.startswith("torch's own RPC is running in this process: call")


def test_install_names_modules_imported_too_early(script: Path) -> None:
    """Records that are the same for both are not among it."""
    script.write_text(TOO_LATE, encoding="utf-8")
    (problem,) = output_of(str(script))
    early = ("PyRRef", "get_rpc_timeout", "rpc", "rpc_sync")
    names = ", ".join(f"__main__.{name}" for name in early)
    assert f"still torch's own: {names}; call" in problem


@pytest.mark.slow  # likewise
def test_children_have_the_facade_before_their_first_import(script: Path) -> None:
    """Also where asyncrpc is not on their path: without `site`, from another place.

    What they send is of a class that is defined in the main module.
    """
    script.write_text(CHILDREN, encoding="utf-8")
    shown = output_of(
        *("-S", "-m", "asyncrpc.compat", str(script), "-m", "--", "-x"),
        cwd=REPOSITORY,
        python_path=Path(torch.__file__).parents[1],
    )
    assert shown == [
        "arguments -m -- -x",
        f"path {script.parent.resolve()}",
        "spawn asyncrpc.compat.rpc.rref",
        "forkserver asyncrpc.compat.rpc.rref",
    ]


@pytest.mark.parametrize("kind", ["module", "package", "directory"])
def test_modules_and_directories_run_as_by_python(kind: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.mkdir()
    for name in ("inner.py", "__main__.py"):
        (program / name).write_text(LOOK, encoding="utf-8")
    target, file = {
        "module": (["-m", "program.inner"], str(program / "inner.py")),
        "package": (["-m", "program"], str(program / "__main__.py")),
        "directory": (["program"], "program"),
    }[kind]
    assert output_of("-m", "asyncrpc.compat", *target, "x", cwd=tmp_path) == [
        f"asyncrpc.compat.rpc.rref {[file, 'x']}"
    ]


@pytest.mark.parametrize("target", [("none.py",), ("-m", "none"), ()])
def test_missing_target_is_a_command_line_error(
    target: tuple[str, ...], tmp_path: Path
) -> None:
    ended = run("-m", "asyncrpc.compat", *target, cwd=tmp_path)
    assert ended.returncode == 2
    is_file = len(target) == 1
    wanted = "the file 'none.py' does not exist" if is_file else "module 'none"
    problem = textwrap.shorten(ended.stderr, 1000)
    assert (wanted if target else "arguments are required: SCRIPT") in problem
