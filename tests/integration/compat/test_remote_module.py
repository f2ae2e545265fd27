"""A RemoteModule of the facade, in processes of their own: what it does, and refuses.

Each test is a scenario that worker0 plays; the others serve it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc.compat import autograd, rpc
from asyncrpc.compat import nn as facade
from asyncrpc.compat.nn import RemoteModule
from asyncrpc.compat.nn.api.remote_module import (
    _REMOTE_MODULE_PICKLED_ATTRIBUTES,
    _remote_forward,
    _RemoteModule,
)
from asyncrpc.compat.optim import DistributedOptimizer
from asyncrpc.errors import ProcessFailedError
from tests.integration.compat.playing import play

WAIT_S = 30.0  # far more than it may take
CANNOT_PICKLE = "Cannot pickle RemoteModule in python pickler"
REFUSED = [
    "add_module",
    "apply",
    "bfloat16",
    "buffers",
    "children",
    "cpu",
    "cuda",
    "double",
    "extra_repr",
    "float",
    "half",
    "ipu",
    "load_state_dict",
    "modules",
    "named_buffers",
    "named_children",
    "named_modules",
    "named_parameters",
    "parameters",
    "register_backward_hook",
    "register_buffer",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_parameter",
    "requires_grad_",
    "share_memory",
    "state_dict",
    "to",
    "type",
    "xpu",
    "zero_grad",
]


# --- what is made and called on other workers ----------------------------------------


class Scaling(nn.Module):
    """Says where it runs; takes and returns containers."""

    def __init__(self, factor: float = 2.0, *, width: int = 3) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((width,), factor))
        self.inner = nn.Linear(1, 1)
        freed = threading.Event()
        self.freed = freed
        weakref.finalize(self, freed.set)

    def forward(self, x: torch.Tensor, *, more: float = 0.0) -> dict[str, Any]:
        return {"out": x * self.factor + more, "where": rpc.get_worker_info().name}


class Derived(RemoteModule):
    """A class of a program's own."""


class Hybrid(nn.Module):
    """Has a part elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Linear(2, 3)
        self.remote = RemoteModule("worker1", nn.Linear, (3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.remote(self.local(x))
        return out


class NoModule:
    pass


def failing() -> nn.Module:
    raise ArithmeticError("no such layer")


def gradient_of(context_id: int, parameter: rpc.RRef[Any]) -> torch.Tensor:
    return autograd.get_gradients(context_id)[parameter.local_value()]


def is_training(module_rref: rpc.RRef[nn.Module]) -> bool:
    return module_rref.local_value().training


def device_of(module_rref: rpc.RRef[nn.Module]) -> str:
    return str(next(module_rref.local_value().parameters()).device)


def forward_of(module: RemoteModule, x: torch.Tensor) -> Any:
    """Use a module that came in a call, in each of its ways."""
    ways = module.forward(x), module.forward_async(x).wait(), module(x)
    assert all(torch.equal(way["out"], ways[0]["out"]) for way in ways)
    return ways[0]


def forward_of_all(
    modules: dict[str, list[RemoteModule]], x: torch.Tensor
) -> list[Any]:
    return [module.forward(x)["where"] for row in modules.values() for module in row]


def attributes_of(module: RemoteModule) -> dict[str, Any]:
    return vars(module)


def kind_of(module: RemoteModule) -> str:
    return type(module).__name__


def made_here(remote_device: str) -> RemoteModule:
    return RemoteModule(remote_device, Scaling)


_freed: list[threading.Event] = []


def watch(module_rref: rpc.RRef[Any]) -> None:
    _freed.append(module_rref.local_value().freed)


def wait_until_freed() -> bool:
    gc.disable()  # a circle would be collected some time
    return _freed.pop().wait(WAIT_S)


# --- running it ----------------------------------------------------------------------


def run_forward() -> None:
    module = RemoteModule("worker1/cpu", Scaling, (3.0,), {"width": 2})
    assert isinstance(module, nn.Module)
    result = module.forward(torch.ones(2), more=1.0)
    assert (result["out"].tolist(), result["where"]) == ([4.0, 4.0], "worker1")
    future = module.forward_async(torch.ones(2))
    assert future.then(lambda done: done.value()["where"]).wait() == "worker1"
    assert module(torch.zeros(2))["out"].tolist() == [0.0, 0.0]
    by_rank = RemoteModule("rank:0", Scaling)
    assert by_rank.forward(torch.ones(3))["where"] == "worker0"
    assert [module.on, by_rank.on, module.device] == ["worker1", 0, "cpu"]
    assert repr(module) == "RemoteModule(worker1/cpu)"
    with pytest.raises(RuntimeError, match="must match the size"):
        module.forward(torch.ones(7))
    with pytest.raises(TypeError, match="less"):
        module.forward_async(torch.ones(2), less=1.0).wait()


def test_forward_runs_on_the_worker_of_the_module() -> None:
    play(run_forward)


def train_once() -> None:
    torch.manual_seed(0)
    hybrid, x = Hybrid(), torch.randn(4, 2)
    module_rref = hybrid.remote.get_module_rref()
    assert module_rref is hybrid.remote.module_rref
    weight, bias = hybrid.remote.remote_parameters()
    assert isinstance(weight, rpc.RRef)
    assert weight.owner().name == "worker1"
    before = weight.to_here().detach().clone(), bias.to_here().detach().clone()
    hidden = hybrid.local(x)
    loss: Any = nn.functional.linear(hidden, *before).sum()  # the same, all here
    loss.backward()
    with autograd.context() as context_id:
        autograd.backward(context_id, [hybrid(x).sum()])
        gradient = autograd.get_gradients(context_id)[hybrid.local.weight]
        torch.testing.assert_close(gradient, hybrid.local.weight.grad)
        there = rpc.rpc_sync("worker1", gradient_of, (context_id, weight))
        torch.testing.assert_close(there, hidden.detach().sum(0, keepdim=True))
        DistributedOptimizer(torch.optim.SGD, [weight, bias], lr=0.5).step(context_id)
    torch.testing.assert_close(weight.to_here(), before[0] - 0.5 * there)
    torch.testing.assert_close(bias.to_here(), before[1] - 0.5 * 4)


def test_remote_module_trains_inside_a_module() -> None:
    play(train_once)


def list_parameters() -> None:
    module = RemoteModule("worker1", Scaling)
    assert len(module.remote_parameters()) == 3
    (own,) = module.remote_parameters(recurse=False)
    assert own.to_here().tolist() == [2.0, 2.0, 2.0]


def test_parameters_of_modules_inside_may_be_left_out() -> None:
    play(list_parameters)


def set_modes() -> None:
    hybrid = Hybrid()
    module, module_rref = hybrid.remote, hybrid.remote.module_rref
    for set_mode, mode in (
        (module.eval, False),
        (module.train, True),
        (lambda: module.train(mode=False), False),
        (module.train, True),
        (hybrid.eval, False),
    ):
        assert set_mode() in {module, hybrid}
        assert rpc.rpc_sync("worker1", is_training, (module_rref,)) is mode


def test_a_mode_reaches_the_module() -> None:
    """Also that of a module around it; torch's does not hear `train(False)`."""
    play(set_modes)


# --- what goes wrong -----------------------------------------------------------------


def make_in_vain() -> None:
    expected = (
        r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of <class "
        r"nn.Module>, but it returns an instance of <class .*NoModule'>"
    )
    kind: Any = NoModule
    for use in (lambda m: m.forward(), RemoteModule.remote_parameters):
        with pytest.raises(ValueError, match=expected):
            use(RemoteModule("worker1", kind))
    with pytest.raises(RuntimeError, match="no such layer"):
        RemoteModule("worker1", failing).forward_async().wait()
    with pytest.raises(ValueError, match="must be a type object decorated by"):
        _RemoteModule("worker1", nn.Linear, (1, 1), _module_interface_cls=object)
    known = RemoteModule("worker1", nn.Linear, (1, 1)).module_rref
    with pytest.raises(ValueError, match="must be a type object decorated by"):
        RemoteModule.init_from_module_rref("worker1", known, object)


def test_failed_construction_is_raised_at_first_use() -> None:
    play(make_in_vain)


def place_wrongly() -> None:
    for remote_device, kind, text in (
        ("worker1/cpu/cpu", ValueError, "Could not parse remote_device: worker1/cpu/"),
        ("/cpu", ValueError, "Could not parse remote_device: /cpu"),
        ("rank:one/cpu", ValueError, "Could not parse remote_device: rank:one/cpu"),
        ("cpu", ValueError, "names no worker"),
        ("worker1/foo", RuntimeError, "device type at start of device string: foo"),
        ("worker1/", RuntimeError, "Device string must not be empty"),
        ("worker7/cpu", RuntimeError, "could not find destination name worker7"),
    ):
        with pytest.raises(kind, match=text):
            RemoteModule(remote_device, nn.Linear, (1, 1))


def test_invalid_device_string_is_refused_at_once() -> None:
    play(place_wrongly)


def test_remote_module_needs_rpc() -> None:
    with pytest.raises(AssertionError, match="RemoteModule only works in RPC"):
        RemoteModule("worker1/cpu", nn.Linear, (1, 1))


def use_refused() -> None:
    module = RemoteModule("worker1", nn.Linear, (1, 1))
    for name in REFUSED:
        with pytest.raises(
            ValueError, match=f"Method ``{name}`` not supported for Rem"
        ):
            getattr(module, name)()
    with pytest.raises(ValueError, match="Please use ``remote_parameters`` instead"):
        next(module.parameters())


def test_methods_that_need_the_module_here_are_refused_by_name() -> None:
    play(use_refused)


# --- travel --------------------------------------------------------------------------


def pass_on() -> None:
    module, x = RemoteModule("worker1", Scaling, (5.0,)), torch.ones(3)
    result = rpc.rpc_sync("worker2", forward_of, (module, x))
    assert (result["out"].tolist(), result["where"]) == ([5.0] * 3, "worker1")
    assert rpc.rpc_sync("worker1", forward_of, (module, x))["where"] == "worker1"
    held = {"first": [module], "more": [module, RemoteModule("worker2", Scaling)]}
    places = rpc.rpc_sync("worker2", forward_of_all, (held, x))
    assert places == ["worker1", "worker1", "worker2"]
    returned = rpc.rpc_sync("worker2", made_here, ("worker1",))
    assert forward_of(returned, x)["where"] == "worker1"
    derived = Derived("worker1", Scaling)
    assert rpc.rpc_sync("worker2", kind_of, (derived,)) == "Derived"


def test_remote_module_travels_in_calls_and_results() -> None:
    play(pass_on, nprocs=3)


def look_at_what_travels() -> None:
    module, said = RemoteModule("worker1/cpu", Scaling), io.StringIO()
    module.eval()
    names = [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    with contextlib.redirect_stderr(said):
        attributes = rpc.rpc_sync("worker1", attributes_of, (module,))
        assert said.getvalue() == ""
        vars(module)["extra"] = 1
        assert "extra" not in rpc.rpc_sync("worker1", attributes_of, (module,))
    assert "The new attribute ``extra`` of RemoteModule is ignored" in said.getvalue()
    assert list(attributes) == names
    assert (attributes["on"], attributes["device"]) == ("worker1", "cpu")
    assert not attributes["is_scriptable"]
    assert not attributes["is_device_map_set"]


def test_extra_attributes_do_not_travel() -> None:
    play(look_at_what_travels)


def pickle_elsewhere() -> None:
    module = RemoteModule("worker1", Scaling)
    for copies in (
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        lambda original: torch.save(original, io.BytesIO()),
        lambda original: pickle.dumps(nn.Sequential(original)),
    ):
        with pytest.raises(RuntimeError, match=CANNOT_PICKLE):
            copies(module)
    with pytest.raises(RuntimeError, match="Cannot unpickle RemoteModule in python"):
        module.__setstate__({})
    assert forward_of(module, torch.ones(3))["where"] == "worker1"


def test_pickle_outside_a_call_is_refused() -> None:
    play(pickle_elsewhere)


def share() -> None:
    module, x = RemoteModule("worker1", Scaling), torch.ones(3)
    other = RemoteModule.init_from_module_rref("worker1/cpu", module.get_module_rref())
    other.eval()
    assert not rpc.rpc_sync("worker1", is_training, (module.module_rref,))
    assert forward_of(other, x)["where"] == "worker1"
    # As torch's own test has it: what it says is on worker2 is where it is.
    values = "worker2", module.get_module_rref()
    there = rpc.rpc_sync("worker2", RemoteModule.init_from_module_rref, values)
    assert forward_of(there, x)["where"] == "worker1"
    assert len(there.remote_parameters()) == 3


def test_references_share_one_module() -> None:
    play(share, nprocs=3)


def let_go() -> None:
    gc.disable()
    module = RemoteModule("worker1", Scaling)
    module.forward(torch.ones(3))
    rpc.rpc_sync("worker1", watch, (module.module_rref,))
    rpc.rpc_sync("worker1", attributes_of, (module,))
    del module
    assert rpc.rpc_sync("worker1", wait_until_freed)


def test_the_module_is_freed_with_the_last_reference() -> None:
    """At once: no circle of objects waits for the garbage collector."""
    play(let_go)


# --- devices -------------------------------------------------------------------------


class Here:
    """Stands for a reference, on its owner."""

    def __init__(self, module: nn.Module) -> None:
        self.local_value = lambda: module


def test_tensors_are_moved_to_the_modules_device() -> None:
    """Wherever in the arguments; `meta` stands for a device that every host has."""
    place = torch.device("meta")
    here: Any = Here(Scaling().to(place))
    args, kwargs = (torch.ones(3),), {"more": torch.ones(3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc, "get_worker_info", lambda: rpc.WorkerInfo("worker1", 1))
        result = _remote_forward(here, "meta", True, args, kwargs)  # noqa: FBT003
    assert result["out"].device == place


def keep_meta() -> None:
    module = RemoteModule("worker1/meta", Scaling)
    assert rpc.rpc_sync("worker1", device_of, (module.module_rref,)) == "meta"
    with pytest.raises(RuntimeError, match="out of meta tensor"):  # on the way back
        module.forward(torch.ones(3))


def test_the_module_is_on_its_device_and_results_come_back_to_the_host() -> None:
    play(keep_meta)


def use_gpu() -> None:
    module = RemoteModule("worker1/cuda:0", Scaling, (3.0,))
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        result = module.forward(x, more=1.0)["out"]
        assert result.device.type == "cpu"
        autograd.backward(context_id, [result.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [3.0, 3.0, 3.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_module_on_a_gpu_takes_and_gives_tensors_of_the_host() -> None:
    play(use_gpu)


# --- the rest ------------------------------------------------------------------------


def test_failed_scenario_fails_its_test() -> None:
    with pytest.raises(ProcessFailedError, match="no such layer"):
        play(failing_scenario)


def failing_scenario() -> None:
    failing()


def test_functions_without_rpc_are_torchs_own() -> None:
    assert facade.all_reduce is torch.distributed.nn.functional.all_reduce
    assert set(facade.__all__) <= set(vars(facade))
