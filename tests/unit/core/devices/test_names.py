"""Names of devices, maps between them, and which of them PJRT uses."""

from __future__ import annotations

import importlib.util
import sys
from contextvars import copy_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from asyncrpc.core.devices.maps import ANY, IDENTITY, TO_HOST, DeviceMap
from asyncrpc.core.devices.names import DeviceName
from asyncrpc.core.devices.pjrt import (
    ProcessPosition,
    choose,
    has_tpu,
    place,
    replica_var,
    set_up,
)
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
    assert DeviceMap.from_wire(TO_HOST.wire).target("xla:0") == "cpu"
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


@pytest.mark.parametrize(
    ("wanted", "plugins", "tpu", "name", "because"),
    [
        ("", [], False, "CPU", "neither a TPU nor a plugin"),
        ("", [], True, "TPU", "this host has one"),
        ("", ["acme"], False, "acme", "its plugin is installed"),
        ("", ["acme"], True, "TPU", "this host has one"),
        ("CPU", ["acme"], True, "CPU", "PJRT_DEVICE says so"),
        ("tpu", [], False, "TPU", "PJRT_DEVICE says so"),
        ("TPU_LEGACY", [], False, "TPU_LEGACY", "PJRT_DEVICE says so"),
        ("ACME", ["acme", "other"], False, "acme", "it is a plugin"),
        ("CUDA", ["CUDA"], False, "CUDA", "it is a plugin"),
    ],
)
def test_pjrt_device_is_chosen_by_environment_and_plugins(
    wanted: str,
    plugins: list[str],
    tpu: bool,  # noqa: FBT001
    name: str,
    because: str,
) -> None:
    choice = choose({"PJRT_DEVICE": wanted}, plugins=plugins, has_tpu=tpu)
    assert choice.name == name
    assert because in choice.because


@pytest.mark.parametrize(
    ("wanted", "plugins", "words"),
    [
        ("CUDA", [], "no longer supports CUDA"),
        ("GPU", [], "without XLA"),
        ("ABACUS", ["acme"], "ABACUS is not one of CPU, TPU, NEURON, acme"),
        ("", ["acme", "other"], r"several plugins are installed \(acme, other\)"),
    ],
)
def test_unavailable_pjrt_device_is_refused(
    wanted: str, plugins: list[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        choose({"PJRT_DEVICE": wanted}, plugins=plugins, has_tpu=False)


def test_automatic_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    environ: dict[str, str] = {}
    with caplog.at_level("INFO", logger="asyncrpc"):
        assert set_up(environ) == environ["PJRT_DEVICE"]
        set_up(environ)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith(f"PJRT uses {environ['PJRT_DEVICE']}: ")


def test_tpu_of_the_host_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs the device and the library that drives it."""
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not has_tpu(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert has_tpu(tmp_path)
    (tmp_path / "accel0").unlink()
    assert not has_tpu(tmp_path)


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_process_position_is_read_from_torchrun() -> None:
    assert place(TORCHRUN) == ProcessPosition(3, 8, "10.0.0.1", 29500)


def test_process_position_is_read_from_another_launcher() -> None:
    environ = {
        "SLURM_JOB_ID": "3",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "t[4-5]",
    }
    task = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert place({**environ, **task}) == ProcessPosition(1, 2, "t4", 15048)


def test_thread_position_counts_the_devices_of_its_process() -> None:
    """Of 3 processes with 2 devices each: the second device of the second."""
    environ = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "h"}

    def of_a_thread() -> ProcessPosition:
        replica_var.set((1, 2))
        return place(environ)

    assert copy_context().run(of_a_thread)[:2] == (3, 6)
    assert place(environ)[:2] == (1, 3)


def test_incomplete_torchrun_environment_is_an_error() -> None:
    with pytest.raises(UsageError, match="found RANK in the environment, but no MAST"):
        place({"RANK": "0"})


class Runtime(ModuleType):
    """What torch_xla.runtime says on one host of a pod."""

    def __init__(self, kind: str) -> None:
        super().__init__("torch_xla.runtime")
        self.kind = kind

    def global_ordinal(self) -> int:
        return 5

    def world_size(self) -> int:
        return 16

    def device_type(self) -> str:
        return self.kind


class Tpu(ModuleType):
    """What torch_xla finds out of the pod's metadata."""

    def discover_master_worker_ip(self) -> str:
        return "10.164.0.7"


@pytest.mark.parametrize(
    ("kind", "environ", "host", "port"),
    [
        ("TPU", {}, "10.164.0.7", 12355),
        ("TPU", {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "99"}, "10.0.0.9", 99),
        ("CPU", {}, "127.0.0.1", 12355),
    ],
)
def test_process_position_is_read_from_the_runtime(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    environ: dict[str, str],
    host: str,
    port: int,
) -> None:
    """As a pod's runtime would say it: there is no pod here."""
    monkeypatch.setenv("PJRT_DEVICE", kind)
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", Runtime(kind))
    monkeypatch.setitem(sys.modules, "torch_xla._internal.tpu", Tpu("tpu"))
    assert place(environ) == ProcessPosition(5, 16, host, port)


def test_missing_torch_xla_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", None)
    with pytest.raises(UsageError, match="XLA devices need torch_xla"):
        place({})
