"""Random programs over workers that keep tensors: gradients of one process.

A plan is drawn first, and run on workers and in one process.  Its workers keep results
that later ones share, fetch from each other, several tensors in a message, and get
tensors by way of the first worker.  Compared are the gradients' values, which
parameters have none, what hooks saw, and how many gradients travelled: one for every
crossing that the roots depend on, by the plan, and none for the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from asyncrpc import Worker
from asyncrpc.autograd import backward, context
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.extensions import Service
from asyncrpc.runtime.links.link import Link
from tests.numerics.keepers import (
    Keeper,
    Keepers,
    Results,
    all_released,
    ask,
    assert_equal,
    group_of,
)

PROGRAMS = 60
STEPS_MAX = 12


@dataclass(eq=False)
class Node:
    """A result, or a tensor of a message, in the graph that a plan describes."""

    home: str
    made_of: list[Node] = field(default_factory=list)
    came_from: str = ""  # of a tensor of a message
    needs_gradient: bool = True


@dataclass(frozen=True)
class Step:
    """Ask a keeper for something, with tensors fetched before, each a (name, keys)."""

    on: str
    method: str
    args: tuple[Any, ...]
    fetched: tuple[tuple[str, list[int]], ...] = ()


class Plan:
    """What a program does; and the graph of what depends on what, by itself."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.names = "abcd"[: 1 + seed % 4]
        self.kept: list[Node] = []
        self.steps: list[Step] = []
        # With nothing handed round by `a`, most passes go through a worker once.
        kinds = ["fetch", "fetch", "constant"]
        if rng.random() < 0.5:
            kinds += ["hand round", "hand round", "cut off"]
        for _ in range(rng.randint(2, STEPS_MAX)):
            kind = rng.choice(kinds if self.kept else ["fetch", "constant"])
            getattr(self, "_" + kind.replace(" ", "_"))(rng.choice(self.names))
        self._fetch(rng.choice(self.names))  # at least one needs a gradient
        self.roots, self.root_nodes = self._draw_messages("a", 2, newest=True)

    def crossings(self) -> list[Node]:
        """Return the tensors of messages that the roots depend on."""
        found: dict[int, Node] = {}
        todo = [one for one in self.root_nodes if one.needs_gradient]
        while todo:
            node = todo.pop()
            if id(node) not in found:
                found[id(node)] = node
                todo += [one for one in node.made_of if one.needs_gradient]
        return [node for node in found.values() if node.came_from]

    def _constant(self, on: str) -> None:
        self.steps.append(Step(on, "constant", (len(self.kept), self.rng.random())))
        self.kept.append(Node(on, needs_gradient=False))

    def _fetch(self, on: str) -> None:
        here = [key for key, node in enumerate(self.kept) if node.home == on]
        own = self.rng.choices(here, k=self.rng.randint(0, 2)) if here else []
        away = [name for name in self.names if name != on]
        messages, nodes = self._draw_messages(on, self.rng.randint(0, 2), away)
        args = (len(self.kept), self.rng.randrange(2), own, messages)
        self.steps.append(Step(on, "compute", args))
        self.kept.append(Node(on, [*(self.kept[key] for key in own), *nodes]))

    def _hand_round(self, on: str) -> None:
        """Fetch tensors to `a`, which sends them on."""
        messages, nodes = self._draw_messages("a", self.rng.randint(1, 2))
        sent = self._message("a", on, nodes)
        args = (len(self.kept), self.rng.randrange(2))
        self.steps.append(Step(on, "take", args, tuple(messages)))
        self.kept.append(Node(on, sent))

    def _cut_off(self, on: str) -> None:
        (message, *_), _ = self._draw_messages("a", 1)
        args = (len(self.kept), self.rng.randrange(2))
        self.steps.append(Step(on, "cut_off", args, ((message[0], message[1][:1]),)))
        self.kept.append(Node(on))

    def _draw_messages(
        self, to: str, count: int, names: Any = None, *, newest: bool = False
    ) -> tuple[list[tuple[str, list[int]]], list[Node]]:
        """Draw what is fetched; return it, and the tensors as they arrive."""
        messages, nodes = [], []
        for _ in range(count):
            homes = {one.home for one in self.kept}
            homes &= set(self.names if names is None else names)
            if not homes:
                break
            name = self.kept[-1].home if newest else self.rng.choice(sorted(homes))
            keys = [key for key, one in enumerate(self.kept) if one.home == name]
            chosen = self.rng.choices(keys, k=self.rng.randint(1, 3))
            if newest:
                chosen.append(keys[-1])
            messages.append((name, chosen))
            nodes += self._message(name, to, [self.kept[key] for key in chosen])
        return messages, nodes

    @staticmethod
    def _message(source: str, to: str, tensors: list[Node]) -> list[Node]:
        """Return tensors as they arrive: one that is twice in a message, once."""
        arrived = {
            id(one): Node(to, [one], source, one.needs_gradient) for one in tensors
        }
        return [arrived[id(one)] for one in tensors]


async def fetch(k: Keepers, messages: Any) -> list[torch.Tensor]:
    found = [await ask(k[name], "give", *keys) for name, keys in messages]
    return [one for values in found for one in values]


async def run(plan: Plan, k: Keepers) -> torch.Tensor:
    """Run a plan; its root is made of all roots' elements."""
    for name in plan.names:
        await ask(k[name], "watch")
    for step in plan.steps:
        args = list(step.args)
        if step.method == "compute":
            args[-1] = [(k[name], keys) for name, keys in args[-1]]
        if step.fetched:
            values = await fetch(k, step.fetched)
            args.append(values if step.method == "take" else values[0])
        await ask(k[step.on], step.method, *args)
    return torch.cat(await fetch(k, plan.roots)).square().sum()


class Counting:
    """Autograd's service of a worker, which counts the gradients that come."""

    def __init__(self, service: Service) -> None:
        self.name = service.name
        self.service = service
        self.gradients = 0

    async def on_request(self, link: Link, method: str, value: Any) -> Any:
        if method == "advance":
            *_, keys, gradients, _history = value
            assert len(keys) == len(gradients)
            self.gradients += len(keys)
        return await self.service.on_request(link, method, value)

    def on_notice(self, link: Link, method: str, value: Any) -> None:
        self.service.on_notice(link, method, value)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        self.service.on_peer_lost(peer, reason)

    async def close(self) -> None:
        await self.service.close()


@contextmanager
def counting(workers: list[Worker]) -> Iterator[list[Counting]]:
    counters = [Counting(worker.service("autograd")) for worker in workers]
    for worker, counter in zip(workers, counters, strict=True):
        worker.add_service(counter)
    try:
        yield counters
    finally:
        for worker, counter in zip(workers, counters, strict=True):
            worker.add_service(counter.service)


async def on_workers(plan: Plan) -> tuple[torch.Tensor, Results, int]:
    """Return the root, what parameters got, and how many gradients travelled."""
    async with group_of(len(plan.names)) as (workers, keepers):
        async with context() as ctx:
            root = await run(plan, keepers)
            with counting(workers) as counters:
                await backward(ctx, root)
            found = {name: await ask(keepers[name], "report") for name in keepers}
        await all_released(workers)
    return root, found, sum(one.gradients for one in counters)


async def here(plan: Plan) -> tuple[torch.Tensor, Results]:
    keepers = {name: Keeper(seed) for seed, name in enumerate(plan.names)}
    root = await run(plan, keepers)
    root.backward()  # type: ignore[no-untyped-call]
    return root, {name: one.report_plain() for name, one in keepers.items()}


@pytest.mark.parametrize("seed", range(PROGRAMS))
async def test_a_random_program_has_the_gradients_of_one_process(seed: int) -> None:
    plan = Plan(seed)
    wanted_root, wanted = await here(plan)
    root, found, travelled = await on_workers(plan)
    torch.testing.assert_close(root, wanted_root, rtol=1e-12, atol=1e-12)
    assert_equal(found, wanted)
    assert travelled == len(plan.crossings())


def comes_back(ways: set[tuple[str, str]]) -> bool:
    """Say whether gradients go through some worker more than once."""
    for _ in range(len(ways)):
        ways = {one for one in ways if any(one[1] == other[0] for other in ways)}
    return bool(ways)


def test_the_plans_are_of_all_kinds() -> None:
    """Through each worker once or not, with parts that have nothing to do with it."""
    kinds = {"once": 0, "to and fro": 0, "with unused parts": 0}
    for seed in range(PROGRAMS):
        plan = Plan(seed)
        crossings = plan.crossings()
        is_cyclic = comes_back({(one.home, one.came_from) for one in crossings})
        kinds["to and fro" if is_cyclic else "once"] += len(plan.names) > 1
        made = {id(node) for one in crossings for node in one.made_of}
        kinds["with unused parts"] += any(id(one) not in made for one in plan.kept)
    assert min(kinds.values()) >= 10, kinds
