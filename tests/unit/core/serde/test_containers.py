"""What is in a value arrives as pickle would bring it: class, identity, attributes.

Each tensor that requires a gradient arrives with its gradient, or the sender learns
that it cannot.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import copy
import datetime as dt
import enum
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asyncrpc.core.serde import Codec, FunctionTable, Policy
from asyncrpc.errors import EncodeError
from tests.unit.core.serde.loopback import TRUSTED, received, round_trip
from tests.values import (
    CONTAINERS,
    CONTENTS,
    SOURCES,
    Boxed,
    Manifold,
    MyList,
    Plain,
    Row,
    Wrapper,
    one_rank,
    shown,
    tagged,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's new kinds


@pytest.mark.parametrize("content", CONTENTS)
def test_value_survives_any_container(content: str) -> None:
    with one_rank() if "DTensor" in content else contextlib.nullcontext():
        for name, (make, get) in CONTAINERS.items():
            value = CONTENTS[content]()
            try:
                hash(value)
            except TypeError:
                if name in {"set", "frozenset", "key"}:
                    continue
            container = make(value)
            got = round_trip([container, value, (value,)])
            assert type(got[0]) is type(container), name
            inner = get(got[0])
            assert shown(inner) == shown(value), name
            if not isinstance(value, VALUES_ALONE):
                assert inner is got[1] is got[2][0], name


# Nobody can tell two of them apart, so they may arrive as two.
VALUES_ALONE = np.generic, torch.Size, torch.dtype


def crossed(value: Any) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """Send a value in a context; return it, and the tensors at either end."""
    encoded = TRUSTED.encode(value)
    assert encoded.loses_gradient is None or encoded.loses_gradient() is None
    entered: list[torch.Tensor] = []

    def on_gradient(tensor: torch.Tensor) -> torch.Tensor:
        entered.append(tensor.requires_grad_())
        return tensor * 1

    got = TRUSTED.decode(encoded.control, received(encoded), on_gradient=on_gradient)
    return got, encoded.gradient_tensors, entered


def gradient_through(
    got: torch.Tensor, sent: list[torch.Tensor], entered: list[torch.Tensor]
) -> None:
    (got * 3).sum().backward()  # type: ignore[no-untyped-call]
    torch.autograd.backward(sent, [each.grad for each in entered])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("container", CONTAINERS)
def test_gradient_returns_from_any_container(container: str, source: str) -> None:
    make, get = CONTAINERS[container]
    leaf = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    tensor = SOURCES[source](leaf)
    got_value, sent, entered = crossed(make(tensor))
    got = get(got_value)
    assert getattr(got, "tag", None) == getattr(tensor, "tag", None)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        gradient_through(got.to_dense(), sent, entered)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0, 3.0, 3.0]


def test_gradient_of_a_jagged_tensor_returns() -> None:
    rows = [torch.ones(2, 3, requires_grad=True), torch.ones(1, 3, requires_grad=True)]
    value = Plain(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    got, sent, entered = crossed(value)
    gradient_through(got.x.values(), sent, entered)
    assert [row.grad.sum().item() for row in rows if row.grad is not None] == [18, 9]


def test_tensor_that_loses_its_gradient_is_named() -> None:
    wrapper = Wrapper(torch.ones(3, requires_grad=True))
    encoded = TRUSTED.encode(([0, Plain(wrapper)], {}), labels=("args", "kwargs"))
    assert encoded.loses_gradient is not None
    text = encoded.loses_gradient()
    assert text is not None
    assert text.startswith("args[1].x: a Wrapper that requires a gradient")
    assert "detach()" in text


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.manifold = Manifold(torch.ones(2))
        self.sharded = nn.Parameter(Wrapper(torch.ones(2, requires_grad=True)))
        tagged(self.linear.weight)


def test_parameters_of_a_module_are_leaves_in_a_context() -> None:
    model = Model()
    got, sent, entered = crossed(Plain(model))
    assert not sent
    assert not entered
    names = [name for name, _ in got.x.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert all(p.is_leaf and p.requires_grad for p in got.x.parameters())
    assert got.x.linear.weight.tag == {"is_expert": True}
    assert type(got.x.manifold) is Manifold


@pytest.mark.parametrize("first", [True, False])
def test_parameter_beside_its_module_stays_the_same_or_is_refused(
    first: bool,  # noqa: FBT001
) -> None:
    model = nn.Linear(2, 2)
    value = [model.weight, model] if first else [model, model.weight]
    encoded = TRUSTED.encode((value, {}), labels=("args", "kwargs"))
    (args, _) = TRUSTED.decode(encoded.control, received(encoded))
    weight, module = args if first else args[::-1]
    assert module.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert encoded.loses_gradient is not None
    text = encoded.loses_gradient() or ""
    assert text.startswith(f"args[{0 if first else 1}]: a Parameter")
    assert not encoded.gradient_tensors


# --- identity and plain values -------------------------------------------------------


class Kind(enum.Enum):
    A = 1


MUTABLE: list[Callable[[], Any]] = [
    list,
    dict,
    set,
    bytearray,
    lambda: MyList([1]),
    lambda: Plain(1),
    lambda: np.ones(3),
    lambda: torch.ones(3),
    lambda: collections.deque([1]),
    lambda: ValueError("x"),
]


@pytest.mark.parametrize("make", MUTABLE)
def test_repeated_value_arrives_as_one_object(make: Callable[[], Any]) -> None:
    thing = make()
    for value in ([thing, thing], [[thing], {"a": [thing]}], [Plain(thing), [thing]]):
        got = round_trip(value)
        flat = [got[0], got[1]]
        if value[0] is not thing:
            first = got[0].x if isinstance(got[0], Plain) else got[0][0]
            second = got[1]["a"][0] if isinstance(got[1], dict) else got[1][0]
            flat = [first, second]
        assert flat[0] is flat[1]
        assert type(flat[0]) is type(thing)


def test_list_in_two_arguments_arrives_as_one_object() -> None:
    same = [1]
    args, kwargs = round_trip([[same, 2, same], {"key": same}])
    assert args[0] is args[2] is kwargs["key"]


@pytest.mark.parametrize("tail", [[], [Plain(1)]])
def test_list_that_contains_itself_arrives_so(tail: list[Any]) -> None:
    loop: list[Any] = [*tail]
    loop.append(loop)
    got = round_trip([1, loop])[1]
    assert got[-1] is got


BULK: dict[str, list[Any]] = {
    "tuples": [(index, index) for index in range(5000)],
    "rows": [Row(float(index)) for index in range(5000)],
    "transitions": [(torch.ones(2) * index, index, 0.5) for index in range(300)],
    "numpy scalars": list(np.arange(5000)),
    "dates": [dt.datetime(2024, 1, 1, tzinfo=dt.UTC)] * 5000,
    "long integers": [1 << 70] * 5000,
    "floats": [float(index) for index in range(5000)],
    "text": [str(index) for index in range(5000)],
    "sets": [{index} for index in range(300)],
    "enums": [Kind.A] * 100,
    "mixed": [None, 1, 2.0, "a", b"b", (1,), {2}, Kind.A, Row(1)] * 700,
}


@pytest.mark.parametrize("name", BULK)
def test_bulk_values_arrive_unchanged(name: str) -> None:
    value = BULK[name]
    got = round_trip(value)
    assert [type(each) for each in got] == [type(each) for each in value]
    if name == "transitions":
        assert all(torch.equal(a[0], b[0]) for a, b in zip(got, value, strict=True))
    else:
        assert got == value


@pytest.mark.parametrize("name", ["tuples", "numpy scalars", "long integers", "sets"])
def test_peer_without_pickle_gets_bulk_values(name: str) -> None:
    value = BULK[name]
    encoded = TRUSTED.encode(value, pickles=False)
    strict = Codec(FunctionTable(Policy.STRICT))
    assert strict.decode(encoded.control, received(encoded)) == value


def test_bulk_rows_are_one_pickle() -> None:
    encoded = TRUSTED.encode(BULK["rows"])
    assert len(encoded.buffers) == 1
    assert encoded.buffers[0].nbytes < 2 * len(pickle.dumps(BULK["rows"], 5))


def test_object_with_its_own_dispatch_table_is_copied_by_it() -> None:
    copied = copy.deepcopy(Boxed([1]))
    assert round_trip([copied, copied])[0] == copied


def test_future_must_be_awaited() -> None:
    async def work() -> None: ...

    loop = asyncio.new_event_loop()
    coroutine = work()
    futures = [
        loop.create_future(),
        concurrent.futures.Future[int](),
        torch.futures.Future(),
        coroutine,
    ]
    for future in futures:
        for value in ([future], [Plain(future)]):
            with pytest.raises(EncodeError, match="await it"):
                TRUSTED.encode(value)
    coroutine.close()
    loop.close()


def test_value_sent_in_a_pickle_dies_with_its_last_reference() -> None:
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    gc.disable()  # nothing waits for the collector
    try:
        encoded = TRUSTED.encode([[tensor, object()], {}], labels=("args", "kwargs"))
        assert encoded.buffers
        del tensor, encoded
        assert gone() is None
    finally:
        gc.enable()


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale


def test_compiled_module_arrives_as_a_script_module() -> None:
    codec = Codec(FunctionTable(Policy.TRUSTED))
    encoded = codec.encode({"module": torch.jit.script(Scaled()), "rows": 3})
    buffers = [memoryview(bytearray(view)) for view in encoded.buffers]
    got = codec.decode(encoded.control, buffers)["module"]
    assert isinstance(got, torch.jit.ScriptModule)
    assert got(torch.ones(2)).tolist() == [2.0, 3.0]
    assert [parameter.requires_grad for parameter in got.parameters()] == [True]
