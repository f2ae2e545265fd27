"""Gradients of what is shared: they are, too, if they are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc.core.serde.encoded import key_of
from asyncrpc.errors import UsageError
from asyncrpc.multiprocessing import Queue, launch
from tests.integration.core.multiprocessing import queue_targets as targets


def test_launch_shares_existing_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    alone = nn.Parameter(torch.ones(3))
    results = launch(
        targets.write_gradients, (parameter, alone), nprocs=2, method="forkserver"
    )
    assert parameter.grad.tolist() == [3.0, 3.0]  # what both have added
    assert alone.grad is None
    assert [result.tolist() for result in results] == [[1.0] * 3] * 2


def test_launch_refuses_a_tensor_of_a_graph() -> None:
    computed = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(UsageError, match=r"send tensor\.detach\(\)"):
        launch(targets.ask_for_a_graph, (computed,))


def test_share_takes_the_gradient_of_a_tensor_along() -> None:
    tensor: Any = torch.ones(3, requires_grad=True)
    tensor.sum().backward()
    assert tensor.grad is not None
    asyncrpc.share(tensor)
    assert tensor.is_shared()
    assert tensor.grad.is_shared()
    assert not asyncrpc.share(torch.ones(3) * 2).requires_grad


def test_share_takes_the_gradients_of_a_module_along() -> None:
    model: Any = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    asyncrpc.share(model)
    assert all(
        parameter.grad is not None and parameter.grad.is_shared()
        for parameter in model.parameters()
    )


def many(*, shared: bool) -> list[torch.Tensor]:
    tensors = [torch.full((number % 7 + 1,), float(number)) for number in range(200)]
    if shared:
        module = nn.Module()
        for number, tensor in enumerate(tensors):
            module.register_buffer(f"b{number}", tensor)
        asyncrpc.share(module)
    return tensors


@pytest.mark.parametrize("shared", [False, True])
def test_launch_takes_one_descriptor_for_all_tensors(shared: bool) -> None:  # noqa: FBT001  a case
    tensors = many(shared=shared)
    views = [tensor[:1] for tensor in tensors]
    before = len(list(Path("/proc/self/fd").iterdir()))
    (without,) = launch(targets.add_to_all, ([],), method="forkserver")
    counts = launch(
        targets.add_to_all, ([*tensors, torch.ones(3)],), nprocs=2, method="forkserver"
    )
    assert max(counts) - without <= 2
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 2
    assert [float(view) for view in views] == [number + 2.0 for number in range(200)]


def test_queue_takes_one_descriptor_for_tensors_shared_together() -> None:
    tensors, queue = many(shared=True), Queue[Any]()
    with launch(
        targets.put_twice, (queue, tensors), join=False, method="forkserver"
    ) as processes:
        before = len(list(Path("/proc/self/fd").iterdir()))
        back = queue.get(timeout_s=60.0)
        last = queue.get(timeout_s=60.0)
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= 1
        processes.wait()
    for tensor, arrived in zip(tensors, back, strict=True):
        arrived.add_(1)
        assert torch.equal(tensor, arrived)
    assert torch.equal(last, tensors[-1])
    assert key_of(last.untyped_storage()) == key_of(tensors[-1].untyped_storage())
    queue.close()
