"""A codec makes a message smaller, and believes nothing that it reads."""

from __future__ import annotations

import sys
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from asyncrpc.core.serde import (
    Encoded,
    Limits,
    compression_for_answer,
    compression_named,
)
from asyncrpc.core.serde.compression import CODECS, CompressionPlan, unreadable
from asyncrpc.core.serde.encoded import is_packed
from asyncrpc.core.serde.kinds import PACKED
from asyncrpc.core.serde.lossless import (
    BLOCK_BYTES,
    COMPRESS_BYTES_MIN,
    EXPANSION_FREE_BYTES,
    EXPANSION_MAX,
    compress,
)
from asyncrpc.core.serde.quick import QuickWriter
from asyncrpc.errors import DecodeError, EncodeError, UsageError
from tests.chaos.heap import Heap
from tests.unit.core.serde.loopback import STRICT, TRUSTED, received, sent_bytes, strict

LOSSLESS = ["lz4", "zstd"]
LOSSY = ["fp16", "bf16", "int8"]
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def packed(value: Any, codec: str, by: Any = TRUSTED) -> Encoded:
    compression = compression_named(codec)
    assert compression is not None
    encoded: Encoded = by.encode_for(compression, value)
    return encoded.pack()


def through(value: Any, codec: str, by: Any = TRUSTED) -> Any:
    encoded = packed(value, codec, by)
    return by.decode(encoded.control, received(encoded))


# --- lossless -------------------------------------------------------------------------


@pytest.mark.parametrize("codec", LOSSLESS)
def test_every_buffer_survives_compression_bit_by_bit(codec: str) -> None:
    value: list[Any] = [
        torch.arange(10_000),
        torch.zeros(5000, dtype=torch.float64),
        np.arange(8000).reshape(80, 100),
        b"abc" * 10_000,
        bytearray(50_000),
        torch.nn.Linear(64, 64),
    ]
    assert sent_bytes(packed(value, codec)) < sent_bytes(TRUSTED.encode(value)) / 2
    back = through(value, codec)
    assert torch.equal(back[0], value[0])
    assert torch.equal(back[1], value[1])
    assert (back[2] == value[2]).all()
    assert back[3:5] == value[3:5]
    assert torch.equal(back[5].weight, value[5].weight)
    for part in (back[0], back[5].weight.detach()):
        part.zero_()  # what arrives may be written to


@pytest.mark.parametrize("codec", LOSSLESS)
def test_incompressible_buffer_travels_uncompressed_and_uncopied(codec: str) -> None:
    noise = torch.randint(0, 256, (100_000,), dtype=torch.uint8)
    encoded = packed(noise, codec)
    assert not is_packed(encoded.control)
    assert encoded.bytes_copied == 0
    assert np.frombuffer(encoded.buffers[0], np.uint8).ctypes.data == noise.data_ptr()
    small = packed(torch.zeros(COMPRESS_BYTES_MIN // 4 - 1), codec)
    assert not is_packed(small.control)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_each_block_is_compressed_on_its_own(codec: str) -> None:
    noise = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8)
    value = torch.cat([noise, torch.zeros(2 * BLOCK_BYTES + 7, dtype=torch.uint8)])
    encoded = packed(value, codec)
    assert BLOCK_BYTES < sent_bytes(encoded) < BLOCK_BYTES + BLOCK_BYTES // 50
    assert encoded.bytes_copied == sent_bytes(encoded)
    assert torch.equal(through(value, codec), value)


@pytest.mark.parametrize("codec", [*LOSSLESS, "int8+zstd", "bf16+lz4"])
@pytest.mark.parametrize("parts", [1, 33])
def test_highly_compressible_message_stays_within_the_ratio_limit(
    codec: str, parts: int
) -> None:
    """A sender leaves some blocks as they are, and its receiver takes them."""
    value = list(torch.zeros(parts, (33 * BLOCK_BYTES // parts) // 4).unbind())
    value = [tensor.clone() for tensor in value]
    encoded = packed(value, codec)
    unpacked_bytes = sum(tensor.nbytes for tensor in value)
    least_bytes = (unpacked_bytes - EXPANSION_FREE_BYTES) / EXPANSION_MAX
    assert least_bytes <= sent_bytes(encoded) < unpacked_bytes / 8
    for mine, its in zip(value, through(value, codec), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("plain", [0, 1, 3])
def test_decompression_bomb_is_refused(codec: str, plain: int) -> None:
    zeros = compress(codec, memoryview(bytes(BLOCK_BYTES)), 0, 0)
    assert zeros is not None
    block = bytes(zeros[0])
    expands = EXPANSION_MAX * len(block)

    def message(blocks: int) -> tuple[bytes, list[memoryview]]:
        data = bytes(plain * BLOCK_BYTES) + blocks * block
        lengths = [BLOCK_BYTES] * plain + blocks * [len(block)]
        size_bytes = (plain + blocks) * BLOCK_BYTES
        inner = STRICT.encode(torch.zeros(size_bytes, dtype=torch.uint8)).control
        packings = msgpack.packb([["", "", size_bytes, codec, lengths]])
        header = (PACKED | len(packings)).to_bytes(4, "little")
        return header + packings + inner, [memoryview(data)]

    spare_bytes = plain * (EXPANSION_MAX - 1) * BLOCK_BYTES + EXPANSION_FREE_BYTES
    most = spare_bytes // (BLOCK_BYTES - expands)
    assert not STRICT.decode(*message(most)).any()
    with pytest.raises(DecodeError, match=f"it may become {EXPANSION_MAX} times"):
        STRICT.open(*message(most + 1))


def test_aliases_stay_aliases_under_every_codec() -> None:
    base = torch.arange(20_000.0) % 64
    for codec in CODECS:
        back, view = through([base, base[100:15_000:3]], codec)
        assert torch.equal(view, back[100:15_000:3])
        back.zero_()
        assert not view.any(), codec


def test_message_without_buffers_is_unchanged() -> None:
    value = [1, "two", {"three": [4.0]}]
    assert through(value, "bf16+zstd") == value
    assert not is_packed(packed(value, "zstd").control)


# --- lossy: what stays as it was ------------------------------------------------------


@pytest.mark.parametrize("codec", LOSSY)
def test_dtype_shape_strides_and_gradient_are_unchanged(codec: str) -> None:
    plain = torch.randn(40, 30)
    parameter = torch.nn.Parameter(torch.randn(3, 5))
    value = [
        *(
            plain,
            plain.T,
            plain[::2, 3:].clone()[::2],
            plain[0, 0].clone(),
            torch.randn(0, 4),
        ),
        *(torch.randn(1, 5).expand(7, 5), plain.clone().requires_grad_(), parameter),
        plain.to(torch.float8_e4m3fn),
    ]
    for mine, its in zip(value, through(value, codec), strict=True):
        assert (its.dtype, its.shape) == (mine.dtype, mine.shape)
        assert its.requires_grad == mine.requires_grad
        assert type(its) is type(mine)
        if mine.numel():
            error = (its.float() - mine.float()).abs().max()
            assert error <= mine.float().abs().max() / 100


@pytest.mark.parametrize("codec", LOSSY)
def test_tensor_of_any_length_is_cast(codec: str) -> None:
    for size in (1, 2, 1023, 1024, 1025, 65_536, 65_537, 200_000):
        value = torch.linspace(-1, 1, size)
        encoded = packed(value, codec)
        assert sent_bytes(encoded) < value.nbytes or size == 1
        assert (through(value, codec) - value).abs().max() < 0.005


def test_16_bit_floats_are_cast_by_int8_alone() -> None:
    half = torch.randn(5000).half()
    for codec in ("fp16", "bf16"):
        assert torch.equal(through(half, codec), half)
        assert packed(half, codec).bytes_copied == 0
    for value in (half, half.bfloat16()):
        assert sent_bytes(packed(value, "int8")) < value.nbytes * 0.51
        back = through(value, "int8")
        assert back.dtype == value.dtype
        assert (back.float() - value.float()).abs().max() < 0.05


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_codecs_cast_tensors_only(codec: str) -> None:
    value: list[Any] = [np.full(10, 1 / 3, np.float32), b"x" * 20_000, 1 / 3]
    back = through(value, codec)
    assert back[0].tobytes() == value[0].tobytes()
    assert back[1:] == value[1:]


@pytest.mark.parametrize("codec", LOSSY)
def test_values_of_sparse_tensors_are_cast_and_indices_are_not(codec: str) -> None:
    dense = torch.diag(torch.randn(300))
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        back = through(sparse, codec)
        assert back.layout == sparse.layout
        assert (back.to_dense() - dense).abs().max() < 0.05


def test_cast_of_a_view_ignores_memory_between_its_elements() -> None:
    base = torch.full((100, 100), 1e30)
    base[:, 10:80] = torch.linspace(-1, 1, 7000).view(100, 70)
    views = [base[:50, 10:80], base[40:, 20:80]]
    for codec in LOSSY:
        for value in (views[:1], views):
            for mine, its in zip(value, through(value, codec), strict=True):
                assert (mine - its).abs().max() < 0.005, codec


def test_infinities_and_nans_stay_under_fp16_and_bf16() -> None:
    value = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0])
    for codec in ("fp16", "bf16"):
        assert str(through(value, codec)) == str(value)


# --- lossy: what is refused -----------------------------------------------------------


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3),
        torch.tensor([True]),
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.uint8),
        torch.eye(3, dtype=torch.float64).to_sparse(),
    ],
    ids=str,
)
def test_harmful_dtype_is_refused(codec: str, tensor: torch.Tensor) -> None:
    with pytest.raises(EncodeError, match=r"value\[1\]\['x'\]: codec .* would harm"):
        packed([0, {"x": tensor}], codec)
    back = through([tensor], f"{codec}+keep")[0]
    assert back.dtype == tensor.dtype
    assert torch.equal(_dense(back), _dense(tensor))


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.parametrize("codec", LOSSY)
def test_quantized_tensor_is_refused_and_kept(codec: str) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(EncodeError, match="would harm a tensor of qint8"):
        packed(tensor, codec)
    assert torch.equal(through(tensor, f"{codec}+keep"), tensor)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense()


@pytest.mark.parametrize(
    ("codec", "number", "why"),
    [
        ("fp16", 65520.0, "65520.*the largest number is 65504"),
        ("fp16", -1e9, "-1e.09"),
        ("bf16", torch.finfo(torch.float32).max, "3.38953e.38"),
        ("int8", float("inf"), "NaN or an infinity"),
        ("int8", float("nan"), "NaN or an infinity"),
    ],
)
@pytest.mark.parametrize("at", [0, 70_000, 99_999])
def test_value_beyond_the_range_of_a_codec_is_refused(
    codec: str, number: float, why: str, at: int
) -> None:
    tensor = torch.zeros(100_000)
    tensor[at] = number
    with pytest.raises(EncodeError, match=rf"value\[0\]: .*{why}.*'{codec}\+keep'"):
        packed([tensor], codec)
    kept = through([tensor], f"{codec}+keep")[0]
    assert kept[at] == number or number != number  # noqa: PLR0124  (a NaN)


def test_largest_numbers_of_a_codec_pass() -> None:
    assert through(torch.tensor([65519.0]), "fp16").tolist() == [65504.0]
    limit = torch.finfo(torch.bfloat16).max
    assert through(torch.tensor([limit]), "bf16").tolist() == [limit]
    top = torch.finfo(torch.float32).max
    back = through(torch.tensor([top, -top, 1.0]), "int8")
    assert torch.isfinite(back).all()
    assert (back[:2].double().abs() >= top * 0.999999).all()


def test_memory_with_two_dtypes_is_refused_and_kept() -> None:
    floats = torch.rand(1000)
    pair = [floats, floats.view(torch.float16)]
    with pytest.raises(EncodeError, match="shares its memory with a tensor of another"):
        packed(pair, "bf16+zstd")
    back = through(pair, "bf16+keep")
    assert torch.equal(back[0], floats)
    assert back[0].data_ptr() == back[1].data_ptr()


def test_unpacked_size_is_limited() -> None:
    tight = strict(limits=Limits(unpacked_bytes_max=10_000))
    with pytest.raises(EncodeError, match="with a codec the limit is 10000"):
        packed(torch.zeros(5000), "zstd", tight)
    bomb = packed(torch.zeros(5000), "zstd", STRICT)
    with pytest.raises(DecodeError, match="20000 bytes after unpacking"):
        tight.decode(bomb.control, received(bomb))


# --- names ----------------------------------------------------------------------------


def test_codec_names_are_checked_and_listed() -> None:
    assert compression_named("") is None
    assert len(CODECS) == 20
    for name in CODECS:
        codec = compression_named(name)
        assert codec is not None
        assert codec.name == name
    for name in ("gzip", "zstd+bf16", "keep", "zstd+keep", "bf16+int8", "BF16"):
        with pytest.raises(UsageError, match=r"unknown; use 'lz4' or 'zstd'"):
            compression_named(name)


def test_answer_codec_keeps_values_that_it_cannot_cast() -> None:
    for asked, answered in {
        "bf16": "bf16+keep",
        "zstd": "zstd",
        "int8+keep": "int8+keep",
    }.items():
        codec = compression_for_answer(asked)
        assert codec is not None
        assert codec.name == answered
    unknown: object
    for unknown in ("gzip", "", None, 3, ["bf16"], {}):
        assert compression_for_answer(unknown) is None


@pytest.mark.parametrize(
    ("codec", "module", "package"),
    [("lz4", "lz4.block", "lz4"), ("bf16+zstd", "zstandard", "zstandard")],
)
def test_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, codec: str, module: str, package: str
) -> None:
    encoded = packed([torch.zeros(50_000)], codec)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UsageError, match=rf"needs the package '{package}': pip install"
    ):
        compression_named(codec)
    with pytest.raises(DecodeError, match=rf"install '{package}' here"):
        TRUSTED.decode(encoded.control, received(encoded))
    assert compression_for_answer(codec) is None


# --- what arrives is not trusted ------------------------------------------------------


def _repacked(packings: Any, control: bytes) -> bytes:
    body: bytes = msgpack.packb(packings)
    length = int.from_bytes(control[:4], "little") & (PACKED - 1)
    return (PACKED | len(body)).to_bytes(4, "little") + body + control[4 + length :]


@pytest.mark.parametrize(
    "packing",
    [
        *(3, [], [[]], [None, None], [7], [["fp16"]], [["fp16", "float32", 8, "", []]]),
        *([["fp16", "float64", 400, "", []]], [["fp16", "float32", 401, "", []]]),
        *([["gone", "float32", 400, "", []]], [["", "", 400, "gone", [200]]]),
        *([["", "", 400, "zstd", [201]]], [["", "", 400, "zstd", [100, 100]]]),
        *([["", "", 400, "zstd", [0]]], [["", "", 400, "zstd", 5]]),
        *([["", "", -1, "zstd", [200]]], [["", "", 1 << 60, "zstd", [200]]]),
        *([["", "", 400, "zstd", [200]]], [["", "", 400, "lz4", [200]]]),
        *([[["fp16"], "float32", 400, "", []]], [["fp16", {}, 400, "", []]]),
    ],
    ids=repr,
)
def test_mismatched_packings_are_refused(packing: Any) -> None:
    encoded = packed([torch.ones(100)], "fp16")
    assert sent_bytes(encoded) == 200
    control = _repacked(packing, encoded.control)
    with pytest.raises(DecodeError):
        TRUSTED.decode(control, received(encoded))


def test_block_with_a_false_length_is_refused() -> None:
    zstandard = pytest.importorskip("zstandard")
    block = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    buffer = memoryview(bytearray(block))
    body = msgpack.packb([["", "", 4096, "zstd", [len(block)]]])
    control = (PACKED | len(body)).to_bytes(4, "little") + body + b"\0\0\0\0\xc0"
    with pytest.raises(DecodeError, match="does not have 4096 bytes"):
        TRUSTED.decode(control, [buffer])
    lz4 = pytest.importorskip("lz4.block")
    block = lz4.compress(bytes(1 << 20), store_size=False)
    buffer = memoryview(bytearray(block))
    body = msgpack.packb([["", "", 8192, "lz4", [len(block)]]])
    control = (PACKED | len(body)).to_bytes(4, "little") + body + b"\0\0\0\0\xc0"
    with pytest.raises(DecodeError, match="damaged"):
        TRUSTED.decode(control, [buffer])


def test_unpacked_bytes_of_a_wrong_size_are_refused() -> None:
    encoded = packed([torch.zeros(50_000)], "zstd")
    other = packed([torch.zeros(60_000)], "zstd")
    length = int.from_bytes(other.control[:4], "little") & (PACKED - 1)
    packings = msgpack.unpackb(other.control[4 : 4 + length])
    with pytest.raises(DecodeError):
        TRUSTED.decode(_repacked(packings, encoded.control), received(other))


def test_message_that_failed_to_unpack_decodes_as_the_error() -> None:
    with pytest.raises(DecodeError, match="the reason"):
        TRUSTED.decode(unreadable("the reason"))


def test_read_only_buffer_is_copied() -> None:
    for codec in ("fp16", "zstd", "int8+lz4"):
        encoded = packed([torch.ones(5000)], codec)
        buffers = [memoryview(bytes(view)) for view in encoded.buffers]
        back = TRUSTED.decode(encoded.control, buffers)[0]
        before = back.clone()
        back.add_(1)  # torch would write to memory that is not to be written to
        assert torch.equal(back, before + 1)
        assert [bytes(view) for view in encoded.buffers] == buffers


def test_plan_without_a_cast_reads_no_element() -> None:
    assert CompressionPlan(CODECS["zstd"], [], []).cast(0, memoryview(b"abc"))[1] == ""


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_codec_ignores_the_default_device_and_dtype(codec: str) -> None:
    tensor = torch.linspace(-1, 1, 10_000)
    expected = through(tensor, codec)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            back = through(tensor, codec)
    finally:
        torch.set_default_dtype(torch.float32)
    assert back.device.type == "cpu"
    assert back.equal(expected)


LARGE = 64 << 20  # characters


def test_long_text_leaves_no_memory_behind() -> None:
    quick, heap = QuickWriter(), Heap()
    assert quick.write("short") is not None
    before = heap.bytes_in_use
    assert quick.write("n" * LARGE) is not None
    assert heap.bytes_in_use - before < LARGE // 4
    assert quick.write("short") is not None
