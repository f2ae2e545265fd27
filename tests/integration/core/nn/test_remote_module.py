"""A remote module behaves as the module would here, and refuses what would be a lie."""

from __future__ import annotations

import gc
import inspect
import pickle
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import RRef, UsageError, Worker
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.core.nn import owner
from asyncrpc.errors import UnknownWorkerError
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as


@asynccontextmanager
async def three_workers() -> AsyncIterator[tuple[Worker, Worker, Worker]]:
    async with Cluster(3) as (a, b, c):
        with acting_as(a):
            yield a, b, c


class Doubling(nn.Module):
    """Knows where it runs and in which mode; takes and returns containers."""

    def __init__(self, factor: float = 2.0, *, offset: float = 0.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.inner = nn.Linear(1, 1)
        self.offset = nn.Buffer(torch.tensor(offset))

    def forward(self, x: torch.Tensor, *, more: float = 0.0) -> dict[str, Any]:
        where = asyncrpc.current_worker().name
        out = x * self.factor + self.offset + more
        return {"out": out, "where": where, "is_training": self.training}


def no_module() -> str:
    return "nothing"


def failing() -> nn.Module:
    raise ArithmeticError("no such layer")


async def forward_of(module: RemoteModule, x: torch.Tensor) -> Any:
    """Use a module that came in a call."""
    return await module.forward_async(x)


def forward_blocking(module: RemoteModule, x: torch.Tensor) -> Any:
    return module(x), module.forward(x, more=1.0)


async def make_elsewhere(to: str) -> list[RemoteModule]:
    """Return a module, inside a container."""
    return [RemoteModule(to, Doubling, (3.0,))]


async def is_same_object(module: RemoteModule, rref: RRef[nn.Module]) -> bool:
    return await module.module_rref.to_here() is await rref.to_here()


@pytest.mark.parametrize("where", ["b", "b/cpu", "1", "1/cpu", "rank:1/cpu"])
async def test_module_runs_on_its_worker(where: str) -> None:
    async with three_workers():
        module = RemoteModule(where, Doubling, args=(3.0,), kwargs={"offset": 1.0})
        result = await module.forward_async(torch.ones(2), more=0.5)
        assert (result["out"].tolist(), result["where"]) == ([4.5, 4.5], "b")
        assert repr(module) == "<RemoteModule on 'b/cpu'>"


async def test_module_on_the_local_worker_works() -> None:
    async with three_workers():
        module = await RemoteModule("a", Doubling)
        assert (await module.forward_async(torch.ones(1)))["where"] == "a"
        assert len(await module.remote_parameters()) == 3


async def test_module_trains_as_a_local_one() -> None:
    async with three_workers():
        torch.manual_seed(0)
        module = RemoteModule("b", nn.Linear, (3, 2))
        local = nn.Linear(3, 2)
        await module.load_state_dict(local.state_dict())
        remote = DistributedOptimizer(
            torch.optim.SGD, await module.remote_parameters(), lr=0.1
        )
        same = torch.optim.SGD(local.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(4, 3, requires_grad=True)
            same.zero_grad()
            local(x).square().sum().backward()
            same.step()
            wanted, x.grad = x.grad, None
            async with context() as ctx:
                await backward(ctx, [(await module.forward_async(x)).square().sum()])
                assert wanted is not None
                assert torch.equal(get_gradients(ctx)[x], wanted)
                await remote.step(ctx)
        for name, value in (await module.state_dict()).items():
            assert torch.equal(value, local.state_dict()[name])


async def test_parameters_come_in_the_order_of_torch() -> None:
    async with three_workers():
        module = RemoteModule("b", Doubling, (5.0,))
        parameters = await module.remote_parameters()
        assert [parameter.owner_name() for parameter in parameters] == ["b"] * 3
        assert (await parameters[0].to_here()).item() == 5.0
        assert len(await module.remote_parameters(recurse=False)) == 1
        del parameters


async def test_blocking_call_works_in_threads_only() -> None:
    async with three_workers() as (a, _, _):
        module = RemoteModule("b", Doubling)
        first, second = await a.peer("c").call(forward_blocking, module, torch.ones(1))
        assert (first["out"].item(), second["out"].item()) == (2.0, 3.0)
        for blocking in (module, module.forward):
            with pytest.raises(UsageError, match=r"await m\.forward_async"):
                blocking(torch.ones(1))


async def test_holders_share_one_module() -> None:
    async with three_workers() as (a, _, _):
        module = RemoteModule("b", Doubling)
        result = await a.peer("c").call(forward_of, module, torch.ones(1))
        assert (result["out"].item(), result["where"]) == (2.0, "b")
        at_owner = await a.peer("b").call(forward_of, module, torch.ones(1))
        assert at_owner["where"] == "b"
        assert await a.peer("b").call(is_same_object, module, module.module_rref)
        (returned,) = await a.peer("c").call(make_elsewhere, "b")
        assert (await returned.forward_async(torch.ones(1)))["out"].item() == 3.0


async def test_module_may_be_passed_on_before_its_owner_knows() -> None:
    """`b` learns of it from `c`, as `a` is still connecting, and asks `a` to wait."""
    async with three_workers() as (a, b, c):
        await a.peer("c").call(max, 1, 2)
        await c.peer("b").call(max, 1, 2)
        assert a.parts.directory.link_of(b.incarnation) is None
        module = RemoteModule("b", Doubling)
        result = await a.peer("c").call(forward_of, module, torch.ones(1))
        assert result["where"] == "b"
        assert (await module.forward_async(torch.ones(1)))["where"] == "b"


async def test_a_reference_to_a_module_is_enough() -> None:
    async with three_workers() as (a, _, _):
        rref = a.peer("b").remote(Doubling, 4.0)
        module = RemoteModule.init_from_module_rref("b/cpu", rref)
        assert (await module.forward_async(torch.ones(1)))["out"].item() == 4.0
        assert module.get_module_rref() is module.module_rref is rref
        with pytest.raises(UsageError, match="on worker 'c', but module_rref is on "):
            RemoteModule.init_from_module_rref("c/cpu", rref)
        del rref


async def test_training_mode_is_set_on_the_owner() -> None:
    async with three_workers():
        module = RemoteModule("b", Doubling)

        async def is_training() -> bool:
            return bool((await module.forward_async(torch.ones(1)))["is_training"])

        assert await is_training()
        assert await module.eval() is module
        assert not await is_training()
        assert await module.train() is module
        assert await is_training()
        await module.train(mode=False)
        assert not await is_training()


async def test_state_is_a_copy_and_can_be_loaded_back() -> None:
    async with three_workers():
        module = RemoteModule("a", Doubling, (5.0,), {"offset": 1.0})
        state = await module.state_dict()
        assert list(state) == ["factor", "offset", "inner.weight", "inner.bias"]
        assert not any(value.requires_grad for value in state.values())
        state["factor"].fill_(7.0)
        assert (await module.state_dict())["factor"].item() == 5.0
        (await owner.state(module.module_rref))["factor"].fill_(7.0)
        assert (await module.state_dict())["factor"].item() == 5.0
        assert await module.load_state_dict(state) == ([], [])
        assert (await module.state_dict())["factor"].item() == 7.0


async def test_a_state_that_does_not_fit_is_refused_or_reported() -> None:
    async with three_workers():
        module = RemoteModule("b", nn.Linear, (2, 1))
        odd = {"weight": torch.zeros(1, 2), "other": torch.zeros(1)}
        with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
            await module.load_state_dict(odd)
        assert await module.load_state_dict(odd, strict=False) == (["bias"], ["other"])
        assert (await module.forward_async(torch.ones(1, 2))).shape == (1, 1)


# --- what goes wrong -----------------------------------------------------------------


async def test_invalid_remote_device_is_refused_at_once() -> None:
    async with three_workers():
        with pytest.raises(UsageError, match=r"remote_device must be .* not 'b/cpu/0'"):
            RemoteModule("b/cpu/0", Doubling)
        with pytest.raises(UnknownWorkerError, match="known: 'a', 'b', 'c'"):
            RemoteModule("nobody/cpu", Doubling)
        with pytest.raises(UnknownWorkerError, match="7"):
            RemoteModule("7/cpu", Doubling)


@pytest.mark.parametrize("device", ["abacus:0", "xpu:99"])
async def test_missing_device_is_an_error_of_the_owner(device: str) -> None:
    async with three_workers():
        module = RemoteModule(f"b/{device}", Doubling)
        with pytest.raises(UsageError, match=rf"worker 'b' has no device {device}"):
            await module
        with pytest.raises(UsageError, match=device):
            await module.forward_async(torch.ones(1))


async def test_failed_construction_is_explained_to_all_holders() -> None:
    async with three_workers():
        module = RemoteModule("b", failing)
        for use in (module, module.remote_parameters(), module.state_dict()):
            with pytest.raises(ArithmeticError, match="no such layer"):
                await use
        with pytest.raises(UsageError, match="no_module made a str"):
            await RemoteModule("b", no_module)  # type: ignore[arg-type]


async def test_values_move_to_the_device_and_back() -> None:
    """The path of modules on a device, taken with the only device there always is."""
    async with three_workers() as (a, _, _):
        remote_module = RemoteModule("b", Doubling)
        module = RemoteModule.init_from_module_rref(
            "b/cpu:0", remote_module.module_rref
        )
        x = torch.ones(1, requires_grad=True)
        async with context() as ctx:
            result = await module.forward_async(x, more=1.0)
            await backward(ctx, [result["out"].sum()])
            assert get_gradients(ctx)[x].item() == 2.0
        assert (result["where"], result["out"].item()) == ("b", 3.0)
        assert a.name == "a"


OFFERED = {"eval", "forward", "load_state_dict", "state_dict", "to", "train"}
METHODS = {
    name
    for name in dir(nn.Module)
    if name[0] != "_" and inspect.isfunction(getattr(nn.Module, name))
}


@pytest.mark.parametrize("name", sorted(METHODS - OFFERED))
async def test_unsupported_method_is_refused_by_name(name: str) -> None:
    """Every method that torch's modules have, so that none is missing in silence."""
    async with three_workers():
        module = RemoteModule("b", Doubling)
        with pytest.raises(UsageError, match=rf"has no {name}\(\).*another worker; "):
            getattr(module, name)()


@pytest.mark.parametrize("name", sorted(OFFERED))
def test_supported_method_is_present(name: str) -> None:
    assert inspect.isfunction(getattr(RemoteModule, name))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
async def test_cast_applies_to_all_holders(dtype: torch.dtype) -> None:
    async with three_workers() as (a, _, _):
        module = RemoteModule("b", Doubling)
        (first, *_) = await module.remote_parameters()
        assert await module.to(dtype) is module
        state = await module.state_dict()
        assert {value.dtype for value in state.values()} == {dtype}
        assert (await first.to_here()).dtype == dtype  # of before, and still the same
        result = await a.peer("c").call(forward_of, module, torch.ones(1, dtype=dtype))
        assert result["out"].dtype == dtype
        for place in ("cuda:0", torch.device("cpu")):
            with pytest.raises(UsageError, match=r"stays on its device; make a new "):
                await module.to(place)  # type: ignore[arg-type]
        del first


async def test_parameters_come_with_their_names() -> None:
    async with three_workers():
        module = RemoteModule("b", Doubling, (5.0,))
        parameters = await module.named_remote_parameters()
        names = [name for name, _ in parameters]
        assert names == ["factor", "inner.weight", "inner.bias"]
        assert (await parameters[0][1].to_here()).item() == 5.0
        assert len(await module.named_remote_parameters(recurse=False)) == 1
        biases = [parameter for name, parameter in parameters if name.endswith("bias")]
        others = [
            parameter for name, parameter in parameters if not name.endswith("bias")
        ]
        groups: list[dict[str, Any]] = [
            {"params": biases, "weight_decay": 0.0},
            {"params": others},
        ]
        optimizer = await DistributedOptimizer("AdamW", groups, weight_decay=0.5)
        decays = [
            param_group["weight_decay"]
            for param_group in optimizer.options.param_groups
        ]
        assert decays == [0.0, 0.5]
        del parameters, biases, others, groups


class Remembering(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ["one"]

    def get_extra_state(self) -> dict[str, list[str]]:
        return {"words": self.words}

    def set_extra_state(self, state: dict[str, list[str]]) -> None:
        self.words = state["words"]


async def test_state_without_tensors_travels() -> None:
    async with three_workers():
        module = RemoteModule("a", Remembering)
        state: dict[str, Any] = await module.state_dict()
        state["_extra_state"]["words"].append("two")  # a copy, also at home
        assert (await module.state_dict())["_extra_state"] == {"words": ["one"]}
        await module.load_state_dict(state)
        assert (await module.state_dict())["_extra_state"] == {"words": ["one", "two"]}


@pytest.fixture(scope="session")
def gpu() -> str:
    """A GPU that this process has opened, and keeps for as long as it lives."""
    torch.ones(1, device="cuda:0")
    return "cuda:0"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
async def test_a_module_on_a_gpu_takes_and_gives_tensors_of_the_host(gpu: str) -> None:
    async with three_workers():
        module = await RemoteModule(f"b/{gpu}", Doubling, (3.0,))
        x = torch.ones(2, requires_grad=True)
        async with context() as ctx:
            result = await module.forward_async(x, more=1.0)
            assert result["out"].device.type == "cpu"
            await backward(ctx, [result["out"].sum()])
            assert get_gradients(ctx)[x].tolist() == [3.0, 3.0]
        state = await module.state_dict()
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}


async def test_pickle_outside_a_call_is_refused() -> None:
    async with three_workers():
        with pytest.raises(UsageError, match="as an argument"):
            pickle.dumps(RemoteModule("b", Doubling))


held: list[weakref.ref[nn.Module]] = []


async def look_at(module: RemoteModule) -> None:
    held[:] = [weakref.ref(await module.module_rref.to_here())]


async def test_module_is_freed_with_its_last_handle() -> None:
    async with three_workers() as (a, _, _):
        module = RemoteModule("b", Doubling)
        await a.peer("b").call(look_at, module)
        rref = module.module_rref
        del module
        await a.peer("b").call(max, 1, 2)
        assert held[0]() is not None  # the reference holds it too
        del rref
        for _ in range(3):  # a note to the loop, then one to the owner
            await a.peer("b").call(max, 1, 2)
        gc.collect()
        assert held[0]() is None
