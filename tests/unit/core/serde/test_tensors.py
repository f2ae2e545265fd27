"""A tensor arrives as it was, without a copy on either side; a hostile one does not."""

import gc
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from asyncrpc.core.serde import kinds
from asyncrpc.core.serde.tensors import DTYPES
from asyncrpc.errors import DecodeError, EncodeError, RejectedError
from tests.unit.core.serde.loopback import (
    STRICT,
    TRUSTED,
    received,
    round_trip,
    sent_bytes,
)

PLAIN_DTYPES = [
    dtype
    for name, dtype in sorted(DTYPES.items())
    if not name.startswith(("q", "bits")) and name not in {"uint1", "int1"}
]


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements' bytes: not every dtype can be compared, or even copied."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.is_complex:
        return bits(torch.view_as_real(plain)) if plain.numel() else b""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return plain.view(sizes[plain.itemsize]).numpy().tobytes()


def alike(first: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        first.dtype == other.dtype
        and first.shape == other.shape
        and bits(first) == bits(other)
    )


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(0).integers(0, 2, count, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype_arrives(dtype: torch.dtype) -> None:
    tensor = random(dtype, 3, 4)
    holey = random(dtype, 300, 400)[:, ::200]  # gathered
    views = (tensor, tensor[1], tensor[1, 2], tensor[1:, ::2], tensor[:0], holey)
    for view in views:
        assert alike(round_trip(view, STRICT), view)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1, 1, 1), (2, 3, 4, 5)])
def test_every_shape_arrives(shape: tuple[int, ...]) -> None:
    assert alike(round_trip(torch.ones(shape)), torch.ones(shape))


def test_tensor_is_sent_and_received_without_a_copy() -> None:
    tensor = torch.arange(6.0)
    encoded = TRUSTED.encode([tensor])
    tensor[0] = 7
    assert np.frombuffer(encoded.buffers[0], np.float32)[0] == 7
    assert encoded.bytes_copied == 0
    buffers = received(encoded)
    back = TRUSTED.decode(encoded.control, buffers)[0]
    np.frombuffer(buffers[0], np.float32)[1] = 8
    assert back.tolist() == [7, 8, 2, 3, 4, 5]
    back.add_(1)  # it is the callee's own


def test_buffers_keep_the_memory_alive() -> None:
    tensor = torch.full((1000,), 3.0)
    gone = weakref.ref(tensor)
    encoded = TRUSTED.encode(tensor)
    encoded.gradient_tensors.clear()
    del tensor
    gc.collect()
    assert gone() is None
    assert bytes(encoded.buffers[0]) == np.full(1000, 3, np.float32).tobytes()


@pytest.mark.parametrize("offset", range(1, 16))
def test_unaligned_buffer_is_realigned(offset: int) -> None:
    whole = torch.randn(3, 4, dtype=torch.complex128)
    for tensor in (whole, whole.T):
        encoded = TRUSTED.encode(tensor)
        slab = np.zeros(encoded.buffers[0].nbytes + 16, np.uint8)
        view = slab.data[offset : offset + encoded.buffers[0].nbytes]
        view[:] = encoded.buffers[0]
        back = TRUSTED.decode(encoded.control, [view])
        assert alike(back, tensor)
        assert back.data_ptr() % 16 == 0


def test_read_only_buffer_is_copied() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tensor in (torch.ones(2, 3), torch.ones(2, 3).T):
            encoded = TRUSTED.encode(tensor)
            data = bytes(encoded.buffers[0])
            TRUSTED.decode(encoded.control, [memoryview(data)]).add_(1)
            assert data == bytes(encoded.buffers[0])


# --- which bytes travel --------------------------------------------------------------


def test_view_sends_its_own_bytes_only() -> None:
    encoded = TRUSTED.encode(torch.zeros(1 << 20)[10:20])
    assert sent_bytes(encoded) == 40
    assert encoded.bytes_copied == 0


def test_span_with_few_holes_is_sent_raw_with_its_strides() -> None:
    view = torch.arange(float(1 << 18))[::2]  # holes: half of 1 MiB
    encoded = TRUSTED.encode(view)
    assert encoded.bytes_copied == 0
    assert sent_bytes(encoded) == (1 << 20) - 4  # the last hole stays
    back = round_trip(view)
    assert back.stride() == (2,)
    assert torch.equal(back, view)


def test_span_of_mostly_holes_is_gathered() -> None:
    whole = torch.arange(1e6).reshape(1000, 1000)
    for view, copied in ((whole[:, 0], 4000), (whole.T[::3, ::2], 334 * 500 * 4)):
        encoded = TRUSTED.encode(view)
        assert sent_bytes(encoded) == encoded.bytes_copied == copied
        assert torch.equal(round_trip(view), view)
    back = round_trip(whole.T[::3, ::2])
    assert back.stride() == (1, 334)  # dense, the order of dimensions kept


def test_transposed_tensor_keeps_its_strides() -> None:
    view = torch.randn(500, 300).T
    back = round_trip(view)
    assert back.stride() == view.stride()
    assert torch.equal(back, view)


def test_expanded_tensor_stays_expanded() -> None:
    view = torch.ones(1, 3).expand(1_000_000, 3)
    assert sent_bytes(TRUSTED.encode(view)) == 12
    assert round_trip(view).stride() == (0, 1)
    holey = torch.arange(1e6).reshape(1000, 1000)[:, :1].expand(1000, 50)
    assert sent_bytes(TRUSTED.encode(holey)) == 4000
    assert round_trip(holey).stride() == (1, 0)
    assert torch.equal(round_trip(holey), holey)


# --- aliases -------------------------------------------------------------------------


def test_aliases_share_one_buffer_and_one_storage() -> None:
    whole = torch.arange(12.0)
    value = [whole[2:6], whole[4:9].view(torch.int32), whole[3:5].view(torch.uint8)]
    encoded = TRUSTED.encode(value)
    assert sent_bytes(encoded) == 7 * 4
    first, second, third = TRUSTED.decode(encoded.control, received(encoded))
    first[2] = 1.0
    assert second[0].item() == 0x3F800000
    third.zero_()
    assert first.tolist() == [2, 0, 0, 5]
    storages = {part.untyped_storage().data_ptr() for part in (first, second, third)}
    assert len(storages) == 1


def test_aliases_of_several_dtypes_stay_aligned() -> None:
    whole = torch.arange(32, dtype=torch.uint8)
    value = [whole[3:20], whole[4:12].view(torch.float32)]
    encoded = TRUSTED.encode(value)
    assert [view.nbytes for view in encoded.buffers] == [20]  # from byte 0, for floats
    narrow, wide = round_trip(value)
    assert alike(narrow, value[0])
    assert alike(wide, value[1])
    narrow.zero_()
    assert wide.tolist() == [0, 0]


def test_distant_views_travel_in_separate_buffers() -> None:
    whole = torch.zeros(1 << 20)
    encoded = TRUSTED.encode([whole[:1], whole[-1:]])
    assert [view.nbytes for view in encoded.buffers] == [4, 4]


def test_disjoint_columns_are_gathered_separately() -> None:
    whole = torch.arange(1e6).reshape(1000, 1000)
    value = [whole[:, 3], whole[:, 5], whole[:, 3]]
    assert sent_bytes(TRUSTED.encode(value[:2])) == 8000
    back = round_trip(value)
    assert all(torch.equal(*pair) for pair in zip(back, value, strict=True))


def test_repeated_column_is_gathered_once_and_stays_an_alias() -> None:
    whole = torch.arange(1e6).reshape(1000, 1000)
    value = [whole[:, 3], whole[:, 3]]
    assert sent_bytes(TRUSTED.encode(value)) == 4000
    first, other = round_trip(value)
    first[7] = -1
    assert other[7] == -1
    assert other[8] == whole[8, 3]


def test_overlapping_views_with_holes_stay_aliases() -> None:
    whole = torch.arange(1e6).reshape(1000, 1000)
    column, columns = round_trip([whole[:, 3], whole[:, 2:4]])
    column[7] = -1
    assert columns[7, 1] == -1
    assert columns[8, 0] == whole[8, 2]


# --- gradients, classes, bits --------------------------------------------------------


def test_requires_grad_survives() -> None:
    leaf = torch.ones(2, requires_grad=True)
    back = round_trip([leaf, leaf * 2, torch.ones(2)])
    assert [part.requires_grad for part in back] == [True, True, False]
    assert all(part.is_leaf for part in back)


def test_gradients_are_reported_in_the_order_of_the_sender() -> None:
    tensors = [torch.full((2,), float(n), requires_grad=True) for n in range(5)]
    sparse = torch.eye(2).to_sparse().requires_grad_()
    value = (tensors[3], {"x": [tensors[1], torch.zeros(1), sparse]}, {1, 2}, tensors)
    encoded = TRUSTED.encode(value)
    assert len(encoded.gradient_tensors) == 6
    reported: list[torch.Tensor] = []

    def on_gradient(tensor: torch.Tensor) -> torch.Tensor:
        assert not tensor.requires_grad
        reported.append(tensor)
        return tensor.clone().requires_grad_() * 1

    back = TRUSTED.decode(encoded.control, received(encoded), on_gradient=on_gradient)
    pairs = zip(encoded.gradient_tensors, reported, strict=True)
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in pairs)
    assert back[0].grad_fn is not None
    assert back[0] is back[3][3]


def test_parameter_becomes_a_tensor_inside_a_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert type(round_trip(parameter)) is torch.nn.Parameter
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert not round_trip(frozen).requires_grad
    back = round_trip(parameter, on_gradient=lambda tensor: tensor * 2)
    assert type(back) is torch.Tensor


def test_module_keeps_its_own_leaves() -> None:
    module = torch.nn.Linear(200, 300)
    encoded = TRUSTED.encode(module)
    assert encoded.gradient_tensors == []
    assert sent_bytes(encoded) == (200 * 300 + 300) * 4
    assert encoded.bytes_copied == 0

    def never(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError(tensor)

    back = round_trip(module, on_gradient=never)
    assert type(back.weight) is torch.nn.Parameter
    x = torch.randn(4, 200)
    assert torch.equal(back(x), module(x))


@pytest.mark.parametrize(
    "lazy",
    [
        lambda x: x.conj(),
        lambda x: x.conj().imag,
        lambda x: torch.view_as_real(x.conj().resolve_conj()),
        lambda x: x.conj().T[::2],
    ],
)
def test_conjugate_and_negative_bits_survive(
    lazy: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = lazy(torch.randn(4, 4, dtype=torch.complex64))
    back = round_trip(tensor)
    assert back.is_conj() == tensor.is_conj()
    assert back.is_neg() == tensor.is_neg()
    assert torch.equal(back, tensor)


def test_meta_tensor_travels_as_its_shape() -> None:
    tensor = torch.empty(1000, 3, device="meta").T
    assert TRUSTED.encode(tensor).buffers == []
    back = round_trip(tensor)
    assert (back.device.type, back.shape, back.stride()) == ("meta", (3, 1000), (1, 3))


def test_subclasses_go_by_pickle() -> None:
    class Sub(torch.Tensor):
        pass

    with pytest.raises(EncodeError, match="strict"):
        STRICT.encode(torch.ones(2).as_subclass(Sub))
    back = round_trip(torch.nn.UninitializedParameter())
    assert isinstance(back, torch.nn.UninitializedParameter)


# --- sparse and quantized ------------------------------------------------------------

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* support is in beta",
    "ignore:Sparse invariant checks",
    "ignore:ComplexHalf support is experimental",
)


COMPOSITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "coo uncoalesced": lambda dense: torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), dense[0, :2], (2, 3), check_invariants=True
    ),
    "coo hybrid": lambda dense: dense.to_sparse(1),
    "coo grad": lambda dense: dense.to_sparse().requires_grad_(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("name", list(COMPOSITES))
def test_sparse_tensors_arrive_unchanged(name: str) -> None:
    tensor = COMPOSITES[name](torch.eye(4)[[0, 0, 2, 3]] * 3)
    back = round_trip(tensor, STRICT)
    assert (back.layout, back.requires_grad) == (tensor.layout, tensor.requires_grad)
    assert torch.equal(back.to_dense(), tensor.to_dense())
    if tensor.layout is torch.sparse_coo:
        assert back.is_coalesced() == tensor.is_coalesced()


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_quantized_tensors_arrive_unchanged() -> None:
    x = torch.randn(4, 6)
    scales, zeros = torch.rand(4) + 0.1, torch.arange(4)
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        plain = torch.quantize_per_tensor(x, 0.1, 3, dtype)
        by_channel = torch.quantize_per_channel(x, scales, zeros, 0, dtype)
        for tensor in (plain, plain.T, by_channel):
            encoded = STRICT.encode(tensor)
            back = STRICT.decode(encoded.control, received(encoded))
            assert back.dtype == dtype
            assert back.stride() == tensor.stride()
            assert back.qscheme() == tensor.qscheme()
            assert torch.equal(back.int_repr(), tensor.int_repr())
            assert torch.equal(back.dequantize(), tensor.dequantize())
            assert encoded.bytes_copied == 0


# --- numpy ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
        np.arange(10)[::-2],
        np.array(3.5),
        np.empty((0, 3), np.int16),
        np.array(["a", "bc"]),
        np.array(["2024-01-01"], "M8[D]"),
        np.zeros(3, [("a", "i4"), ("b", "f8", (2,)), ("c", [("d", "S3")])]),
        np.arange(3, dtype=">i4"),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_numpy_arrays_arrive_writable(array: np.ndarray[Any, Any]) -> None:
    back = round_trip([array], STRICT)[0]
    assert back.dtype == array.dtype
    assert back.flags.f_contiguous == (
        array.flags.f_contiguous or (array.ndim == 1 and array.size > 0)
    )
    assert back.flags.writeable
    np.testing.assert_array_equal(back, array)


def test_numpy_arrays_are_sent_without_a_copy() -> None:
    for array in (np.zeros((300, 400)), np.zeros((300, 400), order="F")):
        encoded = TRUSTED.encode(array)
        array[0, 0] = 1
        assert encoded.bytes_copied == 0
        assert np.frombuffer(encoded.buffers[0])[0] == 1


def test_arrays_of_objects_need_a_pickle() -> None:
    array = np.array([{"a": 1}, None])
    assert (round_trip(array) == array).all()
    with pytest.raises(EncodeError, match="strict"):
        STRICT.encode(array)


# --- hostile peers -------------------------------------------------------------------

BUFFER = 64


def crafted(*entries: list[Any], root: int = 0) -> tuple[bytes, list[memoryview]]:
    table = msgpack.packb(list(entries))
    tree = msgpack.packb(msgpack.ExtType(kinds.REFERENCE, bytes([root])))
    control = len(table).to_bytes(4, "little") + table + tree
    return control, [np.zeros(BUFFER, np.uint8).data]


def test_valid_crafted_tensor_is_accepted() -> None:
    """So the other cases are refused for what is wrong with them, not for form."""
    for entry in (
        [kinds.ENTRY_TENSOR, 0, "float32", [16], 0],
        [kinds.ENTRY_TENSOR, 0, "float32", [2, 2], 0, 12, [1, 2]],
    ):
        control, buffers = crafted(entry)
        STRICT.decode(control, buffers)


@pytest.mark.parametrize(
    "fields",
    [
        ["float32", [17], 0],
        ["float32", [15], 0],
        ["float32", [-16], 0],
        ["float32", [-4, -4], 0],
        ["float32", [1 << 62, 4], 0],
        ["float32", [16], 1],
        ["float32", [16], -2],
        ["float32", [16], True],
        ["float32", [16], None],
        ["float32", ["16"], 0],
        ["float32", [16.0], 0],
        ["float32", None, 0],
        ["float32", [1] * 100, 0],
        ["float99", [16], 0],
        [None, [16], 0],
        [["x"], [16], 0],
        ["qint8", [64], 0],
        ["float32", [16], -1],
        ["float32", [16]],
        [],
        ["bfloat16", [33], 0],
        ["float32", [2, 2], 0, 13, [1, 2]],
        ["float32", [2, 2], 0, -1, [1, 2]],
        ["float32", [2, 2], 0, 0, [-1, 2]],
        ["float32", [2, 2], 0, 0, [1]],
        ["float32", [2, 2], 0, 0, [1, 1 << 60]],
        ["float32", [2, 2], 0, 1 << 63, [1, 2]],
        ["float32", [1 << 32, 1 << 32], 0, 0, [0, 0]],
        ["float32", [2, 2], 0, 0, "ab"],
        ["float32", [2, 2], 0, 0.5, [1, 2]],
        ["complex128", [1], 0, 4, [1]],
        ["float32", [16], 0, 0, None, "cuda:0"],
        ["float32", [16], 0, 0, None, "cpu", 1],
        ["float32", [16], 0, 0, [1], 5],
    ],
    ids=repr,
)
def test_hostile_tensor_is_refused(fields: list[Any]) -> None:
    for flags in (0, kinds.REQUIRES_GRAD):
        control, buffers = crafted([kinds.ENTRY_TENSOR, flags, *fields])
        if fields[-1:] == [1] and len(fields) == 7:
            STRICT.decode(control, buffers)  # more fields are a later version's
            continue
        with pytest.raises(DecodeError):
            STRICT.decode(control, buffers)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ([[2, 2], 0, 13, [1, 2]], "reaches byte 68 of a buffer of 64"),
        ([[17], 0, 0, [1]], "reaches byte 68 of a buffer of 64"),
        ([[1 << 32, 1 << 32], 0, 0, [0, 0]], "sizes overflow"),
        ([[2, 2], 0, 0, [-1, 2]], "is -1"),
    ],
)
def test_hostile_tensor_is_refused_before_torch_sees_it(
    fields: list[Any], text: str
) -> None:
    control, buffers = crafted([kinds.ENTRY_TENSOR, 0, "float32", *fields])
    with pytest.raises(DecodeError, match=text):
        STRICT.decode(control, buffers)


@pytest.mark.parametrize(
    "entry",
    [
        [kinds.ENTRY_TENSOR, "x", "float32", [16], 0],
        [kinds.ENTRY_TENSOR, kinds.REQUIRES_GRAD, "int32", [16], 0],
        [kinds.ENTRY_TENSOR, kinds.META, "float32", [1 << 61], -1, 0, [1 << 61]],
        [kinds.ENTRY_TENSOR, kinds.META, "float32", [1], -1, 0, None],
        [kinds.ENTRY_SPARSE_COO, 0, [4, 4], 0, 0, False],
        [kinds.ENTRY_SPARSE_COO, 0, [4, 4], 1, 2, False],
        [kinds.ENTRY_SPARSE_COMPRESSED, 0, [4, 4], 0, 0, 0, "torch.sparse_csr"],
        [kinds.ENTRY_SPARSE_COMPRESSED, 0, [4, 4], 0, 0, 0, "torch.strided"],
        [kinds.ENTRY_QUANTIZED, 0, "qint8", 0, 1.0, 0],
        [kinds.ENTRY_QUANTIZED, 0, "float32", 0, 1.0, 0],
        [kinds.ENTRY_ARRAY, "|O", [8], "C", 0],
        [kinds.ENTRY_ARRAY, "<f4", [17], "C", 0],
        [kinds.ENTRY_ARRAY, "<f4", [15], "C", 0],
        [kinds.ENTRY_ARRAY, "<f4", [16], "K", 0],
        [kinds.ENTRY_ARRAY, "<f4", [16], "C", 1],
        [kinds.ENTRY_ARRAY, "<f4", [16], "C", -1],
        [kinds.ENTRY_ARRAY, [["a", "|O"]], [8], "C", 0],
        [kinds.ENTRY_ARRAY, {"names": 1}, [8], "C", 0],
        [kinds.ENTRY_BYTES, 7],
        [kinds.ENTRY_METHOD, b"\xc0", "__class__"],
        [kinds.ENTRY_METHOD, b"", "x"],
        [kinds.ENTRY_FUNCTION, 5],
        [kinds.ENTRY_ENUM, "os:system", "x"],
        [kinds.ENTRY_ENUM, "builtins:int", "x"],
        [kinds.ENTRY_EXCEPTION, "builtins:int", b"\x93\x90\x80\x80"],
        [kinds.ENTRY_EXCEPTION, "os:error", b"\x93\x90\x80\x80"],
        [kinds.ENTRY_EXTERNAL, 1],
        [kinds.ENTRY_PARTIAL, b"\x93\xc0\x90\x80"],
        [99],
        [],
        5,
    ],
    ids=repr,
)
def test_hostile_entry_is_refused(entry: Any) -> None:
    tensor = [kinds.ENTRY_TENSOR, 0, "float32", [16], 0]
    control, buffers = crafted(tensor, entry, root=1)
    with pytest.raises((DecodeError, RejectedError)):
        STRICT.decode(control, buffers)


def test_sparse_indices_outside_of_the_tensor_are_refused() -> None:
    encoded = STRICT.encode(torch.eye(4).to_sparse())
    buffers = received(encoded)
    np.frombuffer(buffers[0], np.int64)[0] = 1 << 40
    with pytest.raises(DecodeError):
        STRICT.decode(encoded.control, buffers)


DEFAULT_DEVICE_SENT: Mapping[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(3.0),
    "empty": lambda: torch.ones(0, 3),
    "transposed": lambda: torch.ones(3, 4).T,
    "gathered": lambda: torch.ones(300, 400)[:, ::200],
    "expanded": lambda: torch.ones(1).expand(4),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "scalar": lambda: torch.tensor(1.0),
    "leaf": lambda: torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", DEFAULT_DEVICE_SENT)
def test_tensor_arrives_on_its_device_under_any_default_device(name: str) -> None:
    tensor = DEFAULT_DEVICE_SENT[name]()
    expected = round_trip([tensor, tensor])
    with torch.device("meta"):
        aliases = round_trip([tensor, tensor])
    assert [back.device.type for back in aliases] == ["cpu", "cpu"]
    for back, like in zip(aliases, expected, strict=True):
        assert back.layout == like.layout
        assert torch.equal(_as_dense(back), _as_dense(like))


def test_views_stay_views_under_any_default_device() -> None:
    whole = torch.arange(36.0).view(6, 6)
    with torch.device("meta"):
        row, rows = round_trip([whole[0], whole[0:2]])
    row[0] = 9
    assert rows.device.type == "cpu"
    assert rows[0, 0] == 9


def _as_dense(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj()
    if plain.is_quantized:
        return plain.dequantize()
    return plain if plain.layout is torch.strided else plain.to_dense()
