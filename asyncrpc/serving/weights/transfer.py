"""One transfer of weights to one replica: announce, send all parts, commit.

A part has `CHUNK_BYTES`, or one tensor.  Each part is confirmed before the next is
sent, so a replica holds at most one part that it has not yet copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch

from asyncrpc.extend import PeerLink, ask
from asyncrpc.serving.weights.messages import (
    BeginTransfer,
    PutTensors,
    TensorHead,
)

CHUNK_BYTES: Final = 16 << 20


def heads_of(state: Mapping[str, torch.Tensor]) -> list[TensorHead]:
    """Return the announcement of tensors."""
    return [
        TensorHead(name, list(tensor.shape), str(tensor.dtype).rpartition(".")[2])
        for name, tensor in state.items()
    ]


def parts_of(state: Mapping[str, torch.Tensor]) -> Iterator[Sequence[str]]:
    """Yield names of tensors that travel together."""
    names: list[str] = []
    nbytes = 0
    for name, tensor in state.items():
        if names and nbytes + tensor.nbytes > CHUNK_BYTES:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += tensor.nbytes
    if names:
        yield names


async def stage_weights(
    link: PeerLink, serial: int, state: Mapping[str, torch.Tensor], version: int
) -> None:
    """Send weights to a replica, which does not serve them yet."""
    await ask(link, BeginTransfer(serial, version, heads_of(state)))
    for names in parts_of(state):
        tensors = [state[name] for name in names]
        await ask(link, PutTensors(serial, list(names), tensors))


def new_serial(random_bytes: Callable[[int], bytes]) -> int:
    """Return the serial of a new transfer."""
    return int.from_bytes(random_bytes(8), "big") >> 1
