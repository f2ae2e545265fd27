"""What a started process is told."""

from __future__ import annotations

import pytest

from asyncrpc.core.multiprocessing.environment import (
    new_secret,
    process_environment,
    threads_each,
    usable_cores,
)
from asyncrpc.errors import UsageError


def test_process_environment_is_that_of_torchrun() -> None:
    environment = process_environment(rank=1, nprocs=4, secret="s", store_port=1234)
    assert environment == {
        "ASYNCRPC_LAUNCHER": "asyncrpc",
        "ASYNCRPC_ONE_HOST": "",
        "ASYNCRPC_SECRET": "s",
        "ASYNCRPC_SECRET_FILE": "",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def test_environment_without_a_store_leaves_the_rendezvous_alone() -> None:
    environment = process_environment(rank=0, nprocs=1, secret="s", store_port=None)
    assert not {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & set(
        environment
    )


def test_secrets_are_256_bits_and_unique() -> None:
    secrets = {new_secret() for _ in range(10)}
    assert len(secrets) == 10
    assert {len(bytes.fromhex(secret)) for secret in secrets} == {32}


def test_cores_are_shared_with_at_least_one_for_each_process() -> None:
    assert threads_each(1, None) == usable_cores()
    assert threads_each(10 * usable_cores(), None) == 1
    assert threads_each(100, 3) == 3
    with pytest.raises(UsageError, match=r"threads_per_process must be .* not 0"):
        threads_each(1, 0)
