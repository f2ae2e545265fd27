"""The names of torch.distributed.rpc, for programs that were written for it.

    import asyncrpc.compat.rpc as rpc
    import asyncrpc.compat.autograd as dist_autograd
    from asyncrpc.compat.optim import DistributedOptimizer
    from asyncrpc.compat.nn import RemoteModule

Everything here blocks, as in torch.  One worker serves the process; its event loop runs
in a thread of its own (`runtime.hosting`).  The interface (signatures, defaults,
exceptions and their texts) is that of torch 2.13; the implementation is asyncrpc.

A program that imports torch's modules need not be edited: `install()`, called first,
replaces them by these, and `python -m asyncrpc.compat script.py` calls it.

This is the only package with process-wide state.
"""

from asyncrpc.compat.installing import install, uninstall

__all__ = ["install", "uninstall"]
