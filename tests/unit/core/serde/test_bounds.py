"""What decoding one message may allocate and compute is bounded."""

from __future__ import annotations

import datetime as dt
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

import msgpack
import numpy as np
import pytest

from asyncrpc.core.serde import Codec, FunctionTable, Limits, Policy, kinds
from asyncrpc.core.serde.bounds import (
    CONTAINER,
    COUNTED_BYTES_MIN,
    SCANNED_BYTES_MIN,
    TEXT_BYTES_MAX,
    Bounds,
    values_in,
)
from asyncrpc.errors import DecodeError

MODULUS: Final = (1 << 61) - 1  # of CPython's hashes of numbers
VALUE_BYTES: Final = 64
MANY: Final = 20_000  # equal hashes: 200 million comparisons, if nothing stops them


def codec(**limits: int) -> Codec:
    return Codec(FunctionTable(Policy.STRICT), limits=Limits(**limits))


def decode(tree: bytes, **limits: int) -> Any:
    return codec(**limits).decode(kinds.FLAT + tree)


def extension(code: int, tree: bytes) -> bytes:
    return b"\xc9" + struct.pack(">Ib", len(tree), code) + tree


def tree_of(value: Any) -> bytes:
    return codec().encode([value]).control[kinds.LENGTH_BYTES + 1 :]


def array(trees: list[bytes]) -> bytes:
    return b"\xdd" + struct.pack(">I", len(trees)) + b"".join(trees)


def mapping(trees: list[bytes]) -> bytes:
    pairs = b"\xdf" + struct.pack(">I", len(trees))
    return pairs + b"".join(tree + b"\xc0" for tree in trees)


CONTAINERS: Final[dict[str, Callable[[list[bytes]], bytes]]] = {
    "set": lambda trees: extension(kinds.SET, array(trees)),
    "frozenset": lambda trees: extension(kinds.FROZENSET, array(trees)),
    "dict": mapping,
    "dict in a tuple": lambda trees: extension(kinds.TUPLE, array([mapping(trees)])),
}

# What has the same hash for every number.
KEYS: Final[dict[str, Callable[[int], Any]]] = {
    "integers": lambda n: (n + 8) * MODULUS,
    "tuples": lambda n: ((n + 8) * MODULUS,),
    "frozensets": lambda n: frozenset({(n + 8) * MODULUS}),
    "complex numbers": lambda n: complex(n, 0) * 2.0**61 + (1 << 61),
}


def colliding(name: str) -> list[bytes]:
    if name == "complex numbers":  # their parts cancel out: 1000003 * imag + real
        numbers = (complex(-1000003 * n, n) for n in range(1, MANY))
        return [tree_of(number) for number in numbers]
    return [tree_of(KEYS[name](n)) for n in range(MANY)]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", KEYS)
def test_keys_of_equal_hashes_are_refused(container: str, name: str) -> None:
    trees = colliding(name)
    assert len({hash(codec().decode(kinds.FLAT + tree)) for tree in trees[:99]}) == 1
    with pytest.raises(DecodeError, match="collide"):
        decode(CONTAINERS[container](trees))


def chained(bits: int, first: int) -> list[int]:
    """Return keys of different hashes that a dict looks for in the same places."""
    mask, at = (1 << bits) - 1, 1
    run = []
    for _ in range(first):  # where a dict looks once the high bits are used up
        run.append(at)
        at = (5 * at + 1) & mask
    full = np.zeros(1 << bits, bool)
    full[run] = True
    keys = np.arange(1 << bits, 1 << (bits + 5), dtype=np.uint64)
    rest, place = keys.copy(), keys & np.uint64(mask)
    is_long = np.ones(keys.size, bool)
    for _ in range(5):
        is_long &= full[place]
        rest >>= np.uint64(5)
        place = (place * np.uint64(5) + rest + np.uint64(1)) & np.uint64(mask)
    rank = np.full(1 << bits, first)
    rank[run] = np.arange(first)
    late: list[int] = keys[is_long & (rank[place] < first // 2)].tolist()
    return run + late


def test_colliding_keys_are_refused() -> None:
    keys = chained(17, 70_000)[: (2 << 17) // 3]
    assert len(keys) == len(set(map(hash, keys))) > 75_000
    with pytest.raises(DecodeError, match="collide"):
        decode(mapping([msgpack.packb(key) for key in keys]))


HONEST: Final[dict[str, Callable[[int], Any]]] = {
    "numbers in a row": lambda n: n,
    "negative ones": lambda n: -n,
    "multiples of 2**20": lambda n: n << 20,
    "multiples of 2**50": lambda n: n << 50,
    "halves": lambda n: n / 2,
    "tiny fractions": lambda n: n / (1 << 30),
    "texts": lambda n: f"key {n}",
    "bytes": lambda n: n.to_bytes(4, "big"),
    "coordinates": lambda n: (n % 100 - 50, n // 100 - 50),
    "long tuples": lambda n: (*range(30), n),
    "durations": lambda n: dt.timedelta(seconds=n),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_keys_are_accepted(name: str) -> None:
    keys = [HONEST[name](n) for n in range(10_000)]
    for value in (set(keys), frozenset(keys), dict.fromkeys(keys), {1: set(keys)}):
        control = codec().encode(value).control
        assert codec().decode(control) == value


SIZES: Final = {  # of trees: each is counted another way
    "short": COUNTED_BYTES_MIN + 100,
    "long": SCANNED_BYTES_MIN + 100,
}
ELEMENTS: Final = {
    "lists": b"\x90",
    "maps": b"\x80",
    "sets": extension(kinds.SET, b"\x90"),
    "small integers": b"\xe3",
    "integers": b"\xce\xff\xff\xff\xff",
    "texts": b"\xa2ab",
    "lists in lists": b"\x91\x91\x90",
    "tuples in lists": b"\x91" + extension(kinds.TUPLE, b"\x91\x90"),
    "maps of lists": b"\x81\x01\x90",
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ELEMENTS)
def test_too_many_values_are_refused(size: str, kind: str) -> None:
    element = ELEMENTS[kind]
    count = SIZES[size] // len(element) + 1
    tree = array([element] * count)
    assert len(decode(tree)) == count if size == "short" else True
    with pytest.raises(DecodeError, match=f"more than {count // 2} values"):
        decode(tree, elements_max=count // 2)


def test_unfinished_lists_are_counted() -> None:
    full = b"\xe3" * (SCANNED_BYTES_MIN // 32)
    head = b"\xdd" + struct.pack(">I", len(full) + 1)
    tree = (head + full) * 40 + b"\xc0"
    with pytest.raises(DecodeError, match="more than 100000 values"):
        decode(tree, elements_max=100_000)


def test_nested_extensions_are_counted_by_their_bytes() -> None:
    tree = b"\xc6" + struct.pack(">I", 1 << 22) + bytes(1 << 22)
    for _ in range(40):
        tree = extension(kinds.TUPLE, b"\x91" + tree)
    with pytest.raises(DecodeError, match="more than 1000000 values"):
        decode(tree, elements_max=1_000_000)


@pytest.mark.parametrize("value", [[1.5] * 9, [{"a": [1, None]}, "text" * 9], (1, 2)])
def test_value_count_is_exact(value: Any) -> None:
    def count(value: Any) -> int:
        if isinstance(value, dict):
            inner = sum(count(key) + count(inner) + 1 for key, inner in value.items())
            return 1 + CONTAINER + inner
        if isinstance(value, list):
            return 1 + CONTAINER + sum(map(count, value))
        return 1

    counted = values_in(memoryview(tree_of([value] * 1000)), 1 << 30)
    if isinstance(value, tuple):  # a container around a list
        assert counted == 1 + CONTAINER + 1000 * (3 + 2 * CONTAINER)
    else:
        assert counted == count([value] * 1000)


def test_long_texts_count_by_their_memory() -> None:
    text = "n" * (4 << 20)
    narrow = values_in(memoryview(tree_of([text])), 1 << 30)
    assert values_in(memoryview(tree_of([text + "\u0100"])), 1 << 30) > 1.9 * narrow
    assert values_in(memoryview(tree_of([text + "\U0001f600"])), 1 << 30) > 3.9 * narrow


@pytest.mark.parametrize("length", [8, 15, 31, 32, 200, 5000, 70_000])
def test_wide_texts_count_by_their_memory(length: int) -> None:
    """One character of 4 bytes makes all of its text take as many for each."""
    text = "n" * (length - 4)
    many = 2 * SCANNED_BYTES_MIN // length
    wide = text + "\U0001f600"
    counted = VALUE_BYTES * values_in(memoryview(tree_of([wide] * many)), 1 << 30)
    taken = many * (sys.getsizeof(wide) + 8)
    assert 0.5 * taken < counted < 1.5 * taken
    ascii_texts = tree_of([text + "1234"] * many)
    assert VALUE_BYTES * values_in(memoryview(ascii_texts), 1 << 30) < counted


@pytest.mark.parametrize("last", ["n", "\U0001f600"])
def test_texts_of_short_messages_count_as_possibly_wide(last: str) -> None:
    tree = tree_of(["n" * 1000 + last] * 1000)
    bounds = Bounds(1 << 21)
    bounds.unpack(tree, lambda *_: None)
    taken = 1000 * sys.getsizeof("n" * 1000 + last) if last != "n" else 0
    assert VALUE_BYTES * (bounds.elements_counted - 1000 - CONTAINER) >= 0.7 * taken


@pytest.mark.parametrize(
    "value",
    [
        lambda text: text,
        lambda text: [[1, text]],
        lambda text: ({text: 1}, 2),
    ],
)
def test_text_too_long_for_a_single_step_is_refused(value: Any) -> None:
    assert decode(tree_of(value("n" * TEXT_BYTES_MAX))) is not None
    with pytest.raises(DecodeError, match=r"send text\.encode\(\)"):
        decode(tree_of(value("n" * (TEXT_BYTES_MAX + 1))))


@pytest.mark.parametrize("nbytes", [100, COUNTED_BYTES_MIN, SCANNED_BYTES_MIN])
def test_truncated_or_overlong_message_is_refused(nbytes: int) -> None:
    tree = tree_of([1.5] * (nbytes // 9 + 1))
    for wrong in (tree[:-1], tree + b"\xc0"):
        with pytest.raises(DecodeError):
            decode(wrong)
