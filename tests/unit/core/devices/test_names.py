"""Names of devices, and maps between them, by our own rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrpc.core.devices.maps import ANY, IDENTITY, TO_HOST, DeviceMap
from asyncrpc.core.devices.names import DeviceName
from asyncrpc.errors import MalformedError, UsageError


@pytest.mark.parametrize(
    ("name", "text", "whole"),
    [
        ("cpu", "cpu", "cpu"),
        ("cpu:0", "cpu", "cpu"),
        ("cuda", "cuda", "cuda:0"),
        ("cuda:1", "cuda:1", "cuda:1"),
        ("tpu:3", "tpu:3", "tpu:3"),
        ("xla", "xla", "xla:0"),
        (2, "cuda:2", "cuda:2"),
        (torch.device("cuda", 1), "cuda:1", "cuda:1"),
        (torch.device("cpu"), "cpu", "cpu"),
    ],
)
def test_device_name_is_read(name: Any, text: str, whole: str) -> None:
    device = DeviceName.parse(name)
    assert (str(device), device.whole) == (text, whole)
    assert device.is_cpu == (text == "cpu")


@pytest.mark.parametrize(
    "name",
    ["", "GPU", "cuda:", "cuda:-1", "cuda:1:2", ":1", "1", -1, "cuda:12345", "c d"],
)
def test_malformed_device_name_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="is not understood"):
        DeviceName.parse(name)


@pytest.mark.parametrize("value", [None, True, 1.5, "cpu:1"])
def test_value_that_is_not_a_device_is_refused(value: Any) -> None:
    with pytest.raises(UsageError):
        DeviceName.parse(value)


def test_device_map_has_an_inverse() -> None:
    there = DeviceMap.parse({0: 1, "xla": "cpu", "cpu": "tpu:0"})
    names = ["cuda:0", "xla:0", "cpu", "cuda:5"]
    moved = [there.target(name) for name in names]
    assert moved == ["cuda:1", "cpu", "tpu:0", "cuda:5"]
    back = there.inverse()
    assert [back.target(name) for name in moved] == names
    assert there.takes_host
    assert back.takes_host


def test_device_map_without_host_entries_leaves_the_host_alone() -> None:
    assert not IDENTITY.takes_host
    assert not DeviceMap.parse({"cpu": "cpu", 0: 1}).takes_host
    assert not TO_HOST.takes_host


def test_default_map_moves_everything_to_the_host() -> None:
    assert [TO_HOST.target(name) for name in ("cpu", "cuda:1")] == ["cpu", "cpu"]
    assert TO_HOST.inverse().target("cpu") == "cpu"
    read = DeviceMap.from_wire(TO_HOST.wire)
    assert read.target("xla:0") == "cpu"
    assert DeviceMap.parse({ANY: "cpu", "xla": "xla"}).target("xla:0") == "xla:0"


@pytest.mark.parametrize("value", [None, [], {"cuda:0": 1}, {"a b": "cpu"}, {0: "cpu"}])
def test_malformed_map_of_a_peer_is_refused(value: Any) -> None:
    with pytest.raises(MalformedError):
        DeviceMap.from_wire(value)


def test_overlong_map_of_a_peer_is_refused() -> None:
    with pytest.raises(MalformedError):
        DeviceMap.from_wire({f"cuda:{at}": f"cuda:{at}" for at in range(300)})


def test_device_map_survives_the_wire() -> None:
    there = DeviceMap.parse({"cuda:0": "cuda:1", "cuda:1": "cuda:0"})
    assert DeviceMap.from_wire(there.wire).wire == there.wire
