"""PJRT's runtime for programs on XLA devices: the device, this replica and the others.

Names are torch_xla's where it has them.  A worker finds the others by `xla://`:

    async with asyncrpc.Worker("trainer", rendezvous="xla://", ...) as worker:
        async with asyncrpc.Group(worker) as group:
            await xla.broadcast_master_param(model, group)

Gradients are reduced by the host (`asyncrpc.ddp`, `reduce_gradients`), which works
wherever workers do, even for several replicas on a CPU, for which torch_xla has no
collectives.
"""

from asyncrpc.parallel.xla.gradients import reduce_gradients
from asyncrpc.parallel.xla.runtime import (
    broadcast_master_param,
    device,
    device_type,
    generator,
    global_ordinal,
    launch,
    local_ordinal,
    optimizer_step,
    rendezvous,
    with_rng_lock,
    world_size,
)

__all__ = [
    "broadcast_master_param",
    "device",
    "device_type",
    "generator",
    "global_ordinal",
    "launch",
    "local_ordinal",
    "optimizer_step",
    "reduce_gradients",
    "rendezvous",
    "with_rng_lock",
    "world_size",
]
