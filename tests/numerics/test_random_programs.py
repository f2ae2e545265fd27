"""Random programs over 1 to 4 workers: gradients equal those of one process.

A program calls workers with local tensors and with references, hands work on from
worker to worker, and keeps results where they are made.  Compared are the values of the
gradients, which parameters have none, and how many gradients travelled: exactly one
for every crossing that the loss depends on, and none for the rest.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from asyncrpc import RRef, Worker, autograd
from asyncrpc.testing import Cluster, acting_as
from tests.numerics import parts

PROGRAMS = 50
PARAMETERS = 2
STEPS_MAX = 10


@dataclass(eq=False)
class Value:
    """One result: as the program has it, and as it is in one process."""

    real: Any  # a tensor of worker a, or an RRef
    plain: torch.Tensor
    crossings: int = 0  # that made it
    made_of: list[Value] = field(default_factory=list)

    @property
    def home(self) -> str:
        return self.real.owner_name() if isinstance(self.real, RRef) else "a"


class Program:
    """Grows one step at a time; worker a runs it."""

    def __init__(self, workers: list[Worker], seed: int) -> None:
        self.rng = random.Random(seed)
        self.a = workers[0]
        self.names = [one.name for one in workers]
        parts.make_parameters(self.names, PARAMETERS, seed)
        self.plain = {
            name: [one.detach().clone().requires_grad_() for one in all_]
            for name, all_ in parts.parameters.items()
        }
        own = zip(parts.parameters["a"], self.plain["a"], strict=True)
        self.values = [Value(real, plain) for real, plain in own]

    async def step(self) -> None:
        name, index = self.rng.choice(self.names), self.rng.randrange(PARAMETERS)
        peer = self.a.peer(name)
        weight = self.plain[name][index]
        kind = self.rng.choice(["call", "keep", "keep", "hand on", "parameter"])
        if kind == "parameter":
            self.values.append(Value(peer.remote(parts.parameter, index), weight))
            return
        one, other = self.rng.choices(self.values, k=2)
        made = [one, other]
        args = (one.real, other.real, index)
        through = self.rng.choice(self.names)
        if kind == "call":
            real: Any = await peer.call(parts.combine, *args)
        elif kind == "keep":
            real = peer.remote(parts.combine, *args)
        else:
            first = self.a.peer(through)
            real = await first.call(parts.combine_by_way_of, name, *args)
        crossings = self.crossings_of(kind, name, made)
        plain = parts.formula(one.plain, other.plain, weight)
        self.values.append(Value(real, plain, crossings, made))

    def crossings_of(self, kind: str, name: str, made: list[Value]) -> int:
        """Count the tensors that travel; a worker calls itself by a connection too."""
        found = 0
        tensors = {id(one): one for one in made if not isinstance(one.real, RRef)}
        hops = 2 if kind == "hand on" else 1
        found += hops * len(tensors)  # one that is given twice travels once
        references = [one for one in made if isinstance(one.real, RRef)]
        found += sum(one.home != name for one in references)
        return found + (0 if kind == "keep" else hops)

    async def loss(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the loss, what it is in one process, and its crossings."""
        last = self.values[-1]
        extra = 0
        real = last.real
        if isinstance(real, RRef):
            extra = 0 if real.is_owner() else 1
            real = await real.to_here()
        return real.sum(), last.plain.sum(), extra + self.crossings_behind(last)

    def crossings_behind(self, last: Value) -> int:
        found: dict[int, Value] = {}
        todo = [last]
        while todo:
            one = todo.pop()
            if id(one) not in found:
                found[id(one)] = one
                todo += one.made_of
        return sum(one.crossings for one in found.values())


def count_gradients(workers: list[Worker]) -> list[int]:
    """Count the gradients that each message brings, from now on."""
    counted: list[int] = []
    for worker in workers:
        service: Any = worker.service("autograd")
        handlers = service._handlers  # noqa: SLF001  (to count messages)
        handler = handlers["gradients"]

        async def counting(link: Any, value: Any, handler: Any = handler) -> Any:
            counted.append(len(value[-2]))
            return await handler(link, value)

        handlers["gradients"] = counting
    return counted


@pytest.mark.parametrize("seed", range(PROGRAMS))
async def test_a_random_program_has_the_gradients_of_one_process(seed: int) -> None:
    rng = random.Random(seed)
    async with Cluster(rng.randint(1, 4)) as workers:
        program = Program(workers, seed)
        with acting_as(workers[0]):
            async with autograd.context() as context:
                for _ in range(rng.randint(1, STEPS_MAX)):
                    await program.step()
                real, plain, crossings = await program.loss()
                counted = count_gradients(workers)
                await autograd.backward(context, [real])
                assert sum(counted) == crossings
                torch.testing.assert_close(real, plain)
                plain.backward()  # type: ignore[no-untyped-call]
                await compare(program, context)


async def compare(program: Program, context: autograd.Context) -> None:
    for name in program.names:
        found = await program.a.peer(name).call(parts.gradients_here, tuple(context.id))
        found = found or [None] * PARAMETERS
        for gradient, plain in zip(found, program.plain[name], strict=True):
            assert (gradient is None) == (plain.grad is None)
            if gradient is not None:
                torch.testing.assert_close(gradient, plain.grad)
