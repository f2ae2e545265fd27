"""Codecs make the payload of a message smaller, where the caller asks for it.

A codec is a *cast* (fewer bits for float tensors, see `quantize`), a *compressor*
(lossless, for the bytes of any buffer, see `lossless`), or a cast followed by a
compressor.
It works on the buffers of an encoded message, after it has been encoded and before it
is decoded; so it can run in a thread, and neither encoder nor decoder knows of it.
Tensors that share memory share a buffer, and do so again on the other side.

A packed control part is a u32, the length of the *packings* with bit 30 set; the
packings, a msgpack array with one element per buffer; and the control part of the
message before it was packed.  A packing is nil for a buffer that travels as it is, or
`[cast, dtype, bytes, compressor, lengths]`: the buffer was `bytes` long, of elements of
`dtype`; `lengths` are those of the compressed blocks.  Names that do not apply are
empty.

The reader trusts nothing: it checks every length, and compares the sum of what it will
allocate with `Limits.unpacked_bytes_max` and with what has arrived (see `lossless`),
before it allocates.  The decoder checks that
the bytes fit the tensors over them, as it does without a codec.

Source: docs/reference/codecs.md, docs/reference/wire-protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import torch

from asyncrpc.core.serde import kinds, lossless
from asyncrpc.core.serde.bounds import Bounds
from asyncrpc.core.serde.encoded import is_packed
from asyncrpc.core.serde.quantize import CASTS, Cast, LossyValueError
from asyncrpc.core.serde.tensors import DTYPES
from asyncrpc.core.serde.unsendable import Unsendable
from asyncrpc.errors import DecodeError, UsageError

_KEEP: Final = "keep"
# With more buffers a message is sent without its codec: what says how each was packed
# would keep the event loop of the receiver too long.
PACKED_BUFFERS_MAX: Final = 1 << 14
_PACKINGS_MAX: Final = 32 * PACKED_BUFFERS_MAX  # values: each packing is 24 or more


@dataclass(frozen=True, slots=True)
class Compression:
    """A codec, by its name.

    Attributes:
        name: what the user writes and what the callee is asked for.
        cast: name of its cast; empty if it has none.
        compressor: name of its compressor; empty if it has none.
        keep: whether a tensor that the cast would harm is sent unchanged; if not, it
            is refused.
    """

    name: str
    cast: str
    compressor: str
    keep: bool

    @property
    def for_answer(self) -> Compression:
        """The codec of the answer: it refuses nothing, as the caller chose it."""
        return CODECS[f"{self.name}+{_KEEP}"] if self._refuses else self

    @property
    def _refuses(self) -> bool:
        return bool(self.cast) and not self.keep


def _codecs() -> Mapping[str, Compression]:
    codecs = {name: Compression(name, "", name, keep=False) for name in lossless.NAMES}
    for cast in CASTS:
        for compressor in ("", *lossless.NAMES):
            name = f"{cast}+{compressor}" if compressor else cast
            codecs[name] = Compression(name, cast, compressor, keep=False)
            kept = f"{name}+{_KEEP}"
            codecs[kept] = Compression(kept, cast, compressor, keep=True)
    return codecs


CODECS: Final[Mapping[str, Compression]] = _codecs()


def compression_named(name: str) -> Compression | None:
    """Return the codec of a name; None for the empty name."""
    if not name:
        return None
    codec = CODECS.get(name) if isinstance(name, str) else None
    if codec is None:
        raise UsageError(
            f"codec {name!r} is unknown; use 'lz4' or 'zstd' (lossless), 'fp16', 'bf16'"
            " or 'int8' (lossy, float tensors), or one of each such as 'bf16+zstd'; a"
            " final '+keep' sends unchanged the tensors that a lossy codec would harm"
        )
    if codec.compressor:
        package = lossless.missing_package(codec.compressor)
        if package:
            raise UsageError(
                f"codec {name!r} needs the package {package!r}: pip install"
                " 'asyncrpc-torch[compression]'"
            )
    return codec


def compression_for_answer(name: object) -> Compression | None:
    """Return the codec that a caller asks for; None if this worker does not have it."""
    codec = CODECS.get(name) if isinstance(name, str) else None
    if codec is None:
        return None
    if codec.compressor and lossless.missing_package(codec.compressor):
        return None
    return codec.for_answer


# --- choosing what to cast ------------------------------------------------------------


class _TensorLocation(NamedTuple):
    """Where a tensor is in a buffer; `value` is the user's object, for errors."""

    value: Any
    dtype: torch.dtype
    shape: list[int]
    strides: list[int] | None  # None: contiguous, and alone in the buffer
    offset: int


class CompressionPlan:
    """Which buffers of a message are cast, and how all of them are packed."""

    def __init__(
        self,
        compression: Compression,
        table: Sequence[list[Any]],
        objects: Sequence[Any],
    ) -> None:
        self._compression = compression
        self._places: dict[int, list[_TensorLocation]] = {}
        if compression.cast:
            self._find_places(CASTS[compression.cast], table, objects)

    def _find_places(
        self, cast: Cast, table: Sequence[list[Any]], objects: Sequence[Any]
    ) -> None:
        structure, owners = _parts(table)
        for index, entry in enumerate(table):
            if entry[0] == kinds.ENTRY_QUANTIZED:
                self._refuse_dtype(objects[index], entry[2])
            if entry[0] != kinds.ENTRY_TENSOR or entry[4] == kinds.NO_BUFFER:
                continue
            if index in structure:
                self._keep(entry[4])
                continue
            value = objects[owners.get(index, index)]
            dtype = DTYPES[entry[2]]
            if dtype in cast.shrinks:
                shape, buffer, *rest = entry[3:]
                offset, strides = [*rest, 0, None][:2]
                place = _TensorLocation(value, dtype, shape, strides, offset)
                self._places.setdefault(buffer, []).append(place)
            elif dtype not in cast.leaves:
                self._refuse_dtype(value, entry[2])
                self._keep(entry[4])
            else:
                self._keep(entry[4])

    def _keep(self, buffer: int) -> None:
        place = _TensorLocation(None, torch.uint8, [], None, 0)
        self._places.setdefault(buffer, []).append(place)

    def _refuse_dtype(self, value: Any, dtype: str) -> None:
        if not self._compression.keep:
            name = self._compression.name
            raise Unsendable(
                value,
                f"codec {name!r} would harm a tensor of {dtype}: convert it to float32,"
                f" call without a codec, or use '{name}+{_KEEP}', which sends such"
                " tensors unchanged",
            )

    def cast(self, buffer: int, view: memoryview) -> tuple[memoryview, str]:
        """Return the bytes of a buffer after the cast, and the dtype they had."""
        places = self._places.get(buffer)
        if not places:
            return view, ""
        first = places[0]
        if any(place.dtype is not first.dtype for place in places):
            return self._mixed(places, view)
        if first.dtype is torch.uint8:
            return view, ""
        flat = torch.frombuffer(view, dtype=first.dtype)
        try:
            narrow = CASTS[self._compression.cast].narrow(_without_holes(flat, places))
        except LossyValueError as error:
            if self._compression.keep:
                return view, ""
            name = self._compression.name
            raise Unsendable(
                first.value,
                f"codec {name!r} would harm it: {error}, call without a codec, or use"
                f" '{name}+{_KEEP}', which sends such tensors unchanged",
            ) from error
        return _bytes_of(narrow), str(first.dtype).removeprefix("torch.")

    def _mixed(
        self, places: list[_TensorLocation], view: memoryview
    ) -> tuple[memoryview, str]:
        """Refuse or keep a buffer that tensors of several dtypes share."""
        if not self._compression.keep:
            value = next(place.value for place in places if place.value is not None)
            raise Unsendable(
                value,
                "it shares its memory with a tensor of another dtype, which codec"
                f" {self._compression.name!r} would harm; send a clone of one",
            )
        return view, ""


def _parts(table: Sequence[list[Any]]) -> tuple[set[int], dict[int, int]]:
    """Return the entries that are structure, not values, and the owner of each part."""
    structure: set[int] = set()
    owners: dict[int, int] = {}
    for index, entry in enumerate(table):
        kind = entry[0]
        if kind == kinds.ENTRY_SPARSE_COO:
            structure.add(entry[3])
            owners[entry[4]] = index
        elif kind == kinds.ENTRY_SPARSE_COMPRESSED:
            structure.update(entry[3:5])
            owners[entry[5]] = index
        elif kind == kinds.ENTRY_QUANTIZED:
            structure.add(entry[3])
            if len(entry) == 7:  # noqa: PLR2004 - per channel
                structure.update(entry[4:6])
    return structure, owners


def _without_holes(flat: torch.Tensor, places: list[_TensorLocation]) -> torch.Tensor:
    """Return the elements of a buffer, with zeros where no tensor has elements.

    The bytes there are arbitrary: they must neither overflow nor spoil a block's scale.
    """
    if any(_fills(place, flat.numel()) for place in places):
        return flat
    seen = torch.zeros_like(flat)
    for _, _, shape, strides, offset in places:
        assert strides is not None  # or it would fill the buffer
        once = [size if step else 1 for size, step in zip(shape, strides, strict=True)]
        seen.as_strided(once, strides, offset).copy_(
            flat.as_strided(once, strides, offset)
        )
    return seen


def _fills(place: _TensorLocation, elements: int) -> bool:
    """Return whether a tensor covers every element of its buffer."""
    if place.strides is None:
        return True
    reached = 1
    for step, size in sorted(zip(place.strides, place.shape, strict=True)):
        if size != 1 and step:
            if step != reached:
                return False
            reached *= size
    return reached == elements


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


# --- packing and unpacking ------------------------------------------------------------


def pack(
    plan: CompressionPlan, control: bytes, buffers: Sequence[memoryview]
) -> tuple[bytes, list[memoryview], int]:
    """Pack the buffers of a message, in any thread."""
    compressor = plan._compression.compressor  # noqa: SLF001
    packings: list[list[Any] | None] = []
    packed: list[memoryview] = []
    written = 0
    free_bytes = lossless.EXPANSION_FREE_BYTES
    for index, view in enumerate(buffers):
        data, dtype = plan.cast(index, view)
        if dtype:
            written += data.nbytes
        compressed = None
        if compressor:
            compressed = lossless.compress(compressor, data, view.nbytes, free_bytes)
        lengths: list[int] = []
        if compressed is not None:
            data, lengths = compressed
            written += data.nbytes
        packed.append(data)
        free_bytes -= lossless.expansion(view.nbytes, data.nbytes)
        cast = plan._compression.cast if dtype else ""  # noqa: SLF001
        by = compressor if lengths else ""
        is_packed = cast or by
        packings.append([cast, dtype, view.nbytes, by, lengths] if is_packed else None)
    if not any(packings):
        return control, packed, written
    return _header(packings) + control, packed, written


def _header(packings: Any) -> bytes:
    body: bytes = msgpack.packb(packings)
    return (kinds.PACKED | len(body)).to_bytes(kinds.LENGTH_BYTES, "little") + body


def _read_packings(packed: memoryview) -> Any:
    try:
        return Bounds(_PACKINGS_MAX).unpack(packed, _no_extension)
    except (ValueError, msgpack.UnpackException) as error:
        raise DecodeError(f"packings are not msgpack: {error}") from error


def _no_extension(code: int, _: bytes) -> None:
    raise DecodeError(f"packings hold a value of code {code}")


def memory_of(control: bytes | memoryview, lengths: Sequence[int]) -> int:
    """Return the bytes of the buffers of a message, packed or unpacked if that is more.

    Both ends count so; of packings that make no sense, the buffers as they travel.
    """
    arrived_bytes = sum(lengths)
    if not is_packed(control):
        return arrived_bytes
    view = memoryview(control)
    stop = kinds.LENGTH_BYTES + (
        int.from_bytes(view[: kinds.LENGTH_BYTES], "little") & (kinds.PACKED - 1)
    )
    try:
        packings = _read_packings(view[kinds.LENGTH_BYTES : stop])
        unpacked_bytes = sum(
            length if packing is None else packing[2]
            for packing, length in zip(packings, lengths, strict=True)
        )
        return max(arrived_bytes, unpacked_bytes)
    except Exception:  # noqa: BLE001  (it is refused when it is opened)
        return arrived_bytes


def unreadable(problem: str) -> bytes:
    """Return a control part that decodes as a `DecodeError` with this text."""
    return _header(problem)


class PackedMessage:
    """A message whose buffers are packed.

    Attributes:
        unpacked_bytes: bytes that its packed buffers will take.
        expansion_bytes: by how much all of them become more than `EXPANSION_MAX` times
            what has arrived; negative if they do not.
    """

    __slots__ = (
        "_buffers",
        "_control",
        "_packings",
        "expansion_bytes",
        "unpacked_bytes",
    )

    def __init__(
        self,
        control: bytes | memoryview,
        buffers: Sequence[memoryview],
        unpacked_bytes_max: int,
    ) -> None:
        view = memoryview(control)
        header = int.from_bytes(view[: kinds.LENGTH_BYTES], "little")
        stop = kinds.LENGTH_BYTES + (header & (kinds.PACKED - 1))
        if stop > view.nbytes:
            raise DecodeError(f"packings end at byte {stop} of {view.nbytes}")
        packings = _read_packings(view[kinds.LENGTH_BYTES : stop])
        if isinstance(packings, str):
            raise DecodeError(packings)
        if type(packings) is not list or len(packings) != len(buffers):
            raise DecodeError(f"packings do not fit the {len(buffers)} buffers")
        self._control = view[stop:]
        self._buffers = buffers
        self._packings = [_Packing.read(packing) for packing in packings]
        self.unpacked_bytes = sum(
            packing.size_bytes for packing in self._packings if packing is not None
        )
        if self.unpacked_bytes > unpacked_bytes_max:
            raise DecodeError(
                f"a payload has {self.unpacked_bytes} bytes after unpacking; the limit"
                f" is {unpacked_bytes_max} (unpacked_bytes_max)"
            )
        arrived_bytes = plain_bytes = 0
        for packing, buffer in zip(self._packings, buffers, strict=True):
            arrived_bytes += buffer.nbytes
            if packing is not None:
                packing.check(buffer.nbytes)
            else:
                plain_bytes += buffer.nbytes
        becomes = self.unpacked_bytes + plain_bytes
        self.expansion_bytes = lossless.expansion(becomes, arrived_bytes)
        if self.expansion_bytes > lossless.EXPANSION_FREE_BYTES:
            raise DecodeError(
                f"a payload of {arrived_bytes} bytes would become {becomes}; it may"
                f" become {lossless.EXPANSION_MAX} times as long, and"
                f" {lossless.EXPANSION_FREE_BYTES} bytes more: let the sender leave"
                " some blocks uncompressed"
            )

    def unpack(self) -> tuple[memoryview, list[memoryview]]:
        """Return the message as it was before it was packed; in any thread."""
        pairs = zip(self._packings, self._buffers, strict=True)
        return self._control, [
            buffer if packing is None else packing.unpack(buffer)
            for packing, buffer in pairs
        ]


class _Packing(NamedTuple):
    """How one buffer was packed."""

    cast: str
    dtype: torch.dtype | None
    size_bytes: int
    compressor: str
    lengths: list[int]

    @classmethod
    def read(cls, packing: Any) -> _Packing | None:
        if packing is None:
            return None
        if type(packing) is not list or len(packing) < 5:  # noqa: PLR2004
            raise DecodeError(f"a packing must be a list of five, not {packing!r:.60}")
        cast, name, size_bytes, compressor, lengths = packing[:5]
        if not isinstance(compressor, str) or compressor not in ("", *lossless.NAMES):
            raise DecodeError(f"codec {compressor!r:.20} is unknown to this worker")
        if type(size_bytes) is not int or size_bytes <= 0:
            raise DecodeError(
                f"a packing must be of 1 byte or more, not {size_bytes!r:.20}"
            )
        if not cast:
            return cls("", None, size_bytes, compressor, lengths)
        if not isinstance(cast, str) or cast not in CASTS:
            raise DecodeError(f"codec {cast!r:.20} is unknown to this worker")
        dtype = DTYPES.get(name) if isinstance(name, str) else None
        if dtype not in CASTS[cast].shrinks or size_bytes % dtype.itemsize:
            raise DecodeError(
                f"{cast!r} does not pack {size_bytes} bytes of {name!r:.20}"
            )
        return cls(cast, dtype, size_bytes, compressor, lengths)

    @property
    def elements(self) -> int:
        return self.size_bytes // (1 if self.dtype is None else self.dtype.itemsize)

    @property
    def narrow_bytes(self) -> int:
        """Bytes after the cast and before the compressor."""
        if not self.cast:
            return self.size_bytes
        return CASTS[self.cast].narrow_bytes(self.elements)

    def check(self, arrived_bytes: int) -> None:
        if self.compressor:
            lossless.check_lengths(self.lengths, self.narrow_bytes, arrived_bytes)
        elif self.narrow_bytes != arrived_bytes:
            raise DecodeError(
                f"{arrived_bytes} bytes arrived where {self.cast!r} makes"
                f" {self.narrow_bytes}"
            )

    def unpack(self, buffer: memoryview) -> memoryview:
        data: Any = buffer
        if self.compressor:
            data = lossless.decompress(
                self.compressor, buffer, self.lengths, self.narrow_bytes
            )
        if not self.cast:
            return memoryview(data)
        if memoryview(data).readonly:
            data = bytearray(data)  # torch warns about read-only memory
        wide = torch.empty(self.elements, dtype=self.dtype, device="cpu")
        CASTS[self.cast].widen(torch.from_numpy(np.frombuffer(data, np.uint8)), wide)
        return _bytes_of(wide)
