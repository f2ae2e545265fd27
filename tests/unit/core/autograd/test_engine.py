"""Graphs that run in segments, as if at once; a waiting thread lets others step."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from asyncrpc.core.autograd.engine import (
    Engine,
    Flow,
    Gradients,
    Keeping,
    is_apart,
    prepare,
)
from asyncrpc.core.autograd.functions import Region, following
from asyncrpc.core.autograd.inline import GradientLock, GradientsSetAside
from asyncrpc.core.autograd.machine import LocalPass

SEEDS = 150


class Own(torch.autograd.Function):
    """A node of the user's own, which counts how often it runs."""

    runs: ClassVar[Counter[int]] = Counter()

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, number: int) -> Any:
        ctx.number = number
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        Own.runs[ctx.number] += 1
        a, b = ctx.saved_tensors
        return gradients[0] * b, gradients[0] * a, None


class Program:
    """A random graph, of which some tensors are sent away."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)

        def vector() -> torch.Tensor:
            return torch.randn(3, dtype=torch.float64, generator=generator)

        self.parameters = [vector().requires_grad_() for _ in range(3)]
        tensors = list(self.parameters)
        for number in range(rng.randint(1, 14)):
            a, b = rng.choice(tensors), rng.choice(tensors)
            tensors.append(self._tensor(rng.randrange(7), a, b, number))
        inner = tensors[3:]
        self.hooked = rng.sample(inner, min(2, len(inner)))
        self.root, self.start = inner[-1], vector()
        self.sent = [rng.choice(inner) for _ in range(rng.randint(0, 4))]
        self.gradients = [vector() if rng.random() < 0.6 else None for _ in self.sent]

    def _tensor(  # noqa: PLR0911  (one for each kind)
        self, kind: int, a: torch.Tensor, b: torch.Tensor, number: int
    ) -> torch.Tensor:
        match kind:
            case 0:
                return a * b
            case 1:
                return a.cos()
            case 2:
                return torch.cat([a, b])[1:4]
            case 3:
                return a + b
            case 4:
                changed = a.clone()
                changed[1:] *= b[1:]  # in place, through a view
                return changed
            case 5:
                seen = a.view(3, 1).expand(3, 3)[:, 0]
                whole = a * b
                part = whole[:2]
                part.mul_(seen[:2])  # a view that others see changed
                return whole if number % 2 else torch.cat([part, whole])[:3]
            case _:
                own: torch.Tensor = Own.apply(a, b, number)  # type: ignore[no-untyped-call]
                return own

    def at_once(self) -> dict[int, torch.Tensor]:
        roots, gradients = [self.root], [self.start]
        for tensor, gradient in zip(self.sent, self.gradients, strict=True):
            if gradient is not None:
                roots.append(tensor)
                gradients.append(gradient)
        torch.autograd.backward(roots, gradients, retain_graph=True)
        gradients_found = {
            at: parameter.grad
            for at, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }
        for parameter in self.parameters:
            parameter.grad = None
        return gradients_found

    def in_segments(self, keeping: Keeping) -> Gradients:
        """Let the gradients of what was sent come one by one."""
        edges = dict(enumerate(map(get_gradient_edge, self.sent)))
        root = get_gradient_edge(self.root)
        region, flow, engine = Region(), Flow(), Engine()
        machine: LocalPass[int, Node] = LocalPass(
            following,
            region.nodes,
            {key: edge.node for key, edge in edges.items()},
            is_apart,
        )
        machine.add_root(-1, root.node)
        region.extend([root])
        arrived: dict[int, tuple[GradientEdge, torch.Tensor]] = {-1: (root, self.start)}

        def go_on() -> None:
            while (segment := machine.next_segment()) is not None:
                starts = [arrived[key] for key in segment.starts]
                engine.run(prepare(segment, starts, region, flow, keeping))

        machine.arrive([-1])
        go_on()
        coming = [key for key, leaf in enumerate(self.gradients) if leaf is not None]
        self.rng.shuffle(coming)
        for key in coming:
            machine.want([key])
            region.extend([edges[key]])
            gradient = self.gradients[key]
            assert gradient is not None
            arrived[key] = edges[key], gradient
            machine.arrive([key])
            go_on()
        machine.rule_out()
        go_on()
        assert machine.is_done
        assert not flow.entering
        assert all(parameter.grad is None for parameter in self.parameters)
        return flow.staged


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_segments_give_the_gradients_of_the_whole_graph(
    seed: int, *, create_graph: bool
) -> None:
    program = Program(seed)
    seen: list[tuple[int, torch.Tensor]] = []
    for at, tensor in enumerate([*program.hooked, *program.parameters]):

        def hook(gradient: torch.Tensor, at: int = at) -> torch.Tensor:
            seen.append((at, gradient.detach().clone()))
            return gradient.clamp(-0.7, 0.7) * 2  # not linear: the whole sum matters

        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    after: Counter[int] = Counter()
    for at, parameter in enumerate(program.parameters):
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _parameter, at=at: after.update([at])
        )
    Own.runs.clear()
    wanted = program.at_once()
    wanted_seen, seen[:] = sorted(seen, key=lambda event: event[0]), []
    wanted_after, wanted_runs = Counter(after), Counter(Own.runs)
    after.clear()
    Own.runs.clear()
    gradients = program.in_segments(Keeping(create_graph=create_graph))
    seen.sort(key=lambda event: event[0])
    assert [at for at, _ in seen] == [at for at, _ in wanted_seen]
    for (_, gradient), (_, other) in zip(seen, wanted_seen, strict=True):
        torch.testing.assert_close(gradient, other)
    assert after == wanted_after
    assert Own.runs == wanted_runs
    at_found = {
        at for at, parameter in enumerate(program.parameters) if parameter in gradients
    }
    assert at_found == wanted.keys()
    for at, gradient in wanted.items():
        torch.testing.assert_close(gradients[program.parameters[at]].detach(), gradient)


def grad_of(parameter: torch.Tensor) -> float | None:
    return None if parameter.grad is None else parameter.grad.item()


def test_waiting_thread_sets_its_gradients_aside_for_other_threads() -> None:
    lock, parameter = GradientLock(), torch.ones((), requires_grad=True)
    parameter.grad = torch.tensor(1.0)
    seen: list[float | None] = []

    def other() -> None:
        with lock, GradientsSetAside(lock, [parameter], [torch.tensor(7.0)]):
            seen.append(grad_of(parameter))
        seen.append(grad_of(parameter))
        parameter.grad = torch.tensor(3.0)

    with lock, lock, GradientsSetAside(lock, [parameter], [torch.tensor(5.0)]):
        assert lock.is_held_here
        token = lock.give_up()
        assert not lock.is_held_here
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        lock.take_back(token)
        assert lock.is_held_here
        assert grad_of(parameter) == 5.0
    assert not lock.is_held_here
    assert seen == [7.0, 1.0]
    assert grad_of(parameter) == 3.0


def test_failed_change_leaves_gradients_alone() -> None:
    lock = GradientLock()
    first, second = torch.ones(1, requires_grad=True), torch.ones(2, requires_grad=True)
    with lock:
        try:
            with GradientsSetAside(lock, [first, second], [torch.ones(1)] * 2):
                raise AssertionError("a gradient of another shape was taken")
        except RuntimeError:
            pass
    assert first.grad is None
    assert second.grad is None
    assert lock.changes == []
