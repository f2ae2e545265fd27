"""The state of a training, from a rank that has it to all others.

Source: the `state.sync()` of Horovod's elastic training.
"""

from __future__ import annotations

import io
from typing import Any, Final

import torch

from asyncrpc.core.torch_modes import plain_steps
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.argument_checks import check_rank
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.argument_checks import check_group

_PIECE_BYTES: Final = 16 << 20  # of one broadcast


@plain_steps
async def broadcast_state(group: Group, state: Any, source: int) -> Any:
    """Return the state of one rank at every rank; a collective.

    Newcomers of an elastic group need it: parameters, buffers, and the state of an
    optimizer, such as its momentum.

    Args:
        group: the ranks.
        state: a value that `torch.save` takes, and `torch.load` reads with
            `weights_only=True`: tensors of any shape, dtype and device, numbers,
            strings, and containers of these, such as a `state_dict`.  Only that of rank
            `source` counts.
        source: the rank whose state it is, such as `ElasticGroup.source`.

    Returns:
        The state; its tensors are on the CPU, except at `source`, which gets its own.

    Raises:
        UsageError: `source` is not a rank of the group, or this is not the worker's
            event loop; or the state at this rank cannot be saved, and no rank gets it.
        CollectiveError: a rank failed or was lost; all ranks fail.

    Cancellation:
        The call fails on all ranks.

    Example:
        >>> mine = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        >>> state = await broadcast_state(group.current, mine, group.source)
    """
    check_group(group)
    check_rank(source, "source", group.size)
    run_in_thread = group.host.run_in_thread
    group.host.check_on_loop("broadcast_state")
    packed = torch.empty(0, dtype=torch.uint8, device="cpu")
    if group.rank == source:
        try:
            packed = await run_in_thread(lambda: _packed(state))
        except Exception as error:
            group.refuse(f"cannot save its state: {error}")
            raise UsageError(f"state cannot be saved: {error}") from error
    length = torch.tensor([len(packed)], device="cpu")
    await group.broadcast(length, source)
    if group.rank != source:
        packed = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    for piece in torch.split(packed, _PIECE_BYTES):
        await group.broadcast(piece, source)
    if group.rank == source:
        return state
    return await run_in_thread(lambda: _unpacked(packed))


def _packed(state: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> Any:
    file = io.BytesIO(packed.numpy().tobytes())
    return torch.load(file, map_location="cpu", weights_only=True)
