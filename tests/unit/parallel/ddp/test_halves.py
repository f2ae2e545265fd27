"""Half precision takes no memory but the buffer's own, and rounds as torch does."""

from __future__ import annotations

import pytest
import torch

from asyncrpc.parallel.ddp.hooks.plain import narrow, widen

HALVES = [torch.float16, torch.bfloat16]
BUFFERS = [torch.float32, torch.float64, *HALVES]
STEP = 1 << 18  # of a conversion
NUMELS = [0, 1, 3, STEP - 1, STEP, STEP + 1, 3 * STEP + 1]


def drawn(numel: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=draw).to(dtype)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", BUFFERS)
@pytest.mark.parametrize("numel", NUMELS)
def test_buffer_is_converted_in_place_and_back(
    numel: int, dtype: torch.dtype, half: torch.dtype
) -> None:
    memory = drawn(numel + 2, dtype)
    edges = memory[0].item(), memory[-1].item()
    buffer = memory[1:-1]
    before = buffer.clone()
    wanted = before.to(half, copy=True).div_(3)
    narrowed = narrow(buffer, half, 3)
    assert narrowed.dtype is half
    assert torch.equal(narrowed, wanted)
    assert narrowed.data_ptr() == buffer.data_ptr()
    assert widen(narrowed, buffer) is buffer
    assert torch.equal(buffer, wanted.to(dtype))
    assert (memory[0].item(), memory[-1].item()) == edges


@pytest.mark.parametrize("dtype", BUFFERS)
def test_half_elsewhere_is_copied_into_the_buffer(dtype: torch.dtype) -> None:
    buffer, half = drawn(1000, dtype), drawn(1000, torch.float16)
    assert widen(half.view(10, 100), buffer) is buffer
    assert torch.equal(buffer, half.to(dtype))


def test_missing_divisor_divides_nothing() -> None:
    buffer = torch.tensor([1.0, 3.0])
    assert narrow(buffer, torch.float16).tolist() == [1.0, 3.0]
