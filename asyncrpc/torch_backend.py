"""asyncrpc as a backend of torch.distributed.

    import asyncrpc.torch_backend
    import torch.distributed as dist

    dist.init_process_group("asyncrpc")  # as torchrun sets it; or rank=, world_size=
    dist.init_process_group("asyncrpc", init_method="asyncrpc://")  # any launcher

The import registers it.  Each rank runs a worker on an event loop in a thread of its
own; the ranks meet at torch's store, and the groups of `new_group` share that worker.
No state of the process is kept here: torch's registry has the process groups, and these
have the worker.

Source: torch.distributed.Backend.register_backend.
"""

from asyncrpc.parallel.collectives.torch_backend import registration as _registration  # noqa: F401
from asyncrpc.parallel.collectives.torch_backend.process_group import (
    AsyncRpcProcessGroup,
)

__all__ = ["AsyncRpcProcessGroup"]
