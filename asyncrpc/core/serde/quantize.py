"""Casts: fewer bits for the elements of a float tensor, with a bound on the error.

    fp16   float16, rounded to nearest: at most 2**-11 of |x|, or 2**-25
    bf16   bfloat16, rounded to nearest: at most 2**-8 of |x|, or 2**-134
    int8   a block of 1024 elements, in memory order, as int8 and one float32 scale: at
           most 1/253 of the block's largest |x|, or 2**-127

A cast refuses a value that it would destroy: a finite number that would become
infinite, and under `int8` also an infinity or a NaN.  The error of all others is
bounded, as
docs/reference/codecs.md states; tests/property/test_codecs.py looks for exceptions.

Everything works in slabs that stay in the cache: the passes over a slab cost less than
reading it from memory.  Casts are called in threads; torch releases the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

BLOCK_ELEMENTS: Final = 1024
_SCALE_BYTES: Final = 4
# 64 KiB of float32, a multiple of the block, which torch handles in one thread: several
# threads would wait for each other at the end of every pass.  On a busy machine of two
# cores int8 packs 0.5 GB/s, and 0.06 with slabs twice as large.
_SLAB_ELEMENTS: Final = 1 << 14

# From these on float32 rounds to infinity: half a step beyond the largest number.
_FP16_LIMIT: Final = 65520.0
_BF16_LIMIT: Final = 2.0**128 - 2.0**119
# The scale is a little too small: 127 times it never exceeds the block's largest
# number, so it cannot overflow.  It is never subnormal: that has too few digits.
_SCALE_OF_PEAK: Final = (1 - 2.0**-22) / 127
_SCALE_MIN: Final = 2.0**-126
# Added and subtracted, it rounds: float32 has no fraction at this size.  torch's own
# `round` wakes other threads at any size: 0.1 GB/s on a busy machine.
_ROUND: Final = 1.5 * 2.0**23

_FLOAT8: Final = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if name.startswith("float8_") and isinstance(dtype, torch.dtype)
)
_FLOAT16: Final = frozenset({torch.float16, torch.bfloat16})


class LossyValueError(Exception):
    """A cast would destroy a value; the text says which and why.

    It never leaves serde.
    """


@dataclass(frozen=True, slots=True)
class Cast:
    """A way to write the elements of a tensor in fewer bits.

    Attributes:
        leaves: dtypes that are as small already; they are sent unchanged.
        narrow: turns a one-dimensional tensor into bytes; raises `LossyValueError`.
        widen: fills a tensor from such bytes.
        narrow_bytes: turns a number of elements into their number of bytes.
    """

    shrinks: frozenset[torch.dtype]
    leaves: frozenset[torch.dtype]
    narrow: Callable[[torch.Tensor], torch.Tensor]
    widen: Callable[[torch.Tensor, torch.Tensor], None]
    narrow_bytes: Callable[[int], int]


def _slabs(elements: int) -> Iterator[slice]:
    for start in range(0, elements, _SLAB_ELEMENTS):
        yield slice(start, min(start + _SLAB_ELEMENTS, elements))


def _to_half(
    wide: torch.Tensor, dtype: torch.dtype, limit: float, advice: str
) -> torch.Tensor:
    narrow = torch.empty(wide.numel(), dtype=dtype, device="cpu")
    for slab in _slabs(wide.numel()):
        part = wide[slab]
        low, high = (float(end) for end in torch.aminmax(part))
        if not (-limit < low and high < limit):  # true also for a NaN
            _refuse_overflow(part, dtype, limit, advice)
        narrow[slab].copy_(part)
    return narrow.view(torch.uint8)


def _refuse_overflow(
    part: torch.Tensor, dtype: torch.dtype, limit: float, advice: str
) -> None:
    over = part[torch.isfinite(part) & (part.abs() >= limit)]
    if len(over):
        raise LossyValueError(
            f"it holds {float(over[0]):g}, which would become infinite (the largest"
            f" number is {torch.finfo(dtype).max:g}): {advice}"
        )


def _to_fp16(wide: torch.Tensor) -> torch.Tensor:
    return _to_half(wide, torch.float16, _FP16_LIMIT, "scale it, use 'bf16'")


def _to_bf16(wide: torch.Tensor) -> torch.Tensor:
    return _to_half(wide, torch.bfloat16, _BF16_LIMIT, "scale it")


def _from_half(narrow: torch.Tensor, wide: torch.Tensor, dtype: torch.dtype) -> None:
    wide.copy_(narrow.view(dtype))


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK_ELEMENTS)


def _rows(elements: torch.Tensor, slab: slice) -> Iterator[torch.Tensor]:
    """Cut a slab into rows of one block each; the last row may be shorter."""
    part = elements[slab]
    whole = part.numel() - part.numel() % BLOCK_ELEMENTS
    if whole:
        yield part[:whole].view(-1, BLOCK_ELEMENTS)
    if whole < part.numel():
        yield part[whole:].view(1, -1)


def _to_int8(wide: torch.Tensor) -> torch.Tensor:
    scales_bytes = _SCALE_BYTES * _blocks(wide.numel())
    narrow = torch.empty(scales_bytes + wide.numel(), dtype=torch.uint8, device="cpu")
    scales = narrow[:scales_bytes].view(torch.float32)
    elements = narrow[scales_bytes:].view(torch.int8)
    scratch = torch.empty(
        min(wide.numel(), _SLAB_ELEMENTS), dtype=torch.float32, device="cpu"
    )
    done = 0
    for slab in _slabs(wide.numel()):
        pairs = zip(_rows(wide, slab), _rows(elements, slab), strict=True)
        for source, target in pairs:
            rows = source.float()
            # Two passes: by rows, aminmax takes 11 times as long as both.
            scale = torch.maximum(rows.amin(1).neg_(), rows.amax(1))
            scale.mul_(_SCALE_OF_PEAK).clamp_(min=_SCALE_MIN)  # NaN stays NaN
            scaled = scratch[: rows.numel()].view(rows.shape)
            torch.div(rows, scale[:, None], out=scaled)
            target.copy_(scaled.add_(_ROUND).sub_(_ROUND))
            scales[done : done + len(scale)] = scale
            done += len(scale)
    if not bool(torch.isfinite(scales).all()):
        raise LossyValueError("it holds a NaN or an infinity: replace it")
    return narrow


def _from_int8(narrow: torch.Tensor, wide: torch.Tensor) -> None:
    scales_bytes = _SCALE_BYTES * _blocks(wide.numel())
    scales = narrow[:scales_bytes].view(torch.float32)
    elements = narrow[scales_bytes:].view(torch.int8)
    done = 0
    for slab in _slabs(wide.numel()):
        pairs = zip(_rows(elements, slab), _rows(wide, slab), strict=True)
        for source, target in pairs:
            scale = scales[done : done + len(source), None]
            done += len(source)
            torch.mul(source, scale, out=target)


CASTS: Final[dict[str, Cast]] = {
    "fp16": Cast(
        frozenset({torch.float32}),
        _FLOAT16 | _FLOAT8,
        _to_fp16,
        lambda narrow, wide: _from_half(narrow, wide, torch.float16),
        lambda elements: 2 * elements,
    ),
    "bf16": Cast(
        frozenset({torch.float32}),
        _FLOAT16 | _FLOAT8,
        _to_bf16,
        lambda narrow, wide: _from_half(narrow, wide, torch.bfloat16),
        lambda elements: 2 * elements,
    ),
    "int8": Cast(
        frozenset({torch.float32}) | _FLOAT16,
        _FLOAT8,
        _to_int8,
        _from_int8,
        lambda elements: elements + _SCALE_BYTES * _blocks(elements),
    ),
}
