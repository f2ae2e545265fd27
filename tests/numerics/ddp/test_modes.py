"""Data parallel work has torch's defaults, whoever holds which mode meanwhile.

The mode is of the task that awaits, or of another one of the same loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrpc import Group, UsageError
from asyncrpc.ddp import (
    DistributedDataParallel,
    Join,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PowerSGDState,
    ZeroRedundancyOptimizer,
    powerSGD_hook,
)
from tests.integration.ddp.ranks import groups_of
from tests.numerics.test_modes_apart import DEFAULT, MODES, PROCESS_WIDE, state

Ran = Awaitable[Any]
SIZE = 2
# Of the whole loop, and so of no task: the other cases have it.
OF_TASKS = [name for name in MODES if name != "set_default_device"]


# --- collectives ---------------------------------------------------------------------

Collective = Callable[[Group, torch.Tensor], Ran]


async def all_reduce(group: Group, x: torch.Tensor) -> Any:
    return [await group.all_reduce(x)]


async def reduce(group: Group, x: torch.Tensor) -> Any:
    return [await group.reduce(x, 0)]


async def broadcast(group: Group, x: torch.Tensor) -> Any:
    return [await group.broadcast(x, 0)]


async def all_gather(group: Group, x: torch.Tensor) -> Any:
    return await group.all_gather(x)


async def gather(group: Group, x: torch.Tensor) -> Any:
    return await group.gather(x, 0) or []


async def scatter(group: Group, x: torch.Tensor) -> Any:
    return [await group.scatter([x] * SIZE if group.rank == 0 else None, 0)]


async def reduce_scatter(group: Group, x: torch.Tensor) -> Any:
    return [await group.reduce_scatter([x] * SIZE)]


async def all_to_all(group: Group, x: torch.Tensor) -> Any:
    return await group.all_to_all([x] * SIZE)


async def send_and_recv(group: Group, x: torch.Tensor) -> Any:
    if group.rank == 0:
        await group.send(x, 1)
        await group.send(x, 1, tag=1)
        return []
    return [await group.recv(0), await group.recv(0, tag=1, out=x)]


COLLECTIVES: dict[str, tuple[Collective, tuple[list[int], list[int]]]] = {
    "all_reduce": (all_reduce, ([3], [3])),
    "reduce": (reduce, ([3], [2])),
    "broadcast": (broadcast, ([1], [1])),
    "all_gather": (all_gather, ([1, 2], [1, 2])),
    "gather": (gather, ([1, 2], [])),
    "scatter": (scatter, ([1], [1])),
    "reduce_scatter": (reduce_scatter, ([3], [3])),
    "all_to_all": (all_to_all, ([1, 2], [1, 2])),
    "send and recv": (send_and_recv, ([], [1, 1])),
}


def numbers(rank: int) -> torch.Tensor:
    return torch.full((3,), float(rank + 1))


def are_plain(found: list[torch.Tensor], wanted: list[int]) -> bool:
    return len(found) == len(wanted) and all(
        type(one) is torch.Tensor
        and one.device.type == "cpu"
        and one.dtype == torch.float32
        and not one.is_inference()
        and one.tolist() == [float(value)] * 3
        for one, value in zip(found, wanted, strict=True)
    )


# --- who holds the mode --------------------------------------------------------------


async def by_those_who_wait(name: str, run: Callable[[], Ran]) -> Any:
    """Enter a mode in the task that awaits."""
    with MODES[name]():
        result = await run()
    assert state() == DEFAULT
    return result


async def by_another(name: str, run: Callable[[], Ran]) -> Any:
    """Enter a mode in another task, which leaves it in the middle and at the end."""
    held, may_end = asyncio.Event(), asyncio.Event()

    async def holds() -> None:
        with MODES[name]():
            held.set()
            await may_end.wait()

    holding = asyncio.create_task(holds())
    running = asyncio.ensure_future(_after(held, run))
    await asyncio.wait([running])
    may_end.set()
    await holding
    assert state() == DEFAULT
    return await running


async def _after(event: asyncio.Event, run: Callable[[], Ran]) -> Any:
    await event.wait()
    return await run()


HELD = [
    *((by_those_who_wait, name) for name in MODES),
    *((by_another, name) for name in OF_TASKS),
]
held_by = pytest.mark.parametrize(
    ("hold", "name"), HELD, ids=[f"{hold.__name__}-{name}" for hold, name in HELD]
)


async def in_groups(
    groups: list[Group],
    hold: Callable[[str, Callable[[], Ran]], Ran],
    name: str,
    run: Callable[[int], Ran],
) -> list[Any]:
    """Run something at all ranks while a mode is held."""

    async def all_ranks() -> list[Any]:
        return list(await asyncio.gather(*(run(rank) for rank in range(len(groups)))))

    result: list[Any] = await hold(name, all_ranks)
    return result


@held_by
async def test_collectives_have_the_defaults(
    hold: Callable[[str, Callable[[], Ran]], Ran], name: str
) -> None:
    async with groups_of(SIZE) as groups:
        for label, (collective, wanted) in COLLECTIVES.items():
            inputs = [numbers(rank) for rank in range(SIZE)]
            found = await in_groups(
                groups,
                hold,
                name,
                lambda rank, call=collective, inputs=inputs: call(  # type: ignore[misc]  # mypy infers no lambda with defaults
                    groups[rank], inputs[rank]
                ),
            )
            for mine, values in zip(found, wanted, strict=True):
                assert are_plain(mine, values), label
        memory = await in_groups(groups, hold, name, lambda rank: groups[rank].empty(3))
        for one in memory:
            assert one.zero_().tolist() == [0.0] * 3  # it is no inference tensor


@pytest.mark.parametrize("within", [True, False])
async def test_tensors_of_inference_mode_are_reduced_within_it_and_without(
    *, within: bool
) -> None:
    with torch.inference_mode():
        inputs = [numbers(rank) for rank in range(SIZE)]
    async with groups_of(SIZE) as groups:
        with torch.inference_mode(within):
            await asyncio.gather(*map(Group.all_reduce, groups, inputs))
            await asyncio.gather(*(g.broadcast(x, 0) for g, x in zip(groups, inputs)))  # noqa: B905
        plain = [numbers(rank) for rank in range(SIZE)]
        await asyncio.gather(*map(Group.all_reduce, groups, plain))
    assert [one.tolist() for one in (*inputs, *plain)] == [[3.0] * 3] * 4


async def test_a_tensor_without_values_is_refused() -> None:
    with MODES["FakeTensorMode"]():
        fake = torch.ones(3)
    async with groups_of(1) as (group,):
        with pytest.raises(UsageError, match="FakeTensor"):
            await group.all_reduce(fake)


# --- modules and optimizers ----------------------------------------------------------


class Net(nn.Module):
    """Has dense and sparse parameters, one that is not used, and statistics."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(5, 6, sparse=sparse)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Map `(batch,)` to a scalar."""
        result: torch.Tensor = self.last(self.norm(self.words(words))).square().mean()
        return result


OPTIONS = ("sparse", "static", "powersgd", "own memory")


async def wrapped(kind: str, group: Group) -> DistributedDataParallel:
    net = Net(sparse=kind == "sparse")
    model = await DistributedDataParallel(
        net,
        group,
        find_unused_parameters=kind != "static",
        static_graph=kind == "static",
        gradient_as_bucket_view=kind != "own memory",
    )
    if kind == "powersgd":
        state = PowerSGDState(None, 1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
    return model


def words_of(rank: int) -> torch.Tensor:
    return torch.tensor([rank, 1, 2, rank + 3])


class Rank:
    """What one rank trains: a module, and two optimizers of parameters of their own."""

    def __init__(self, kind: str, group: Group) -> None:
        self.kind, self.group = kind, group
        torch.manual_seed(2)
        self.sharded = [nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
        self.averaged = [nn.Parameter(torch.full((2,), float(group.rank)))]
        self.zero = ZeroRedundancyOptimizer(
            self.sharded, torch.optim.Adam, group, lr=0.1
        )
        averager = PeriodicModelAverager(group, 2)
        inner = torch.optim.SGD(self.averaged, lr=0.1, momentum=0.9)
        self.local = PostLocalSGDOptimizer(inner, averager)
        self.model: DistributedDataParallel | None = None

    async def meet(self) -> None:
        """Wrap the module."""
        self.model = await wrapped(self.kind, self.group)

    def loss(self) -> torch.Tensor:
        """Compute a loss, and give the parameters of the optimizers gradients."""
        assert self.model is not None
        for one in (*self.sharded, *self.averaged):
            one.grad = torch.ones_like(one)
        result: torch.Tensor = self.model(words_of(self.group.rank))
        return result

    async def train(self, loss: torch.Tensor) -> None:
        """Take a step of each kind."""
        assert self.model is not None
        async with Join([self.model, self.zero, self.local.averager]):
            await self.model.backward(loss)
            await self.zero.step()
            await self.local.step()

    async def save(self) -> None:
        """Gather the state of the sharded optimizer at rank 0."""
        await self.zero.consolidate_state_dict(0)

    def result(self) -> list[torch.Tensor]:
        """Return all that training has changed."""
        assert self.model is not None
        grads = [one.grad for one in self.model.module.parameters()]
        return [
            one.detach().to_dense().clone()
            for one in (
                *(one for one in grads if one is not None),
                *self.model.module.buffers(),
                *self.sharded,
                *self.averaged,
            )
        ]


async def trained(
    kind: str, hold: Callable[[str, Callable[[], Ran]], Ran], name: str
) -> list[torch.Tensor]:
    """Wrap, train and save under a mode; return what came of it at rank 0."""
    async with groups_of(SIZE) as groups:
        ranks = [Rank(kind, group) for group in groups]
        await asyncio.gather(*(rank.meet() for rank in ranks))
        for _ in range(4):
            losses = [rank.loss() for rank in ranks]
            await in_groups(
                groups,
                hold,
                name,
                lambda at, losses=losses: ranks[at].train(losses[at]),  # type: ignore[misc]  # likewise
            )
        await in_groups(groups, hold, name, lambda at: ranks[at].save())
        first, second = (rank.result() for rank in ranks)
        for mine, other in zip(first, second, strict=True):
            assert torch.equal(mine, other)
        return [*first, torch.tensor(len(ranks[0].zero.state_dict()["state"]))]


async def at_once(_name: str, run: Callable[[], Ran]) -> Any:
    return await run()


@pytest.mark.parametrize("kind", OPTIONS)
@held_by
async def test_passes_hooks_buffers_and_steps_have_the_defaults(
    hold: Callable[[str, Callable[[], Ran]], Ran], name: str, kind: str
) -> None:
    wanted = await trained(kind, at_once, "")
    found = await trained(kind, hold, name)
    assert state() == DEFAULT
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
        assert not one.is_inference()


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets every operation pass, and remembers it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    """As `Passing`, for torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


PLAIN_BACKWARD: dict[str, Callable[[], Any]] = {
    **{
        name: MODES[name]
        for name in ("no_grad", "inference_mode", "autocast", "torch.device")
    },
    "a dispatch mode": Passing,
    "a function mode": PassingFunctions,
}


@pytest.mark.parametrize("name", PLAIN_BACKWARD)
async def test_autograds_own_pass_is_reduced_under_any_mode(name: str) -> None:
    """What asyncrpc does within it, the mode does not see."""
    async with groups_of(SIZE) as groups:
        models = await asyncio.gather(*(wrapped("own memory", g) for g in groups))
        seen: dict[bool, list[list[str]]] = {True: [], False: []}

        def backward(rank: int, *, syncs: bool) -> None:
            models[rank].zero_grad()
            loss = models[rank](words_of(rank))
            with (
                contextlib.nullcontext() if syncs else models[rank].no_sync(),
                PLAIN_BACKWARD[name]() as mode,
            ):
                torch.autograd.backward(loss)
            seen[syncs].append(getattr(mode, "seen", []))

        for syncs in (False, True):
            await asyncio.gather(
                *(asyncio.to_thread(backward, r, syncs=syncs) for r in range(SIZE))
            )
        assert seen[True] == seen[False]
        grads = [[p.grad for p in one.module.parameters()] for one in models]
        for one, other in zip(*grads, strict=True):
            assert (one is None) is (other is None)
            assert one is None or (other is not None and torch.equal(one, other))


@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "autocast"])
async def test_a_loss_that_is_computed_in_the_thread_has_the_modes_of_the_caller(
    name: str,
) -> None:
    seen: list[Any] = []
    async with groups_of(1) as (group,):
        model = await DistributedDataParallel(nn.Linear(2, 1), group)

        def loss() -> torch.Tensor:
            seen.append(state())
            with torch.inference_mode(mode=False), torch.enable_grad():
                result: torch.Tensor = model(torch.ones(1, 2)).sum()
            return result

        with MODES[name]():
            under = state()
            await model.backward(loss)
            assert state() == under
        zero = ZeroRedundancyOptimizer(
            model.module.parameters(), torch.optim.SGD, group, lr=0.1
        )

        async def closure() -> torch.Tensor:
            return loss()

        with MODES[name]():
            await zero.step(closure)
            await zero.step(loss)
    assert seen == [under] * 3


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("name", PROCESS_WIDE)
async def test_a_state_of_the_process_changes_nothing_and_is_left_alone(
    name: str,
) -> None:
    wanted = await trained("powersgd", at_once, "")
    set_it, unset, get = PROCESS_WIDE[name]

    async def under(_name: str, run: Callable[[], Ran]) -> Any:
        set_it()
        before = torch.get_rng_state(), torch.get_num_threads(), get()
        result = await run()
        after = torch.get_rng_state(), torch.get_num_threads(), get()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        unset()
        return result

    try:
        found = await trained("powersgd", under, name)
    finally:
        unset()
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
