"""An encoded value: the parts of it that a message has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from asyncrpc.serde.copies import Copy


@dataclass(slots=True)
class Encoded:
    """A value, ready to be sent.

    Attributes:
        control: msgpack, see `kinds`.
        buffers: C-contiguous views of bytes, in the order to send them; they keep their
            memory alive.  They view the sender's tensors: a write to a tensor before
            the buffers are sent would be sent.
        gradient_tensors: the tensors that require a gradient, each once, in the order
            in which `Codec.decode` reports them.
        bytes_copied: bytes that were gathered in user space.
        shared: storages that travel by reference, by key; None if there are none.
        loses_gradient: returns where in the value a tensor is whose gradient cannot
            follow it, and why; None if there is none.
        copies: copies from devices into `buffers` that must be made before they are
            sent.
    """

    control: bytes
    buffers: list[memoryview]
    gradient_tensors: list[torch.Tensor]
    bytes_copied: int
    shared: dict[bytes, torch.UntypedStorage] | None = field(default=None, kw_only=True)
    copies: Sequence[Copy] = field(default=(), kw_only=True)
    loses_gradient: Callable[[], str | None] | None = field(default=None, kw_only=True)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def pack(self) -> Encoded:
        """Return the message in the form to send: `self` if it has no codec."""
        return self
