"""What the steps of a program do, on a worker or in one process.

A station does not know which it is: it asks others, keeps references and goes backward
by the functions of `ask` to `go_backward`.  In one process a message is a copy of each
tensor in it (`Crossing`), which is what a worker sees of another's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.autograd.graph import Node, get_gradient_edge

import asyncrpc
from asyncrpc import RRef
from asyncrpc.autograd import backward, current_context
from tests.numerics.programs import language as steps

Maybe = torch.Tensor | None
Gradients = list[torch.Tensor]
CLAMP: Final = 0.25
DTYPES: Final = {
    "double": torch.float64,
    "complex": torch.complex128,
    "bfloat16": torch.bfloat16,
}


@dataclass
class Report:
    """What one station has at the end.

    Attributes:
        gradients: of its parameters, by slot.
        seen: what hooks saw, each time, by their number.  Where there is no gradient at
            all one process calls hooks with None, and workers do not: not noted.
        values: all slots.
        are_needed: whether the slots require gradients.
    """

    gradients: dict[int, Maybe]
    seen: dict[int, Gradients]
    values: dict[int, torch.Tensor]
    are_needed: dict[int, bool]


class Station:
    """Keeps tensors in slots, and does the steps of one worker."""

    def __init__(self, name: str, world: OneProcess | None = None) -> None:
        self.name = name
        self.world = world
        self.others: Mapping[str, Any] = {}
        self.slots: dict[int, torch.Tensor] = {}
        self.boxes: dict[int, Any] = {}
        self.parameters: dict[int, torch.Tensor] = {}
        self.seen: dict[int, Gradients] = {}
        self.nodes: list[Node] = []  # a leaf does not keep its node, nor so its hooks

    def meet(self, others: Mapping[str, Any]) -> None:
        self.others = others

    def part(self) -> None:
        """Let go of the others, which hold this one."""
        self.others = {}
        self.boxes.clear()

    async def do(self, step: steps.Step) -> None:
        done = STEPS[type(step)](self, step)
        if inspect.isawaitable(done):
            await done

    async def report(self) -> Report:
        """Say what the caller's context has, once no pass runs here."""
        service: Any = asyncrpc.current_worker().parts.service("autograd")
        assert all(parameter.grad is None for parameter in self.parameters.values())
        return self.report_of(await service.gathered(current_context().id))

    def report_of(self, gathered: Mapping[torch.Tensor, torch.Tensor]) -> Report:
        return Report(
            {
                slot: gathered.get(parameter)
                for slot, parameter in self.parameters.items()
            },
            self.seen,
            {slot: value.detach() for slot, value in self.slots.items()},
            {slot: value.requires_grad for slot, value in self.slots.items()},
        )

    # --- what others ask for ---------------------------------------------------------

    def give(self, slots: Sequence[int]) -> list[torch.Tensor]:
        return [self.slots[slot] for slot in slots]

    def take(self, slots: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        self.slots.update(zip(slots, values, strict=True))

    def mixed(self, own: Sequence[int], values: Sequence[torch.Tensor]) -> torch.Tensor:
        return mix([*self.give(own), *values])

    def hold(self, box: int, reference: Any) -> None:
        self.boxes[box] = reference

    async def pass_on(
        self, way: Sequence[tuple[str, int]], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        (_, slot), *rest = way
        mixed = [mix([self.slots[slot], value]) for value in values]
        if rest:
            mixed = await ask(self, self.others[rest[0][0]], "pass_on", rest, mixed)
        return [mix([value, self.slots[slot]]) for value in mixed]


# --- the functions of a program ------------------------------------------------------


def fit(value: torch.Tensor) -> torch.Tensor:
    """Return a double of the usual shape.

    It is made of a copy, so that the slot may be changed in place later.
    """
    copied = value.clone()
    if copied.is_complex():
        copied = copied.real + copied.imag.cos()
    flat = copied.to(torch.float64).reshape(-1)
    repeats = -(-6 // flat.numel())
    return flat.repeat(repeats)[:6].reshape(steps.SHAPE)


def mix(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return something of all values that is never large, nor saved by its own node."""
    result = torch.full(steps.SHAPE, 0.5, dtype=torch.float64)
    for place, value in enumerate(values):
        fitted = fit(value)
        result = torch.tanh(result * fitted.cos() + (1 + place) / 2 * fitted)
    return result.clone()


def turned(value: torch.Tensor, into: str) -> torch.Tensor:
    fitted = fit(value)
    if into == "sum":
        return fitted.sum()
    if into == "complex":
        return torch.complex(fitted, fitted.cos())
    return (fitted.to(DTYPES[into]) * 1.5).clone()


def like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return `value` in the shape and dtype of `other`."""
    flat = fit(value).reshape(-1)
    repeats = -(-other.numel() // flat.numel())
    flat = flat.repeat(repeats)[: other.numel()].reshape(other.shape)
    return (
        torch.complex(flat, flat.cos()) if other.is_complex() else flat.to(other.dtype)
    )


def drawn(slot: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(slot)
    return torch.randn(steps.SHAPE, dtype=DTYPES[kind], generator=generator)


def gradient_for(root: torch.Tensor) -> torch.Tensor:
    ramp = torch.linspace(0.5, 1.5, root.numel(), dtype=torch.float64)
    return like(ramp, root.detach())


class DeafSum(torch.autograd.Function):
    """The sum of two, with a nil gradient for the first."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(value=False)
        return value + other

    @staticmethod
    def backward(_: Any, *gradients: Maybe) -> tuple[None, Maybe]:
        return None, gradients[0]


# --- steps of one station ------------------------------------------------------------


def _parameter(at: Station, step: steps.Parameter) -> None:
    parameter = drawn(step.to, step.kind).requires_grad_()
    at.slots[step.to] = at.parameters[step.to] = parameter


def _constant(at: Station, step: steps.Constant) -> None:
    at.slots[step.to] = drawn(step.to, step.kind)


def _mix(at: Station, step: steps.Mix) -> None:
    at.slots[step.to] = mix(at.give(step.of))


def _turn(at: Station, step: steps.Turn) -> None:
    at.slots[step.to] = turned(at.slots[step.of], step.into)


def _rows(at: Station, step: steps.Rows) -> None:
    rows = torch.nn.functional.embedding(
        torch.tensor([1, 0, 1]), at.slots[step.of], sparse=True
    )
    at.slots[step.to] = rows.sin().clone()


def _deaf(at: Station, step: steps.Deaf) -> None:
    value, other = fit(at.slots[step.value]), fit(at.slots[step.other])
    total: torch.Tensor = DeafSum.apply(value, other)  # type: ignore[no-untyped-call]
    at.slots[step.to] = total.clone()


def _detach(at: Station, step: steps.Detach) -> None:
    at.slots[step.to] = at.slots[step.of].detach().clone()


VIEWS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "transpose": lambda value: value.mT,
    "row": lambda value: value[0],
    "columns": lambda value: value[..., 1:],
    "conj": torch.conj,
    "real": lambda value: value.real,
    "imag": lambda value: value.imag,
}


def _view(at: Station, step: steps.View) -> None:
    at.slots[step.to] = VIEWS[step.how](at.slots[step.of])


def _change(at: Station, step: steps.Change) -> None:
    changed, by = at.slots[step.of], at.slots[step.by]
    # A view of what was changed by something with a history learns of that only when it
    # is looked at: unless it is, torch 2.13 takes it for a leaf and refuses the change.
    _ = changed.grad_fn
    if step.how == "mul":
        changed.mul_(like(by, changed).cos())
    elif step.how == "add":
        changed.add_(like(by, changed))
    else:
        changed[0] = like(by, changed[0])


def _hook(at: Station, step: steps.Hook) -> None:
    tensor, seen = at.slots[step.of], at.seen.setdefault(step.number, [])
    if step.how in ("accumulated", "halve"):
        _hook_accumulated(tensor, seen, step.how)
    elif step.how in ("before", "after"):
        at.nodes.append(_hook_node(tensor, seen, step.how))
    else:
        _hook_gradient(tensor, seen, step.how)


def _hook_gradient(tensor: torch.Tensor, seen: Gradients, how: str) -> None:
    def on_gradient(gradient: Maybe) -> Maybe:
        if gradient is None:
            return None
        seen.append(gradient.clone())
        if how == "look":
            return None
        return gradient * 2 if how == "double" else gradient.clamp(-CLAMP, CLAMP)

    # torch crashes if it finds only then that a view's base has been changed.
    assert tensor.grad_fn is not None or tensor.is_leaf
    tensor.register_hook(on_gradient)  # type: ignore[no-untyped-call]


def _hook_accumulated(tensor: torch.Tensor, seen: Gradients, how: str) -> None:
    def on_accumulated(leaf: torch.Tensor) -> None:
        if leaf.grad is None:
            return
        seen.append(leaf.grad.clone())
        if how == "halve":
            leaf.grad = leaf.grad * 0.5  # another hook may have the tensor itself

    tensor.register_post_accumulate_grad_hook(on_accumulated)  # type: ignore[no-untyped-call]


def _hook_node(tensor: torch.Tensor, seen: Gradients, how: str) -> Node:
    def on_node(*gradients: Sequence[Maybe]) -> None:
        (gradient,) = gradients[-1]
        if gradient is not None:
            seen.append(gradient.clone())

    node = get_gradient_edge(tensor).node
    if how == "before":
        node.register_prehook(on_node)
    else:
        node.register_hook(on_node)
    return node


# --- steps between stations ----------------------------------------------------------


async def _fetch(at: Station, step: steps.Fetch) -> None:
    at.take(step.to, await ask(at, at.others[step.source], "give", step.of))


async def _send(at: Station, step: steps.Send) -> None:
    await ask(at, at.others[step.target], "take", step.to, at.give(step.of))


async def _relay(at: Station, step: steps.Relay) -> None:
    first = at.others[step.way[0][0]]
    at.take(step.to, await ask(at, first, "pass_on", step.way, at.give(step.of)))


async def _remote(at: Station, step: steps.Remote) -> None:
    owner = at.others[step.owner]
    box = await remote(at, owner, "mixed", step.own, at.give(step.of))
    at.hold(step.box, box)


async def _share(at: Station, step: steps.Share) -> None:
    await ask(at, at.others[step.target], "hold", step.box, at.boxes[step.box])


async def _to_here(at: Station, step: steps.ToHere) -> None:
    at.slots[step.to] = await fetched(at, at.boxes[step.box])


async def _method(at: Station, step: steps.Method) -> None:
    answer = await ask(at, at.boxes[step.box], "mul", at.slots[step.of])
    at.slots[step.to] = answer


async def _pass(at: Station, step: steps.Pass) -> None:
    roots = [at.slots[slot] for slot, _ in step.roots]
    gradients = [
        gradient_for(root) if is_given else None
        for root, (_, is_given) in zip(roots, step.roots, strict=True)
    ]
    await go_backward(at, roots, gradients, retain_graph=step.retain_graph)


STEPS: Final[Mapping[type, Callable[[Station, Any], Any]]] = {
    steps.Parameter: _parameter,
    steps.Constant: _constant,
    steps.Mix: _mix,
    steps.Turn: _turn,
    steps.Rows: _rows,
    steps.Deaf: _deaf,
    steps.Detach: _detach,
    steps.View: _view,
    steps.Change: _change,
    steps.Hook: _hook,
    steps.Fetch: _fetch,
    steps.Send: _send,
    steps.Relay: _relay,
    steps.Remote: _remote,
    steps.Share: _share,
    steps.ToHere: _to_here,
    steps.Method: _method,
    steps.Pass: _pass,
}


# --- the same on workers and in one process ------------------------------------------


async def ask(at: Station, other: Any, method: str, *args: Any) -> Any:
    """Call a method of what is referred to, by a message."""
    if isinstance(other, RRef):
        return await getattr(other.rpc_async(), method)(*args)
    return await other.ask(at, method, args)


async def remote(at: Station, other: Any, method: str, *args: Any) -> Any:
    """Have a method called there, and refer to its result once it is made."""
    if not isinstance(other, RRef):
        return await other.remote(at, method, args)
    reference = getattr(other.remote(), method)(*args)
    await reference.rpc_async().dim()
    return reference


async def fetched(at: Station, box: Any) -> Any:
    return await (box.to_here() if isinstance(box, RRef) else box.to_here(at))


async def go_backward(
    at: Station,
    roots: list[torch.Tensor],
    gradients: list[Maybe],
    *,
    retain_graph: bool,
) -> None:
    if at.world is not None:
        at.world.go_backward(roots, gradients, retain_graph=retain_graph)
    else:
        await backward(current_context(), roots, retain_graph, gradients=gradients)


# --- one process ---------------------------------------------------------------------


@dataclass
class OneProcess:
    """What is in common to the stations of one process.

    Attributes:
        stations: by name.
        crossed: tensors in messages that require a gradient.
        travelled: those of them that took part in a pass, once for each pass.
        flows: pairs of stations between which gradients went, each (from, to).
        gradients: gathered over all passes.
    """

    stations: dict[str, Station] = field(default_factory=dict)
    crossed: int = 0
    travelled: int = 0
    flows: set[tuple[str, str]] = field(default_factory=set)
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def go_backward(
        self, roots: list[torch.Tensor], gradients: list[Maybe], *, retain_graph: bool
    ) -> None:
        """Run a pass, whose hooks see its own gradients and not what was before."""
        torch.autograd.backward(roots, gradients, retain_graph=retain_graph)
        for station in self.stations.values():
            for parameter in station.parameters.values():
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None:
                    self.gradients[parameter] = added(
                        self.gradients.get(parameter), gradient
                    )


def added(gradient: Maybe, other: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        return other
    # A dense tensor can be added to a sparse one only from this side.
    return other + gradient if gradient.is_sparse else gradient + other


class Message:
    """A message in one process; a tensor that is in it twice arrives once."""

    def __init__(self, source: Station, target: Station) -> None:
        self.source = source
        self.target = target
        self._memo: dict[int, torch.Tensor] = {}

    def arrived(self, value: Any) -> Any:
        """Return what the target gets."""
        if isinstance(value, list | tuple):
            return [self.arrived(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        arrival = self._memo.get(id(value))
        if arrival is None:
            arrival = self._copy(value) if value.requires_grad else value.clone()
            self._memo[id(value)] = arrival
        return arrival

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        self.world.crossed += 1
        copy: torch.Tensor = Crossing.apply(value, self)  # type: ignore[no-untyped-call]
        return copy

    def on_gradient(self) -> None:
        self.world.travelled += 1
        self.world.flows.add((self.target.name, self.source.name))

    @property
    def world(self) -> OneProcess:
        assert self.source.world is not None
        return self.source.world


class Crossing(torch.autograd.Function):
    """A tensor of a message in one process: a copy, and a count of what comes back."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, message: Message) -> torch.Tensor:
        ctx.message = message
        ctx.set_materialize_grads(value=False)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Maybe) -> tuple[Maybe, None]:
        ctx.message.on_gradient()
        return gradients[0], None


@dataclass
class Here:
    """Something of a station in one process, as others refer to it."""

    owner: Station
    value: Any

    async def ask(self, at: Station, method: str, args: Any) -> Any:
        result = await self._call(at, method, args)
        return Message(self.owner, at).arrived(result)

    async def remote(self, at: Station, method: str, args: Any) -> Here:
        return Here(self.owner, await self._call(at, method, args))

    async def to_here(self, at: Station) -> Any:
        if at is self.owner:
            return self.value
        return Message(self.owner, at).arrived(self.value)

    async def _call(self, at: Station, method: str, args: Any) -> Any:
        arguments = Message(at, self.owner).arrived(args)
        result = getattr(self.value, method)(*arguments)
        return await result if inspect.isawaitable(result) else result
