"""The names of torch.distributed.rpc, for programs that were written for it.

    import asyncrpc.compat.rpc as rpc
    import asyncrpc.compat.autograd as dist_autograd
    from asyncrpc.compat.optim import DistributedOptimizer
    from asyncrpc.compat.nn import RemoteModule

Everything here blocks, as there.  One worker serves the process; its event loop runs in
a thread of its own (`hosting`).  What programs see (signatures, defaults, exceptions
and their texts) is as in torch 2.13; what goes on underneath is asyncrpc.

This is the only package with process-wide state.
"""
