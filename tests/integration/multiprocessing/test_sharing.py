"""Gradients of what is shared: they are, too, if they are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc.errors import UsageError
from asyncrpc.multiprocessing import launch
from tests.integration.multiprocessing import queue_targets as targets


def test_launch_shares_the_gradients_that_are_there() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    alone = nn.Parameter(torch.ones(3))
    found = launch(
        targets.write_gradients, (parameter, alone), nprocs=2, method="forkserver"
    )
    assert parameter.grad.tolist() == [3.0, 3.0]  # what both have added
    assert alone.grad is None
    assert [one.tolist() for one in found] == [[1.0] * 3] * 2


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
        one.grad is not None and one.grad.is_shared() for one in model.parameters()
    )
