"""The same module at every rank, before the first step: compared, then made the same.

Source: torch/nn/parallel/distributed.py and torch/distributed/utils.py,
`_verify_param_shape_across_processes` and `_sync_module_states`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.flat import pack, unpack

_PACKED_BYTES: Final = 16 << 20  # of one broadcast, which are copied before it


async def verify(
    group: Group, tensors: Mapping[str, torch.Tensor], options: Mapping[str, object]
) -> None:
    """Compare names, shapes, strides and dtypes of tensors, and options, by rank."""
    lines = [f"{name} = {value}" for name, value in options.items()]
    lines += [_line(name, tensor) for name, tensor in tensors.items()]
    text = json.dumps(lines).encode()
    digest = hashlib.blake2b(text, digest_size=32).digest()
    digests = await group.all_gather(_bytes(digest))
    if all(torch.equal(other, digests[0]) for other in digests):
        return
    encoded = await group.all_gather(_bytes(text))
    all_lines = [json.loads(bytes(content.tolist())) for content in encoded]
    for rank, theirs in enumerate(all_lines):
        if theirs != all_lines[0]:
            raise UsageError(
                "every rank needs the same module and options; rank "
                f"{rank} ({group.members[rank]!r}) has "
                f"{_difference(theirs, all_lines[0])}"
            )


async def broadcast(group: Group, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Fill tensors with those of one rank, a few megabytes at a time."""
    run_in_thread = group.host.run_in_thread
    for some in _portions(tensors):
        packed = await run_in_thread(lambda some=some: pack(some))  # type: ignore[misc]
        await group.broadcast(packed, root)
        if group.rank != root:
            await run_in_thread(
                lambda some=some, packed=packed: unpack(packed, some)  # type: ignore[misc]
            )


def _portions(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    portions: list[list[torch.Tensor]] = []
    nbytes = _PACKED_BYTES
    for tensor in tensors:
        if nbytes + tensor.nbytes > _PACKED_BYTES:
            portions.append([])
            nbytes = 0
        portions[-1].append(tensor)
        nbytes += tensor.nbytes
    return portions


def _line(name: str, tensor: torch.Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f", strides {tuple(tensor.stride())}"
    fixed = "" if tensor.requires_grad else ", without gradient"
    return f"{name}: {tensor.dtype} {tuple(tensor.shape)}{strides}{fixed}"


def _difference(theirs: Sequence[str], ours: Sequence[str]) -> str:
    """Return a description of the first difference between two lists of lines."""
    for their_line, our_line in zip(theirs, ours, strict=False):
        if their_line != our_line:
            return f"{their_line!r} where rank 0 has {our_line!r}"
    if len(theirs) < len(ours):
        return f"no {ours[len(theirs)]!r}, which rank 0 has"
    return f"{theirs[len(ours)]!r}, which rank 0 does not have"


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
