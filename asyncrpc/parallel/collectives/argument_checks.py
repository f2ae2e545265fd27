"""Arguments of a group, except tensors: checked before anything begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from asyncrpc.core.arguments import (
    check_kind,
    check_seconds,
    check_sequence,
    shown,
    wrong,
)
from asyncrpc.core.devices.names import CPU
from asyncrpc.core.worker import Worker
from asyncrpc.errors import UsageError
from asyncrpc.extend import ServiceHost, host_of

_REASON_MAX: Final = 4096  # characters that other ranks get
_TAG_BITS: Final = 63  # and the sign: what a message can carry
_BYTES_MAX: Final = 1 << 62  # of one tensor
_DEVICE_MAX: Final = 64  # characters


def check_group(worker: Worker, name: str, timeout_s: float | None) -> None:
    """Check the arguments of a group."""
    check_kind("worker", worker, Worker, "a worker")
    check_kind("name", name, str, "a string")
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s, at_least=0)
    host_of(worker).check_on_loop("Group")


def names_of(worker: Worker, members: Sequence[str | int] | None) -> tuple[str, ...]:
    """Return the names of the workers of a group, by rank."""
    if members is None:
        if worker.world_size <= 0:
            problem = "is not in a group of a fixed size; pass members=[...]"
            raise UsageError(f"worker {worker.name!r} {problem}")
        members = range(worker.world_size)
    check_sequence("members", members, "a list of names or ranks of workers")
    for index, member in enumerate(members):
        wanted = "the name or rank of a worker"
        check_kind(f"members[{index}]", member, (str, int), wanted)
    names = tuple(worker.peer(member).name for member in members)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"members must be distinct; repeated: {', '.join(map(repr, twice))}"
        )
    return names


def check_rank(rank: object, name: str, size: int) -> None:
    """Raise UsageError unless an argument is a rank of a group of this size."""
    if type(rank) is not int or not 0 <= rank < size:
        raise wrong(name, f"a rank from 0 to {size - 1}", rank)


def check_ranks(ranks: Sequence[int], mine: int, size: int) -> None:
    """Raise UsageError unless these are ranks of a group, this one among them."""
    check_sequence("ranks", ranks, "a list of ranks of this group")
    for index, rank in enumerate(ranks):
        check_rank(rank, f"ranks[{index}]", size)
    if mine not in ranks:
        raise UsageError(
            f"ranks must include rank {mine}, that of this worker, and {shown(ranks)} "
            "does not"
        )


def check_tag(tag: object) -> None:
    """Raise UsageError unless a tag can be sent."""
    if type(tag) is not int or tag.bit_length() > _TAG_BITS:
        raise wrong("tag", f"an integer of {_TAG_BITS + 1} bits", tag)


async def check_device(host: ServiceHost, device: str) -> None:
    """Raise UsageError unless this worker has a device of the name."""
    if type(device) is not str or len(device) > _DEVICE_MAX:
        raise wrong("device", "the name of a device", device)
    if device == CPU:
        return
    try:
        await host.run_in_thread(lambda: host.devices.require(device))
    except UsageError as error:
        raise UsageError(f"device cannot be {device!r}: {error}") from error


def bytes_of(sizes: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor that will be made."""
    check_kind("dtype", dtype, torch.dtype, "a torch.dtype")
    check_sequence("shape", sizes, "sizes, integers of at least 0")
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise wrong("shape", "sizes, integers of at least 0", sizes)
    nbytes: int = math.prod(sizes) * dtype.itemsize
    if nbytes > _BYTES_MAX:
        raise wrong("shape", "the shape of a tensor that fits into memory", sizes)
    return nbytes


def speakable(reason: str) -> str:
    """Return a reason as it can be told to others: short, and in Unicode."""
    return reason[:_REASON_MAX].encode(errors="replace").decode()
