"""What decoding one message may allocate and compute.

A byte of msgpack can become 88 bytes of memory: an empty list takes as much.  So what a
tree is made of is counted: a value as 1, a container as `CONTAINER` more.  And a few
kilobytes of keys with equal hashes would keep a core busy for a minute: `filled` gives
up on them.

    shorter than COUNTED_BYTES_MIN  nothing is counted: it can do no harm
    shorter than SCANNED_BYTES_MIN  values are counted once their container is made
    longer                          values are counted before any is made

Whatever takes long here can run in a thread: it lets others run every few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from time import thread_time_ns
from typing import Any, Final, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from asyncrpc.core.serde import kinds
from asyncrpc.core.serde.policy import Limits
from asyncrpc.errors import DecodeError

COUNTED_BYTES_MIN: Final = 8 << 10
SCANNED_BYTES_MIN: Final = 2 << 20
CONTAINER: Final = 8
PAIR: Final = 3  # while a map is made, there are a key, a value and a pair of both

_AT_ONCE_MAX: Final = 1 << 16  # values that are unpacked at once, in some milliseconds
_DEPTH_MAX: Final = 8
_PIECE_BYTES: Final = 64 << 10
_ENTRY_VALUES: Final = 32  # of a table: that of a tensor counts 24
_BYTES_OF_VALUE: Final = 64  # of text, and of containers that are unpacked twice

Lift = Callable[[int, bytes], Any]


class Bounds:
    """What the rest of one message may hold."""

    __slots__ = ("_elements_left", "_elements_max", "_hooks", "_scanned")

    def __init__(self, elements_max: int) -> None:
        self._elements_max = self._elements_left = elements_max
        self._scanned = 0  # values of the tree at hand that have been counted
        self._hooks: dict[str, Any] = {}  # of the tree at hand

    def unpack(self, packed: bytes | memoryview, lift: Lift) -> Any:
        """Return the value of a msgpack-encoded tree, or of a part of it."""
        if self._hooks and len(packed) <= _AT_ONCE_MAX:  # most parts: tuples, say
            return msgpack.unpackb(packed, **self._hooks)
        view = memoryview(packed)
        if self._hooks:
            return self._read(view)
        if view.nbytes >= SCANNED_BYTES_MIN:
            self._scanned = values_in(view, self._elements_left)
            self.take(self._scanned)
        elif _may_be_wide(np.frombuffer(view, np.uint8)):
            self.take((_WIDE - 1) * view.nbytes // _BYTES_OF_VALUE)
        elements_left = self._elements_left
        hooks = {
            "ext_hook": lift,
            "list_hook": None if self._scanned else self._on_list,
            "strict_map_key": False,
            "unicode_errors": "surrogatepass",
        }
        short = None if self._scanned else self._on_short_map
        self._hooks = {**hooks, "object_hook": short, "max_map_len": HASHED_MIN}
        try:
            return self._read(view)
        except ValueError:  # a long map, most likely: its keys are watched
            self._elements_left = elements_left
            self._hooks = {**hooks, "object_pairs_hook": self._on_map}
            value, stop = self._read_at(view, 0)
            if stop != view.nbytes:
                raise DecodeError("the message goes on after its value") from None
            return value
        finally:
            self._scanned, self._hooks = 0, {}

    @property
    def elements_counted(self) -> int:
        """Return how many values have been counted."""
        return self._elements_max - self._elements_left

    def take(self, values: int) -> None:
        """Count values."""
        self._elements_left -= values
        if self._elements_left < 0:
            raise DecodeError(
                f"a message of more than {self._elements_max} values arrived"
                " (MessageLimits.elements_max); put large data into tensors, arrays or"
                " bytes, or stream it"
            )

    def take_container(self, packed_bytes: int) -> None:
        """Count a container that was packed apart."""
        if not self._scanned:
            self.take(CONTAINER + packed_bytes // _BYTES_OF_VALUE)

    def _read(self, view: memoryview) -> Any:
        if min(view.nbytes, self._scanned or view.nbytes) <= _AT_ONCE_MAX:
            return msgpack.unpackb(view, **self._hooks)
        value, stop = self._read_first(view)
        if stop != view.nbytes:
            raise DecodeError("the message goes on after its value")
        return value

    def _read_first(self, view: memoryview, head: bytes = b"") -> tuple[Any, int]:
        """Return the first value of a head and a view, and where the next begins."""
        nbytes = view.nbytes + len(head)
        unpacker = msgpack.Unpacker(
            _Pieces(view, head),
            read_size=min(_PIECE_BYTES, nbytes),
            max_buffer_size=nbytes,
            **self._hooks,
        )
        return unpacker.unpack(), unpacker.tell() - len(head)

    def _read_at(self, view: memoryview, at: int, depth: int = 0) -> tuple[Any, int]:
        """Return the value that begins at a byte, and where the next one does.

        A long map is read as the list of its keys and values: as pairs, as those are
        that lie deeper than in short lists, it would take twice the time.
        """
        first = view[at] if at < view.nbytes else 0
        if first in _SHORT_LISTS and depth < _DEPTH_MAX:
            stop, values = at + 1, []
            for _ in range(first & 15):
                value, stop = self._read_at(view, stop, depth + 1)
                values.append(value)
            return (values if self._scanned else self._on_list(values)), stop
        start = at + 1 + _LENGTH_BYTES.get(first, 0)
        length = int.from_bytes(view[at + 1 : start], "big")
        if first not in _MAPS or not HASHED_MIN <= length < _LONG_MAPS_END:
            value, stop = self._read_first(view[at:])
            return value, at + stop
        head = _LIST_HEAD + (2 * length).to_bytes(4, "big")
        flat, stop = self._read_first(view[start:], head)
        if not self._scanned:
            self.take((PAIR - 2) * length)
        return filled({}, _Pairs(flat), itemgetter(0)), start + stop

    def _on_list(self, values: list[Any]) -> list[Any]:
        self._elements_left -= CONTAINER + len(values)
        if self._elements_left < 0:
            self.take(0)
        return values

    def _on_map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        if not self._scanned:
            self.take(CONTAINER + PAIR * len(pairs))
        return filled({}, pairs, itemgetter(0))

    def _on_short_map(self, table: dict[Any, Any]) -> dict[Any, Any]:
        self._elements_left -= CONTAINER + PAIR * len(table)
        if self._elements_left < 0:
            self.take(0)
        return table


class _Pairs(Sequence[tuple[Any, Any]]):
    """The pairs of a list of keys and values, each made when it is asked for."""

    def __init__(self, flat: list[Any]) -> None:
        self._flat = flat

    def __len__(self) -> int:
        return len(self._flat) // 2

    def __getitem__(self, index: Any) -> Any:
        start, stop, _ = index.indices(len(self))
        keys = self._flat[2 * start : 2 * stop : 2]
        return zip(keys, self._flat[2 * start + 1 : 2 * stop : 2], strict=True)


def entries_of(packed: memoryview, limits: Limits) -> Iterator[list[Any]]:
    """Yield the entries of a table, each when it is asked for."""
    if packed.nbytes <= COUNTED_BYTES_MIN:
        table = msgpack.unpackb(packed, unicode_errors="surrogatepass")
        if type(table) is not list or len(table) > limits.objects_max:
            raise DecodeError("the table of a message is not a list, or too long")
        yield from table
        return
    bounds = Bounds(_ENTRY_VALUES * limits.objects_max)
    if packed.nbytes >= SCANNED_BYTES_MIN:
        bounds.take(values_in(packed, _ENTRY_VALUES * limits.objects_max))
    unpacker = msgpack.Unpacker(
        _Pieces(packed),
        read_size=min(_PIECE_BYTES, packed.nbytes),
        max_buffer_size=packed.nbytes,
        unicode_errors="surrogatepass",
    )
    count = unpacker.read_array_header()
    if count > limits.objects_max:
        raise DecodeError(f"the table of a message has {count} entries; too many")
    for _ in range(count):
        yield unpacker.unpack()
    if unpacker.tell() != packed.nbytes:
        raise DecodeError("the table of a message goes on after its last entry")


class _Pieces:
    """A file of bytes for msgpack; other threads may run after each piece."""

    def __init__(self, packed: memoryview, head: bytes = b"") -> None:
        self._head, self._rest = head, packed

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        if self._head:
            head, self._head = self._head, b""
            return head
        piece, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return bytes(piece)


# --- counting ------------------------------------------------------------------------

# First bytes of containers, and of values whose content is read apart.  Other values
# hold such bytes, too: of floats one in six.
_CONTAINERS: Final = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
_EXTENSIONS: Final = bytes((0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)))
_NEITHER: Final = bytes(sorted(set(range(256)) - {*_CONTAINERS, *_EXTENSIONS}))
EXTENSION: Final = 4  # takes as long to be read as so many containers


def weight_at_most(packed: bytes) -> int:
    """Return a number that the containers in a tree do not exceed.

    An extension counts as `EXTENSION`.  It takes 1 ns for a byte.
    """
    heavy = packed.translate(None, _NEITHER)
    return len(heavy) + (EXTENSION - 1) * len(heavy.translate(None, _CONTAINERS))


# By its first byte, the bytes of a msgpack value of fixed length; 0 of others.
_FIXED: Final = np.zeros(256, np.int64)
_FIXED[0x00:0x80] = _FIXED[0xE0:] = 1
_FIXED[0xA0:0xC0] = np.arange(1, 33)
_FIXED[[0xC0, 0xC1, 0xC2, 0xC3]] = 1
_FIXED[[0xCA, 0xCB]] = 5, 9
_FIXED[[0xCC, 0xCD, 0xCE, 0xCF]] = _FIXED[[0xD0, 0xD1, 0xD2, 0xD3]] = 2, 3, 5, 9
_FIXED[0x80:0xA0] = 1  # short maps and lists: what they hold comes next
_FIXED_BYTES: Final = _FIXED.tolist()
# What a value counts that begins with this byte and is of fixed length.
_WEIGHTS: Final = np.ones(256, np.int64)
_WEIGHTS[0x80:0x90] = 1 + CONTAINER + (PAIR - 2) * np.arange(16)
_WEIGHTS[0x90:0xA0] = 1 + CONTAINER
_LENGTH_BYTES: Final = {  # of those whose length follows
    **dict.fromkeys((0xC4, 0xC7, 0xD9), 1),
    **dict.fromkeys((0xC5, 0xC8, 0xDA, 0xDC, 0xDE), 2),
    **dict.fromkeys((0xC6, 0xC9, 0xDB, 0xDD, 0xDF), 4),
}
# Of a message that may have wide texts: one of 31 bytes takes 190.
_WIDE_WEIGHTS: Final = _WEIGHTS.copy()
_WIDE_WEIGHTS[0xA8:0xC0] = 2
_RUN_MIN: Final = 8
_RUN_MAX: Final = 1 << 16
_WIDE_FROM: Final = 0xC4  # first bytes of characters that make a text wide: 2, 4 bytes
_WIDEST_FROM: Final = 0xF0
_WIDE: Final = 4  # bytes of each character of a text that has one of 4 bytes
_NOT_WIDEST: Final = bytes(range(_WIDEST_FROM))
# A longer text would be decoded in one step of more than 20 ms.
TEXT_BYTES_MAX: Final = 16 << 20


def values_in(packed: memoryview, most: int) -> int:
    """Return how many values a tree has, or more than `most` if it has more.

    Containers count for more than one, and so do long texts; what is not msgpack may
    count as anything.  Values of the same length in a row are counted together.
    """
    data, bytes_end = np.frombuffer(packed, np.uint8), packed.nbytes
    weights = _WIDE_WEIGHTS if _may_be_wide(data) else _WEIGHTS
    weight = weights.tolist()
    count = at = last_bytes = in_row = 0
    while at < bytes_end and count <= most:
        first = packed[at]
        nbytes = _FIXED_BYTES[first]
        if not nbytes:
            nbytes, values = _walk(packed, data, at, first)
            at, count = at + nbytes, count + values
            continue
        in_row = in_row + 1 if nbytes == last_bytes else 0
        last_bytes = nbytes
        if in_row < _RUN_MIN:
            at, count = at + nbytes, count + weight[first]
            continue
        firsts = data[at : at + nbytes * _RUN_MAX : nbytes]
        differs = _FIXED[firsts] != nbytes
        length = int(differs.argmax()) or firsts.size  # the first is of this length
        at, count = at + nbytes * length, count + int(weights[firsts[:length]].sum())
        in_row = 0
    return count


def _walk(
    packed: memoryview, data: npt.NDArray[np.uint8], at: int, first: int
) -> tuple[int, int]:
    """Return the bytes to go on to the next value, and what this one counts."""
    start = at + 1 + _LENGTH_BYTES.get(first, 0)
    length = int.from_bytes(packed[at + 1 : start], "big")
    if first in _MAPS:
        return start - at, 1 + CONTAINER + (PAIR - 2) * length
    if first in _LISTS:
        return start - at, 1 + CONTAINER
    stop = start + length
    if first in _TEXTS:
        return stop - at, 1 + _text_bytes(data[start:stop]) // _BYTES_OF_VALUE
    if first in _BYTES:
        return stop - at, 1 + length // _BYTES_OF_VALUE
    if packed[start : start + 1] == _REFERENCE:  # whose content is a number
        length = length or 1 << max(0, first - _FIXED_EXTENSION)
        return start + 1 + length - at, 1
    return start + 1 - at, CONTAINER + length // _BYTES_OF_VALUE  # its content follows


def _may_be_wide(data: npt.NDArray[np.uint8]) -> bool:
    """Return whether texts may have characters of 4 bytes; numbers look like them."""
    return bool(data.size and data.max() >= _WIDEST_FROM)


def _text_bytes(data: npt.NDArray[np.uint8]) -> int:
    """Return what the characters of an encoded text take."""
    nbytes = data.size
    if nbytes > TEXT_BYTES_MAX:
        raise DecodeError(
            f"a text of {nbytes} bytes arrived; the limit is {TEXT_BYTES_MAX}: send"
            " text.encode(), which is sent as bytes, or stream it"
        )
    if nbytes > _PIECE_BYTES:
        widest = int(data.max())
        return nbytes * (
            _WIDE if widest >= _WIDEST_FROM else 2 if widest >= _WIDE_FROM else 1
        )
    text = data.tobytes()
    if text.isascii():
        return nbytes
    return nbytes * (_WIDE if text.translate(None, _NOT_WIDEST) else 2)


_MAPS: Final = frozenset((0xDE, 0xDF))
_LISTS: Final = frozenset((0xDC, 0xDD))
_SHORT_LISTS: Final = frozenset(range(0x90, 0xA0))
_LIST_HEAD: Final = b"\xdd"  # of a long list; its length follows
_LONG_MAPS_END: Final = 1 << 31  # twice as many fit into the length of a list
_TEXTS: Final = frozenset((0xD9, 0xDA, 0xDB))
_BYTES: Final = frozenset((0xC4, 0xC5, 0xC6))
_FIXED_EXTENSION: Final = 0xD4  # of 1 byte; the next ones are of 2, 4, 8 and 16
_REFERENCE: Final = bytes((kinds.REFERENCE,))


# --- keys ----------------------------------------------------------------------------

# A table of fewer keys is filled in some milliseconds, whatever they are.
HASHED_MIN: Final = 256
# Honest keys take 0.05 to 0.3 us, multiples of 2**50 included; a thousand of equal
# hashes take 10 us each, and twice as many twice as long.
_KEY_NS: Final = 4_000
_KEYS_NS: Final = 5_000_000
_KEYS_PIECE: Final = 256

_Table = TypeVar("_Table", dict[Any, Any], set[Any])


def filled(table: _Table, values: Sequence[Any], key: Callable[[Any], Any]) -> _Table:
    """Return a new dict or set after it has been filled.

    No count of equal hashes would do: keys whose hashes differ can share all the places
    that they are looked for.  What is limited is the processor time of this thread.

    Args:
        table: empty.
    """
    if len(values) < HASHED_MIN:
        table.update(values)
        return table
    hashing_ns = 0
    begun_ns = thread_time_ns()
    for at in range(0, len(values), _KEYS_PIECE):
        table.update(values[at : at + _KEYS_PIECE])
        spent_ns = thread_time_ns() - begun_ns - hashing_ns
        if spent_ns <= _KEYS_NS + _KEY_NS * at:
            continue
        keys = [key(value) for value in values[: at + _KEYS_PIECE]]
        # Long tuples take their time to be hashed at all.
        hashing_ns += 2 * _ns_to_hash(keys)
        if thread_time_ns() - begun_ns - hashing_ns > _KEYS_NS + _KEY_NS * at:
            raise DecodeError(
                f"{len(values)} keys of a {type(table).__name__} arrived whose hashes"
                " collide; send them as a list"
            )
    return table


def _ns_to_hash(keys: list[Any]) -> int:
    begun_ns = thread_time_ns()
    for key in keys:
        hash(key)
    return thread_time_ns() - begun_ns
