"""Checks of torch's modes in collectives and data parallel work, for ranks anywhere.

A check is given the ranks of this process as groups of `SIZE` ranks: `test_modes` runs
it with all of them in one process, on one loop, and with one in each of two.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrpc import Group, UsageError, Worker
from asyncrpc.ddp import (
    DistributedDataParallel,
    Join,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PowerSGDState,
    ZeroRedundancyOptimizer,
    powerSGD_hook,
)
from asyncrpc.multiprocessing import launch
from tests.integration.parallel.ddp.ranks import groups_of
from tests.numerics.test_modes_apart import DEFAULT, MODES, PROCESS_WIDE, state

SIZE = 2
Ran: TypeAlias = Awaitable[Any]
Groups: TypeAlias = list[Group]
Hold: TypeAlias = Callable[[Callable[[], Ran]], Ran]
Check: TypeAlias = Callable[[Groups], Awaitable[None]]

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


COLLECTIVES: Final[dict[str, tuple[Collective, tuple[list[int], list[int]]]]] = {
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


def are_plain(tensors: list[torch.Tensor], wanted: list[int]) -> bool:
    return len(tensors) == len(wanted) and all(
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and not tensor.is_inference()
        and tensor.tolist() == [float(value)] * 3
        for tensor, value in zip(tensors, wanted, strict=True)
    )


# --- who holds the mode --------------------------------------------------------------


async def at_once(run: Callable[[], Ran]) -> Any:
    """Hold nothing."""
    return await run()


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


async def by_the_process(name: str, run: Callable[[], Ran]) -> Any:
    """Set a state of the whole process, which is left alone."""
    set_it, unset, get = PROCESS_WIDE[name]
    set_it()
    try:
        before = torch.get_rng_state(), torch.get_num_threads(), get()
        result = await run()
        after = torch.get_rng_state(), torch.get_num_threads(), get()
    finally:
        unset()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    return result


HELD: Final[dict[str, Hold]] = {
    f"{hold.__name__}-{name}": partial(hold, name)
    for hold, names in (
        (by_those_who_wait, MODES),
        # What is of the whole loop is of no task: the other cases have it.
        (by_another, [name for name in MODES if name != "set_default_device"]),
    )
    for name in names
}
OF_PROCESS: Final[dict[str, Hold]] = {
    name: partial(by_the_process, name) for name in PROCESS_WIDE
}


async def at_all(count: int, hold: Hold, run: Callable[[int], Ran]) -> list[Any]:
    """Run something at all ranks of this process while a mode is held."""

    async def all_ranks() -> list[Any]:
        return list(await asyncio.gather(*map(run, range(count))))

    result: list[Any] = await hold(all_ranks)
    return result


async def check_equal(groups: Groups, values: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check that all ranks, also of other processes, have the same values."""
    flat = [
        torch.cat([tensor.flatten().double() for tensor in mine]) for mine in values
    ]
    gathered = await asyncio.gather(*map(Group.all_gather, groups, flat))
    for ranks in gathered:
        assert all(torch.equal(rank, ranks[0]) for rank in ranks)


async def collectives_have_the_defaults(groups: Groups, *, hold: Hold) -> None:
    count = len(groups)
    for label, (collective, wanted) in COLLECTIVES.items():
        inputs = [numbers(group.rank) for group in groups]
        run = partial(_collective, collective, groups, inputs)
        for group, outputs in zip(groups, await at_all(count, hold, run), strict=True):
            assert are_plain(outputs, wanted[group.rank]), label
    for memory in await at_all(count, hold, lambda at: groups[at].empty(3)):
        assert memory.zero_().tolist() == [0.0] * 3  # it is no inference tensor


def _collective(
    collective: Collective, groups: Groups, inputs: list[torch.Tensor], at: int
) -> Ran:
    return collective(groups[at], inputs[at])


async def inference_tensors_are_reduced(groups: Groups, *, within: bool) -> None:
    with torch.inference_mode():
        inputs = [numbers(group.rank) for group in groups]
    with torch.inference_mode(within):
        await asyncio.gather(*map(Group.all_reduce, groups, inputs))
        sends = zip(groups, inputs, strict=True)
        await asyncio.gather(*(group.broadcast(x, 0) for group, x in sends))
    plain = [numbers(group.rank) for group in groups]
    await asyncio.gather(*map(Group.all_reduce, groups, plain))
    assert all(tensor.tolist() == [3.0] * 3 for tensor in (*inputs, *plain))


async def fakes_are_refused(groups: Groups) -> None:
    with MODES["FakeTensorMode"]():
        fake = torch.ones(3)
    for group in groups:
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
        for parameter in (*self.sharded, *self.averaged):
            parameter.grad = torch.ones_like(parameter)
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
        grads = [parameter.grad for parameter in self.model.module.parameters()]
        return [
            tensor.detach().to_dense().clone()
            for tensor in (
                *(grad for grad in grads if grad is not None),
                *self.model.module.buffers(),
                *self.sharded,
                *self.averaged,
            )
        ]


async def trained(groups: Groups, kind: str, hold: Hold) -> list[list[torch.Tensor]]:
    """Wrap, train and save under a mode; return what came of it at each rank."""
    count, ranks = len(groups), [Rank(kind, group) for group in groups]
    await asyncio.gather(*(rank.meet() for rank in ranks))
    for _ in range(4):
        losses = [rank.loss() for rank in ranks]
        await at_all(count, hold, partial(_train, ranks, losses))
    await at_all(count, hold, lambda at: ranks[at].save())
    values = [rank.result() for rank in ranks]
    await check_equal(groups, values)
    for rank in ranks:
        if rank.group.rank == 0:
            assert len(rank.zero.state_dict()["state"]) == len(rank.sharded)
    return values


def _train(ranks: list[Rank], losses: list[torch.Tensor], at: int) -> Ran:
    return ranks[at].train(losses[at])


async def training_has_the_defaults(groups: Groups, *, kind: str, hold: Hold) -> None:
    wanted = await trained(groups, kind, at_once)
    results = await trained(groups, kind, hold)
    assert state() == DEFAULT
    for mine, theirs in zip(results, wanted, strict=True):
        for tensor, other in zip(mine, theirs, strict=True):
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor, other)
            assert not tensor.is_inference()


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


PLAIN_BACKWARD: Final[dict[str, Callable[[], Any]]] = {
    **{
        name: MODES[name]
        for name in ("no_grad", "inference_mode", "autocast", "torch.device")
    },
    "a dispatch mode": Passing,
    "a function mode": PassingFunctions,
}


async def plain_backward_is_reduced(groups: Groups, *, name: str) -> None:
    """What asyncrpc does within it, the mode does not see."""
    models = await asyncio.gather(*(wrapped("own memory", group) for group in groups))
    seen: dict[bool, list[list[str]]] = {True: [], False: []}

    def backward(at: int, *, syncs: bool) -> None:
        models[at].zero_grad()
        loss = models[at](words_of(groups[at].rank))
        with (
            contextlib.nullcontext() if syncs else models[at].no_sync(),
            PLAIN_BACKWARD[name]() as mode,
        ):
            torch.autograd.backward(loss)
        seen[syncs].append(getattr(mode, "seen", []))

    for syncs in (False, True):
        passes = (partial(backward, at, syncs=syncs) for at in range(len(groups)))
        await asyncio.gather(*map(asyncio.to_thread, passes))
    assert seen[True] == seen[False]
    grads = [
        [parameter.grad for parameter in model.module.parameters()] for model in models
    ]
    await check_equal(
        groups,
        [[torch.zeros(1) if grad is None else grad for grad in mine] for mine in grads],
    )


async def losses_have_the_modes_of_the_caller(groups: Groups, *, name: str) -> None:
    """Of `model.backward` and of a step, which compute them in a thread."""

    async def one_rank(group: Group) -> None:
        seen: list[Any] = []
        model = await DistributedDataParallel(nn.Linear(2, 1), group)
        zero = ZeroRedundancyOptimizer(
            model.module.parameters(), torch.optim.SGD, group, lr=0.1
        )

        def loss() -> torch.Tensor:
            seen.append(state())
            with torch.inference_mode(mode=False), torch.enable_grad():
                result: torch.Tensor = model(torch.ones(1, 2)).sum()
            return result

        async def closure() -> torch.Tensor:
            return loss()

        jobs: list[Callable[[], Ran]] = [
            partial(model.backward, loss),
            partial(zero.step, closure),
            partial(zero.step, loss),
        ]
        for job in jobs:
            with MODES[name]():
                under = state()
                await job()
                assert state() == under
        assert seen == [under] * 3

    for group in groups:  # the loop has one mode at a time
        await one_rank(group)


# By what is checked: the cases.
CHECKS: Final[dict[str, dict[str, Check]]] = {
    "collectives": {
        label: partial(collectives_have_the_defaults, hold=hold)
        for label, hold in {**HELD, **OF_PROCESS}.items()
    },
    "tensors": {
        "within": partial(inference_tensors_are_reduced, within=True),
        "without": partial(inference_tensors_are_reduced, within=False),
        "fakes": fakes_are_refused,
    },
    **{
        kind: {
            label: partial(training_has_the_defaults, kind=kind, hold=hold)
            for label, hold in HELD.items()
        }
        for kind in OPTIONS
    },
    "states of the process": {
        label: partial(training_has_the_defaults, kind="powersgd", hold=hold)
        for label, hold in OF_PROCESS.items()
    },
    "plain backward": {
        name: partial(plain_backward_is_reduced, name=name) for name in PLAIN_BACKWARD
    },
}
# Of one rank, as a mode that is held while ranks wait for each other is each other's.
ALONE: Final[dict[str, Check]] = {
    name: partial(losses_have_the_modes_of_the_caller, name=name)
    for name in ("no_grad", "inference_mode", "autocast")
}


CASES = {
    f"{what}-{label}": check
    for what, checks in CHECKS.items()
    for label, check in checks.items()
}


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("check", CASES.values(), ids=CASES)
async def test_ranks_of_a_process_have_the_defaults(check: Check) -> None:
    async with groups_of(SIZE) as groups:
        await check(groups)


@pytest.mark.parametrize("check", ALONE.values(), ids=ALONE)
async def test_loss_computed_in_the_thread_has_the_modes_of_the_caller(
    check: Check,
) -> None:
    async with groups_of(1) as groups:
        await check(groups)


async def one_rank(rank: int, what: str) -> None:
    async with (
        Worker(f"worker{rank}", rendezvous="env://") as worker,
        Group(worker, timeout_s=60.0) as group,
    ):
        for check in CHECKS[what].values():
            await check([group])


@pytest.mark.slow
@pytest.mark.parametrize("what", CHECKS)
def test_ranks_of_two_processes_have_the_defaults(what: str) -> None:
    """The same checks, where each rank has a loop of its own."""
    launch(one_rank, (what,), SIZE, method="forkserver", timeout_s=300)
