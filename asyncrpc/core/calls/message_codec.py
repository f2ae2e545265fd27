"""Values in the messages of one link: encoded and decoded, with all that takes part.

Here references and propagators (`extensions`) take part in every message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.core.calls.common_arguments import CommonArguments
from asyncrpc.core.devices.maps import DeviceMap
from asyncrpc.core.serde import (
    UNREAD,
    Compression,
    Encoded,
    copies_buffers,
    is_staged,
    references_in,
    stage,
    weight_at_most,
    words_of,
)
from asyncrpc.core.serde.by_value import NO_CODE, CodeName
from asyncrpc.core.services.extensions import OnGradient, Pins, Propagator, References
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.wire.frames import FrameKind, Meta, unpack_head
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    DecodeError,
    EncodeError,
    Outcome,
    RemoteProtocolError,
)

if TYPE_CHECKING:
    from asyncrpc.core.calls.deferred import DeferredMessages
    from asyncrpc.core.calls.ports import CallConnection, CallHost
    from asyncrpc.core.devices.staging import Devices

NO_META: Final[dict[str, Any]] = {}
# A control part that is longer is read in a thread, which takes 100 us to begin; and so
# is one that is longer than a small one and may have more containers, which take 0.5 us
# each, or whose message holds as many bytes that are copied.
READ_HERE_BYTES_MAX: Final = 64 << 10
SMALL_BYTES_MAX: Final = 8 << 10
READ_HERE_WEIGHT_MAX: Final = 12 << 10
COPIED_HERE_BYTES_MAX: Final = 1 << 20
_META_SECOND: Final = (FrameKind.REQUEST, FrameKind.STREAM_ITEM)
_NO_TABLE: Final = bytes(3)
CODEC: Final = "c"  # in the meta of a request: the codec that the caller uses and wants


def unreadable(error: BaseException) -> AsyncRpcError:
    """Return the error about a message whose content could not be read.

    Only this message is at fault: it is answered, and the connection stays.
    """
    if isinstance(error, AsyncRpcError) and not isinstance(error, RemoteProtocolError):
        return error
    problem = f"what arrived cannot be read: {words_of(error)}"
    decode_error = DecodeError(problem, outcome=Outcome.NOT_EXECUTED)
    decode_error.__cause__ = error
    return decode_error


def unsendable(error: BaseException) -> AsyncRpcError:
    """Return the error about a result or item that could not be encoded."""
    if not isinstance(error, AsyncRpcError):
        problem = f"cannot be sent: {words_of(error)}"
        unsendable = EncodeError(problem, outcome=Outcome.EXECUTED)
        unsendable.__cause__ = error
        return unsendable
    if isinstance(error, CallError):
        error.outcome = Outcome.EXECUTED
    return error


def takes_long(control: bytes, buffers: Sequence[memoryview]) -> bool:
    """Return whether a message is read in a thread."""
    nbytes = len(control)
    if nbytes > READ_HERE_BYTES_MAX:
        return True
    if nbytes > SMALL_BYTES_MAX and weight_at_most(control) > READ_HERE_WEIGHT_MAX:
        return True
    return sum(
        buffer.nbytes for buffer in buffers
    ) > COPIED_HERE_BYTES_MAX and copies_buffers(control)


def may_be_deferred(encoded: Encoded) -> bool:
    """Return whether a message waits for memory or devices, here or at the peer."""
    return bool(
        encoded.shared or encoded.copies or encoded.code or is_staged(encoded.control)
    )


def meta_of(kind: int, head: bytes) -> Meta:
    """Return what travels beside a message of any kind."""
    if kind == FrameKind.RESPONSE:
        return answer_meta(head)
    if kind not in _META_SECOND:
        return NO_META
    record = unpack_head(head)
    meta = record[1] if len(record) > 1 else None
    return meta if type(meta) is dict else NO_META


def answer_meta(head: bytes) -> Meta:
    """Return what travels beside an answer."""
    record = unpack_head(head) if head else []
    meta = record[0] if record else None
    return meta if type(meta) is dict else NO_META


class DecodedBuffers(list[memoryview]):
    """The buffers of a message that has been decoded in a thread, and its value.

    Attributes:
        value: what was decoded.
        values: how many values it has.
        error: raised in its place, if it could not be.
    """

    def __init__(
        self,
        buffers: Sequence[memoryview],
        value: Any = None,
        *,
        loans: list[Any],
        error: BaseException | None = None,
        values: int = 0,
    ) -> None:
        super().__init__(buffers)
        self.value = value
        self.values = values
        self.error = error
        self._loans = loans

    def take_loans(self) -> list[Any] | None:
        """Return the loans that came with the references; once."""
        loans, self._loans = self._loans, []
        return loans or None


class MessageCodec:
    """Encodes and decodes the values of the messages of one link.

    Attributes:
        call_soon: of the worker's loop.
        values: how many the message has that was decoded last, if they were counted.
        discard_apart: takes the references of a long message, and gives them back.
    """

    def __init__(
        self,
        link: PeerLink,
        parts: CallHost,
        *,
        connection: CallConnection,
        dead_places: Sized,
        give_back_places: Callable[[], None],
        refer: Callable[[Encoded], None],
        devices: Devices,
        deferred: DeferredMessages,
        pickles: bool = True,
    ) -> None:
        """Join the parts that take part in messages.

        Args:
            link: of these messages; references and propagators get it.
            dead: places in memory of peers that are no longer used here, and that
                `give_back` gives back; always the same object.
        """
        self._pickles = pickles
        self._link = link
        self._loop = parts.loop
        self.call_soon = parts.loop.call_soon
        self.values = 0
        self.discard_apart: Callable[[bytes], None]
        self._codec = parts.codec
        self._references = parts.references
        self._propagators = parts.propagators
        self._connection = connection
        self._dead = dead_places
        self._give_back_places = give_back_places
        self._refer_to = refer
        self._devices = devices
        self._deferred = deferred
        self._host = parts

    # --- out -------------------------------------------------------------------------

    def encode(
        self,
        value: Any,
        meta: dict[str, Any] | None = None,
        labels: Sequence[str] = (),
        compression: Compression | None = None,
        device_map: DeviceMap | None = None,
    ) -> tuple[Encoded, Pins | None, dict[str, Any] | None]:
        """Encode a value for the peer; let references and propagators take part.

        With a codec, what is returned has still to be packed.  A device map matters
        only if tensors of the host's memory go to devices by it.
        """
        if self._dead:  # before the message, whose sender may need the room
            self._give_back_places()
        references = self._references
        quick = self._codec.encode_quickly(value) if compression is None else None
        if quick is not None:
            encoded, pins = quick, None
        elif references is None:
            encoded, pins = self._encode_values(value, labels, compression), None
        else:
            references.begin_encode(self._link)
            sent = False
            try:
                encoded = self._encode_values(value, labels, compression)
                sent = True
            finally:
                pins = references.end_encode(sent=sent)
        if encoded.shared:
            self._refer(encoded, pins)
        if device_map is not None and device_map.takes_host:
            stage(encoded)
        if compression is None and (encoded.copies or encoded.code):
            self.prepare(encoded)
        if encoded.bytes_copied:
            self._connection.bytes_gathered += encoded.bytes_copied
        for propagator in self._propagators:
            if propagator.variable.get() is not None:
                meta = self._propagate(propagator, encoded, meta, pins)
        return encoded, pins, meta

    def _refer(self, encoded: Encoded, pins: Pins | None) -> None:
        """Make the peer map the memory of a message before it reads the message."""
        try:
            self._refer_to(encoded)
        except AsyncRpcError:
            if pins is not None:
                pins.undo()
            raise

    def prepare(self, encoded: Encoded) -> None:
        """Send a message only when it is whole, and the peer has the code it names."""
        if encoded.copies:
            self._devices.fill(encoded.copies, self._deferred.defer(encoded).on_filled)
        if encoded.code:
            self.await_code(encoded, encoded.code)

    def await_code(self, encoded: Encoded, code: Sequence[CodeName]) -> None:
        """Send a message only when the peer has this code."""
        self._host.code.send(self._link, code, encoded, self._deferred.defer)

    def await_function(self, encoded: Encoded, name: CodeName) -> None:
        """Send a call only when the peer has its function; EncodeError: it cannot."""
        if not self.takes_code:
            raise EncodeError(f"{name.simple} {NO_CODE}", outcome=Outcome.NOT_EXECUTED)
        self.await_code(encoded, [name])

    @property
    def takes_code(self) -> bool:
        """Whether the peer takes functions and classes by value."""
        return self._pickles

    def _encode_values(
        self, value: Any, labels: Sequence[str], compression: Compression | None
    ) -> Encoded:
        if compression is None:
            return self._codec.encode_slowly(
                value, labels=labels, pickles=self._pickles
            )
        return self._codec.encode_for(
            compression, value, labels=labels, pickles=self._pickles
        )

    def encode_common(
        self,
        common: CommonArguments,
        labels: Sequence[str],
        meta: dict[str, Any] | None = None,
        compression: Compression | None = None,
        device_map: DeviceMap | None = None,
    ) -> tuple[Encoded, Pins | None, dict[str, Any] | None]:
        """Encode for one of several peers, or take what was encoded for another.

        References are counted per receiver, so arguments with one are never common.
        """
        if device_map is not None and device_map.takes_host:
            value = list(common.value)
            return self.encode(value, meta, labels, compression, device_map)
        codec = "" if compression is None else compression.name
        codec += "" if self._pickles else " strict"
        encoded = common.encodings.get(codec)
        if encoded is not None:  # what was gathered is counted where it was done
            for propagator in self._propagators:
                if propagator.variable.get() is not None:
                    meta = self._propagate(propagator, encoded, meta)
            return replace(encoded, bytes_copied=0), None, meta
        value = list(common.value)
        encoded, pins, meta = self.encode(value, meta, labels, compression)
        if pins is None and not (encoded.shared or encoded.copies or encoded.code):
            common.encodings[codec] = replace(encoded)
        return encoded, pins, meta

    def _propagate(
        self,
        propagator: Propagator,
        encoded: Encoded,
        meta: dict[str, Any] | None,
        pins: Pins | None = None,
    ) -> dict[str, Any] | None:
        """Let a propagator take part in a message; return its meta."""
        try:
            part = propagator.outgoing(self._link, encoded)
        except AsyncRpcError:
            if pins is not None:
                pins.undo()
            raise
        return meta if part is None else {**(meta or {}), propagator.key: part}

    # --- in --------------------------------------------------------------------------

    def decode(
        self,
        control: bytes,
        buffers: list[memoryview],
        meta: Meta,
        *,
        counts: bool = False,
    ) -> tuple[Any, Any]:
        """Return a value, and the loans that came with it.

        With `counts`, how many values it has is in `values`.
        """
        on_gradient = None
        if meta and type(buffers) is not DecodedBuffers:
            on_gradient = self.join(meta)
        value, loans = UNREAD, None
        if not counts:
            value = self._codec.decode_quickly(control, buffers, on_gradient)
        if value is UNREAD:
            counted = self._count if counts else None
            value, loans = self._decode_slowly(control, buffers, on_gradient, counted)
        if on_gradient is not None:
            self.joined(on_gradient)
        return value, loans

    def join(self, meta: Meta) -> OnGradient | None:
        """Let propagators take part in a message; return what receives its tensors."""
        on_gradient: OnGradient | None = None
        for propagator in self._propagators:
            if propagator.key in meta:
                receive = propagator.incoming(self._link, meta[propagator.key])
                on_gradient = receive or on_gradient
        return on_gradient

    def joined(self, on_gradient: OnGradient | None) -> None:
        """Tell the propagators that all tensors of a message have been received."""
        if on_gradient is not None:
            for propagator in self._propagators:
                propagator.decoded(on_gradient)

    def _count(self, values: int) -> None:
        self.values = values

    def _decode_slowly(
        self,
        control: bytes,
        buffers: list[memoryview],
        on_gradient: OnGradient | None,
        counted: Callable[[int], None] | None,
    ) -> tuple[Any, Any]:
        if type(buffers) is DecodedBuffers:
            return self._decoded(buffers)
        references = self._references
        if references is None:
            value = self._codec.decode(
                control, buffers, on_gradient=on_gradient, counted=counted
            )
            return value, None
        references.begin_decode(self._link)
        try:
            value = self._codec.decode(
                control, buffers, on_gradient=on_gradient, counted=counted
            )
        except BaseException:
            self._settle_unread(references, control, references.lifted)
            raise
        return value, references.end_decode()

    def decode_error(self, control: bytes, buffers: list[memoryview]) -> Any:
        """Return the description of an error, in which no reference travels."""
        if type(buffers) is DecodedBuffers:
            return self._decoded(buffers)[0]
        return self._codec.decode(control, buffers)

    def give_back(
        self, control: bytes, buffers: list[memoryview] | None = None
    ) -> None:
        """Take the references of a message that is not read, and give them back.

        The sender counts them as arrived: see `References`.
        """
        references = self._references
        if references is None:
            return
        if type(buffers) is DecodedBuffers:  # taken, but the value goes nowhere
            self._drop_soon(buffers.take_loans())
        elif len(control) <= READ_HERE_BYTES_MAX:
            references.begin_decode(self._link)
            self._settle_unread(references, control, 0)
        else:
            self.discard_apart(control)

    def _settle_unread(self, references: References, control: bytes, read: int) -> None:
        """Take the references that were not read, then give back all of the message."""
        for tree in references_in(control, self._codec.limits)[read:]:
            with suppress(AsyncRpcError):
                references.lift(tree)
        self._drop_soon(references.end_decode())

    def _drop_soon(self, loans: Any) -> None:
        if loans is not None:  # when what was read of the message is dead
            self._loop.call_soon(self.take_over, loans)

    # --- messages that are read in threads: see `long_messages` -----------------------

    def may_refer(self, control: bytes) -> bool:
        """Return whether a control part may hold references."""
        return self._references is not None and control[:3] != _NO_TABLE

    def references_in(self, control: bytes) -> list[Any]:
        """Return what travels for each reference in a message; in any thread."""
        return references_in(control, self._codec.limits)

    def lift(self, trees: Sequence[Any], lifted: list[Any]) -> list[Any]:
        """Take references, on the loop; return the loans that came with them."""
        references = self._references
        assert references is not None  # see `may_refer`
        references.begin_decode(self._link)
        for tree in trees:
            try:
                lifted.append(references.lift(tree))
            except AsyncRpcError as error:
                lifted.append(error)
        return references.end_decode() or []

    def read_apart(
        self,
        control: bytes,
        buffers: list[memoryview],
        on_gradient: OnGradient | None,
        lifted: list[Any],
        loans: list[Any],
    ) -> DecodedBuffers:
        """Decode a message whose references have been lifted; in any thread."""
        counts: list[int] = []
        try:
            value = self._codec.decode(
                control,
                buffers,
                on_gradient=on_gradient,
                lifted=lifted,
                counted=counts.append,
            )
        except Exception as error:  # noqa: BLE001  (it is raised where it is awaited)
            return DecodedBuffers(buffers, loans=loans, error=error)
        return DecodedBuffers(buffers, value, loans=loans, values=counts[0])

    def _decoded(self, buffers: DecodedBuffers) -> tuple[Any, Any]:
        self.values = buffers.values
        loans = buffers.take_loans()
        value, error = buffers.value, buffers.error
        buffers.value = buffers.error = None
        if error is not None:
            self._drop_soon(loans)
            raise error
        return value, loans

    def take_over(self, loans: Any) -> None:
        """Give back what a result lent, or register it; both go as notices."""
        references = self._references
        if loans is not None and references is not None:
            references.settle_loans(self._link, loans, answered=False)
