"""The backend FAULTY_TENSORPIPE; importing this module registers it.

Source: torch.distributed.rpc._testing.faulty_agent_backend_registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from asyncrpc.compat.rpc import backend_registry, constants, starting
from asyncrpc.compat.rpc._testing.faulty_worker import (
    FaultyTensorPipeAgent,
    add_faults,
)
from asyncrpc.compat.rpc.faults import Faults
from asyncrpc.compat.rpc.options import TensorPipeRpcBackendOptions


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options that also say which messages are lost or delayed.

    Args:
        messages_to_fail: names of types of messages; see `faults.MessageType`.
        messages_to_delay: seconds, by the name of a type.
        num_fail_sends: how often each message is lost before it is sent.
        **options: options of the backend without faults.

    Raises:
        TypeError: an argument is of the wrong type.
        RuntimeError: a type of message is unknown, or a number is negative.

    Source: torch._C._distributed_rpc_testing.FaultyTensorPipeRpcBackendOptions, which
    checks the names when the agent is made.
    """

    def __init__(
        self,
        *,
        messages_to_fail: Iterable[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if isinstance(messages_to_fail, str) or not isinstance(num_fail_sends, int):
            raise TypeError(
                "messages_to_fail must be a list of names, num_fail_sends an int, not "
                f"{messages_to_fail!r} and {num_fail_sends!r}"
            )
        self._messages_to_fail = list(messages_to_fail)
        self._messages_to_delay = dict(messages_to_delay or {})
        self._num_fail_sends = num_fail_sends
        self.faults()

    @property
    def messages_to_fail(self) -> list[str]:
        """Names of the types that are lost."""
        return list(self._messages_to_fail)

    @property
    def messages_to_delay(self) -> dict[str, float]:
        """Seconds of delay, by the name of a type."""
        return dict(self._messages_to_delay)

    @property
    def num_fail_sends(self) -> int:
        """How often each message is lost."""
        return self._num_fail_sends

    def faults(self) -> Faults:
        """Return the faults for one worker, with nothing counted yet."""
        return Faults(
            self._messages_to_fail, self._messages_to_delay, self._num_fail_sends
        )


def _faulty_tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    **options: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        **options,
    )


def _faulty_tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> FaultyTensorPipeAgent:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. "
            f"{rpc_backend_options}"
        )
    agent = starting.start_agent(
        (store, name, rank, world_size, rpc_backend_options),
        extensions=[partial(add_faults, faults=rpc_backend_options.faults())],
        agent_class=FaultyTensorPipeAgent,
    )
    assert isinstance(agent, FaultyTensorPipeAgent)
    return agent


if not backend_registry.backend_registered("FAULTY_TENSORPIPE"):
    backend_registry.register_backend(
        "FAULTY_TENSORPIPE",
        _faulty_tensorpipe_construct_rpc_backend_options_handler,
        _faulty_tensorpipe_init_backend_handler,
    )
