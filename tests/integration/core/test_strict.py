"""Under the strict policy peers call what is exposed, and nothing is imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import LocalRendezvous, Options, Policy, Worker
from asyncrpc.errors import EncodeError
from asyncrpc.testing import Cluster
from tests.integration.core import remote
from tests.integration.core.groups import started


@asyncrpc.expose
def exposed(value: object = 1) -> object:
    return value


@asyncrpc.expose
def fill(value: torch.Tensor) -> None:
    value.fill_(7)


@pytest.fixture
async def lenient_and_strict() -> AsyncIterator[tuple[Worker, Worker]]:
    meeting = LocalRendezvous(2)
    lenient = Worker("lenient", rank=0, rendezvous=meeting)
    options = Options(policy=Policy.STRICT)
    strict = Worker("strict", rank=1, rendezvous=meeting, options=options)
    async with started(lenient, strict):
        yield lenient, strict


@pytest.fixture
def bait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that could be imported, and is not."""
    (tmp_path / "bait_for_imports.py").write_text("def run(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("bait_for_imports")
    del sys.modules["bait_for_imports"]
    return module


async def test_strict_worker_runs_exposed_functions_only(
    lenient_and_strict: tuple[Worker, Worker],
) -> None:
    strict = lenient_and_strict[0].peer("strict")
    assert await strict.call(exposed, [1, "a"]) == [1, "a"]
    refused: list[Any] = [remote.echo, os.getpid, print, remote.Counter]
    for function in refused:
        with pytest.raises(asyncrpc.RejectedError, match="whose policy is strict"):
            await strict.call(function)
    assert await strict.call(exposed) == 1


async def test_strict_worker_imports_nothing_for_a_peer(
    lenient_and_strict: tuple[Worker, Worker], bait: ModuleType
) -> None:
    lenient, _ = lenient_and_strict
    sys.modules["bait_for_imports"] = bait
    lenient.parts.functions.name_of(bait.run)  # so that it is known by its name there
    del sys.modules["bait_for_imports"]
    for function, args in ((bait.run, ()), (exposed, (bait.run,))):
        with pytest.raises(asyncrpc.CallError) as caught:
            await lenient.peer("strict").call(function, *args)
        assert caught.value.outcome is asyncrpc.Outcome.NOT_EXECUTED
        assert "bait_for_imports" not in sys.modules
    assert await lenient.peer("strict").call(exposed) == 1


async def test_trusting_worker_imports_for_a_peer(bait: ModuleType) -> None:
    """The control of the test above."""
    async with Cluster(2) as (a, _):
        sys.modules["bait_for_imports"] = bait
        a.parts.functions.name_of(bait.run)
        del sys.modules["bait_for_imports"]
        assert await a.peer("b").call(bait.run) is None
        assert sys.modules.pop("bait_for_imports", None) is not None


@pytest.mark.parametrize("policy", Policy)
async def test_shared_memory_that_can_shrink_is_refused(policy: Policy) -> None:
    """Whoever touches it ends with SIGBUS, once its sender has shrunk it."""
    async with Cluster(2, network="uds", options=Options(policy=policy)) as (a, b):
        peer = a.peer(b.name)
        by_torch: Any = torch.ones(3000)
        by_torch = asyncrpc.share(by_torch.share_memory_())
        if policy is Policy.TRUSTED:
            await peer.call(fill, by_torch)
        else:
            with pytest.raises(EncodeError, match=r"share tensor\.clone\(\)"):
                await peer.call(fill, by_torch)
        clone = asyncrpc.share(by_torch.clone())
        await peer.call(fill, clone)
        assert clone[0] == 7
