"""Tensors that have to go to devices, or to leave them, as serde knows of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asyncrpc.core.serde import (
    DevicePlacement,
    HostStager,
    Limits,
    Staged,
    is_staged,
    kinds,
    stage,
)
from asyncrpc.errors import DecodeError, EncodeError, Outcome
from tests.unit.core.serde.loopback import STRICT, received
from tests.unit.core.serde.test_tensors import crafted

X = torch.ones(2, 3)
FROM_DEVICE = [kinds.ENTRY_TENSOR, 0, "float32", [16], 0, 0, None, "cuda:1"]


def test_device_tensor_must_be_placed() -> None:
    """It is taken as what was put there for it, and never for one of the host."""
    control, buffers = crafted(FROM_DEVICE)
    with pytest.raises(DecodeError, match="cuda:1"):
        STRICT.decode(control, buffers)
    placed = torch.arange(3.0)
    assert STRICT.decode(control, Staged(buffers, {0: placed})) is placed


def test_placement_lists_tensors_with_their_devices() -> None:
    control, buffers = crafted(FROM_DEVICE)
    landing = DevicePlacement(
        control, buffers, Limits(), lambda name: {"cuda:1": "xla:0"}[name]
    )
    assert landing.wanted.keys() == {0}
    tensor, where = landing.wanted[0]
    assert where == "xla:0"
    assert tensor.shape == (16,)
    assert tensor.is_cpu


def test_host_tensors_may_be_placed_on_devices() -> None:
    encoded = STRICT.encode([torch.ones(3), 2, torch.empty(0, 4)])
    assert not is_staged(encoded.control)
    stage(encoded)
    assert is_staged(encoded.control)
    stays = DevicePlacement(encoded.control, received(encoded), Limits(), str)
    assert stays.wanted == {}
    moves = DevicePlacement(
        encoded.control, received(encoded), Limits(), lambda _: "cuda:0"
    )
    assert [where for _, where in moves.wanted.values()] == ["cuda:0", "cuda:0"]
    shapes = [tuple(tensor.shape) for tensor, _ in moves.wanted.values()]
    assert shapes == [(3,), (0, 4)]
    back = STRICT.decode(encoded.control, received(encoded))
    assert torch.equal(back[0], torch.ones(3))


_OF_PARTS: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "per tensor": lambda: torch.quantize_per_tensor(X, 0.5, 0, torch.qint8),
    "per channel": lambda: torch.quantize_per_channel(
        X, torch.ones(2), torch.zeros(2), 0, torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", list(_OF_PARTS))
def test_tensors_with_parts_are_placed_as_a_whole(name: str) -> None:
    """So a device need not check them, which would stop whoever reads the message."""
    x = _OF_PARTS[name]()
    encoded = STRICT.encode([x, torch.ones(2)])
    stage(encoded)
    landing = DevicePlacement(
        encoded.control, received(encoded), Limits(), lambda _: "xla:0"
    )
    moved = {at: tensor for at, (tensor, to) in landing.wanted.items() if to == "xla:0"}
    assert [tensor.layout for tensor in moved.values()] == [x.layout, torch.strided]
    placed = {at: tensor for at, (tensor, _) in landing.wanted.items()}
    back, _ = STRICT.decode(encoded.control, Staged(received(encoded), placed))
    assert back is next(iter(moved.values()))
    assert torch.equal(_dense(back), _dense(x))


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize() if x.is_quantized else x.to_dense()


def test_placement_checks_joined_tensors() -> None:
    encoded = STRICT.encode(torch.eye(3).to_sparse())
    stage(encoded)
    buffers = received(encoded)
    buffers[0][:8] = (99).to_bytes(8, "little")  # an index
    with pytest.raises(DecodeError, match=r"99|indices"):
        DevicePlacement(encoded.control, buffers, Limits(), lambda _: "xla:0")


def test_message_without_a_tensor_is_not_staged() -> None:
    encoded = STRICT.encode([1, "two"])
    stage(encoded)
    assert not is_staged(encoded.control)


@pytest.mark.parametrize(
    "control",
    [
        (kinds.STAGED | 1000).to_bytes(4, "little"),
        (kinds.STAGED | 3).to_bytes(4, "little") + b"\xc1\xc1\xc1",
        (kinds.STAGED | 1).to_bytes(4, "little") + b"\x01",
        (kinds.STAGED | 2).to_bytes(4, "little") + b"\x91\x01",
        (kinds.STAGED | 2).to_bytes(4, "little") + b"\x91\x90",
    ],
)
def test_placement_of_malformed_bytes_is_refused(control: bytes) -> None:
    with pytest.raises(DecodeError):
        DevicePlacement(control, [], Limits(), str)


def test_host_stager_refuses_device_tensors() -> None:
    with pytest.raises(EncodeError, match=r"tensor\.cpu\(\)") as caught:
        HostStager().to_host(torch.empty(2))
    assert caught.value.outcome is Outcome.NOT_EXECUTED
