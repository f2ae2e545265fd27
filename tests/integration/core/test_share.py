"""`asyncrpc.share`: tensors that travel by reference between workers of one host."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.masked import masked_tensor

import asyncrpc
from asyncrpc import Options, UsageError, Worker, WorkerLostError
from asyncrpc.core.payloads import regions
from asyncrpc.core.payloads.machine import regions as machine
from asyncrpc.core.serde.encoded import key_of
from asyncrpc.core.serde.shared import is_sealed, place_of
from asyncrpc.errors import DecodeError, EncodeError
from asyncrpc.testing import Cluster
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import processes, until
from tests.integration.core.test_shared_memory import FILES, KEPT, drop_kept, keep


def last_kept() -> Any:
    return KEPT[-1]


def add_in_place(value: torch.Tensor, amount: float) -> None:
    value.detach().add_(amount)


def fill_model(model: nn.Module, value: float) -> list[bool]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return [parameter.requires_grad for parameter in model.parameters()]


async def pass_on(name: str, value: torch.Tensor) -> None:
    await asyncrpc.current_worker().peer(name).call(keep, value)


async def rows(value: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    for row in asyncrpc.share(value):
        yield row


def two_of_one(size: int) -> list[torch.Tensor]:
    whole = asyncrpc.share(torch.zeros(size))
    return [whole, whole[size // 2 :]]


@pytest.fixture
async def trio() -> AsyncIterator[Trio]:
    """Three workers of this process, each with its own mappings."""
    async with Cluster(3, network="uds", options=Options(drain_timeout_s=2.0)) as three:
        yield three[0], three[1], three[2]
        KEPT.clear()


def is_shared(value: torch.Tensor) -> bool:
    return bool(value.untyped_storage().is_shared())


# --- sharing -------------------------------------------------------------------------


def test_a_tensor_is_moved_in_place_with_all_its_views() -> None:
    value = torch.arange(10.0)
    view = value[3:]
    assert asyncrpc.share(value) is value
    assert is_shared(value)
    assert torch.equal(value, torch.arange(10.0))
    value[3] = 9
    assert view[0] == 9
    key = key_of(value.untyped_storage())
    asyncrpc.share(view)
    assert key_of(view.untyped_storage()) == key


@pytest.mark.parametrize("kind", [nn.Linear, torch.zeros])
def test_shared_memory_cannot_shrink(kind: Callable[[int, int], Any]) -> None:
    """Otherwise a process could end another one by SIGBUS."""
    value = asyncrpc.share(kind(30, 100))
    tensor = value.weight if isinstance(value, nn.Linear) else value
    descriptor, _ = place_of(tensor.untyped_storage())
    assert is_sealed(descriptor)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, 0)


def test_a_module_keeps_its_parameters_and_shares_all_state() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model(torch.ones(2, 3)).sum().backward()
    before = list(model.parameters())
    assert asyncrpc.share(model) is model
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert all(map(is_shared, [*model.parameters(), *model.buffers()]))
    assert all(
        parameter.grad is not None and is_shared(parameter.grad) for parameter in before
    )


@pytest.mark.parametrize(
    "value",
    [5, [torch.ones(3)], torch.eye(3).to_sparse(), torch.ones(3, device="meta")],
)
def test_unshareable_value_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="value must be"):
        asyncrpc.share(value)


class Wrapper(torch.Tensor):
    """A tensor without memory, which computes with another one."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  how torch's are made
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        wrapper.held = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's type is a stub's
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inner = [arg.held if isinstance(arg, Wrapper) else arg for arg in args]
        result = func(*inner, **(kwargs or {}))
        return Wrapper(result) if isinstance(result, torch.Tensor) else result


def a_fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def a_module_of_a_wrapper() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(Wrapper(torch.ones(4, 4)), requires_grad=False)
    return module


def a_distributed_tensor() -> torch.Tensor:
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    spec = DTensorSpec(
        mesh, (Replicate(),), TensorMeta(torch.Size([3]), (1,), torch.float32)
    )
    return DTensor(  # type: ignore[no-untyped-call]  # torch's
        torch.ones(3), spec, requires_grad=False
    )


WITHOUT_MEMORY: dict[str, Callable[[], torch.Tensor | nn.Module]] = {
    "a wrapper": lambda: Wrapper(torch.ones(3)),
    "a parameter of a module": a_module_of_a_wrapper,
    "a DTensor": a_distributed_tensor,
    "a MaskedTensor": lambda: masked_tensor(torch.ones(2), torch.ones(2).bool()),
    "a FakeTensor": a_fake_tensor,
    "a jagged tensor": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2)]),
    "a functional tensor": lambda: torch._to_functional_tensor(torch.ones(3)),  # noqa: SLF001
    "a parameter of a lazy module": lambda: nn.LazyLinear(3),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|nested tensor)")
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_tensor_without_its_own_memory_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="value must"):
        asyncrpc.share(WITHOUT_MEMORY[kind]())


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_tensor_inside_a_transform_is_refused(transform: Any) -> None:
    def share(value: torch.Tensor) -> torch.Tensor:
        return asyncrpc.share(value).sum()

    with pytest.raises(UsageError, match="value must"):
        transform(share)(torch.ones(3))


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def many(count: int = 300) -> nn.Module:
    """A module of parameters of several sizes and kinds, all different."""
    module = nn.Module()
    for number in range(count):
        weight = torch.full((number % 5, 7), float(number), dtype=torch.float64)
        module.register_parameter(f"w{number}", nn.Parameter(weight))
    return module


def values_of(module: nn.Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in module.parameters()]


def test_a_module_takes_one_descriptor_and_every_view_goes_along() -> None:
    module = many()
    state, wanted = module.state_dict(), values_of(module)
    before = descriptors()
    asyncrpc.share(module)
    assert len(descriptors() - before) == 1
    assert values_of(module) == wanted
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert [tensor.flatten().tolist() for tensor in state.values()] == values_of(module)
    assert all(
        is_shared(parameter) for parameter in module.parameters() if parameter.numel()
    )


def test_the_memory_of_a_module_ends_with_the_last_of_its_tensors() -> None:
    module: Any = asyncrpc.share(many())
    last = module.w299
    file = descriptors()
    del module
    gc.collect()
    assert last[0, 0] == 299
    del last
    gc.collect()
    assert len(file - descriptors()) == 1


def test_a_share_without_a_descriptor_left_moves_nothing() -> None:
    module = many()
    before = [parameter.data_ptr() for parameter in module.parameters()]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="no file descriptor left"):
            asyncrpc.share(module)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [parameter.data_ptr() for parameter in module.parameters()] == before
    assert all(
        key_of(parameter.untyped_storage()) is None for parameter in module.parameters()
    )
    asyncrpc.share(module)
    assert values_of(module) == values_of(many())


def test_used_module_keeps_its_graph_and_storages_when_shared() -> None:
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied = module[1].weight = module[0].weight
    view = module[0].bias.detach()
    loss = module(torch.ones(1, 3)).sum()
    asyncrpc.share(module)
    loss.backward()
    assert tied.grad is not None
    assert module[0].weight is module[1].weight
    view.fill_(5)
    assert module[0].bias.tolist() == [5.0] * 3


def test_inference_tensors_and_bits_are_kept() -> None:
    with torch.inference_mode():
        module = nn.Module()
        module.register_buffer("first", torch.arange(3.0))
        module.register_buffer("wave", torch.tensor([1 + 2j]).conj())
        module.register_buffer("empty", torch.ones(0))
        module.register_buffer("expanded", torch.ones(1).expand(4))
    asyncrpc.share(module)
    state: Any = module
    assert state.first.is_inference()
    assert state.wave.is_conj()
    assert (state.wave.tolist(), state.expanded.tolist()) == ([1 - 2j], [1.0] * 4)


async def test_a_shared_module_takes_one_descriptor_of_its_receiver(a: Worker) -> None:
    module = asyncrpc.share(many(40))
    await a.peer("b").call(len, ())  # connected
    before = descriptors()
    await a.peer("b").call(keep, module)
    await until(lambda: len(descriptors() - before) <= 1)
    await a.peer("b").call(fill_model, KEPT[-1], 3.0)
    assert all(bool((parameter == 3).all()) for parameter in module.parameters())
    assert KEPT[-1].w1.data_ptr() != module.get_parameter("w1").data_ptr()


# --- by reference --------------------------------------------------------------------


async def test_an_update_in_place_is_seen_on_both_sides(a: Worker) -> None:
    value = asyncrpc.share(torch.zeros(100_000))
    await a.peer("b").call(keep, value)
    await a.peer("b").call(add_in_place, value[10:20], 2.0)
    assert value.sum() == 20
    value += 1
    assert KEPT[-1].sum() == 100_020
    assert KEPT[-1].data_ptr() != value.data_ptr()  # it is mapped twice


async def test_call_with_a_shared_tensor_moves_no_payload(a: Worker) -> None:
    value = asyncrpc.share(torch.ones(1 << 20))
    for _ in range(2):
        call = a.parts.start_call("b", remote.total, (value,))
        assert await call == 1 << 20
        assert call.stats.bytes_copied == 0
        assert call.stats.bytes_sent < 100


@pytest.mark.parametrize(
    "view",
    [
        lambda value: value,
        lambda value: value[3:7],
        lambda value: value.view(20, 50).t(),
        lambda value: value[::3],
        lambda value: value.view(torch.int32),
        lambda value: value[:1].expand(7),
        lambda value: value[5],
        lambda value: value[:0],
    ],
)
async def test_views_of_a_shared_tensor_arrive_as_views(a: Worker, view: Any) -> None:
    sent = view(asyncrpc.share(torch.randn(1000)))
    back = await a.peer("b").call(remote.echo, sent)
    assert torch.equal(back, sent)
    assert back.stride() == sent.stride() or sent.numel() <= 1
    assert not sent.numel() or back.data_ptr() == sent.data_ptr()


async def test_conjugate_bit_and_gradient_travel_with_shared_tensor(a: Worker) -> None:
    wave = asyncrpc.share(torch.randn(10, dtype=torch.complex64))
    assert torch.equal(await a.peer("b").call(remote.echo, wave.conj()), wave.conj())
    weight = asyncrpc.share(nn.Parameter(torch.ones(3)))
    back = await a.peer("b").call(remote.echo, weight)
    assert type(back) is nn.Parameter
    assert back.requires_grad
    assert back.data_ptr() == weight.data_ptr()


async def test_shared_tensor_sent_back_is_the_original_memory(a: Worker) -> None:
    value = asyncrpc.share(torch.zeros(5000))
    back = await a.peer("b").call(remote.echo, value)
    assert back.untyped_storage() is value.untyped_storage()
    await a.peer("b").call(keep, value)
    assert (await a.peer("b").call(last_kept)).data_ptr() == value.data_ptr()


async def test_shared_tensor_passed_on_is_the_same_memory(a: Worker, c: Worker) -> None:
    value = asyncrpc.share(torch.zeros(5000))
    await a.peer("b").call(pass_on, "c", value)
    await c.peer("a").call(add_in_place, KEPT[-1], 3.0)  # c and a share nothing yet
    assert value[-1] == 3
    assert KEPT[-1][-1] == 3


@pytest.mark.parametrize("constructor", [lambda module: module, torch.jit.script])
async def test_shared_module_is_trained_elsewhere(a: Worker, constructor: Any) -> None:
    model = asyncrpc.share(
        constructor(nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 5)))
    )
    assert await a.peer("b").call(fill_model, model, 7.0) == [True] * 4
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())
    back = await a.peer("b").call(remote.echo, model)
    for mine, its in zip(model.parameters(), back.parameters(), strict=True):
        assert mine.data_ptr() == its.data_ptr()


async def test_a_result_may_be_shared_and_aliases_stay(a: Worker) -> None:
    whole, half = await a.peer("b").call(two_of_one, 1000)
    half.fill_(1)
    assert whole.sum() == 500


async def test_items_of_a_stream_may_be_shared(a: Worker) -> None:
    items = a.peer("b").stream(rows, torch.arange(12.0).view(4, 3))
    received = [item async for item in items]
    received[0].fill_(9)
    assert torch.equal(torch.stack(received)[1:], torch.arange(12.0).view(4, 3)[1:])
    assert received[3].untyped_storage() is received[0].untyped_storage()


@pytest.mark.parametrize("of", [torch.Tensor.numpy, torch.Tensor.clone])
async def test_array_or_clone_travels_by_value(a: Worker, of: Any) -> None:
    value = asyncrpc.share(torch.zeros(5000))
    back = await a.peer("b").call(remote.echo, of(value))
    back[:] = 1
    assert type(back) is type(of(value))
    assert value.sum() == 0


async def test_codec_leaves_a_shared_tensor_unchanged(a: Worker) -> None:
    value = asyncrpc.share(torch.zeros(50_000))
    await a.peer("b").using(codec="bf16").call(add_in_place, value, 1.001)
    assert value[0] == torch.tensor(1.001)


# --- order ---------------------------------------------------------------------------


async def test_plain_calls_pass_a_call_that_waits_for_shared_memory(
    a: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = asyncio.Event()
    passing = regions.Regions._pass_all  # noqa: SLF001

    async def later(*arguments: Any) -> None:
        await may_go.wait()
        await passing(*arguments)

    monkeypatch.setattr(regions.Regions, "_pass_all", later)
    waits = a.parts.start_call("b", remote.add, (asyncrpc.share(torch.zeros(10)), 1))
    assert await a.peer("b").call(remote.add, 1) == 2  # by a name not yet numbered
    assert not waits.done()
    may_go.set()
    assert (await waits).sum() == 10


async def test_call_cancelled_while_waiting_never_runs(
    a: Worker, b: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = asyncio.Event()

    async def later(*_: Any) -> None:
        await may_go.wait()

    monkeypatch.setattr(regions.Regions, "_pass_all", later)
    call = a.parts.start_call("b", keep, (asyncrpc.share(torch.zeros(10)),))
    await asyncio.sleep(0)
    call.cancel()
    may_go.set()
    assert await a.peer("b").call(remote.add, 1) == 2
    assert not KEPT
    assert not b.parts.active


# --- where it cannot go --------------------------------------------------------------


@pytest.mark.parametrize("network", ["mem", "tcp"])
async def test_sharing_without_common_memory_is_explained(network: Any) -> None:
    async with Cluster(2, network=network) as (a, _):
        value = asyncrpc.share(torch.zeros(5))
        calls: list[tuple[Any, Any]] = [(remote.echo, value), (two_of_one, 10)]
        for function, argument in calls:
            with pytest.raises(EncodeError, match=r"send tensor\.clone\(\)"):
                await a.peer("b").call(function, argument)
        assert (await a.peer("b").call(remote.echo, value.clone())).sum() == 0


@pytest.mark.parametrize(
    ("limit", "refusal"),
    [
        ("REGIONS_MAX", "at most 1 shared storages"),
        ("PEER_REGIONS_MAX", "one peer can share at most 1 storages"),
    ],
)
async def test_refusal_of_shared_memory_fails_its_call_alone(
    a: Worker, limit: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, limit, 1)
    first, second = (asyncrpc.share(torch.zeros(5)) for _ in range(2))
    await a.peer("b").call(remote.echo, first)
    a.parts.memory.regions._kept.regions.clear()  # noqa: SLF001  (only b is to be full)
    calls: list[tuple[Any, Any]] = [(remote.echo, second), (two_of_one, 10)]
    for function, argument in calls:
        with pytest.raises(EncodeError, match=refusal):
            await a.peer("b").call(function, argument)
    assert await a.peer("b").call(remote.add, 1) == 2


async def test_unknown_key_of_shared_memory_fails_its_call_alone(a: Worker) -> None:
    value = asyncrpc.share(torch.zeros(5))
    await a.peer("b").call(remote.echo, torch.zeros(1))
    with pytest.raises(DecodeError, match="but its memory is not here"):
        a.parts.memory.regions.find(os.urandom(16))
    assert (await a.peer("b").call(remote.echo, value)).sum() == 0


# --- the end -------------------------------------------------------------------------


async def test_unused_memory_is_released_on_all_workers(
    a: Worker, b: Worker, c: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "IDLE_S", 0.02)
    value = asyncrpc.share(torch.zeros(5))
    await a.peer("b").call(pass_on, "c", value)
    assert KEPT[-1].sum() == 0
    everyone = [worker.parts.memory.regions for worker in (a, b, c)]
    await until(lambda: len(b.parts.memory.regions) == 0)  # it has passed it on only
    await a.peer("b").call(add_in_place, value, 1.0)  # and gets it again
    assert KEPT[-1].sum() == 5
    KEPT.clear()
    del value
    await until(lambda: not any(map(len, everyone)))


async def test_memory_is_kept_for_a_message_whose_peer_is_slow_to_map_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands still for longer than memory without a user is kept."""
    monkeypatch.setattr(regions, "IDLE_S", 0.02)
    async with (cluster := processes("b")) as a:
        value = asyncrpc.share(torch.ones(5))
        await a.peer("b").call(remote.total, torch.ones(1))  # so there is a mover
        os.kill(cluster.pid("b"), signal.SIGSTOP)
        call = a.parts.start_call("b", remote.total, (value,))
        del value
        sweeps: dict[int, Any] = {}

        def was_swept() -> bool:
            timer = a.parts.memory.regions._sweeping  # noqa: SLF001
            sweeps[id(timer)] = timer
            return len(sweeps) > 4

        await until(was_swept)
        os.kill(cluster.pid("b"), signal.SIGCONT)
        assert await asyncio.wait_for(call, 60.0) == 5.0


async def test_shared_model_survives_a_killed_process() -> None:
    async with (cluster := processes("b", "c")) as a:
        model = asyncrpc.share(nn.Linear(500, 100))
        weight = model.weight
        for name, value in (("b", 2.0), ("c", 3.0)):
            await a.peer(name).call(fill_model, model, value)
            assert bool((weight == value).all())
        result, _ = await a.peer("b").call(two_of_one, 1000)
        await a.peer("c").call(keep, result)  # b's memory, passed on by a
        cluster.kill("b", signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            await a.peer("b").call(remote.add, 1)
        await a.peer("c").call(add_in_place, result, 4.0)
        assert bool((result == 4).all())
        assert bool(((await a.peer("c").call(last_kept)) == 4).all())
        await a.peer("c").call(drop_kept)
    left = [file.name for file in FILES.iterdir()]
    assert not [name for name in left if name.startswith("torch_")]
