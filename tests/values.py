"""What programs send: containers of every kind, and what is in them.

Each container is a function that makes it around a value, and one that takes the value
out again.  `shown` says what of a value must arrive: what pickle would bring.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, NamedTuple, TypedDict, TypeVar

import attrs
import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

T = TypeVar("T")


class Row(NamedTuple):
    x: Any


class Typed(TypedDict):
    x: Any


@dataclasses.dataclass
class Plain:
    x: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


@dataclasses.dataclass
class Boxed(Generic[T]):
    x: T


@attrs.define
class Attrs:
    x: Any


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x


class MyList(list[Any]): ...


class MyDict(dict[str, Any]): ...


class MyTuple(tuple[Any, ...]):  # noqa: SLOT001 - it has a __dict__
    pass


class Output(collections.OrderedDict[str, Any]):
    """As the outputs of models of some libraries: a mapping with attributes."""

    def __init__(self, x: Any) -> None:
        super().__init__(x=x)
        self.x = x

    def __reduce__(self) -> Any:
        return Output, (self.x,)


class Meta(torch.Tensor):
    pass


class Manifold(nn.Parameter):
    pass


class Wrapper(torch.Tensor):
    """A wrapper subclass, as DTensor is one: it has no elements of its own."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        wrapper.inner = inner.detach()
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        plain = [each.inner if isinstance(each, Wrapper) else each for each in args]
        return func(*plain, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _wrapped, (self.inner, self.requires_grad)


def _wrapped(inner: torch.Tensor, requires_grad: bool) -> Any:  # noqa: FBT001
    return Wrapper(inner.detach().requires_grad_(requires_grad))


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: Any


@dataclasses.dataclass
class PostInit:
    x: Any
    again: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.again = [self.x]


@attrs.frozen
class AttrsFrozen:
    x: Any


class InSlots:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class InState:
    """It says itself what of it is pickled."""

    def __init__(self, x: Any) -> None:
        self.x, self.lock = x, object()

    def __getstate__(self) -> Any:
        return [self.x]

    def __setstate__(self, state: Any) -> None:
        self.x, self.lock = state[0], object()


class ByKeyword:
    x: Any

    def __new__(cls, *, x: Any) -> Any:
        instance = super().__new__(cls)
        instance.x = x
        return instance

    def __getnewargs_ex__(self) -> Any:
        return (), {"x": self.x}


Pair = collections.namedtuple("Pair", "x y")  # noqa: PYI024 - this kind, too


class Subclasses:
    """A class derived from each kind of container, with an attribute.

    Python's own pickle loses those of a Counter and a defaultdict.
    """

    all: Final[dict[str, tuple[type, tuple[Any, ...]]]] = {}


for _base, _args in (
    *((int, (4,)), (float, (4.0,)), (complex, (4j,)), (str, ("text",))),
    *((bytes, (b"b",)), (bytearray, (b"b",)), (list, ([1],)), (tuple, ([1],))),
    *((dict, ({"a": 1},)), (set, ([1],)), (frozenset, ([1],))),
    *((collections.deque, ([1], 5)), (collections.OrderedDict, ({"a": 1},))),
    *((collections.UserDict, ({"a": 1},)), (collections.UserList, ([1],))),
    *((collections.UserString, ("text",)), (collections.ChainMap, ({"a": 1},))),
    *((types.SimpleNamespace, ()), (Pair, (1, 2))),
    *((ValueError, ("text",)), (OSError, (2, "text"))),
):
    _name = f"My{_base.__name__}"
    globals()[_name] = type(_name, (_base,), {"__module__": __name__})
    Subclasses.all[_name] = globals()[_name], _args


def with_attribute(name: str, x: Any) -> Any:
    kind, args = Subclasses.all[name]
    value: Any = kind(*args)
    value.held = x
    return value


def within_itself(x: Any) -> Any:
    value: dict[str, Any] = {"x": x}
    value["self"] = value
    return value


def round_about(x: Any) -> Any:
    """Return an object in a list that it refers to."""
    holder = Holder(None)
    holder.x = (x, [holder])
    return holder


def in_array(x: Any) -> Any:
    array = np.empty(1, object)
    array[0] = x
    return array


class Transition(NamedTuple):
    state: Any
    action: int
    reward: float
    done: bool


CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda x: [x], lambda c: c[0]),
    "tuple": (lambda x: (x,), lambda c: c[0]),
    "dict": (lambda x: {"x": x}, lambda c: c["x"]),
    "OrderedDict": (lambda x: collections.OrderedDict(x=x), lambda c: c["x"]),
    "defaultdict": (
        lambda x: collections.defaultdict(list, {"x": x}),
        lambda c: c["x"],
    ),
    "Counter": (lambda x: collections.Counter({"x": x}), lambda c: c["x"]),
    "ChainMap": (lambda x: collections.ChainMap({"x": x}), lambda c: c["x"]),
    "UserDict": (lambda x: collections.UserDict(x=x), lambda c: c["x"]),
    "UserList": (lambda x: collections.UserList([x]), lambda c: c[0]),
    "deque": (lambda x: collections.deque([x], 3), lambda c: c[0]),
    "NamedTuple": (Row, lambda c: c.x),
    "TypedDict": (lambda x: Typed(x=x), lambda c: c["x"]),
    "dataclass": (Plain, lambda c: c.x),
    "frozen": (Frozen, lambda c: c.x),
    "slots": (Slotted, lambda c: c.x),
    "generic": (Boxed[Any], lambda c: c.x),
    "attrs": (Attrs, lambda c: c.x),
    "object": (Holder, lambda c: c.x),
    "list subclass": (lambda x: MyList([x]), lambda c: c[0]),
    "dict subclass": (lambda x: MyDict(x=x), lambda c: c["x"]),
    "tuple subclass": (lambda x: MyTuple([x]), lambda c: c[0]),
    "model output": (Output, lambda c: c.x),
    "partial": (lambda x: functools.partial(Plain, x), lambda c: c.args[0]),
    "nested": (lambda x: [{"a": (Plain(x), 1)}], lambda c: c[0]["a"][0].x),
    "frozen slots": (FrozenSlots, lambda c: c.x),
    "__post_init__": (PostInit, lambda c: c.again[0]),
    "frozen attrs": (AttrsFrozen, lambda c: c.x),
    "slotted object": (InSlots, lambda c: c.x),
    "object with a state": (InState, lambda c: c.x),
    "object by keyword": (lambda x: ByKeyword(x=x), lambda c: c.x),
    "namedtuple": (lambda x: Pair(1, x), lambda c: c.y),
    "SimpleNamespace": (lambda x: types.SimpleNamespace(x=x), lambda c: c.x),
    "set": (lambda x: {x}, lambda c: next(iter(c))),
    "frozenset": (lambda x: frozenset([x]), lambda c: next(iter(c))),
    "key": (lambda x: {(1, x): 1}, lambda c: next(iter(c))[1]),
    "slice": (lambda x: slice(x, 5), lambda c: c.start),
    "iterator": (lambda x: iter([x]), next),
    "exception": (ValueError, lambda c: c.args[0]),
    "array of objects": (in_array, lambda c: c[0]),
    "itself": (within_itself, lambda c: c["self"]["self"]["x"]),
    "round about": (round_about, lambda c: c.x[1][0].x[0]),
    "replay buffer": (
        lambda x: collections.deque([Transition(x, 1, 0.5, done=False)] * 3, 9),
        lambda c: c[2].state,
    ),
    **{
        name: (functools.partial(with_attribute, name), lambda c: c.held)
        for name in Subclasses.all
    },
}


def tagged(tensor: torch.Tensor) -> torch.Tensor:
    tensor.tag = {"is_expert": True}  # type: ignore[attr-defined]
    return tensor


class MyArray(np.ndarray[Any, Any]): ...


def with_gradient() -> Any:
    leaf = nn.Parameter(torch.ones(3))
    leaf.grad = torch.full((3,), 2.0)
    return leaf


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Make a process group of this process alone, without sockets, for DTensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed() -> DTensor:
    mesh = init_device_mesh("cpu", (1,))
    return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])


SOURCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "leaf": lambda leaf: leaf,
    "non-leaf": lambda leaf: leaf * 1,
    "view": lambda leaf: leaf[:],
    "transposed": lambda leaf: leaf.view(1, -1).t(),
    "tagged": lambda leaf: tagged(leaf * 1),
    "subclass": lambda leaf: (leaf * 1).as_subclass(Meta),
    "tagged subclass": lambda leaf: tagged((leaf * 1).as_subclass(Meta)),
    "sparse": lambda leaf: (leaf * 1).to_sparse(),
}
CONTENTS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(3.0),
    "leaf": lambda: torch.ones(3, requires_grad=True),
    "Parameter": lambda: nn.Parameter(torch.ones(3)),
    "frozen Parameter": lambda: nn.Parameter(torch.ones(3), requires_grad=False),
    "tagged": lambda: tagged(torch.ones(3)),
    "tagged Parameter": lambda: tagged(nn.Parameter(torch.ones(3))),
    "Buffer": lambda: nn.Buffer(torch.ones(3)),
    "subclass": lambda: tagged(torch.ones(3).as_subclass(Meta)),
    "leaf of a subclass": lambda: torch.ones(3).as_subclass(Meta).requires_grad_(),
    "Parameter's subclass": lambda: tagged(Manifold(torch.ones(3))),
    "wrapper": lambda: Wrapper(torch.ones(3, requires_grad=True)),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(1), torch.ones(2)], layout=torch.jagged
    ),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    "empty": lambda: torch.ones(0, 3),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "part of a storage": lambda: torch.arange(12.0)[2:8:2],
    "expanded": lambda: torch.ones(1).expand(4),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "channels last": lambda: torch.ones(2, 3, 4, 4).to(
        memory_format=torch.channels_last
    ),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "CSR": lambda: torch.eye(2).to_sparse_csr(),
    "BSR": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "not coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 3),
        torch.tensor([0.5, 0.25]),
        torch.tensor([0, 1]),
        0,
        torch.quint8,
    ),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.ones(3).to(torch.uint16),
    "complex32": lambda: torch.ones(3).to(torch.complex32),
    "scalar": lambda: torch.tensor(3.0),
    "nothing of a storage": lambda: torch.ones(4)[4:],
    "Parameter with a gradient": with_gradient,
    "tagged Buffer": lambda: tagged(nn.Buffer(torch.ones(3), persistent=False)),
    "uninitialized": nn.UninitializedParameter,
    "DTensor": distributed,
    "DTensor leaf": lambda: distributed().requires_grad_(),
    "DTensor Parameter": lambda: nn.Parameter(distributed()),
    "array": lambda: np.arange(3.0),
    "Fortran array": lambda: np.asfortranarray(np.ones((2, 3))),
    "array of no dimension": lambda: np.array(3.0),
    "array of text": lambda: np.array(["a", "bb"]),
    "array of records": lambda: np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    "recarray": lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "masked array": lambda: np.ma.array([1, 2], mask=[False, True]),
    "array subclass": lambda: np.arange(3.0).view(MyArray),
    "numpy scalar": lambda: np.float32(2),
    "numpy date": lambda: np.datetime64("2020-01-01"),
    "dtype": lambda: torch.float16,
    "size": lambda: torch.Size([1, 2]),
    "generator": lambda: torch.Generator().manual_seed(3),
    "packed sequence": lambda: nn.utils.rnn.pack_sequence(
        [torch.ones(2, 3), torch.ones(1, 3)]
    ),
    "module": lambda: nn.Linear(2, 2),
}


# --- comparing -----------------------------------------------------------------------


def shown(value: Any) -> Any:
    """Return all that must arrive of one content, in a form that can be compared."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return kind, _tensor(value)
    if isinstance(value, np.ndarray):
        array: Any = value
        plain = array.filled(0) if kind is np.ma.MaskedArray else array
        text = plain.tobytes()
        return kind, value.dtype, value.shape, text, value.flags.f_contiguous
    if isinstance(value, torch.Generator):
        return kind, value.get_state().tolist()
    if isinstance(value, nn.Module):
        return kind, {key: shown(part) for key, part in value.state_dict().items()}
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return kind, shown(value.data), shown(value.batch_sizes)
    return kind, value


def _tensor(value: Any) -> Any:
    bits = value.dtype, value.device, value.layout, value.requires_grad, value.is_leaf
    attributes = sorted(vars(value).keys() - _OWN)
    return *bits, attributes, getattr(value, "tag", None), _elements(value)


# What DTensor, nested tensors and Wrapper keep of their own.
_OWN: Final = {
    *("inner", "_spec", "_local_tensor", "_offsets", "_lengths", "_values", "_size"),
    *("_strides", "_ragged_idx", "_metadata_cache"),
}


def _elements(value: Any) -> Any:  # noqa: PLR0911  (one for each layout)
    if isinstance(value, nn.UninitializedParameter):
        return None
    if isinstance(value, DTensor):
        return value._spec.placements, value._local_tensor.tolist()  # noqa: SLF001
    if isinstance(value, Wrapper):
        return value.inner.tolist()
    if value.is_nested:
        return [part.tolist() for part in value.unbind()]
    if value.is_quantized:
        return value.int_repr().tolist(), value.qscheme(), value.dequantize().tolist()
    if value.layout is torch.sparse_coo:
        parts = value._indices(), value._values()  # noqa: SLF001
        return *(part.tolist() for part in parts), value.is_coalesced()
    if value.layout is not torch.strided:
        return value.shape, value.to_dense().tolist()
    strides = value.stride() if value.numel() > 1 else ()
    form = value.shape, strides, value.is_conj(), value.is_neg()
    if value.is_meta:
        return form
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return *form, bytes(plain.view(-1).view(torch.uint8).tolist())
