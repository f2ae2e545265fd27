"""The shortcuts of serde write and read exactly what the long way does, or decline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.serde import UNREAD, Codec, Encoded, FunctionTable, Policy
from asyncrpc.core.serde.quick import QuickReader, QuickWriter
from asyncrpc.errors import DecodeError

CODEC = Codec(FunctionTable(Policy.TRUSTED))

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=()), max_size=20),
)
flat = st.recursive(
    scalars,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4), st.dictionaries(scalars, parts, max_size=4)
    ),
    max_leaves=8,
)
dtypes = st.sampled_from(
    [
        *(torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool),
        *(torch.bfloat16, torch.complex64),
    ]
)
shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:  # noqa: PLR0911  (one a kind)
    """Plain ones, and ones that only look so."""
    shape = draw(shapes)
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(draw(dtypes))
    match draw(st.integers(0, 10)):
        case 0 if tensor.dim() > 1:
            return tensor.transpose(0, 1)
        case 4 if tensor.is_complex():
            return tensor.conj()
        case 5 if tensor.is_complex():
            return tensor.mul(1j).conj().imag  # its sign is a flag
        case 1 if tensor.is_floating_point() or tensor.is_complex():
            return tensor.requires_grad_()
        case 2 if tensor.is_floating_point():
            return torch.nn.Parameter(tensor)
        case 3:
            return tensor.to("meta")
        case 8:
            return tensor.expand(2, *tensor.shape)
        case 9 if tensor.dim():
            return tensor[..., :: draw(st.integers(1, 3))]
        case 10 if tensor.dim() > 1 and tensor.is_floating_point():
            return tensor.transpose(0, 1)[1:].detach().requires_grad_()
        case _:
            return tensor


arguments = st.tuples(
    st.lists(st.one_of(flat, tensors(), st.binary(max_size=4)), max_size=3),
    st.dictionaries(st.text(max_size=3), flat, max_size=2),
).map(list)
deep = st.recursive(
    st.one_of(scalars, tensors(), st.binary(max_size=4)),
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.lists(parts, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), parts, max_size=4),
        parts.map(lambda part: [part, part]),
    ),
    max_leaves=8,
)
deep_arguments = st.tuples(
    st.lists(deep, max_size=3), st.dictionaries(st.text(max_size=3), deep, max_size=2)
).map(list)
values = st.one_of(
    *(flat, arguments, tensors(), st.lists(flat, max_size=3).map(tuple), deep),
    deep_arguments,
)


def long_way(value: Any) -> Encoded:
    with mock.patch.object(CODEC, "encode_quickly", return_value=None):
        return CODEC.encode(value)


def received(views: list[memoryview]) -> list[memoryview]:
    return [memoryview(bytearray(view)) for view in views]


@given(values)
def test_quick_encoding_equals_the_long_one(value: Any) -> None:
    quick = CODEC.encode_quickly(value)
    if quick is not None:
        slow = long_way(value)
        assert quick.control == slow.control
        assert [*map(bytes, quick.buffers)] == [*map(bytes, slow.buffers)]
        assert [*map(id, quick.gradient_tensors)] == [*map(id, slow.gradient_tensors)]
        assert not quick.bytes_copied


@given(value=values, is_watched=st.booleans())
def test_quick_decoding_equals_the_long_one(*, value: Any, is_watched: bool) -> None:
    encoded = CODEC.encode(value)
    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def watch(at: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        def on_gradient(tensor: torch.Tensor) -> torch.Tensor:
            seen[at].append(tensor)
            return tensor + 1

        return on_gradient if is_watched else None

    buffers = received(encoded.buffers)
    quick = CODEC.decode_quickly(encoded.control, buffers, watch(0))
    if quick is UNREAD:
        assert not seen[0]
        return
    with mock.patch.object(CODEC, "decode_quickly", return_value=UNREAD):
        buffers = received(encoded.buffers)
        slow = CODEC.decode(encoded.control, buffers, on_gradient=watch(1))
    assert_same(quick, slow)
    assert_same(*seen)


def assert_same(first: Any, other: Any) -> None:
    assert type(first) is type(other)
    if isinstance(first, torch.Tensor):
        assert (first.dtype, first.shape, first.stride()) == (
            other.dtype,
            other.shape,
            other.stride(),
        )
        assert torch.equal(first, other)
        assert (first.requires_grad, first.is_leaf) == (
            other.requires_grad,
            other.is_leaf,
        )
    elif isinstance(first, dict):
        assert list(first) == list(other)
        assert_same([*first.values()], [*other.values()])
    elif isinstance(first, list | tuple):
        assert len(first) == len(other)
        for mine, its in zip(first, other, strict=True):
            assert_same(mine, its)
    else:
        assert first == other


DEEP = [
    [[torch.ones(2), torch.ones(3, requires_grad=True)], {}],
    [[1, torch.ones(2)], {"mask": torch.zeros(2)}],
    [[(1, 2), b"3"], {"shape": (4, (5, 6))}],
    [[{"x": torch.ones(2), "y": [torch.ones(3), (torch.ones(4), 1)]}], {}],
    (torch.ones(2), 0.5),
    (torch.ones(2), (torch.ones(3), {"loss": 1.0})),
    {"x": torch.ones(2), "y": torch.ones(3)},
]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [[], {}],
        [[1, "two", 3.0, [4]], {"five": 6}],
        [[torch.ones(3)], {}],
        [[torch.ones(2, 2), 1], {"alpha": 2}],
        [[torch.ones(2, requires_grad=True)], {"plan": [1, [2]]}],
        torch.ones(3, dtype=torch.float64),
        torch.ones(1).expand(3),
        [[torch.ones(2, 3).t()], {}],
        torch.ones(4, 4)[:, 1::2],
        *DEEP,
    ],
    ids=str,
)
def test_values_of_most_calls_are_encoded_quickly(value: Any) -> None:
    assert CODEC.encode_quickly(value) is not None


@pytest.mark.parametrize(
    "value",
    [
        None,
        [[], {}],
        [[1, [2, [3]]], {}],
        [[torch.ones(3)], {}],
        [[torch.ones(3), 2], {"out": None}],
        torch.ones(3),
        torch.ones(3, requires_grad=True),
        torch.ones(1).expand(3),
        [[torch.ones(1).expand(2, 3).clone().t(), 7], {}],
        *DEEP,
    ],
    ids=str,
)
def test_values_of_most_calls_are_decoded_quickly(value: Any) -> None:
    encoded = CODEC.encode(value)
    got = CODEC.decode_quickly(encoded.control, received(encoded.buffers))
    assert got is not UNREAD
    assert_same(got, value)


@given(st.binary(max_size=40), st.lists(st.binary(max_size=16), max_size=2))
def test_junk_is_left_to_the_long_way(control: bytes, parts: list[bytes]) -> None:
    buffers = received([memoryview(part) for part in parts])
    quick = CODEC.decode_quickly(control, buffers)
    if quick is not UNREAD:
        with mock.patch.object(CODEC, "decode_quickly", return_value=UNREAD):
            assert_same(quick, CODEC.decode(control, buffers))


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("number", [False, 0.0, 2])
def test_value_equal_to_a_number_is_not_read_quickly(at: int, number: object) -> None:
    """False and 0.0 equal 0; the long way refuses them, or reads them itself."""
    encoded = CODEC.encode(torch.ones(4))
    stop = 4 + int.from_bytes(encoded.control[:4], "little")
    (entry,) = msgpack.unpackb(encoded.control[4:stop])
    entry[at] = number
    table = msgpack.packb([entry])
    control = len(table).to_bytes(4, "little") + table + encoded.control[stop:]
    assert CODEC.decode_quickly(control, received(encoded.buffers)) is UNREAD


@pytest.mark.parametrize(
    "place",
    [
        [1, [1, 4]],
        [-1, [1, 4]],
        [False, [1, 4]],
        [0, [1, -4]],
        [0, [1, 4.0]],
        [0, [1, True]],
        [0, [1]],
        [0, [1, 4, 0]],
        [0, (1 << 62, 1 << 62)],
        [0, [1, 1 << 60]],
        [0, None],
        [0],
        [0, [1, 4], 0],
    ],
    ids=str,
)
def test_malformed_buffer_position_is_not_read_quickly(place: list[Any]) -> None:
    """Strides of the wrong kind or number, or that reach where no memory can be."""
    encoded = CODEC.encode(torch.arange(8.0).reshape(2, 4).t())
    stop = 4 + int.from_bytes(encoded.control[:4], "little")
    (entry,) = msgpack.unpackb(encoded.control[4:stop])
    assert entry[5:] == [0, [1, 4]]
    table = msgpack.packb([[*entry[:5], *place]])
    control = len(table).to_bytes(4, "little") + table + encoded.control[stop:]
    assert CODEC.decode_quickly(control, received(encoded.buffers)) is UNREAD


def test_view_with_large_holes_is_gathered() -> None:
    sparse = torch.arange(1 << 16)[:: 1 << 8]
    assert CODEC.encode_quickly(sparse) is None
    encoded = CODEC.encode(sparse)
    assert sum(buffer.nbytes for buffer in encoded.buffers) == sparse.nbytes


def test_buffer_of_another_size_is_not_read_quickly() -> None:
    encoded = CODEC.encode(torch.ones(4))
    for nbytes in (15, 17):
        short = [memoryview(bytearray(nbytes))]
        assert CODEC.decode_quickly(encoded.control, short) is UNREAD
        with pytest.raises(DecodeError):
            CODEC.decode(encoded.control, short)


def test_quick_caches_are_bounded() -> None:
    writer, reader = QuickWriter(), QuickReader()
    for size in range(1, 3000):
        encoded = writer.write(torch.ones(size))
        assert encoded is not None
        reader.read(encoded.control, received(encoded.buffers))
    assert len(writer._tables) <= 1024  # noqa: SLF001
    assert len(reader._forms) <= 1024  # noqa: SLF001


def test_conjugate_of_a_known_shape_goes_the_long_way() -> None:
    """Its bytes are those of the number itself; only a flag tells."""
    tensor = torch.full((2,), 1 + 2j)
    for value in (tensor, tensor.conj(), tensor.clone().requires_grad_().conj()):
        encoded = CODEC.encode(value)
        got = CODEC.decode(encoded.control, received(encoded.buffers))
        assert torch.equal(got, value)


@pytest.mark.parametrize("kind", ["one tensor", "one list", "one storage", "deep"])
def test_tensors_that_share_memory_go_the_long_way(kind: str) -> None:
    tensor, part = torch.ones(4), [torch.ones(2)]
    deep: Any = (((((tensor,),),),),)
    value = {
        "one tensor": [[tensor, tensor], {}],
        "one list": [[part, part, tensor], {}],
        "one storage": [[tensor, tensor.view(2, 2)], {}],
        "deep": [[deep], {}],
    }[kind]
    assert CODEC.encode_quickly(value) is None


@pytest.mark.parametrize(
    "tree", [[1], {"a": 1}, "text", 7], ids=["list", "dict", "text", "number"]
)
def test_root_of_a_tensor_message_is_a_tuple_only_for_a_list(tree: Any) -> None:
    seen: list[torch.Tensor] = []

    def on_gradient(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    encoded = CODEC.encode((torch.ones(2, requires_grad=True),))
    stop = 4 + int.from_bytes(encoded.control[:3], "little")
    control = encoded.control[:stop] + msgpack.packb(tree)
    got = CODEC.decode_quickly(control, received(encoded.buffers), on_gradient)
    assert (got is UNREAD) is not (type(tree) is list)
    assert (not seen) is not (type(tree) is list)


def test_deeply_nested_tuples_are_left_to_the_long_way() -> None:
    tree: Any = 1
    for _ in range(2000):
        tree = msgpack.ExtType(1, msgpack.packb([tree]))
    control = bytes(4) + msgpack.packb([tree])
    assert CODEC.decode_quickly(control, []) is UNREAD
