"""Any nest of values reads back the same; no bytes make the decoder do anything else.

The second half plays the hostile peer: arbitrary bytes, and true messages with bytes
changed.  Under both policies what comes out is a value, DecodeError or RejectedError; a
message that was changed may name other modules, so there the policy is strict.
"""

import contextlib
import math
from typing import Any

import msgpack
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.serde import Codec, FunctionTable, Policy, kinds
from asyncrpc.errors import DecodeError, RejectedError

TRUSTED = Codec(FunctionTable(Policy.TRUSTED))
STRICT = Codec(FunctionTable(Policy.STRICT))

keys = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters()),
    st.binary(max_size=20),
    st.tuples(st.integers(), st.text(max_size=3)),
    st.frozensets(st.integers(), max_size=3),
)
leaves = st.one_of(
    keys,
    st.text(st.characters(exclude_categories=())),  # lone surrogates, too
    st.complex_numbers(allow_nan=False),
    st.binary(max_size=40).map(bytearray),
    st.integers(16_380, 16_390).map(bytes),
    st.builds(slice, st.integers(), st.none(), st.integers()),
    st.builds(range, st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)),
    st.sampled_from([..., torch.float32, torch.Size([2]), len, int, torch.strided]),
    st.dates(),
    st.datetimes(),
    st.timedeltas(),
    st.sampled_from([np.float32(1.5), np.int8(-1), np.bool_(True)]),  # noqa: FBT003
)
values = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.lists(parts, max_size=5),
        st.lists(parts, max_size=5).map(tuple),
        st.dictionaries(keys, parts, max_size=5),
        st.sets(keys, max_size=4),
    ),
    max_leaves=25,
)


def received(views: list[memoryview]) -> list[memoryview]:
    return [np.frombuffer(view, np.uint8).copy().data for view in views]


def same(first: Any, other: Any) -> bool:
    """Compare types as well: True is not 1, nor a bytearray bytes, however deep."""
    if type(first) is not type(other):
        return False
    if isinstance(first, (list, tuple)):
        return len(first) == len(other) and all(map(same, first, other))
    if isinstance(first, dict):
        return same(list(first.items()), list(other.items()))
    return bool(first == other)


@given(values)
def test_any_value_reads_back_the_same(value: Any) -> None:
    for codec in (TRUSTED, STRICT):
        encoded = TRUSTED.encode(value)
        with contextlib.suppress(RejectedError):  # strict has not exposed `len`
            back = codec.decode(encoded.control, received(encoded.buffers))
            assert same(back, value)


@given(st.lists(values, max_size=3), st.dictionaries(st.text(), values, max_size=3))
def test_arguments_read_back_the_same(args: list[Any], kwargs: dict[str, Any]) -> None:
    encoded = TRUSTED.encode((args, kwargs))
    assert same(
        TRUSTED.decode(encoded.control, received(encoded.buffers)), (args, kwargs)
    )


@given(st.floats())
def test_floats_keep_their_bits(number: float) -> None:
    back = TRUSTED.decode(TRUSTED.encode(number).control)
    assert math.copysign(1, back) == math.copysign(1, number)
    assert back == number or (math.isnan(back) and math.isnan(number))


# --- the hostile peer ----------------------------------------------------------------

BUFFERS = 3


def attempt(codec: Codec, control: bytes) -> None:
    """Decode; anything but a value, DecodeError and RejectedError fails the test."""
    buffers = [np.zeros(64, np.uint8).data for _ in range(BUFFERS)]
    with contextlib.suppress(DecodeError, RejectedError):
        codec.decode(control, buffers)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_harmless(control: bytes) -> None:
    attempt(STRICT, control)
    attempt(STRICT, kinds.FLAT + control)
    attempt(STRICT, len(control).to_bytes(4, "little") + control + b"\xc0")


numbers = st.one_of(
    st.integers(-3, 70), st.sampled_from([1 << 31, 1 << 62, 1 << 63, -(1 << 63)])
)
junk = st.recursive(
    st.one_of(
        numbers,
        st.none(),
        st.booleans(),
        st.floats(),
        st.sampled_from(
            [*("float32", "bfloat16", "qint8", "<f4", "|O", "cpu", "C", "os:system")]
        ),
        st.text(max_size=5),
        st.binary(max_size=8),
    ),
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.dictionaries(st.text(max_size=2), parts, max_size=2),
    ),
    max_leaves=6,
)
sizes = st.lists(numbers, max_size=3)
tensors = st.tuples(
    st.just(kinds.ENTRY_TENSOR),
    st.integers(0, 63),
    st.sampled_from(["float32", "bfloat16", "complex64", "bool", "int4", "qint8"]),
    sizes,
    numbers,
    numbers,
    sizes | st.none(),
).map(list)
entries = st.one_of(
    tensors,
    tensors.map(lambda entry: entry[:5]),
    st.lists(junk, max_size=6).flatmap(
        lambda rest: st.integers(0, 14).map(lambda kind: [kind, *rest])
    ),
    junk,
)


@given(st.lists(entries, max_size=4), st.integers(0, 40), st.binary(max_size=20))
def test_arbitrary_tables_are_harmless(
    table: list[Any], code: int, data: bytes
) -> None:
    packed = msgpack.packb(table)
    for ext in (msgpack.ExtType(code, data), msgpack.ExtType(0, bytes([code % 4]))):
        tree = msgpack.packb([ext])
        attempt(STRICT, len(packed).to_bytes(4, "little") + packed + tree)


def rich() -> list[Any]:
    whole = torch.arange(12.0).reshape(3, 4)
    return [
        (1, {"a": {2, 3}, (1, 2): 1j}),
        [whole, whole.T[1:], whole.bfloat16(), torch.eye(2).to_sparse()],
        np.arange(6).reshape(2, 3),
        [whole[0].conj(), slice(1, 2), torch.nn.Parameter(whole), b"x" * 20_000],
        [len, KeyError("x"), 10**30, np.float32(1), torch.float16],
    ]


@given(st.sampled_from(rich()), st.data())
def test_valid_messages_with_changed_bytes_are_harmless(
    value: Any, data: st.DataObject
) -> None:
    encoded = TRUSTED.encode(value)
    control = bytearray(encoded.control)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(control) - 1))
        control[at] = data.draw(st.integers(0, 255))
    buffers = received(encoded.buffers)
    with contextlib.suppress(DecodeError, RejectedError):
        STRICT.decode(bytes(control), buffers)


@given(st.binary(max_size=60))
def test_arbitrary_pickles_fail_as_decode_errors(pickled: bytes) -> None:
    # No opcode that finds a class: this is about failures, not about what pickle may
    # do.
    harmless = bytes(byte for byte in pickled if byte not in b"ci\x93\x82\x83\x84")
    table = msgpack.packb([[kinds.ENTRY_PICKLE, harmless, []]])
    tree = msgpack.packb(msgpack.ExtType(kinds.REFERENCE, b"\0"))
    attempt(TRUSTED, len(table).to_bytes(4, "little") + table + tree)
