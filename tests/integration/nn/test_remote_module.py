"""A remote module behaves as the module would here, and refuses what would be a lie."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import RRef, UnknownWorkerError, UsageError, Worker
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.nn import RemoteModule, owner
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
async def test_it_runs_where_it_was_put(where: str) -> None:
    async with three_workers():
        module = RemoteModule(where, Doubling, args=(3.0,), kwargs={"offset": 1.0})
        result = await module.forward_async(torch.ones(2), more=0.5)
        assert result["out"].tolist() == [4.5, 4.5]
        assert result["where"] == "b"
        assert repr(module) == "<RemoteModule on 'b/cpu'>"


async def test_a_module_on_its_own_worker_is_no_exception() -> None:
    async with three_workers():
        module = await RemoteModule("a", Doubling)
        assert (await module.forward_async(torch.ones(1)))["where"] == "a"
        assert len(await module.remote_parameters()) == 3


async def test_it_trains() -> None:
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
                out = await module.forward_async(x)
                await backward(ctx, [out.square().sum()])
                assert wanted is not None
                assert torch.equal(get_gradients(ctx)[x], wanted)
                await remote.step(ctx)
        for name, value in (await module.state_dict()).items():
            assert torch.equal(value, local.state_dict()[name])


async def test_its_parameters_are_those_of_torch_in_order() -> None:
    async with three_workers():
        module = RemoteModule("b", Doubling, (5.0,))
        found = await module.remote_parameters()
        assert [one.owner_name() for one in found] == ["b"] * 3
        assert (await found[0].to_here()).item() == 5.0
        assert len(await module.remote_parameters(recurse=False)) == 1
        del found


async def test_it_may_be_called_from_a_thread_and_not_from_a_loop() -> None:
    async with three_workers() as (a, _, _):
        module = RemoteModule("b", Doubling)
        first, second = await a.peer("c").call(forward_blocking, module, torch.ones(1))
        assert (first["out"].item(), second["out"].item()) == (2.0, 3.0)
        for blocking in (module, module.forward):
            with pytest.raises(UsageError, match=r"await m\.forward_async"):
                blocking(torch.ones(1))


async def test_all_who_hold_it_use_the_same_module() -> None:
    async with three_workers() as (a, _, _):
        module = RemoteModule("b", Doubling)
        result = await a.peer("c").call(forward_of, module, torch.ones(1))
        assert (result["out"].item(), result["where"]) == (2.0, "b")
        at_owner = await a.peer("b").call(forward_of, module, torch.ones(1))
        assert at_owner["where"] == "b"
        assert await a.peer("b").call(is_same_object, module, module.module_rref)
        (returned,) = await a.peer("c").call(make_elsewhere, "b")
        assert (await returned.forward_async(torch.ones(1)))["out"].item() == 3.0


async def test_it_may_be_passed_on_before_its_owner_has_heard_of_it() -> None:
    """`b` learns of it from `c`, as `a` is still connecting, and asks `a` to wait."""
    async with three_workers() as (a, b, c):
        await a.peer("c").call(max, 1, 2)
        await c.peer("b").call(max, 1, 2)
        assert a.directory.link_of(b.incarnation) is None
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
        with pytest.raises(
            UsageError, match=r"on worker 'c', and the module is on 'b'"
        ):
            RemoteModule.init_from_module_rref("c/cpu", rref)
        del rref


async def test_its_mode_is_set_where_it_is() -> None:
    async with three_workers():
        module = RemoteModule("b", Doubling)

        async def is_training() -> bool:
            result = await module.forward_async(torch.ones(1))
            return bool(result["is_training"])

        assert await is_training()
        assert await module.eval() is module
        assert not await is_training()
        assert await module.train() is module
        assert await is_training()
        await module.train(mode=False)
        assert not await is_training()


async def test_its_state_is_a_copy_and_comes_back() -> None:
    async with three_workers():
        module = RemoteModule("a", Doubling, (5.0,), {"offset": 1.0})
        state = await module.state_dict()
        assert list(state) == ["factor", "offset", "inner.weight", "inner.bias"]
        assert not any(value.requires_grad for value in state.values())
        state["factor"].fill_(7.0)
        assert (await module.state_dict())["factor"].item() == 5.0
        at_home = await owner.state(module.module_rref)
        at_home["factor"].fill_(7.0)
        assert (await module.state_dict())["factor"].item() == 5.0
        assert await module.load_state_dict(state) == ([], [])
        assert (await module.state_dict())["factor"].item() == 7.0


async def test_a_state_that_does_not_fit_is_refused_or_reported() -> None:
    async with three_workers():
        module = RemoteModule("b", nn.Linear, (2, 1))
        odd = {"weight": torch.zeros(1, 2), "other": torch.zeros(1)}
        with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
            await module.load_state_dict(odd)
        found = await module.load_state_dict(odd, strict=False)
        assert found == (["bias"], ["other"])
        assert (await module.forward_async(torch.ones(1, 2))).shape == (1, 1)


# --- what goes wrong -----------------------------------------------------------------


async def test_what_is_wrong_with_the_place_is_said_at_once() -> None:
    async with three_workers():
        with pytest.raises(UsageError, match="remote device 'b/cpu/0'"):
            RemoteModule("b/cpu/0", Doubling)
        with pytest.raises(UnknownWorkerError, match="known: 'a', 'b', 'c'"):
            RemoteModule("nobody/cpu", Doubling)
        with pytest.raises(UnknownWorkerError, match="7"):
            RemoteModule("7/cpu", Doubling)


@pytest.mark.parametrize("device", ["abacus:0", "xpu:99"])
async def test_a_device_that_is_not_there_is_an_error_of_the_owner(device: str) -> None:
    async with three_workers():
        module = RemoteModule(f"b/{device}", Doubling)
        with pytest.raises(UsageError, match=rf"worker 'b' cannot .* on '{device}'"):
            await module
        with pytest.raises(UsageError, match=device):
            await module.forward_async(torch.ones(1))


async def test_a_module_that_cannot_be_made_says_why_to_all_who_use_it() -> None:
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
        made = RemoteModule("b", Doubling)
        module = RemoteModule.init_from_module_rref("b/cpu:0", made.module_rref)
        x = torch.ones(1, requires_grad=True)
        async with context() as ctx:
            result = await module.forward_async(x, more=1.0)
            await backward(ctx, [result["out"].sum()])
            assert get_gradients(ctx)[x].item() == 2.0
        assert (result["where"], result["out"].item()) == ("b", 3.0)
        assert a.name == "a"


@pytest.mark.parametrize(
    "name",
    [
        *("parameters", "named_parameters", "buffers", "to", "cuda", "half", "apply"),
        *("zero_grad", "requires_grad_", "register_forward_hook", "add_module"),
    ],
)
async def test_what_would_be_a_lie_is_refused_by_name(name: str) -> None:
    async with three_workers():
        module = RemoteModule("b", Doubling)
        assert hasattr(nn.Module, name)
        with pytest.raises(UsageError, match=rf"has no {name}\(\).*another worker; "):
            getattr(module, name)()


async def test_it_cannot_be_pickled_out_of_a_call() -> None:
    async with three_workers():
        with pytest.raises(UsageError, match="as an argument"):
            pickle.dumps(RemoteModule("b", Doubling))


held: list[weakref.ref[nn.Module]] = []


async def look_at(module: RemoteModule) -> None:
    held[:] = [weakref.ref(await module.module_rref.to_here())]


async def test_it_is_freed_with_its_last_handle() -> None:
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
