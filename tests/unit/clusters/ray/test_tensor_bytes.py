"""Tensors become bytes for Ray's object store, and bytes tensors, without a copy."""

from __future__ import annotations

import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from asyncrpc.clusters.ray.store import (
    TensorBytes,
    copied,
    mapped,
    shared,
    to_bytes,
)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64]
)
def test_contiguous_tensor_is_not_copied_either_way(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5).to(dtype)
    stored = to_bytes(tensor)
    assert stored.content.ctypes.data == tensor.data_ptr()
    back = shared(stored)
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)


def test_read_only_array_becomes_a_tensor_without_a_warning() -> None:
    """Ray gives such arrays; torch would warn, once for the whole process."""
    stored = to_bytes(torch.arange(4.0))
    stored.content.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shared(stored).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_shared_tensor_keeps_its_array_alive() -> None:
    """And so the object in the store, which Ray frees when no array uses it."""

    class Content(np.ndarray[tuple[int, ...], np.dtype[np.uint8]]):
        """An array that can be watched."""

    content = np.arange(8, dtype=np.uint8).view(Content)
    watched = weakref.ref(content)
    tensor = shared(TensorBytes(content, torch.uint8, (8,)))
    del content
    gc.collect()
    assert watched() is not None
    part = tensor[4:]
    del tensor
    gc.collect()
    assert watched() is not None
    assert part.tolist() == [4, 5, 6, 7]
    del part
    gc.collect()
    assert watched() is None


def test_copied_tensor_has_its_own_memory() -> None:
    tensor = torch.ones(3)
    assert copied(to_bytes(tensor)).data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.tensor(7),
        torch.empty(0, 2),
        torch.ones(2, dtype=torch.complex64).conj(),
        nn.Parameter(torch.ones(2)),
    ],
)
def test_every_tensor_layout_survives_storage(tensor: torch.Tensor) -> None:
    back = shared(to_bytes(tensor))
    assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(back, tensor.detach())
    assert not back.requires_grad


@pytest.mark.parametrize(
    "value", [7, "text", torch.ones(2).to_sparse(), np.ones(2), None]
)
def test_other_values_are_left_to_ray(value: object) -> None:
    assert to_bytes(value) is value
    assert shared(value) is value
    assert copied(value) is value


def test_containers_are_searched_for_tensors() -> None:
    tensor = torch.ones(1)
    packed = mapped({"a": [tensor, (tensor, 2)]}, to_bytes)
    assert type(packed["a"][1]) is tuple
    back = mapped(packed, shared)
    assert torch.equal(back["a"][1][0], tensor)
    assert back["a"][1][1] == 2
