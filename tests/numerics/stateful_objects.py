"""Objects that compute and keep, on workers or in one process, for autograd's tests.

A program asks keepers to do things and does not know where they are: `ask` goes through
a reference, or calls the object itself.  So the same program runs both ways.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.autograd.graph import get_gradient_edge

import asyncrpc
from asyncrpc import RRef, Worker
from asyncrpc.autograd import Context, backward, context, current_context, get_gradients
from asyncrpc.testing import Cluster, acting_as
from asyncrpc.testing.network import Network

SHAPE = (3,)
Maybe = torch.Tensor | None


class Keeper:
    """Has parameters, keeps tensors between calls, and records what hooks see."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = [
            torch.randn(
                SHAPE, dtype=torch.float64, generator=generator
            ).requires_grad_()
            for _ in range(2)
        ]
        self.kept: dict[int, torch.Tensor] = {}
        self.seen: list[tuple[str, torch.Tensor]] = []

    def times(self, value: torch.Tensor, index: int = 0) -> torch.Tensor:
        return value * self.weights[index].sin()

    def both(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors in one message."""
        return value * self.weights[0], value.cos() * self.weights[1]

    def join(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.sin() * right * self.weights[0]

    async def join_references(self, *values: Any) -> torch.Tensor:
        return self.join(*[await v if isinstance(v, RRef) else v for v in values])

    def echo(self, value: Any) -> Any:
        return value

    def parameter(self, index: int) -> torch.Tensor:
        return self.weights[index]

    def in_place(self, value: torch.Tensor) -> torch.Tensor:
        value.mul_(self.weights[0])
        value.add_(1)
        return value * value

    def keep(self, key: int, value: torch.Tensor) -> torch.Tensor:
        """Keep a result that later ones share; return something made of it."""
        self.kept[key] = torch.tanh(value * self.weights[0])
        return self.kept[key] * self.weights[1]

    def use(self, key: int, value: torch.Tensor) -> torch.Tensor:
        return self.kept[key] * value.cos()

    def give(self, *keys: int) -> list[torch.Tensor]:
        return [self.kept[key] for key in keys]

    def deaf(self, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Depend on `value`, but give it no gradient."""
        return deaf(value, other * self.weights[0])

    def hook_kept(self, key: int) -> None:
        self.kept[key].register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: self.seen.append(("kept", gradient.clone()))
        )

    def failing(self, value: torch.Tensor, error: Exception) -> torch.Tensor:
        return failing(value * self.weights[0], error)

    def slowly(self, value: torch.Tensor, gate: str) -> torch.Tensor:
        """Stop at a gate on the way back."""
        result = value * self.weights[0]
        result.register_hook(  # type: ignore[no-untyped-call]
            lambda _gradient: Gate.open_ones[gate].pass_through()
        )
        return result

    async def way(self, others: list[Any], value: torch.Tensor) -> torch.Tensor:
        """Multiply, let the others do the same, multiply what comes back."""
        value = self.times(value)
        if others:
            value = await ask(others[0], "way", others[1:], value)
        return self.times(value, 1)

    async def times_after(self, seconds: float, value: torch.Tensor) -> torch.Tensor:
        """For virtual time."""
        await asyncio.sleep(seconds)
        return self.times(value)

    async def later(self, to: Any, gate: str, value: torch.Tensor) -> None:
        """Go on when the caller may have left: ask another worker for something."""
        open_gate = Gate.open_ones[gate]
        open_gate.reached.set()
        await open_gate.opened.wait()
        await ask(to, "times", value * self.weights[0])

    async def relay(self, to: Any, method: str, *args: Any) -> Any:
        return await ask(to, method, *args)

    def watch(self, clamp: float = 0.0) -> None:
        """Hook the first parameter in every way that there is."""
        weight = self.weights[0]
        node = get_gradient_edge(weight).node

        def on_accumulated(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.seen.append(("accumulated", parameter.grad.clone()))

        def on_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
            self.seen.append(("tensor", gradient.clone()))
            # No linear function: on parts it would give another sum.
            return gradient.clamp(-clamp, clamp) if clamp else None

        weight.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        weight.register_post_accumulate_grad_hook(on_accumulated)  # type: ignore[no-untyped-call]
        node.register_prehook(lambda into: self.seen.append(("into", into[0].clone())))
        node.register_hook(lambda _out, into: self.seen.append(("node", into[0])))
        self.node = node  # a leaf does not keep its node, nor so the node's hooks

    def set_grads(self, number: float) -> None:
        for weight in self.weights:
            weight.grad = torch.full_like(weight, number)

    async def report(self) -> Report:
        """Say what the caller's context has, once no pass runs here."""
        service: Any = asyncrpc.current_worker().parts.service("autograd")
        gradients = await service.gathered(current_context().id)
        return self._report([gradients.get(weight) for weight in self.weights])

    def report_plain(self) -> Report:
        return self._report([weight.grad for weight in self.weights])

    def grads(self) -> list[Maybe]:
        return [weight.grad for weight in self.weights]

    def _report(self, gradients: list[Maybe]) -> Report:
        seen = [(name, tensor.detach().clone()) for name, tensor in self.seen]
        return Report(
            [
                gradient if gradient is None else gradient.clone()
                for gradient in gradients
            ],
            seen,
        )


@dataclass
class Report:
    """What one keeper's parameters got, and what their hooks saw."""

    gradients: list[Maybe]
    seen: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    @property
    def tensors(self) -> list[Maybe]:
        return [*self.gradients, *(tensor for _, tensor in self.seen)]


class Deaf(torch.autograd.Function):
    """`other`, with a nil gradient for `value`."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return other + value

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradients[0]


def deaf(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Deaf.apply(value, other)  # type: ignore[no-untyped-call]
    return result


class Failing(torch.autograd.Function):
    """The value itself; an error on the way back."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ctx.error


def failing(value: torch.Tensor, error: Exception) -> torch.Tensor:
    result: torch.Tensor = Failing.apply(value, error)  # type: ignore[no-untyped-call]
    return result


class Gate:
    """Where something stops until the test lets it go on.

    Attributes:
        reached: set when it has come.
        opened: set when it may go on.
    """

    open_ones: dict[str, Gate] = {}  # noqa: RUF012  (workers find them by name)

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._may_go = threading.Event()
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    def __enter__(self) -> Self:
        self.open_ones[self._name] = self
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        del self.open_ones[self._name]

    def pass_through(self) -> None:
        """Stop a thread."""
        self._loop.call_soon_threadsafe(self.reached.set)
        self._may_go.wait()

    def let_go(self) -> None:
        self._may_go.set()
        self.opened.set()


async def ask(keeper: Any, method: str, *args: Any) -> Any:
    """Call a method, wherever the keeper is."""
    target = keeper.rpc_async() if isinstance(keeper, RRef) else keeper
    result = getattr(target, method)(*args)
    return await result if inspect.isawaitable(result) else result


Keepers = Mapping[str, Any]
Program = Callable[[Keepers, torch.Tensor], Awaitable[list[torch.Tensor]]]
Results = dict[str, Report]


def keepers_on(workers: list[Worker]) -> dict[str, RRef[Keeper]]:
    first = workers[0]
    return {
        worker.name: first.peer(worker.name).remote(Keeper, seed)
        for seed, worker in enumerate(workers)
    }


def leaf(seed: int = 100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    return tensor.requires_grad_()


async def reports(keepers: Keepers, ctx: Context, x: torch.Tensor) -> Results:
    """Return what every keeper has, and `x` under its own name."""
    by_name = {name: await ask(keeper, "report") for name, keeper in keepers.items()}
    own = get_gradients(ctx).get(x)
    return {**by_name, "x": Report([None if own is None else own.clone()])}


async def in_one_process(program: Program, names: str, passes: int = 1) -> Results:
    keepers = {name: Keeper(seed) for seed, name in enumerate(names)}
    x = leaf()
    roots = await program(keepers, x)
    for _ in range(passes):
        torch.autograd.backward(
            roots, [torch.ones_like(root) for root in roots], retain_graph=passes > 1
        )
    by_name = {name: keeper.report_plain() for name, keeper in keepers.items()}
    return {**by_name, "x": Report([x.grad])}


async def distributed(program: Program, names: str, passes: int = 1) -> Results:
    """Run a program on workers; `.grad` is nowhere touched, and contexts end."""
    async with group_of(len(names)) as (workers, keepers):
        x = leaf()
        async with context() as ctx:
            roots = await program(keepers, x)
            ones = [torch.ones_like(root) for root in roots]
            for _ in range(passes):
                await backward(ctx, roots, passes > 1, gradients=ones)
            results = await reports(keepers, ctx, x)
        assert x.grad is None
        for keeper in keepers.values():
            assert await ask(keeper, "grads") == [None, None]
        await all_released(workers)
    return results


@asynccontextmanager
async def group_of(
    count: int, network: Network | None = None
) -> AsyncIterator[tuple[list[Worker], Keepers]]:
    """Workers, of which the first is the current one, with a keeper on each."""
    async with Cluster(count, network=network or "mem") as workers:
        with acting_as(workers[0]):
            keepers = keepers_on(workers)
            yield workers, keepers
            keepers.clear()


async def all_released(workers: list[Worker]) -> None:
    """Wait until no worker knows of a context; its end goes from one to the next."""
    async with asyncio.timeout(30):
        while any(open_contexts(worker) for worker in workers):
            for worker in workers[1:]:
                await workers[0].peer(worker.name).call(int)


def open_contexts(worker: Worker) -> int:
    service: Any = worker.parts.service("autograd")
    return int(service.open_contexts)


def assert_equal(actual: Results, wanted: Results) -> None:
    """Compare values, which gradients are none, and what hooks saw, in order."""
    for name, report in wanted.items():
        here, there = actual[name], report
        present = [gradient is not None for gradient in here.gradients]
        assert present == [gradient is not None for gradient in there.gradients], name
        assert [kind for kind, _ in here.seen] == [kind for kind, _ in there.seen]
    torch.testing.assert_close(
        [actual[name].tensors for name in wanted],
        [report.tensors for report in wanted.values()],
        rtol=1e-12,
        atol=1e-12,
    )


async def check(program: Program, names: str = "ab", passes: int = 1) -> Results:
    """Run a program both ways and compare; return what it gives."""
    wanted = await in_one_process(program, names, passes)
    assert_equal(await distributed(program, names, passes), wanted)
    return wanted
