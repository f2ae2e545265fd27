"""What does a value cost on its way through the codec, in microseconds?

Encoding and decoding are on the path of every call.  Tensors are viewed, not copied:
the time must not grow with their size, as docs/explanation/zero-copy.md claims.

    $ make bench ONLY=serde
"""

from __future__ import annotations

import decimal
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from asyncrpc.core.serde import (
    Codec,
    FunctionTable,
    Policy,
    describe_exception,
    rebuild_exception,
)

ROUNDS: Final = 60
CODEC: Final = Codec(FunctionTable(Policy.TRUSTED))

small = torch.randn(4, 4)
VALUES: Final[dict[str, Any]] = {
    "([1, 'a'], {})": ([1, "a"], {}),
    "([1, 2.0], {'lr': 0.1})": ([1, 2.0], {"lr": 0.1}),
    "([tensor], {})": ([small], {}),
    "tensor, bfloat16": small.bfloat16(),
    "tensor, 64 MiB": torch.zeros(1 << 24),
    "tensor, transposed": small.T,
    "tensor that requires grad": small.clone().requires_grad_(),
    "10 views of one storage": list(torch.randn(10, 4)),
    "numpy array": np.ones(4),
    "torch.add": torch.add,
    "Decimal, by pickle": decimal.Decimal("1.5"),
    "Linear(4, 4), by pickle": torch.nn.Linear(4, 4),
    "1000 integers": list(range(1000)),
    "1 MB of bytes": [bytes(1_000_000)],
}


def median_us(function: Callable[[], object], per_round: int) -> float:
    times_ns = []
    for _ in range(ROUNDS):
        start_ns = time.perf_counter_ns()
        for _ in range(per_round):
            function()
        times_ns.append((time.perf_counter_ns() - start_ns) / per_round)
    return statistics.median(times_ns) / 1000


def bench_value(value: Any) -> tuple[float, float]:
    encoded = CODEC.encode(value)
    buffers = [np.frombuffer(view, np.uint8).copy().data for view in encoded.buffers]
    encode_us = median_us(lambda: CODEC.encode(value), 100)
    decode_us = median_us(lambda: CODEC.decode(encoded.control, buffers), 100)
    return encode_us, decode_us


def fail() -> None:
    raise ValueError("text")


def bench_exception() -> tuple[float, float]:
    try:
        fail()
    except ValueError as caught:
        error = caught
    tree = describe_exception(error, CODEC, worker="ps", pid=1)
    functions = CODEC.functions
    return (
        median_us(lambda: describe_exception(error, CODEC, worker="ps", pid=1), 20),
        median_us(lambda: rebuild_exception(tree, functions, function="f", to="p"), 20),
    )


if __name__ == "__main__":
    print(f"{'value':>28} {'encode, us':>12} {'decode, us':>12}")
    rows = {name: bench_value(value) for name, value in VALUES.items()}
    rows["ValueError, describe/rebuild"] = bench_exception()
    for name, (encode_us, decode_us) in rows.items():
        print(f"{name:>28} {encode_us:>12.2f} {decode_us:>12.2f}")
