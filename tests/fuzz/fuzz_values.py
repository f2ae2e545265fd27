"""Values: under the strict policy bytes become a value, or an error that says so.

Nothing is imported, opened, compiled or run meanwhile, by Python's own audit events;
and the shortcut for plain values never reads what the whole decoder would not.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import torch

from asyncrpc import expose
from asyncrpc.core.serde import (
    Codec,
    DevicePlacement,
    FunctionTable,
    Limits,
    Policy,
    Staged,
    compression_named,
)
from asyncrpc.core.serde.exceptions import describe_exception, rebuild_exception
from asyncrpc.core.serde.quick import UNREAD
from asyncrpc.errors import DecodeError, RejectedError, UsageError
from tests.fuzz.auditing import watched
from tests.fuzz.choices import Choices

LIMITS = Limits(control_bytes_max=1 << 16, objects_max=256, unpacked_bytes_max=1 << 20)
TEXTS = (
    *("float32", "int64", "complex64", "quint8", "bool", "bfloat16", "torch.strided"),
    *("torch.sparse_coo", "torch.sparse_csr", "torch.channels_last", "cpu", "meta"),
    *("<f4", "|O", "<M8[s]", "|V8", "C", "F", "zstd", "lz4", "bf16", "int8", ""),
    *("builtins:eval", "builtins:list", "os:system", "builtins:ValueError"),
    *("builtins:ExceptionGroup", "asyncrpc.errors:RemoteError", "__class__"),
    *("tests.fuzz.fuzz_values:Colour", "tests.fuzz.fuzz_values:Exposed", "RED"),
    *("tests.fuzz.fuzz_values:exposed", "method", "__reduce__", "_private"),
    *("type", "message", "traceback", "args", "state", "slots", "notes", "cause"),
    *("context", "suppress", "members", "worker", "pid", "2020-01-01", "12:00:00"),
)


@expose
class Colour(enum.Enum):
    """An enum that peers may name."""

    RED = 1


@expose
class Exposed(Exception):  # noqa: N818  (any exposed class)
    """An exception that peers may name, and may not call methods of, but this."""

    def method(self) -> int:
        return 1


@expose
def exposed(*args: Any) -> Any:
    """Let peers name this; decoding never calls it."""
    raise AssertionError("called while a value was decoded")


for _codec in ("lz4", "zstd"):  # their packages may be imported, when first asked for
    with suppress(UsageError):
        compression_named(_codec)
FUNCTIONS = FunctionTable(Policy.STRICT)
CODEC = Codec(FUNCTIONS, None, LIMITS)
PICKLE = 7  # the code of an entry
EXCEPTIONS = {"type", "message", "traceback", "args"}


def control_of(
    choices: Choices, texts: tuple[str, ...], pickles: tuple[bytes, ...] = ()
) -> bytes:
    """Make a control part that is sound msgpack in three parts.

    Args:
        pickles: of which one is in each entry that is a pickle; none: anything is.
    """
    entries = []
    for _ in range(choices.below(5)):
        entry: list[Any] = [choices.below(16)]
        for _ in range(choices.below(9)):
            if choices.below(4) == 0:
                entry.append(msgpack.packb(choices.tree(texts)))
            else:
                entry.append(choices.tree(texts))
        if entry[0] == PICKLE and pickles:
            entry[1:] = [pickles[choices.below(len(pickles))], []]
        entries.append(entry)
    table = msgpack.packb(entries) if entries else b""
    tree = msgpack.packb(choices.tree(texts))
    length = len(table) | choices.below(2) << 31
    message: bytes = struct.pack("<I", length) + table + tree
    if choices.below(8) == 0:
        packings = msgpack.packb([choices.tree(texts)])
        message = struct.pack("<I", len(packings) | 1 << 30) + packings + message
    return message


def check(data: bytes) -> None:
    """Decode a message in both ways."""
    choices = Choices(data)
    how = choices.below(2)
    lengths = [choices.below(256) for _ in range(choices.below(4))]
    buffers = [memoryview(bytearray(length)) for length in lengths]
    control = control_of(choices, TEXTS) if how else bytes(choices.left)
    with watched() as seen:
        quick = CODEC.decode_quickly(control, buffers)
        try:
            value = CODEC.decode(control, buffers)
        except (DecodeError, RejectedError):
            assert quick is UNREAD
            value = None
        else:
            assert quick is UNREAD or type(quick) is type(value)
        if isinstance(value, dict) and value.keys() >= EXCEPTIONS:
            with suppress(DecodeError):
                rebuild_exception(value, FUNCTIONS, function="f", to="w")
        land(control, buffers)
    assert not seen, seen


def land(control: bytes, buffers: list[memoryview]) -> None:
    """Look which tensors are to be on devices, then read the message with them."""
    devices: list[str] = []

    def device_of(came_from: str) -> str:
        devices.append(came_from)
        return ("cpu", "cuda:0", "xla:1")[len(devices) % 3]

    try:
        landing = DevicePlacement(control, buffers, LIMITS, device_of)
        placed = {index: tensor for index, (tensor, _) in landing.wanted.items()}
        assert all(tensor.is_cpu for tensor in placed.values())
        CODEC.decode(control, Staged(buffers, placed))
    except (DecodeError, RejectedError):
        return


def values() -> Iterator[Any]:
    """Give a value of every kind."""
    tensor = torch.arange(6.0).reshape(2, 3)
    yield from (None, [[], {}])
    yield [[1, "a", b"b", 2.5, (1,), {2}, 1 << 70], {"k": tensor}]
    yield [tensor, tensor[:, 1:], tensor.T, torch.nn.Parameter(tensor)]
    yield torch.eye(2).to_sparse()
    yield torch.eye(2).to_sparse_csr()
    yield torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8)
    yield [np.arange(4), np.float32(1), np.dtype("i4"), torch.float32, torch.Size([1])]
    yield [Colour.RED, exposed, slice(1, 2), range(3), ..., 1j, bytearray(b"a")]
    yield tensor.to("meta")
    error = Exposed("no")
    error.__cause__ = ValueError(1)
    yield describe_exception(error, CODEC, worker="w", pid=1)
    yield error


def seeds() -> Iterator[bytes]:
    """Give a message of every kind, and some that the policy refuses."""
    for value in values():
        encoded = CODEC.encode(value)
        lengths = [min(255, len(buffer)) for buffer in encoded.buffers][:3]
        yield bytes([0, len(lengths), *lengths]) + encoded.control
    trusted = Codec(FunctionTable(Policy.TRUSTED), None, LIMITS)
    for refused in (OrderedDict(a=1), pickle.loads, [print]):
        yield b"\0\0" + trusted.encode(refused).control
    for first in range(15):
        yield bytes([1, 1, 64, 1, first, 7, *([3, 1, 3, 0, 2, 3] * 8)])
