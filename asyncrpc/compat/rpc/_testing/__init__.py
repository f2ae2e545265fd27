"""A backend that loses and delays messages, for tests of programs.

    import asyncrpc.compat.rpc._testing

    backend = rpc.backend_registry.BackendType["FAULTY_TENSORPIPE"]
    options = rpc.construct_rpc_backend_options(
        backend,
        messages_to_fail=["PYTHON_CALL"],
        num_fail_sends=2,
        messages_to_delay={"SCRIPT_CALL": 1.5},
    )
    rpc.init_rpc("worker0", backend, 0, 2, rpc_backend_options=options)

Importing this registers the backend.  `faulty_worker` says what it simulates and what
not.

Source: torch.distributed.rpc._testing.
"""

from __future__ import annotations

from asyncrpc.compat.rpc._testing import faulty_agent_backend_registry
from asyncrpc.compat.rpc._testing.faulty_agent_backend_registry import (
    FaultyTensorPipeRpcBackendOptions,
)
from asyncrpc.compat.rpc._testing.faulty_worker import FaultyTensorPipeAgent

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]


def is_available() -> bool:
    """Return whether messages can be lost and delayed: always."""
    return True
