"""asyncrpc: an asyncio-native RPC framework for PyTorch.

One implementation, three interfaces: `Worker`, a value; the functions of
torch.distributed.rpc, on the current worker; and `asyncrpc.serving`, for workers inside
an aiohttp or ASGI application.

Importing it loads the core: workers, calls, references, autograd.  What is built on
these (collectives, data parallelism, optimizers, modules) is loaded when its name is
first used.
"""

from typing import TYPE_CHECKING

import torch as _torch  # noqa: F401  (it leaves garbage, which it collects itself)

from asyncrpc.core.on_demand import names_on_demand, no_collection

with no_collection():
    from asyncrpc import autograd, errors, functions
    from asyncrpc.api import (
        Worker,
        get_worker_info,
        init_rpc,
        remote,
        rpc_async,
        rpc_sync,
        shutdown,
    )
    from asyncrpc.core.calls.context import cancelled, deadline
    from asyncrpc.core.calls.futures import CallFuture, CallStats
    from asyncrpc.core.counters import Counters
    from asyncrpc.core.ids import WorkerInfo
    from asyncrpc.core.links.tokens import JoinTokens
    from asyncrpc.core.loop.loops import run
    from asyncrpc.core.membership.changes import MemberChange, MemberChanges
    from asyncrpc.core.membership.machine.records import (
        ChangeKind,
    )
    from asyncrpc.core.membership.rendezvous import JoinRendezvous, LocalRendezvous
    from asyncrpc.core.options import (
        DeviceOptions,
        LimitOptions,
        LivenessOptions,
        NetworkOptions,
        Options,
    )
    from asyncrpc.core.peers.group import GroupCall, GroupReply, PeerGroup
    from asyncrpc.core.peers.peer import Peer
    from asyncrpc.core.rref.handle import RRef
    from asyncrpc.core.rref.records import RRefRecord
    from asyncrpc.core.serde import Policy, expose, share
    from asyncrpc.core.transport.tls import Tls
    from asyncrpc.core.wire.limits import MessageLimits
    from asyncrpc.core.worker import current_worker
    from asyncrpc.errors import (
        AsyncRpcError,
        CallError,
        DeadlineExceededError,
        Outcome,
        OwnerLostError,
        RejectedError,
        RemoteError,
        UsageError,
        WorkerLostError,
    )
    from asyncrpc.functions import async_execution, idempotent, on_loop

if TYPE_CHECKING:
    from asyncrpc import (
        collectives,
        ddp,
        inspection,
        multiprocessing,
        nn,
        optim,
    )
    from asyncrpc.clusters.actors.actor import Actor
    from asyncrpc.clusters.actors.actors import ActorReply, Actors, ActorsMethod
    from asyncrpc.clusters.actors.exclusive import exclusive
    from asyncrpc.clusters.actors.scatter import scatter
    from asyncrpc.clusters.changes import ClusterChange, ClusterChanges
    from asyncrpc.clusters.cluster import Cluster
    from asyncrpc.clusters.code.sender import CodeUpdate
    from asyncrpc.clusters.remote.options import RayOptions, SlurmOptions, SshOptions
    from asyncrpc.clusters.restarts import RestartLimits
    from asyncrpc.collectives import ElasticGroup, Group, join_group
    from asyncrpc.preemption import Preemption, PreemptionStep
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "Actor": "asyncrpc.clusters.actors.actor",
            "ActorReply": "asyncrpc.clusters.actors.actors",
            "Actors": "asyncrpc.clusters.actors.actors",
            "ActorsMethod": "asyncrpc.clusters.actors.actors",
            "Cluster": "asyncrpc.clusters.cluster",
            "ClusterChange": "asyncrpc.clusters.changes",
            "ClusterChanges": "asyncrpc.clusters.changes",
            "CodeUpdate": "asyncrpc.clusters.code.sender",
            "ElasticGroup": "asyncrpc.collectives",
            "Group": "asyncrpc.collectives",
            "Preemption": "asyncrpc.preemption",
            "PreemptionStep": "asyncrpc.preemption",
            "RayOptions": "asyncrpc.clusters.remote.options",
            "RestartLimits": "asyncrpc.clusters.restarts",
            "SlurmOptions": "asyncrpc.clusters.remote.options",
            "SshOptions": "asyncrpc.clusters.remote.options",
            "collectives": "asyncrpc.collectives",
            "ddp": "asyncrpc.ddp",
            "exclusive": "asyncrpc.clusters.actors.exclusive",
            "inspection": "asyncrpc.inspection",
            "join_group": "asyncrpc.collectives",
            "multiprocessing": "asyncrpc.multiprocessing",
            "nn": "asyncrpc.nn",
            "optim": "asyncrpc.optim",
            "scatter": "asyncrpc.clusters.actors.scatter",
        },
    )

__version__ = "0.1.0"

# In groups, as the API page shows them.
__all__ = [  # noqa: RUF022
    # Workers and calls
    "Worker",
    "Peer",
    "CallFuture",
    "CallStats",
    "Policy",
    "Tls",
    "Counters",
    "WorkerInfo",
    # Options
    "Options",
    "NetworkOptions",
    "LivenessOptions",
    "LimitOptions",
    "MessageLimits",
    "DeviceOptions",
    # How workers find each other, and membership
    "LocalRendezvous",
    "JoinRendezvous",
    "JoinTokens",
    "MemberChange",
    "ChangeKind",
    "MemberChanges",
    # Workers that a program starts
    "Cluster",
    "ClusterChange",
    "ClusterChanges",
    "CodeUpdate",
    "RestartLimits",
    "SshOptions",
    "SlurmOptions",
    "RayOptions",
    # Objects on them
    "Actor",
    "Actors",
    "ActorsMethod",
    "ActorReply",
    "exclusive",
    "scatter",
    # Preemption by the scheduler
    "Preemption",
    "PreemptionStep",
    # Calls to several workers at once
    "PeerGroup",
    "GroupCall",
    "GroupReply",
    # Functions and decorators around calls
    "run",
    "deadline",
    "cancelled",
    "current_worker",
    "on_loop",
    "async_execution",
    "idempotent",
    "expose",
    "share",
    # The names of torch.distributed.rpc
    "init_rpc",
    "rpc_async",
    "rpc_sync",
    "remote",
    "shutdown",
    "get_worker_info",
    # Remote references
    "RRef",
    "RRefRecord",
    # Collectives
    "Group",
    "ElasticGroup",
    "join_group",
    # Errors that programs catch; all are in `asyncrpc.errors`
    "AsyncRpcError",
    "UsageError",
    "CallError",
    "RemoteError",
    "RejectedError",
    "DeadlineExceededError",
    "WorkerLostError",
    "OwnerLostError",
    "Outcome",
    # Modules
    "autograd",
    "collectives",
    "ddp",
    "errors",
    "functions",
    "inspection",
    "multiprocessing",
    "nn",
    "optim",
]
