"""Values on the wire: `Codec` turns any value into bytes and buffers, and back.

See `kinds` for the format, `encoding` and `decoding` for the two directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from asyncrpc.core.serde import compression as packing
from asyncrpc.core.serde.compression import Compression, PackedMessage
from asyncrpc.core.serde.decoding import Decoder, OnGradient
from asyncrpc.core.serde.encoded import Encoded, HostStager, Stager, is_packed
from asyncrpc.core.serde.encoding import Encoder
from asyncrpc.core.serde.exceptions import words_of
from asyncrpc.core.serde.functions import FunctionTable
from asyncrpc.core.serde.hooks import Hooks
from asyncrpc.core.serde.policy import Limits, Policy
from asyncrpc.core.serde.quick import QuickReader, QuickWriter, unencodable
from asyncrpc.core.serde.shared import FindStorage
from asyncrpc.core.serde.unsendable import (
    TooDeep,
    Unsendable,
    parts_of,
    path_outside,
    path_to,
)
from asyncrpc.core.torch_modes import with_defaults
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    DecodeError,
    EncodeError,
    RejectedError,
)

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})


@dataclass(slots=True)
class Unpacked(Encoded):
    """A value to which `pack` has still to apply the codec, in a thread."""

    plan: packing.CompressionPlan
    value: Any
    labels: Sequence[str]

    def pack(self) -> Encoded:
        """Apply the codec; in any thread."""
        try:
            control, buffers, written = packing.pack(
                self.plan, self.control, self.buffers
            )
        except Unsendable as error:
            raise _at_its_path(error, self.value, self.labels) from error
        copied = self.bytes_copied + written
        return Encoded(
            control,
            buffers,
            self.gradient_tensors,
            copied,
            code=self.code,
            loses_gradient=self.loses_gradient,
        )


class Codec:
    """Encodes and decodes values under one worker's policy."""

    def __init__(
        self,
        functions: FunctionTable,
        hooks: Hooks | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        stager: Stager | None = None,
    ) -> None:
        self.functions = functions
        self.hooks = hooks
        self.limits = limits
        self.stager: Stager = HostStager() if stager is None else stager
        writer = self._writer = QuickWriter(
            pickles=functions.policy is Policy.TRUSTED,
            objects_max=limits.objects_max,
            control_bytes_max=limits.control_bytes_max,
        )
        reader = self._reader = QuickReader(objects_max=limits.objects_max)
        # As attributes: most values of every call take no step more to get there.
        self.encode_quickly, self.decode_quickly = writer.write, reader.read

    def encode(
        self, value: Any, *, labels: Sequence[str] = (), pickles: bool = True
    ) -> Encoded:
        """Encode a value.

        Tensors and arrays are viewed, not copied, except those whose elements `spans`
        has gathered.  A tensor of any shape, dtype and strides can be sent.
        """
        quick = self.encode_quickly(value)
        if quick is not None:
            return quick
        return self.encode_slowly(value, labels=labels, pickles=pickles)

    def _encoder(self, *, pickles: bool) -> Encoder:
        pickles = pickles and self.functions.policy is Policy.TRUSTED
        return Encoder(
            self.functions, self.hooks, self.limits, self.stager, pickles=pickles
        )

    @with_defaults
    def encode_slowly(
        self, value: Any, *, labels: Sequence[str] = (), pickles: bool = True
    ) -> Encoded:
        """Encode a value for which `encode_quickly` returned None, as `encode` does."""
        encoder = self._encoder(pickles=pickles)
        encoder.gathers = True
        control = self._encode(encoder, value, labels)
        outbox = encoder.outbox
        return Encoded(
            control,
            outbox.buffers,
            encoder.gradient_tensors,
            outbox.bytes_copied,
            shared=_storages_of(encoder),
            copies=outbox.copies,
            code=encoder.code,
            loses_gradient=_loss_of(encoder, value, labels),
        )

    @with_defaults
    def encode_for(
        self,
        compression: Compression,
        value: Any,
        *,
        labels: Sequence[str] = (),
        pickles: bool = True,
    ) -> Encoded:
        """Encode a value for sending with a codec.

        Its buffers are as `encode` makes them.  `Encoded.pack` applies the codec; call
        it in any thread.
        """
        encoder = self._encoder(pickles=pickles)
        control = self._encode(encoder, value, labels)
        outbox = encoder.outbox
        gradient_tensors, copied = encoder.gradient_tensors, outbox.bytes_copied
        shared = _storages_of(encoder)
        # References to memory are sent unchanged.
        if not 0 < len(outbox.buffers) <= packing.PACKED_BUFFERS_MAX or shared:
            return Encoded(
                control,
                outbox.buffers,
                gradient_tensors,
                copied,
                shared=shared,
                copies=outbox.copies,
                code=encoder.code,
                loses_gradient=_loss_of(encoder, value, labels),
            )
        try:
            plan = packing.CompressionPlan(compression, encoder.table, encoder.objects)
            self._check_packed(value, sum(view.nbytes for view in outbox.buffers))
        except Unsendable as error:
            raise _at_its_path(error, value, labels) from error
        return Unpacked(
            control,
            outbox.buffers,
            gradient_tensors,
            copied,
            plan,
            value,
            labels,
            copies=outbox.copies,
            code=encoder.code,
            loses_gradient=_loss_of(encoder, value, labels),
        )

    def _check_packed(self, value: Any, size_bytes: int) -> None:
        if size_bytes > self.limits.unpacked_bytes_max:
            raise Unsendable(
                value,
                f"the payload has {size_bytes} bytes; with a codec the limit is"
                f" {self.limits.unpacked_bytes_max} (unpacked_bytes_max): split it, or"
                " send it without a codec",
            )

    def open(
        self, control: bytes | memoryview, buffers: Sequence[memoryview]
    ) -> PackedMessage:
        """Check a message that `is_packed`, to be unpacked in a thread."""
        return PackedMessage(control, buffers, self.limits.unpacked_bytes_max)

    def _encode(self, encoder: Encoder, value: Any, labels: Sequence[str]) -> bytes:
        try:
            return self._control(encoder, value, is_call=labels[-1:] == ("kwargs",))
        except Unsendable as error:
            where = path_to(value, error.value, labels)
            if where == "value":  # all of it, or what a `__reduce__` has made
                where = self._first_unsendable(value, labels) or where
            refused, cause = f"{where}: {error.problem}", error.__cause__
        except EncodeError:  # from the stager, with its text
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the values' own code runs here
            where = self._first_unsendable(value, labels) or "value"
            problem = f"{where}: {words_of(error)}"
            raise unencodable(problem) from error
        # Outside the handler: the error there holds the value; it would be __context__.
        try:
            raise unencodable(refused) from cause
        finally:
            del cause  # its traceback refers to this frame: a cycle

    def _first_unsendable(self, value: Any, labels: Sequence[str]) -> str:
        """Return the path of the first part of a request that cannot be sent."""
        if not labels:
            return ""
        for path, part in parts_of(value, labels):
            size_bytes = self.encoded_bytes(part, takes_references=True)
            if size_bytes is None or size_bytes > self.limits.control_bytes_max:
                return path
        return " and ".join(labels)

    def encode_plain(self, value: Any) -> bytes:
        """Return the control part of a value of numbers, text, and lists of them."""
        control = self._writer.write_flat(value)
        if control is None or len(control) > self.limits.control_bytes_max:
            # No pickle: a long one would go in a buffer, and here is none.
            return self.encode_slowly(value, pickles=False).control
        return control

    @property
    def find_shared(self) -> FindStorage | None:
        """Return what finds storages that messages refer to; None: they are refused."""
        return self._reader.find_shared

    @find_shared.setter
    def find_shared(self, find: FindStorage | None) -> None:
        self._reader.find_shared = find

    @with_defaults
    def decode(
        self,
        control: bytes | memoryview,
        buffers: Sequence[memoryview] = (),
        *,
        on_gradient: OnGradient | None = None,
        lifted: Sequence[Any] | None = None,
        counted: Callable[[int], None] | None = None,
    ) -> Any:
        """Decode a value.

        Args:
            control: as encoded, or packed; not trusted.
            on_gradient: called for each tensor (any shape) that required a gradient at
                the sender, in the order of `Encoded.gradient_tensors`; the argument
                requires none, and the result replaces it.  None: these tensors become
                leaves that require a gradient.
            lifted: what hooks have made of the references in the message, in order, or
                errors to raise in place of them; None: hooks are called.
            counted: called with the number of values; None: those of short messages are
                not counted.
        """
        if is_packed(control):
            control, buffers = self.open(control, buffers).unpack()
        hooks = self.hooks if lifted is None else _LiftedHooks(lifted)
        decoder = Decoder(buffers, self.functions, hooks, self.limits)
        decoder.find_shared = self.find_shared
        decoder.counts = counted is not None
        try:
            value = decoder.decode(memoryview(control), on_gradient)
            if counted is not None:
                counted(decoder.values)
            return value  # noqa: TRY300
        except (DecodeError, RejectedError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a value's own code may run here
            raise DecodeError(
                f"the message is not a value: {words_of(error)}"
            ) from error

    def encoded_bytes(
        self, value: object, *, takes_references: bool = False
    ) -> int | None:
        """Return the length of a value's control part; None if it cannot be sent.

        Under STRICT that includes a value with a function or class that peers may not
        call: the reader would refuse the whole message.  No hook is called.
        """
        kind = type(value)
        if kind is str:
            return 4 * len(value)  # type: ignore[arg-type]
        if kind in _SCALARS and kind is not bytes:
            return 16
        hooks = None
        if self.hooks is not None:
            hooks = _DryHooks(self.hooks.handled, takes_references=takes_references)
        codec = Codec(self.functions, hooks, self.limits, self.stager)
        try:
            encoded = codec.encode(value)
        except CallError:
            return None
        return None if self._is_forbidden(encoded) else len(encoded.control)

    def _is_forbidden(self, encoded: Encoded) -> bool:
        """Return whether a worker of this one's policy would refuse a value."""
        if self.functions.policy is Policy.TRUSTED or encoded.copies:
            return False
        codec = Codec(self.functions, _DryHooks(), self.limits)
        try:
            codec.decode(encoded.control, encoded.buffers)
        except RejectedError:
            return True
        except CallError:
            return False
        return False

    def _control(self, encoder: Encoder, value: Any, *, is_call: bool) -> bytes:
        try:
            control = encoder.encode(value, is_call=is_call)
        except TooDeep:
            raise Unsendable(
                value,
                "under policy strict containers must not be nested deeper than"
                f" {self.limits.depth_max} levels, nor contain themselves; flatten"
                " them",
            ) from None
        if len(control) > self.limits.control_bytes_max:
            raise Unsendable(
                value,
                f"the value takes {len(control)} bytes besides its tensors; the limit"
                f" is {self.limits.control_bytes_max}"
                " (MessageLimits.control_bytes_max): put large data into tensors,"
                " arrays or bytes, or stream it",
            )
        return control


class _DryHooks:
    """Stands in for the hooks when nothing will be sent."""

    def __init__(
        self, handled: tuple[type, ...] = (), *, takes_references: bool = False
    ) -> None:
        self.handled = handled
        self._takes_references = takes_references

    def lower(self, value: Any) -> None:
        """Refuse a value, unless it belongs to a call, which counts references."""
        if self._takes_references:
            return
        raise unencodable(f"a {type(value).__qualname__} outside of a call")

    def lift(self, tree: Any) -> None:
        """Never called: what these hooks encode is never decoded."""


class _LiftedHooks:
    """Stands in for the hooks when their work has been done."""

    handled: tuple[type, ...] = ()

    def __init__(self, lifted: Sequence[Any]) -> None:
        self._lifted = iter(lifted)

    def lower(self, value: Any) -> None:
        """Never called: nothing is encoded."""

    def lift(self, tree: Any) -> Any:
        """Return the next one."""
        lifted = next(self._lifted, None)
        if lifted is None:
            raise DecodeError("a reference arrived where none may be")
        if isinstance(lifted, AsyncRpcError):
            raise lifted
        return lifted


def _storages_of(encoder: Encoder) -> dict[bytes, torch.UntypedStorage] | None:
    if not encoder.shared:
        return None
    return {key: storage for key, (storage, _) in encoder.shared.items()}


def _loss_of(
    encoder: Encoder, value: Any, labels: Sequence[str]
) -> Callable[[], str | None] | None:
    """Return what finds a tensor of a message whose gradient cannot follow it."""
    parameters = encoder.parameters
    if not parameters and not encoder.detached:
        return None
    detached = [tensor for tensor in encoder.detached if id(tensor) not in parameters]
    if detached:
        return lambda: (
            f"{path_to(value, detached[0], labels)}: a"
            f" {type(detached[0]).__qualname__} that requires a gradient pickles"
            " itself, so that its gradient cannot come back in an autograd context;"
            " send it as a torch.Tensor, or its detach()"
        )
    if not parameters:
        return None

    def find() -> str | None:
        where = path_outside(value, parameters, torch.nn.Module, labels)
        return where and (
            f"{where}: a Parameter that requires a gradient is also in an nn.Module of"
            " this message, which takes it as a leaf of its own, so that its gradient"
            " cannot come back in an autograd context; send one of them"
        )

    return find


def _at_its_path(error: Unsendable, root: Any, labels: Sequence[str]) -> EncodeError:
    return unencodable(f"{path_to(root, error.value, labels)}: {error.problem}")
