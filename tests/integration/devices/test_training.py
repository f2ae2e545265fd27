"""Distributed autograd, optimizers and modules on devices: as in host memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import UsageError, Worker, autograd
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as, fake_device
from tests.integration.devices import remote
from tests.integration.devices.accelerators import IS_FAKE, TYPE, Hands, options

HOME = f"{TYPE}:0"
Pair = tuple[Worker, Worker]


def inputs(seed: int = 7) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    """Compare: to the last bit where the device is the host in disguise."""
    if actual is None or wanted is None:
        return actual is wanted
    if IS_FAKE:
        return torch.equal(actual, wanted)
    return torch.allclose(actual, wanted, rtol=1e-5, atol=1e-6)


class Net:
    """Two layers on two workers, and the same two in this process on the host."""

    def __init__(self, pair: Pair, hands: Hands) -> None:
        a, _ = pair
        self.hands = hands
        self.first = a.peer("b").remote(remote.Layer, HOME, 1)
        self.second = remote.Layer("cpu", 2)
        self.plain = [remote.Layer("cpu", 1), remote.Layer("cpu", 2)]

    async def put_second(self) -> None:
        self.second = await self.hands.do(lambda: remote.Layer(HOME, 2))

    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss, on the device."""
        hidden = await self.first.rpc_async().forward(x)
        loss: torch.Tensor = await self.hands.do(
            lambda: self.second(hidden).pow(2).sum()
        )
        return loss

    def plain_forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.plain[1](self.plain[0](x)).pow(2).sum()
        return loss


@pytest.fixture
async def net(pair: Pair, hands: Hands) -> Net:
    built = Net(pair, hands)
    await built.put_second()
    return built


async def leaf(hands: Hands, x: torch.Tensor) -> torch.Tensor:
    return await hands.do(lambda: x.to(HOME).requires_grad_())


async def test_gradients_equal_one_process(net: Net, hands: Hands) -> None:
    x = await leaf(hands, inputs())
    plain_x = inputs().requires_grad_()
    wanted = net.plain_forward(plain_x)
    wanted.backward()  # type: ignore[no-untyped-call]
    async with autograd.context() as context:
        loss = await net.forward(x)
        assert str(loss.device) == HOME
        await autograd.backward(context, [loss])
        gradients = autograd.get_gradients(context)
        assert {str(gradient.device) for gradient in gradients.values()} == {HOME}
        there = await net.first.rpc_async().gradient(list(context.id))
        mine = {key: await hands.take(gradient) for key, gradient in gradients.items()}
    assert close(mine[x], plain_x.grad)
    assert close(mine[net.second.weight], net.plain[1].weight.grad)
    assert close(there, net.plain[0].weight.grad)


async def test_gradients_of_several_passes_add_up(net: Net, hands: Hands) -> None:
    x = await leaf(hands, inputs())
    plain_x = inputs().requires_grad_()
    async with autograd.context() as context:
        loss = await net.forward(x)
        for _ in range(3):
            await autograd.backward(context, [loss], retain_graph=True)
        there = await net.first.rpc_async().gradient(list(context.id))

        def gathered() -> torch.Tensor:
            return autograd.get_gradients(context)[x].cpu()  # adds up: in a thread

        gradient = await hands.do(gathered)
    plain = net.plain_forward(plain_x)
    for _ in range(3):
        plain.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert close(gradient, plain_x.grad)
    assert close(there, net.plain[0].weight.grad)


async def test_gradients_of_a_tensor_used_twice_add_up(
    pair: Pair, hands: Hands
) -> None:
    """Two gradients meet at one node, and are added in a thread."""
    layer = pair[0].peer("b").remote(remote.Layer, HOME, 1)
    plain = remote.Layer("cpu", 1)
    x = await leaf(hands, inputs())
    plain_x = inputs().requires_grad_()
    async with autograd.context() as context:
        once = await layer.rpc_async().forward(x)
        twice = await layer.rpc_async().forward(once)

        def together() -> torch.Tensor:
            loss: torch.Tensor = (once * twice + once).sum()
            return loss

        loss = await hands.do(together)
        await autograd.backward(context, [loss])
        gradient = await hands.take(autograd.get_gradients(context)[x])
        there = await layer.rpc_async().gradient(list(context.id))
    hidden = plain(plain_x)
    (hidden * plain(hidden) + hidden).sum().backward()
    assert close(gradient, plain_x.grad)
    assert close(there, plain.weight.grad)


@pytest.mark.skipif(not IS_FAKE, reason="leaves of the host and of a device")
@pytest.mark.parametrize(("mine", "theirs"), [("cpu", HOME), (HOME, "cpu")])
async def test_gradients_come_back_by_the_device_map(
    ledger: fake_device.Ledger,
    is_exclusive: bool,  # noqa: FBT001
    mine: str,
    theirs: str,
) -> None:
    """A tensor goes to another type of device; its gradient is where the tensor is."""
    _ = ledger
    chosen = options(is_exclusive=is_exclusive, maps={"b": {mine: theirs}})
    async with Cluster(2, options=chosen) as (a, _):
        with acting_as(a):
            hands = Hands(a)
            layer = a.peer("b").remote(remote.Layer, theirs, 1)
            x = await hands.do(lambda: inputs().to(mine).requires_grad_())
            async with autograd.context() as context:
                y = await layer.rpc_async().forward(x)
                assert str(y.device) == mine
                loss = await hands.do(lambda: y.pow(2).sum())
                await autograd.backward(context, [loss])
                gradient = autograd.get_gradients(context)[x]
                assert str(gradient.device) == mine
                received = await hands.take(gradient)
                there = await hands.take(
                    await layer.rpc_async().gradient(list(context.id))
                )
    plain, plain_x = remote.Layer("cpu", 1), inputs().requires_grad_()
    plain(plain_x).pow(2).sum().backward()
    assert close(received, plain_x.grad)
    assert close(there, plain.weight.grad)


# --- optimizers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "chosen"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.05}),
    ],
)
async def test_steps_equal_one_process(
    net: Net, hands: Hands, cls: Any, chosen: dict[str, Any]
) -> None:
    parameters = [
        await net.first.rpc_async().weight_reference(),
        asyncrpc.RRef(net.second.weight),
    ]
    optimizer = DistributedOptimizer(cls, parameters, **chosen)
    plain_parameters = [layer.weight for layer in net.plain]
    plain = cls(plain_parameters, **chosen)
    for step in range(4):
        x = inputs(step)
        async with autograd.context() as context:
            loss = await net.forward(await hands.put(x))
            await autograd.backward(context, [loss])
            clip = 1.0 if step == 2 else None
            await optimizer.step(context, clip_grad_norm=clip)
        plain.zero_grad()
        net.plain_forward(x).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(plain_parameters, clip)
        plain.step()
    weights = await net.first.rpc_async().weights()
    assert torch.allclose(weights, plain_parameters[0], rtol=1e-5, atol=1e-6)
    mine = await hands.take(net.second.weight)
    assert torch.allclose(mine, plain_parameters[1], rtol=1e-5, atol=1e-6)


# --- modules -------------------------------------------------------------------------


async def test_remote_module_on_a_device_takes_host_tensors(
    pair: Pair, hands: Hands
) -> None:
    _ = pair
    module = await RemoteModule(f"b/{HOME}", torch.nn.Linear, args=(4, 2))
    state = await module.state_dict()
    assert all(value.is_cpu for value in state.values())
    wanted = torch.nn.functional.linear(inputs(), state["weight"], state["bias"])
    for x in (inputs(), await hands.put(inputs())):
        result = await module.forward_async(x)
        assert result.is_cpu
        assert torch.allclose(result, wanted, rtol=1e-5, atol=1e-6)
    await module.load_state_dict({name: value * 2 for name, value in state.items()})
    again = await module.forward_async(inputs())
    assert torch.allclose(again, wanted * 2, rtol=1e-5, atol=1e-6)


async def test_a_remote_module_trains_on_a_device(pair: Pair, hands: Hands) -> None:
    _ = pair
    module = await RemoteModule(f"b/{HOME}", remote.Layer, args=(HOME, 1))
    plain, x = remote.Layer("cpu", 1), inputs()
    optimizer = DistributedOptimizer(
        torch.optim.SGD, await module.remote_parameters(), lr=0.1
    )
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        async with autograd.context() as context:
            y = await module.forward_async(x)
            await autograd.backward(context, [y.pow(2).sum()])
            await optimizer.step(context)
        plain_optimizer.zero_grad()
        plain(x).pow(2).sum().backward()
        plain_optimizer.step()
    state = await module.state_dict()
    assert torch.allclose(state["weight"], plain.weight, rtol=1e-5, atol=1e-6)


async def test_remote_module_on_a_missing_device_is_refused(pair: Pair) -> None:
    _ = pair
    module = RemoteModule(f"b/{TYPE}:7", torch.nn.Linear, args=(4, 2))
    with pytest.raises(UsageError, match=rf"'b' has no device {TYPE}:7"):
        await module


@pytest.fixture
async def mapped(
    ledger: fake_device.Ledger | None,
    is_exclusive: bool,  # noqa: FBT001
) -> AsyncIterator[Hands]:
    _ = ledger
    chosen = options(is_exclusive=is_exclusive, maps={"b": {HOME: HOME}})
    async with Cluster(2, options=chosen) as (a, _):
        with acting_as(a):
            yield Hands(a)


async def test_device_map_keeps_results_on_devices(mapped: Hands) -> None:
    """PyTorch does the same."""
    module = await RemoteModule(f"b/{HOME}", remote.Layer, args=(HOME, 1))
    result = await module.forward_async(await mapped.put(inputs()))
    assert str(result.device) == HOME
    assert close(await mapped.take(result), remote.Layer("cpu", 1)(inputs()).detach())


# --- collectives ---------------------------------------------------------------------


async def collectives(group: asyncrpc.Group, hands: Hands) -> None:
    """Run every collective with tensors on a device; compare with those of the host."""
    rank, size = group.rank, group.size

    def mine(of: int) -> torch.Tensor:
        return torch.arange(6.0) + 10 * of

    async def put(tensor: torch.Tensor) -> torch.Tensor:
        return await hands.put(tensor)

    async def same(actual: torch.Tensor, wanted: torch.Tensor) -> None:
        assert str(actual.device) == HOME
        assert torch.equal(await hands.take(actual), wanted)

    total = sum((mine(of) for of in range(size)), torch.zeros(6))
    await same(await group.all_reduce(await put(mine(rank))), total)
    await same(await group.all_reduce(await put(mine(rank)), "avg"), total / size)
    reduced = await group.reduce(await put(mine(rank)), 1)
    await same(reduced, total if rank == 1 else mine(rank))
    await same(await group.broadcast(await put(mine(rank)), 1), mine(1))
    for of, received in enumerate(
        await group.all_gather(await put(mine(rank)[: 3 + rank]))
    ):
        await same(received, mine(of)[: 3 + of])
    gathered = await group.gather(await put(mine(rank)), 0)
    assert (gathered is None) == (rank != 0)
    for of, received in enumerate(gathered or ()):
        await same(received, mine(of))
    parts = [await put(mine(of)) for of in range(size)] if rank == 0 else None
    await same(await group.scatter(parts, 0, device=HOME), mine(rank))
    rows = await put(torch.ones(2 * size, 3) * (rank + 1))
    wanted = torch.ones(2, 3) * sum(range(1, size + 1))
    await same(await group.reduce_scatter(rows), wanted)
    sent = [await put(mine(rank) + of) for of in range(size)]
    for of, received in enumerate(await group.all_to_all(sent)):
        await same(received, mine(of) + rank)
    if rank == 0:
        await group.send(await put(mine(5)), 1)
    elif rank == 1:
        await same(await group.recv(0, out=await put(torch.zeros(6))), mine(5))
    transposed = await hands.do(lambda: mine(rank).view(2, 3).to(HOME).t())
    await group.all_reduce(transposed)
    await same(transposed, total.view(2, 3).t())


async def test_collectives_on_devices_give_the_expected_values(pair: Pair) -> None:
    async def at(worker: Worker) -> None:
        async with asyncrpc.Group(worker, ["a", "b"], name="devices") as group:
            await collectives(group, Hands(worker))

    await asyncio.gather(*map(at, pair))


async def test_collective_may_mix_host_and_device(pair: Pair) -> None:
    """Ranks need not have the same devices."""

    async def at(worker: Worker) -> torch.Tensor:
        hands = Hands(worker)
        async with asyncrpc.Group(worker, ["a", "b"], name="mixed") as group:
            x = torch.full((5,), float(group.rank + 1))
            value = await hands.put(x) if group.rank else x
            return await hands.take(await group.all_reduce(value))

    for total in await asyncio.gather(*map(at, pair)):
        assert torch.equal(total, torch.full((5,), 3.0))


async def test_host_collectives_do_not_wait_for_a_device(
    pair: Pair, hands: Hands
) -> None:
    """The threads of large collectives touch no device."""
    ended = threading.Event()
    using = asyncio.ensure_future(hands.do(lambda: ended.wait(10)))

    async def at(worker: Worker) -> None:
        async with asyncrpc.Group(worker, ["a", "b"], name="host") as group:
            total = await group.all_reduce(torch.ones(1 << 20))
            assert torch.equal(total, torch.full((1 << 20,), 2.0))

    await asyncio.gather(*map(at, pair))
    ended.set()
    assert await using  # it had its turn all the time
