"""asyncrpc: an asyncio-native RPC framework for PyTorch.

Three ways in, one implementation: `Worker`, a value; the functions that
torch.distributed.rpc knows, on the current worker; and `asyncrpc.serving` for workers
inside an aiohttp application.
"""

from asyncrpc import autograd, errors, functions, multiprocessing, nn, optim
from asyncrpc.api import (
    Worker,
    get_worker_info,
    init_rpc,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from asyncrpc.errors import *  # noqa: F403  (every public error; errors.__all__)
from asyncrpc.errors import __all__ as _errors
from asyncrpc.functions import async_execution, on_loop
from asyncrpc.ids import WorkerInfo
from asyncrpc.rref.handle import RRef
from asyncrpc.runtime.context import cancelled, current_worker, deadline
from asyncrpc.runtime.futures import CallFuture, CallStats
from asyncrpc.runtime.loops import run
from asyncrpc.runtime.options import Options
from asyncrpc.runtime.peer import Peer
from asyncrpc.runtime.rendezvous import LocalRendezvous
from asyncrpc.serde import Policy, expose

__version__ = "0.1.0"

__all__ = [
    "CallFuture",
    "CallStats",
    "LocalRendezvous",
    "Options",
    "Peer",
    "Policy",
    "RRef",
    "Worker",
    "WorkerInfo",
    "async_execution",
    "autograd",
    "cancelled",
    "current_worker",
    "deadline",
    "errors",
    "expose",
    "functions",
    "get_worker_info",
    "init_rpc",
    "multiprocessing",
    "nn",
    "on_loop",
    "optim",
    "remote",
    "rpc_async",
    "rpc_sync",
    "run",
    "shutdown",
    *_errors,
]
