"""The names of torch.distributed.rpc, for programs that were written for it.

    import asyncrpc.compat.rpc as rpc
    import asyncrpc.compat.autograd as dist_autograd
    from asyncrpc.compat.optim import DistributedOptimizer
    from asyncrpc.compat.nn import RemoteModule

Everything here blocks, as there.  One worker serves the process; its event loop runs in
a thread of its own (`runtime.hosting`).  What programs see (signatures, defaults,
exceptions and their texts) is as in torch 2.13; what goes on underneath is asyncrpc.

A program that imports torch's modules need not be edited: `install()`, called first,
puts these in their place, and `python -m asyncrpc.compat script.py` calls it.

This is the only package with process-wide state.
"""

from asyncrpc.compat.installing import install, uninstall

__all__ = ["install", "uninstall"]
