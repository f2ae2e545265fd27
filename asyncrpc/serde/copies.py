"""Tensors whose bytes have still to come from a device to the host, and who says so.

Serde moves host bytes only, and never waits: a tensor on a device is sent as a buffer
of the host that is filled before it leaves.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from asyncrpc.errors import EncodeError, Outcome


class Copy(NamedTuple):
    """A tensor whose bytes are still to come to the host.

    Attributes:
        source: on a device.
        target: in host memory, of the same shape and dtype, contiguous or as dense as
            the source; nothing is in it yet.
        mark: when the source is ready, in words of its device.
    """

    source: torch.Tensor
    target: torch.Tensor
    mark: Any = None


class Stager(Protocol):
    """Says where tensors of devices go on the host."""

    def to_host(self, tensor: torch.Tensor) -> Copy:
        """Return where `tensor` (any shape, on a device) is to be copied; do not wait.

        Raises:
            EncodeError: this worker has no way to the tensor's device.
        """
        ...


class HostStager:
    """The stager of a codec without devices: the host is all there is."""

    def to_host(self, tensor: torch.Tensor) -> Copy:
        """Refuse."""
        raise EncodeError(
            f"a tensor on device {str(tensor.device)!r} cannot be sent from here;"
            " send tensor.cpu()",
            outcome=Outcome.NOT_EXECUTED,
        )
