"""No codec loses more than docs/reference/codecs.md says, whatever the numbers are.

Each bound is recomputed in float64 from the tensor that was sent.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrpc.core.serde import Codec, FunctionTable, Policy
from asyncrpc.core.serde.compression import CODECS
from asyncrpc.errors import DecodeError, RejectedError

CODEC = Codec(FunctionTable(Policy.STRICT))
BLOCK = 1024

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def tensors(draw: st.DrawFn, limit: float) -> torch.Tensor:
    """Numbers of all magnitudes, some drawn one by one, up to several blocks."""
    size = draw(st.integers(1, 3 * BLOCK))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    exponents = torch.randint(-150, 128, (size,), generator=generator)
    spread = draw(st.sampled_from([0.0, 0.1, 1.0]))
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    values *= 2.0 ** (exponents.double() * spread)
    wide = values.clamp(-limit, limit).float()
    for at, number in draw(
        st.lists(st.tuples(st.integers(0, size - 1), floats), max_size=8)
    ):
        wide[at] = min(max(number, -limit), limit)
    return wide


def lost(value: torch.Tensor, codec: str) -> torch.Tensor:
    encoded = CODEC.encode_for(CODECS[codec], [value]).pack()
    buffers = [np.frombuffer(view, np.uint8).copy().data for view in encoded.buffers]
    back = CODEC.decode(encoded.control, buffers)[0]
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    error: torch.Tensor = (back.double() - value.double()).abs()
    return error


@given(tensors(65504.0))
def test_fp16_loses_at_most_one_part_in_2048(value: torch.Tensor) -> None:
    bound = torch.clamp(value.double().abs() * 2**-11, min=2**-25)
    assert (lost(value, "fp16") <= bound).all()


@given(tensors(torch.finfo(torch.bfloat16).max))
def test_bf16_loses_at_most_one_part_in_256(value: torch.Tensor) -> None:
    bound = torch.clamp(value.double().abs() * 2**-8, min=2**-134)
    assert (lost(value, "bf16") <= bound).all()


@given(tensors(torch.finfo(torch.float32).max))
def test_int8_loses_at_most_one_part_in_253_of_its_block(value: torch.Tensor) -> None:
    assert (lost(value, "int8") <= int8_bound(value)).all()


@given(tensors(60000.0), st.sampled_from([torch.float16, torch.bfloat16]))
def test_int8_of_16_bit_floats_loses_a_rounding_more(
    value: torch.Tensor, dtype: torch.dtype
) -> None:
    narrow = value.to(dtype)
    digits = 2**-11 if dtype is torch.float16 else 2**-8
    bound = int8_bound(narrow)
    rounding = torch.clamp((narrow.double().abs() + bound) * digits, min=2**-25)
    assert (lost(narrow, "int8") <= bound + rounding).all()


def int8_bound(value: torch.Tensor) -> torch.Tensor:
    blocks = torch.split(value.double().abs(), BLOCK)
    peaks = [torch.full_like(block, float(block.max())) for block in blocks]
    return torch.clamp(torch.cat(peaks) / 253, min=2**-127)


@given(tensors(1e30), st.sampled_from(["lz4", "zstd"]))
def test_lossless_codecs_lose_nothing(value: torch.Tensor, codec: str) -> None:
    assert not lost(value.repeat(3), codec).any()


@pytest.mark.parametrize("codec", ["fp16", "int8+zstd", "lz4"])
@settings(max_examples=200)
@given(data=st.data())
def test_damaged_messages_are_values_or_decode_errors(
    codec: str, data: st.DataObject
) -> None:
    value = [torch.zeros(3000), b"ab" * 9000]
    encoded = CODEC.encode_for(CODECS[codec], value).pack()
    control = bytearray(encoded.control)
    buffers = [bytearray(view) for view in encoded.buffers]
    for part in data.draw(st.lists(st.sampled_from([control, *buffers]), min_size=1)):
        at = data.draw(st.integers(0, len(part) - 1))
        part[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError, RejectedError):
        CODEC.decode(bytes(control), [memoryview(buffer) for buffer in buffers])
