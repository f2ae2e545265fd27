"""The seam for devices: where device memory becomes host memory and back.

Serde moves host bytes only.  `asyncrpc.devices` implements `Stager` for CUDA and XLA; a
worker without one has `HostStager`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from asyncrpc.errors import DecodeError, EncodeError, Outcome


class Stager(Protocol):
    """Copies tensors between devices and the host."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` (any shape) in host memory, complete when this returns.

        Raises:
            EncodeError: this worker has no way to the tensor's device.
        """
        ...

    def to_device(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """Return `tensor` (any shape, in host memory) on `device`.

        Args:
            tensor: received; nobody else holds it.
            device: where the sender had it, as text: `"cuda:1"`.

        Raises:
            DecodeError: this worker has no such device.
        """
        ...


class HostStager:
    """The stager of a worker without devices: the host is all there is."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host tensor as it is; refuse any other."""
        if tensor.is_cpu:
            return tensor
        raise EncodeError(
            f"a tensor on device {str(tensor.device)!r} cannot be sent by this worker;"
            " send tensor.cpu(), or give the worker a stager for that device",
            outcome=Outcome.NOT_EXECUTED,
        )

    def to_device(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """Return the tensor if `device` is the host; refuse any other."""
        if device == "cpu":
            return tensor
        raise DecodeError(
            f"a tensor from device {device!r} arrived and this worker has no stager for"
            " it; have the sender send tensor.cpu(), or map the device"
        )
