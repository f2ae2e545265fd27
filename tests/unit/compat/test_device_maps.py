"""The maps of devices that the facade refuses when a group starts; no GPU is needed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from asyncrpc.compat.rpc.device_maps import DeviceWishes, check_device_maps
from asyncrpc.compat.rpc.options import TensorPipeRpcBackendOptions

A = DeviceWishes("a", cuda_devices=2)
B = DeviceWishes("b", cuda_devices=1)


def maps(**by_peer: dict[str, str]) -> DeviceWishes:
    return replace(A, maps=by_peer)


@pytest.mark.parametrize(
    "a",
    [
        A,
        maps(b={"cuda:1": "cuda:0"}),
        maps(b={"cuda": "cpu", "cuda:1": "cuda"}),
        maps(a={"cuda:0": "cuda:1", "cuda:1": "cuda:0"}),
        maps(b={"xla:7": "fake:3"}),  # they are looked for when they are used
        replace(maps(b={"cuda:1": "cuda:0"}), devices=["cuda:1"]),
    ],
)
def test_valid_device_map_is_accepted(a: DeviceWishes) -> None:
    check_device_maps([a, B])
    check_device_maps([B, DeviceWishes.decode(a.encode())])


ABSENT = "devices with invalid indices"
IN_B = "in its device map for b:"
REFUSED = [
    (
        maps(b={"cuda:2": "cuda:0"}),
        f"source {ABSENT} {IN_B} cuda:2, and worker a has 2 CUDA devices",
    ),
    (
        maps(b={"cuda:0": "cuda:1"}),
        f"target {ABSENT} {IN_B} cuda:1, and worker b has 1 CUDA device",
    ),
    (
        maps(b={"cuda:0": "cuda:0", "cuda:1": "cuda:0"}),
        f"duplicated target devices {IN_B} cuda:0, cuda:0",
    ),
    (
        maps(c={"cuda:0": "cuda:0"}),
        "invalid target node names in its device maps: c; the workers are a, b",
    ),
    (
        replace(maps(b={"cuda:0": "cuda:0"}), devices=["cuda:1"]),
        f"unexpected source devices {IN_B} cuda:0; worker a was told to use cuda:1",
    ),
    (replace(A, devices=["cuda:0", "cuda:0"]), "duplicated devices: cuda:0, cuda:0"),
    (
        replace(A, devices=["cuda:2"]),
        f"{ABSENT}: cuda:2, and worker a has 2 CUDA devices",
    ),
]


@pytest.mark.parametrize(("a", "why"), REFUSED)
def test_invalid_device_map_is_refused_on_every_worker(
    a: DeviceWishes, why: str
) -> None:
    for order in ([a, B], [B, a]):
        with pytest.raises(ValueError, match=f"^{re.escape(f'Node a has {why}')}$"):
            check_device_maps(order)


def test_growing_group_checks_the_known_devices_only() -> None:
    check_device_maps([maps(c={"cuda:0": "cuda:9"})], is_static=False)
    with pytest.raises(ValueError, match="source devices with invalid indices"):
        check_device_maps([maps(c={"cuda:9": "cuda:0"})], is_static=False)


def test_device_wishes_are_read_from_options() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"b": {"cuda:0": "cuda:1"}})
    options.set_device_map("b", {"cuda:1": torch.device("cuda:0")})
    wishes = DeviceWishes.of_options("a", options)
    assert wishes.maps == {"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}}
    assert not wishes.devices
    assert wishes.cuda_devices == torch.cuda.device_count()
