"""Copies of device tensors to the host that must be made before a message is sent.

Serde handles host bytes only, and never waits: for a tensor on a device the message has
a host buffer that is filled before the message is sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from asyncrpc.errors import EncodeError, Outcome


class Copy(NamedTuple):
    """A copy of a tensor to the host that has still to be made.

    Attributes:
        source: the tensor, on a device.
        target: in host memory, of the same shape and dtype, contiguous or as dense as
            the source; its content is still undefined.
        mark: the device's own object (an event, say) for when the source is ready.
    """

    source: torch.Tensor
    target: torch.Tensor
    mark: Any = None


class Stager(Protocol):
    """Chooses host memory for tensors on devices."""

    def to_host(self, tensor: torch.Tensor) -> Copy:
        """Return the copy to make of `tensor` (any shape, on a device); do not wait."""
        ...


class HostStager:
    """The stager of a codec without devices: it refuses every tensor."""

    def to_host(self, tensor: torch.Tensor) -> Copy:
        """Refuse."""
        raise EncodeError(
            f"a tensor on device {str(tensor.device)!r} cannot be sent from here;"
            " send tensor.cpu()",
            outcome=Outcome.NOT_EXECUTED,
        )
