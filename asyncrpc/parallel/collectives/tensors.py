"""Tensors as collectives take them: checked, and flat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from asyncrpc.core.arguments import check_sequence, wrong
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.machine.operations import Descriptor

if TYPE_CHECKING:
    from asyncrpc.core.devices.staging import Devices

DIMS_MAX: Final = 64  # that can travel; torch has few operations for more


def described(
    operation: str, tensor: torch.Tensor, how: str = "", root: int = -1
) -> Descriptor:
    """Return what all ranks must agree on in a collective over a tensor."""
    return Descriptor(operation, how, str(tensor.dtype), tuple(tensor.shape), root)


def check(
    tensor: torch.Tensor, name: str = "tensor", *, is_written: bool = False
) -> None:
    """Refuse a tensor that no collective can move."""
    if not isinstance(tensor, torch.Tensor):
        raise wrong(name, "a tensor", tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = (
            "quantized"
            if tensor.is_quantized
            else str(tensor.layout).removeprefix("torch.")
        )
        raise UsageError(
            f"{name} must be a dense tensor, not a {kind} one: convert it first"
        )
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UsageError(
            f"{name} must be a tensor with memory of its own, not a "
            f"{type(tensor).__name__}: take its parts, or its whole as a plain tensor"
        )
    if tensor.is_meta:
        raise UsageError(f"{name} must be a tensor with values, not one on 'meta'")
    if tensor.dim() > DIMS_MAX:
        raise UsageError(
            f"{name} must have at most {DIMS_MAX} dimensions, not {tensor.dim()}"
        )
    if is_written and 0 in tensor.stride() and not _has_own_elements(tensor):
        raise UsageError(
            f"{name} of shape {tuple(tensor.shape)} is expanded: several of its "
            "elements are one in memory, and cannot be written to; use a copy, "
            f"{name}.clone(memory_format=torch.contiguous_format)"
        )


def _has_own_elements(tensor: torch.Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return not tensor.numel() or all(stride or size == 1 for size, stride in sizes)


class Hosted:
    """A tensor as one of the host: itself, or a copy that is written back.

    `async with Hosted(worker.devices, tensor) as host`; values written to `host` are in
    the tensor when the block has ended well.
    """

    __slots__ = ("_devices", "_host", "_tensor", "_write")

    def __init__(
        self, devices: Devices, tensor: torch.Tensor, *, write: bool = True
    ) -> None:
        self._devices = devices
        self._tensor = self._host = tensor
        self._write = write

    async def __aenter__(self) -> torch.Tensor:
        """Copy the tensor, if it is on a device."""
        if not self._tensor.is_cpu:
            (self._host,) = await self._devices.copies_of([self._tensor])
        return self._host

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Copy it back."""
        if kind is None and self._write and self._host is not self._tensor:
            await self._devices.write(self._tensor, self._host)


async def put_like(
    devices: Devices, tensors: Sequence[torch.Tensor], like: torch.Tensor
) -> list[torch.Tensor]:
    """Copy host tensors to the device of another tensor."""
    if like.is_cpu:
        return list(tensors)
    where = str(like.device)
    placed = await devices.placed(
        {index: (tensor, where) for index, tensor in enumerate(tensors)}
    )
    return [placed[index] for index in range(len(tensors))]


def text(tensor: torch.Tensor) -> str:
    """Return the description of a tensor in errors."""
    return f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that nothing else refers to."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in contiguous memory, which may be its own."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def cut(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut a tensor along its first dimension into parts of the same length."""
    length = len(tensor) // count
    return [tensor[part * length : (part + 1) * length] for part in range(count)]


class RankTensors:
    """One tensor for each rank, or one tensor that is cut into them.

    Attributes:
        like: the first tensor that was given.
    """

    def __init__(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        operation: str,
        size: int,
    ) -> None:
        self._size = size
        self._whole: torch.Tensor | None = None
        self._each: Sequence[torch.Tensor] = ()
        if isinstance(tensors, torch.Tensor):
            check(tensors, "tensors")
            rows = len(tensors) if tensors.dim() else 0
            if not tensors.dim() or rows % size:
                raise UsageError(
                    f"tensors: {operation} cuts {text(tensors)} along its first "
                    f"dimension, which is not divisible by the {size} ranks; give a "
                    "list"
                )
            self._whole = self.like = tensors
            self.numels = (tensors.numel() // size,) * size
            self.shapes = [(rows // size, *tensors.shape[1:])] * size
        else:
            self._each = one_each(tensors, operation, size)
            self.like = self._each[0]
            self.numels = tuple(tensor.numel() for tensor in self._each)
            self.shapes = [tuple(tensor.shape) for tensor in self._each]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of all tensors."""
        return {tensor.dtype for tensor in self._each or (self.like,)}

    async def on_host(self, devices: Devices) -> list[torch.Tensor]:
        """Return the tensors in host memory, copied if they are not there."""
        if self._whole is None:
            return await devices.copies_of(self._each)
        (whole,) = await devices.copies_of([self._whole])
        return cut(whole.detach(), self._size)


def one_each(
    tensors: Sequence[torch.Tensor] | None, operation: str, size: int
) -> Sequence[torch.Tensor]:
    """Return the tensors, if there is one for each rank."""
    check_sequence("tensors", tensors, f"one tensor for each of the {size} ranks")
    assert tensors is not None  # checked above
    if len(tensors) != size:
        raise UsageError(
            f"tensors: {operation} needs one tensor for each of the {size} ranks, but "
            f"got {len(tensors)}"
        )
    for rank, tensor in enumerate(tensors):
        check(tensor, f"tensors[{rank}]")
    return tensors


def split(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Cut a flat tensor into as many parts as there are ranks, as even as can be."""
    least, more = divmod(flat.numel(), size)
    lengths = [least + (rank < more) for rank in range(size)]
    parts: list[torch.Tensor] = list(flat.split(lengths))  # type: ignore[no-untyped-call]
    return parts


@contextmanager
def flat(tensor: torch.Tensor, *, write: bool = True) -> Iterator[torch.Tensor]:
    """Give a tensor as one dimension of contiguous memory.

    Values written there are in the tensor when the block has ended well.
    """
    plain = tensor.detach()
    is_plain = plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
    if is_plain:
        yield plain.view(-1)
        return
    other = packed(plain)
    yield other.view(-1)
    if write:
        plain.copy_(other)
