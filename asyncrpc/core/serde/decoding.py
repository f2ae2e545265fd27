"""One message on its way in: a tree, a table and buffers become a value.

Entries are rebuilt in order, each from entries before it; then msgpack reads the tree
and asks `Decoder.lift` about every ExtType.  Whatever bytes arrive, the result is a
value, `DecodeError` or `RejectedError`.

Serde's part in staging: device memory becomes host memory, and back.

Serde handles host bytes only, and never waits.  A tensor on a device is sent as a host
buffer that `asyncrpc.core.devices` fills before it leaves; `Encoded.copies` lists
those buffers.  Tensors for a device of the receiver are copied there before the message
is read: `DevicePlacement` lists them, and `Staged` carries them to the decoder.
"""

from __future__ import annotations

import enum
import functools
import io
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import torch

from asyncrpc.core.serde import kinds, layouts, pickling
from asyncrpc.core.serde.arrays import read_array
from asyncrpc.core.serde.bounds import COUNTED_BYTES_MIN, Bounds, entries_of
from asyncrpc.core.serde.dismantling import assemble
from asyncrpc.core.serde.encoded import Encoded
from asyncrpc.core.serde.functions import FunctionTable
from asyncrpc.core.serde.hooks import Hooks
from asyncrpc.core.serde.layouts import parts_of, put_together
from asyncrpc.core.serde.plain import FROM_TREE
from asyncrpc.core.serde.policy import Limits, Policy
from asyncrpc.core.serde.shared import FindStorage
from asyncrpc.core.serde.tensors import DEVICE_AT, TensorReader
from asyncrpc.errors import DecodeError, Outcome, RejectedError

_STAGED_IN_BYTE: Final = kinds.STAGED >> 24
_UNPREPARED_IN_BYTE: Final = (kinds.STAGED | kinds.PACKED) >> 24


class Staged(list[memoryview]):
    """The buffers of a message whose device tensors are placed.

    Attributes:
        tensors: the tensors on devices, by the index of their entry.
    """

    def __init__(
        self, buffers: Sequence[memoryview], tensors: dict[int, torch.Tensor]
    ) -> None:
        super().__init__(buffers)
        self.tensors = tensors


def is_staged(control: bytes | memoryview) -> bool:
    """Return whether tensors of a message must be on devices before it is read."""
    return len(control) >= kinds.LENGTH_BYTES and bool(control[3] & _STAGED_IN_BYTE)


def is_unprepared(control: bytes | memoryview) -> bool:
    """Return whether a message is packed, or `is_staged`."""
    return len(control) >= kinds.LENGTH_BYTES and bool(control[3] & _UNPREPARED_IN_BYTE)


def stage(encoded: Encoded) -> None:
    """Tell the receiver to place the tensors of a message before reading it."""
    control = encoded.control
    header = int.from_bytes(control[: kinds.LENGTH_BYTES], "little")
    if header & ~kinds.FLAGS == 0:
        return  # it holds no objects
    header |= kinds.STAGED
    rest = control[kinds.LENGTH_BYTES :]
    encoded.control = header.to_bytes(kinds.LENGTH_BYTES, "little") + rest
    if not encoded.buffers:
        encoded.buffers = [memoryview(b"\0")]


class DevicePlacement:
    """The tensors of one message, and the device for each.

    Attributes:
        wanted: by index of the entry, the tensor in host memory and its device.
    """

    def __init__(
        self,
        control: bytes | memoryview,
        buffers: Sequence[memoryview],
        limits: Limits,
        device_of: Callable[[str], str],
    ) -> None:
        self._reader = TensorReader(buffers, limits.dimensions_max)
        self.wanted: dict[int, tuple[torch.Tensor, str]] = {}
        try:
            self._table = _table(control, limits)
            for index, entry in enumerate(self._table):
                if entry[0] == kinds.ENTRY_TENSOR:
                    self._take(index, entry, device_of)
                elif parts := parts_of(entry):
                    self._take_composite(index, entry, parts)
        except DecodeError:
            raise
        except Exception as error:
            raise DecodeError(
                f"the message is not a value: {type(error).__name__}: {error}"
            ) from error

    def _take(
        self, index: int, entry: list[Any], device_of: Callable[[str], str]
    ) -> None:
        came_from = str(entry[DEVICE_AT]) if len(entry) > DEVICE_AT else "cpu"
        device = device_of(came_from)
        if (device != "cpu" or came_from != "cpu") and not entry[1] & kinds.META:
            self.wanted[index] = self._reader.read(entry), device

    def _take_composite(self, index: int, entry: list[Any], parts: list[int]) -> None:
        """Move a tensor as a whole, if its parts belong on a device.

        The tensor is rebuilt, and its indices are checked, on the host: on a device
        that would happen when the message is read, on the event loop.
        """
        moved = [part for part in parts if part in self.wanted]
        if not moved:
            return
        device = self.wanted[moved[-1]][1]
        whole = put_together(entry, self._part)
        for part in moved:
            self.wanted[part] = self.wanted[part][0], "cpu"
        self.wanted[index] = whole, device

    def _part(self, index: int) -> torch.Tensor:
        if type(index) is not int or not 0 <= index < len(self._table):
            raise DecodeError(
                f"a tensor refers to object {index!r:.20} of {len(self._table)}"
            )
        wanted = self.wanted.get(index)
        return self._reader.read(self._table[index]) if wanted is None else wanted[0]


def _table(control: bytes | memoryview, limits: Limits) -> list[Any]:
    view = memoryview(control)
    header = int.from_bytes(view[: kinds.LENGTH_BYTES], "little")
    stop = kinds.LENGTH_BYTES + (header & ~kinds.FLAGS)
    if stop > view.nbytes or stop > limits.control_bytes_max:
        raise DecodeError(f"a table ends at byte {stop} of {view.nbytes}")
    if stop == kinds.LENGTH_BYTES:
        return []
    return list(entries_of(view[kinds.LENGTH_BYTES : stop], limits))


OnGradient = Callable[[torch.Tensor], torch.Tensor]

_COPIED_AT_ONCE_MAX: Final = 1 << 20  # in between other threads may run
_COPIES: Final = (kinds.ENTRY_BYTES, kinds.ENTRY_BYTEARRAY, kinds.ENTRY_PICKLE)


class Decoder:
    """Decodes one message.  Used once, in one thread.

    Attributes:
        find_shared: finds storages that were sent by reference; None: they are refused.
        counts: whether values are counted, however short the message is.
    """

    __slots__ = (
        "_bounds",
        "_depth",
        "_functions",
        "_hooks",
        "_limits",
        "_objects",
        "_on_gradient",
        "_placed",
        "_tensors",
        "counts",
        "find_shared",
    )

    def __init__(
        self,
        buffers: Sequence[memoryview],
        functions: FunctionTable,
        hooks: Hooks | None,
        limits: Limits,
    ) -> None:
        self._functions = functions
        self._hooks = hooks
        self._limits = limits
        self._objects: list[Any] = []
        self._tensors = TensorReader(buffers, limits.dimensions_max)
        self._placed = buffers.tensors if isinstance(buffers, Staged) else {}
        self.find_shared: FindStorage | None = None
        self._depth = 0
        self._bounds: Bounds | None = None
        self.counts = False
        self._on_gradient: OnGradient | None = None

    @property
    def values(self) -> int:
        """Return how many values the message has, if they were counted."""
        return 0 if self._bounds is None else self._bounds.elements_counted

    def decode(self, control: memoryview, on_gradient: OnGradient | None) -> Any:
        """Return the value; the codec translates whatever this raises."""
        self._on_gradient = on_gradient
        size_bytes = control.nbytes
        if size_bytes > self._limits.control_bytes_max:
            raise DecodeError(
                f"a control part of {size_bytes} bytes arrived; the limit is"
                f" {self._limits.control_bytes_max}"
            )
        if size_bytes > COUNTED_BYTES_MIN or self.counts:
            self._bounds = Bounds(self._limits.elements_max)
        header = int.from_bytes(control[: kinds.LENGTH_BYTES], "little")
        table_stop = kinds.LENGTH_BYTES + (header & ~kinds.FLAGS)
        if table_stop > size_bytes:
            raise DecodeError(f"a table ends at byte {table_stop} of {size_bytes}")
        if table_stop > kinds.LENGTH_BYTES:
            self._read_table(control[kinds.LENGTH_BYTES : table_stop])
        value = self.unpack(control[table_stop:])
        return tuple(value) if header & kinds.ROOT_IS_TUPLE else value

    def unpack(self, packed: Any) -> Any:
        """Return the value of a msgpack-encoded tree."""
        if self._depth >= self._limits.depth_max:
            raise DecodeError(
                f"the message is nested deeper than {self._limits.depth_max} levels"
            )
        self._depth += 1
        if self._bounds is not None:
            value = self._bounds.unpack(packed, self.lift)
        else:
            value = msgpack.unpackb(
                packed,
                ext_hook=self.lift,
                strict_map_key=False,
                unicode_errors="surrogatepass",
            )
        self._depth -= 1
        return value

    def lift(self, code: int, packed: bytes) -> Any:
        """Return the value of an ExtType."""
        if code == kinds.REFERENCE:
            return self.get(int.from_bytes(packed, "little"))
        from_tree = FROM_TREE.get(code)
        if from_tree is None:
            raise DecodeError(f"value code {code} is unknown to this worker")
        if self._bounds is not None:
            self._bounds.take_container(len(packed))
        return from_tree(self.unpack(packed))

    def get(self, index: int) -> Any:
        """Return the object of an entry that has been read."""
        if type(index) is not int or not 0 <= index < len(self._objects):
            raise DecodeError(
                f"a value refers to object {index!r:.20} of {len(self._objects)}"
            )
        return self._objects[index]

    # --- the table -------------------------------------------------------------------

    def _read_table(self, packed: memoryview) -> None:
        for entry in entries_of(packed, self._limits):
            reader = _READERS.get(entry[0])
            if reader is None:
                raise DecodeError(f"object code {entry[0]!r:.20} is unknown")
            self._objects.append(reader(self, entry))

    def _tensor(self, entry: list[Any]) -> torch.Tensor:
        if self._placed:
            tensor = self._placed.get(len(self._objects))
            if tensor is not None:
                return self._finished(tensor, entry[1])
        if len(entry) > DEVICE_AT and entry[DEVICE_AT] != "cpu":
            raise DecodeError(
                f"a tensor from device {entry[DEVICE_AT]!r:.40} arrived where only"
                " tensors of the host are accepted; let the sender send tensor.cpu()"
            )
        return self._finished(self._tensors.read(entry), entry[1])

    def _shared(self, entry: list[Any]) -> torch.Tensor:
        if self.find_shared is None:
            raise DecodeError("a shared tensor arrived where no memory is shared")
        storage = self.find_shared(bytes(self._tensors.buffer(entry[4])))
        return self._finished(self._tensors.read_shared(entry, storage), entry[1])

    def _composite(self, entry: list[Any]) -> torch.Tensor:
        placed = self._placed.get(len(self._objects)) if self._placed else None
        if placed is not None:
            return self._finished(placed, entry[1])
        return self._finished(layouts.put_together(entry, self._part), entry[1])

    def _finished(self, tensor: torch.Tensor, flags: int) -> torch.Tensor:
        """Give a tensor its gradient and its class."""
        if not flags & (kinds.REQUIRES_GRAD | kinds.PARAMETER):
            return tensor
        requires_grad = bool(flags & kinds.REQUIRES_GRAD)
        if requires_grad and self._on_gradient and not flags & kinds.LEAF:
            return self._on_gradient(tensor)
        if flags & kinds.PARAMETER:
            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_()

    def _part(self, index: int) -> torch.Tensor:
        part = self.get(index)
        if type(part) is not torch.Tensor:
            raise DecodeError(f"object {index} is not part of a tensor")
        return part

    def _array(self, entry: list[Any]) -> Any:
        index = entry[4]
        buffer = None if index == kinds.NO_BUFFER else self._tensors.buffer(index)
        return read_array(entry, buffer)

    def _bytes(self, entry: list[Any]) -> bytes:
        buffer = self._tensors.buffer(entry[1])
        if buffer.nbytes <= _COPIED_AT_ONCE_MAX:
            return bytes(buffer)
        copy = io.BytesIO()  # whose bytes are not copied once more
        for at in range(0, buffer.nbytes, _COPIED_AT_ONCE_MAX):
            copy.write(buffer[at : at + _COPIED_AT_ONCE_MAX])
        return copy.getvalue()

    def _bytearray(self, entry: list[Any]) -> bytearray:
        buffer = self._tensors.buffer(entry[1])
        copy = bytearray(buffer.nbytes)
        for at in range(0, buffer.nbytes, _COPIED_AT_ONCE_MAX):
            copy[at : at + _COPIED_AT_ONCE_MAX] = buffer[at : at + _COPIED_AT_ONCE_MAX]
        return copy

    def _pickle(self, entry: list[Any]) -> Any:
        if self._functions.policy is not Policy.TRUSTED:
            raise RejectedError(
                "a pickle arrived, and this worker's policy is strict; let the caller"
                " send tensors and plain containers",
                outcome=Outcome.NOT_EXECUTED,
            )
        _, content, indices = entry
        data = self._tensors.buffer(content) if type(content) is int else content
        buffers = [self._tensors.buffer(index) for index in indices]
        return pickling.load(data, buffers, self.get)

    def _function(self, entry: list[Any]) -> Any:
        return self._functions.resolve_argument(_text(entry[1]))

    def _method(self, entry: list[Any]) -> Any:
        instance, name = self.unpack(entry[1]), _text(entry[2])
        self._functions.check_method(type(instance), name)
        return getattr(instance, name)

    def _partial(self, entry: list[Any]) -> Any:
        function, args, kwargs = self.unpack(entry[1])
        return functools.partial(function, *args, **kwargs)

    def _enum(self, entry: list[Any]) -> Any:
        cls = self._functions.resolve_argument(_text(entry[1]))
        if not isinstance(cls, type) or not issubclass(cls, enum.Enum):
            raise DecodeError(f"{entry[1]!r} does not name an enum")
        return cls.__members__[entry[2]]

    def _exception(self, entry: list[Any]) -> Any:
        cls = self._functions.resolve_error(_text(entry[1]))
        return assemble(cls, self.unpack(entry[2]))

    def _external(self, entry: list[Any]) -> Any:
        if self._hooks is None:
            raise DecodeError("a reference arrived, but this codec accepts none")
        return self._hooks.lift(entry[1])


def references_in(
    control: bytes | memoryview,
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> list[Any]:
    """Return what `Hooks.lower` gave for each reference in a message, in order.

    Nothing else is read: for a message that cannot be decoded, or is not wanted.
    """
    header = int.from_bytes(control[: kinds.LENGTH_BYTES], "little")
    stop = kinds.LENGTH_BYTES + (header & ~(kinds.FLAGS | kinds.PACKED))
    if header & kinds.PACKED:  # the original control part follows
        return references_in(control[stop:], limits)
    packed = memoryview(control)[kinds.LENGTH_BYTES : stop]
    if not packed:
        return []
    entries = entries_of(packed, limits)
    try:
        return [entry[1] for entry in entries if entry[0] == kinds.ENTRY_EXTERNAL]
    except Exception:  # noqa: BLE001  (no correct peer sends that: it names nothing)
        return []


def copies_buffers(control: bytes | memoryview) -> bool:
    """Return whether values of a message are copies of its buffers."""
    header = int.from_bytes(control[: kinds.LENGTH_BYTES], "little")
    stop = kinds.LENGTH_BYTES + (header & ~kinds.FLAGS)
    packed = memoryview(control)[kinds.LENGTH_BYTES : stop]
    try:
        return any(entry[0] in _COPIES for entry in entries_of(packed, Limits()))
    except Exception:  # noqa: BLE001  (whoever reads it says what is wrong with it)
        return False


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DecodeError(f"a name must be a string, not a {type(value).__name__}")
    return value


_READERS: Final[dict[int, Callable[[Decoder, list[Any]], Any]]] = {
    kinds.ENTRY_TENSOR: Decoder._tensor,  # noqa: SLF001
    kinds.ENTRY_SPARSE_COO: Decoder._composite,  # noqa: SLF001
    kinds.ENTRY_SPARSE_COMPRESSED: Decoder._composite,  # noqa: SLF001
    kinds.ENTRY_QUANTIZED: Decoder._composite,  # noqa: SLF001
    kinds.ENTRY_ARRAY: Decoder._array,  # noqa: SLF001
    kinds.ENTRY_BYTES: Decoder._bytes,  # noqa: SLF001
    kinds.ENTRY_BYTEARRAY: Decoder._bytearray,  # noqa: SLF001
    kinds.ENTRY_PICKLE: Decoder._pickle,  # noqa: SLF001
    kinds.ENTRY_FUNCTION: Decoder._function,  # noqa: SLF001
    kinds.ENTRY_METHOD: Decoder._method,  # noqa: SLF001
    kinds.ENTRY_PARTIAL: Decoder._partial,  # noqa: SLF001
    kinds.ENTRY_ENUM: Decoder._enum,  # noqa: SLF001
    kinds.ENTRY_EXCEPTION: Decoder._exception,  # noqa: SLF001
    kinds.ENTRY_SHARED: Decoder._shared,  # noqa: SLF001
    kinds.ENTRY_EXTERNAL: Decoder._external,  # noqa: SLF001
}
