"""Values of every kind arrive as pickle would bring them, whichever way they are sent.

And their gradients come back, or an error names what loses them.  `tests/values.py` has
the kinds; a way sends them one by one, and all contents in each container.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ClassVar, Final, TypeAlias

import pytest
import torch
import uvloop
from torch import nn

from asyncrpc import Worker, autograd
from asyncrpc.errors import EncodeError
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core.groups import processes
from tests.values import CONTAINERS, CONTENTS, SOURCES, Wrapper, one_rank, shown

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's new kinds

# Sends a value to another worker, or has it sent from there; returns what arrived.
Way: TypeAlias = Callable[[Worker, Any], Awaitable[Any]]

BY_HASH: Final = frozenset({"set", "frozenset", "key"})
NEEDS_A_GROUP: Final = frozenset(name for name in CONTENTS if "DTensor" in name)


class Shelf:
    """What one end leaves for the other, in this process."""

    value: Any = None


def put(value: Any = None, *, keyword: Any = None) -> None:
    Shelf.value = value if keyword is None else keyword


def take() -> Any:
    return Shelf.value


async def take_items() -> Any:
    yield 1
    yield Shelf.value


def own(parameter: nn.Parameter) -> nn.Parameter:
    return parameter


def contained_values() -> dict[str, Any]:
    tensor = torch.ones(2)
    values = {name: make(tensor) for name, (make, _) in CONTAINERS.items()}
    del values["itself"], values["iterator"]
    return {**values, "size": torch.Size([2, 3]), "dtype": torch.float16}


class Keeping(torch.optim.SGD):
    """Keeps a value of each kind in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(contained_values())


def fail() -> None:
    raise ValueError(Shelf.value)


class Shelves:
    """A value with methods."""

    def put(self, value: Any) -> None:
        Shelf.value = value

    def take(self) -> Any:
        return Shelf.value


class Holding(nn.Module):
    """A module that holds a value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.held = [value]
        Shelf.value = value

    def forward(self) -> Any:
        return self.held[0]


async def as_argument(a: Worker, value: Any) -> Any:
    await a.peer("b").call(put, value)
    return Shelf.value


async def as_keyword(a: Worker, value: Any) -> Any:
    await a.peer("b").call(put, keyword=value)
    return Shelf.value


async def as_result(a: Worker, value: Any) -> Any:
    Shelf.value = value
    return await a.peer("b").call(take)


async def as_item(a: Worker, value: Any) -> Any:
    Shelf.value = value
    return [item async for item in a.peer("b").stream(take_items)][1]


async def as_referenced_value(a: Worker, value: Any) -> Any:
    Shelf.value = value
    return await a.peer("b").remote(take).to_here()


async def as_argument_of_remote(a: Worker, value: Any) -> Any:
    await a.peer("b").remote(put, value).to_here()
    return Shelf.value


async def as_argument_of_a_method(a: Worker, value: Any) -> Any:
    shelves: Any = a.peer("b").remote(Shelves)
    await shelves.rpc_async().put(value)
    return Shelf.value


async def as_result_of_a_method(a: Worker, value: Any) -> Any:
    Shelf.value = value
    shelves: Any = a.peer("b").remote(Shelves)
    return await shelves.remote().take().to_here()


async def in_an_error(a: Worker, value: Any) -> Any:
    Shelf.value = value
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (its text is the value's)
        await a.peer("b").call(fail)
    return caught.value.args[0]


async def in_a_module(a: Worker, value: Any) -> Any:
    await a.peer("b").call(put, Holding(value))
    return Shelf.value.held[0]


async def in_a_remote_module(a: Worker, value: Any) -> Any:
    with acting_as(a):
        module = await RemoteModule("b", Holding, args=(value,))
        return await module.forward_async()


WAYS: Final[dict[str, Way]] = {
    way.__name__: way
    for way in (
        *(as_argument, as_keyword, as_argument_of_remote, as_argument_of_a_method),
        *(as_result, as_item, as_referenced_value, as_result_of_a_method),
        *(in_an_error, in_a_module, in_a_remote_module),
    )
}


def contents(*, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return a value of each kind."""
    return {name: make() for name, make in CONTENTS.items() if name not in without}


def contained(values: dict[str, Any], container: str) -> dict[str, tuple[Any, Any]]:
    """Return each value in a container, and beside it."""
    return {
        name: (CONTAINERS[container][0](value), value)
        for name, value in values.items()
        if container not in BY_HASH or is_hashable(value)
    }


def check(got: Any, sent: Any, container: str, like: dict[str, Any]) -> None:
    for name, (outer, beside) in got.items():
        where = f"{name} in {container}"
        inner = CONTAINERS[container][1](outer)
        assert type(outer) is type(sent[name][0]), where
        assert shown(inner) == like[name], where
        if isinstance(beside, torch.Tensor):
            assert inner is beside, where


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def returned(value: Any) -> Any:
    return value


# --- gradients -----------------------------------------------------------------------


def gradient_sources() -> Iterator[tuple[str, str]]:
    for container in CONTAINERS:
        for source in SOURCES:
            yield container, source


def summed(value: Any, container: str) -> torch.Tensor:
    tensor = CONTAINERS[container][1](value)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        total: torch.Tensor = (tensor.to_dense() * 3).sum()
    return total


def boxed(leaf: torch.Tensor, container: str, source: str) -> Any:
    return CONTAINERS[container][0](SOURCES[source](leaf))


async def boxed_items(leaf: torch.Tensor, container: str, source: str) -> Any:
    yield boxed(leaf, container, source)


class Summing:
    def summed(self, value: Any, container: str) -> torch.Tensor:
        return summed(value, container)


async def sum_of_argument(a: Worker, leaf: torch.Tensor, *names: str) -> torch.Tensor:
    return await a.peer("b").call(summed, boxed(leaf, *names), names[0])


async def sum_by_keyword(a: Worker, leaf: torch.Tensor, *names: str) -> torch.Tensor:
    return await a.peer("b").call(summed, value=boxed(leaf, *names), container=names[0])


async def sum_of_result(a: Worker, leaf: torch.Tensor, *names: str) -> torch.Tensor:
    value: Any = await a.peer("b").call(boxed, leaf, *names)
    return summed(value, names[0])


async def sum_of_item(a: Worker, leaf: torch.Tensor, *names: str) -> torch.Tensor:
    items = [x async for x in a.peer("b").stream(boxed_items, leaf, *names)]
    return summed(items[0], names[0])


async def sum_of_reference(a: Worker, leaf: torch.Tensor, *names: str) -> torch.Tensor:
    return summed(await a.peer("b").remote(boxed, leaf, *names).to_here(), names[0])


async def sum_by_method(a: Worker, leaf: torch.Tensor, *names: str) -> torch.Tensor:
    rref: Any = a.peer("b").remote(Summing)
    total: torch.Tensor = await rref.rpc_async().summed(boxed(leaf, *names), names[0])
    return total


SUMS: Final = {
    way.__name__: way
    for way in (
        *(sum_of_argument, sum_by_keyword, sum_by_method),
        *(sum_of_result, sum_of_item, sum_of_reference),
    )
}


class TestOnOneLoop:
    """What arrives does not depend on the loop."""

    loops: ClassVar = {"uvloop": uvloop.new_event_loop}

    @pytest.mark.parametrize("way", WAYS)
    async def test_value_arrives_unchanged_by_every_way(self, way: str) -> None:
        with one_rank():
            values = contents()
            like = {name: shown(value) for name, value in values.items()}
            async with Cluster(2) as (a, _):
                for name, value in values.items():
                    assert shown(await WAYS[way](a, value)) == like[name], name
                for container in CONTAINERS:
                    sent = contained(values, container)
                    check(await WAYS[way](a, sent), sent, container, like)
            Shelf.value = None

    async def test_values_arrive_unchanged_between_processes(self) -> None:
        """There and back, so that the other process has to build and to send each."""
        values = contents(without=NEEDS_A_GROUP)
        like = {name: shown(value) for name, value in values.items()}
        async with processes("b") as a:
            for container in CONTAINERS:
                sent = contained(values, container)
                check(await a.peer("b").call(returned, sent), sent, container, like)

    @pytest.mark.parametrize("way", SUMS)
    async def test_gradient_comes_back_by_every_way(self, way: str) -> None:
        async with Cluster(2) as (a, _):
            with acting_as(a):
                for container, source in gradient_sources():
                    leaf = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
                    async with autograd.context() as ctx:
                        loss = await SUMS[way](a, leaf, container, source)
                        await autograd.backward(ctx, loss)
                        gradient = autograd.get_gradients(ctx).get(leaf)
                    assert gradient is not None, (container, source)
                    assert gradient.tolist() == [3.0] * 3, (container, source)

    @pytest.mark.parametrize(
        "container", ["list", "dataclass", "Mylist", "round about"]
    )
    async def test_tensor_that_loses_its_gradient_is_named_by_every_way(
        self, container: str
    ) -> None:
        make = CONTAINERS[container][0]
        words = "a Wrapper that requires a gradient"
        async with Cluster(2) as (a, _):
            with acting_as(a):
                async with autograd.context():
                    value = make(Wrapper(torch.ones(3, requires_grad=True)))
                    Shelf.value = value
                    for sent in (
                        lambda: a.peer("b").call(put, value),
                        lambda: a.peer("b").call(put, keyword=value),
                        lambda: a.peer("b").call(take),
                        lambda: a.peer("b").remote(put, value).to_here(),
                        lambda: a.peer("b").remote(take).to_here(),
                        lambda: as_item(a, value),
                        lambda: as_argument_of_a_method(a, value),
                        lambda: as_result_of_a_method(a, value),
                    ):
                        with pytest.raises(EncodeError, match=re.escape(words)):
                            await sent()
            Shelf.value = None

    async def test_the_state_of_an_optimizer_has_its_containers(self) -> None:
        """Except a dict or list within itself, which is an OptimizerError."""
        parameter = nn.Parameter(torch.ones(2))
        async with Cluster(2) as (a, _):
            with acting_as(a):
                reference = a.peer("b").remote(own, parameter)
                optimizer = await DistributedOptimizer(Keeping, [reference], lr=0.1)
                async with autograd.context() as ctx:
                    await autograd.backward(ctx, (await reference.to_here()).sum())
                    await optimizer.step(ctx)
                state = await optimizer.state_dict()
        for name, value in contained_values().items():
            copied = state["state"][0][name]
            assert type(copied) is type(value), name
            if name in CONTAINERS:
                assert CONTAINERS[name][1](copied).tolist() == [1.0, 1.0], name
            else:
                assert copied == value
