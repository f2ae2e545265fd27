"""Thousands of small tensors travel together, and arrive as if each came alone."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrpc.core.serde import Codec, Encoded, FunctionTable, Policy, compression_named

CODEC = Codec(FunctionTable(Policy.TRUSTED))
COUNT = 200

Transition = collections.namedtuple("Transition", "state action reward")  # noqa: PYI024


@dataclasses.dataclass
class Step:
    state: torch.Tensor
    action: int


def received(encoded: Encoded) -> list[memoryview]:
    return [memoryview(bytearray(view)) for view in encoded.buffers]


def round_trip(value: Any, codec: Codec = CODEC) -> tuple[Encoded, Any]:
    encoded = codec.encode(value)
    return encoded, codec.decode(encoded.control, received(encoded))


ROWS: dict[str, tuple[Callable[[int], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda i: torch.full((3,), i), lambda row: row),
    "tuple": (lambda i: (torch.full((2, 2), i), i), lambda row: row[0]),
    "namedtuple": (
        lambda i: Transition(torch.full((), float(i)), i, 0.5),
        lambda row: row.state,
    ),
    "dataclass": (lambda i: Step(torch.full((4,), i % 2 == 0), i), lambda r: r.state),
    "dict": (lambda i: {"state": torch.full((1,), i)}, lambda row: row["state"]),
}


@pytest.mark.parametrize("kind", ROWS)
def test_small_tensors_share_buffers_and_arrive_with_own_memory(kind: str) -> None:
    make, get = ROWS[kind]
    rows = [make(i) for i in range(COUNT)]
    encoded, got = round_trip(rows)
    assert len(encoded.buffers) < COUNT // 2
    for mine, its in zip(rows, got, strict=True):
        tensor, arrived = get(mine), get(its)
        assert type(its) is type(mine)
        assert arrived.dtype == tensor.dtype
        assert torch.equal(arrived, tensor)
        assert arrived.untyped_storage().nbytes() == tensor.nbytes
        assert not arrived._is_view()  # noqa: SLF001
    last = get(got[-1]).clone()
    get(got[-2]).zero_()
    get(got[-2]).resize_(7)
    assert torch.equal(get(got[-1]), last)
    assert get(got[-1])._version == 0  # noqa: SLF001


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.uint16, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_small_tensors_of_any_dtype_arrive(dtype: torch.dtype) -> None:
    rows = [torch.full((2,), i % 3).to(dtype) for i in range(COUNT)]
    _, got = round_trip(rows)
    for mine, its in zip(rows, got, strict=True):
        assert its.dtype == dtype
        assert torch.equal(its.to(torch.complex64), mine.to(torch.complex64))


def other_tensors() -> dict[str, Callable[[int], torch.Tensor]]:
    """Return those that cannot be rows, or only with care."""
    large = torch.arange(COUNT * 4.0).reshape(COUNT, 4)
    with torch.inference_mode():
        inferred = [torch.full((4,), float(i)) for i in range(COUNT)]
    return {
        "views of one": lambda i: large[i],
        "transposed": lambda i: torch.arange(6).reshape(2, 3).t() + i,
        "expanded": lambda i: torch.full((1,), i).expand(3),
        "negative": lambda i: torch.full((2,), complex(0, i)).conj().imag,
        "conjugate": lambda i: torch.full((2,), complex(0, i)).conj(),
        "empty": lambda _: torch.empty(0, 3),
        "inference": inferred.__getitem__,
        "gradient": lambda i: torch.full((2,), float(i), requires_grad=True),
        "parameter": lambda i: torch.nn.Parameter(torch.full((2,), float(i))),
        "sparse": lambda i: torch.full((2,), float(i)).to_sparse(),
        "of many shapes": lambda i: torch.ones(i % 7 + 1),
        "large": lambda i: torch.full((2000,), i),
    }


@pytest.mark.parametrize("kind", other_tensors())
def test_other_tensors_arrive_between_small_ones(kind: str) -> None:
    make = other_tensors()[kind]
    rows = [(torch.full((3,), i), make(i)) for i in range(COUNT)]
    encoded, got = round_trip(rows)
    for (mine, other), (its, arrived) in zip(rows, got, strict=True):
        assert torch.equal(its, mine)
        assert type(arrived) is type(other)
        assert arrived.requires_grad == other.requires_grad
        assert torch.equal(arrived.to_dense(), other.to_dense())
    is_recorded = rows[0][1].requires_grad
    assert len(encoded.gradient_tensors) == (COUNT if is_recorded else 0)


def test_attributes_of_small_tensors_are_kept() -> None:
    rows = [torch.full((2,), i) for i in range(COUNT)]
    for i, row in enumerate(rows):
        row.number = i  # type: ignore[attr-defined]
    _, got = round_trip(rows)
    assert [row.number for row in got] == [*range(COUNT)]


def test_repeated_small_tensor_is_one_object() -> None:
    states = [torch.full((3,), i) for i in range(COUNT + 1)]
    encoded, got = round_trip([(states[i], states[i + 1]) for i in range(COUNT)])
    assert len(encoded.buffers) < COUNT // 2
    for (_, mine), (its, _) in itertools.pairwise(got):
        assert mine is its


@pytest.mark.parametrize("kind", ["row", "column", "part"])
def test_small_tensors_with_shared_memory_still_share_it(kind: str) -> None:
    share: Callable[[torch.Tensor], torch.Tensor] = {
        "row": torch.Tensor.detach,
        "column": torch.Tensor.t,
        "part": lambda tensor: tensor[1:],
    }[kind]
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(COUNT):
        tensor = torch.full((2, 2), i)
        rows.append((tensor, share(tensor)))
    _, got = round_trip(rows)
    for (mine, other), (its, arrived) in zip(rows, got, strict=True):
        assert torch.equal(its, mine)
        assert torch.equal(arrived, other)
        its.fill_(-1)
        assert (arrived == -1).all()


def test_rows_are_right_if_the_pickle_is_written_twice() -> None:
    class Local:
        """Pickle fails at the first try."""

        tries = 0

        def __reduce__(self) -> tuple[Any, ...]:
            Local.tries += 1
            if Local.tries == 1:
                raise RuntimeError
            return int, (5,)

    tensors = [torch.full((3,), i) for i in range(COUNT)]
    _, (got, number) = round_trip((tensors, Local()))
    assert number == 5
    assert Local.tries == 2
    assert torch.equal(torch.stack(got), torch.stack(tensors))


def test_strict_worker_takes_small_tensors_one_by_one() -> None:
    codec = Codec(FunctionTable(Policy.STRICT))
    tensors = [torch.full((3,), i) for i in range(COUNT)]
    encoded, got = round_trip(tensors, codec)
    assert len(encoded.buffers) == COUNT
    assert torch.equal(torch.stack(got), torch.stack(tensors))


def test_codec_is_applied_to_each_small_tensor() -> None:
    tensors = [torch.full((4,), float(10**i)) for i in range(4)] * 20
    rows = [tensor.clone() for tensor in tensors]
    codec = compression_named("int8")
    assert codec is not None
    packed = CODEC.encode_for(codec, rows).pack()
    got = CODEC.decode(packed.control, received(packed))
    for mine, its in zip(rows, got, strict=True):
        assert torch.allclose(its, mine, rtol=0.01)
