"""PJRT, the runtime of XLA devices: which device, and which processes take part.

`PJRT_DEVICE` of the environment names the type of device before torch_xla is imported.
`choose` decides the type, `place` finds rank, number of processes and master: both from
their arguments, so that they can be tested without an accelerator.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Collection, Mapping, MutableMapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, NamedTuple

from asyncrpc.core import environment
from asyncrpc.core.environment import LaunchPlacement
from asyncrpc.core.environment.values import Field
from asyncrpc.core.host.this_host import LAUNCHER_PID
from asyncrpc.errors import UsageError

logger = logging.getLogger("asyncrpc")

VARIABLE: Final = "PJRT_DEVICE"
SCHEME: Final = "xla://"
MASTER_PORT: Final = 12355  # torch_xla's, unless MASTER_PORT names another
_PLUGINS: Final = "torch_xla.plugins"  # entry points, as torch_xla reads them
# Since torch_xla 2.9 plugins bring the types of GPU.
_BUILT_IN: Final = ("CPU", "TPU", "NEURON")


class Choice(NamedTuple):
    """A type of device.

    Attributes:
        name: as `PJRT_DEVICE` has it.
        because: the reason, for the log.
    """

    name: str
    because: str


class ProcessPosition(NamedTuple):
    """One process among those of a program.

    Attributes:
        rank: from 0.
        world_size: how many there are.
        host: where rank 0 is.
        port: of the store there.
    """

    rank: int
    world_size: int
    host: str
    port: int


def choose(
    environ: Mapping[str, str], *, plugins: Collection[str], has_tpu: bool
) -> Choice:
    """Decide which type of device this process uses."""
    wanted = environ.get(VARIABLE, "").upper()
    known = {name.upper(): name for name in plugins}
    if wanted:
        if wanted in known:
            return Choice(known[wanted], f"{VARIABLE} says so, and it is a plugin")
        if wanted.partition("_")[0] in _BUILT_IN:
            return Choice(wanted, f"{VARIABLE} says so")
        if wanted in {"CUDA", "GPU"}:
            raise UsageError(
                f"{VARIABLE}={wanted}: torch_xla 2.9 no longer supports CUDA, and no "
                "plugin for it is installed; use tensors on cuda devices, without XLA"
            )
        names = ", ".join([*_BUILT_IN, *known.values()])
        raise UsageError(f"{VARIABLE}={wanted} is not one of {names}")
    if has_tpu:
        return Choice("TPU", "this host has one")
    if len(known) == 1:
        (name,) = known.values()
        return Choice(name, "its plugin is installed")
    if known:
        names = ", ".join(known.values())
        raise UsageError(
            f"several plugins are installed ({names}): choose one with {VARIABLE}"
        )
    return Choice("CPU", "there is neither a TPU nor a plugin")


def set_up(environ: MutableMapping[str, str] = os.environ) -> str:
    """Choose the device of this process before torch_xla is imported; return it."""
    plugins = {
        plugin.name for plugin in importlib.metadata.entry_points(group=_PLUGINS)
    }
    choice = choose(environ, plugins=plugins, has_tpu=has_tpu())
    if environ.get(VARIABLE) != choice.name:
        logger.info("PJRT uses %s: %s", choice.name, choice.because)
        environ[VARIABLE] = choice.name
    if choice.name in plugins:
        environ.setdefault("PJRT_DYNAMIC_PLUGINS", "1")
    return choice.name


def has_tpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this host has a TPU, and the library that drives it."""
    if importlib.util.find_spec("libtpu") is None:
        return False
    return any(devices.glob("accel*")) or any(devices.glob("vfio/[0-9]*"))


# Which of the replicas of its process a thread is, and how many those are.
replica_var: ContextVar[tuple[int, int]] = ContextVar("replica", default=(0, 1))


def place(environ: Mapping[str, str] = os.environ) -> ProcessPosition:
    """Find this process among the others: by its launcher, else by the runtime.

    Under torchrun, `asyncrpc run`, srun or mpirun the environment says all of
    processes, and each of its replicas, if they are threads of it, has a place among
    them.  Else each replica that the runtime knows has one: a process, or on TPU v2 and
    v3 a thread.  Variables of pods or nodes are not read: the runtime knows better.
    """
    placement = environment.resolve(environ, launcher_pid=LAUNCHER_PID)
    if placement.is_started:
        return _started_place(placement)
    variables = [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if environ.get(name)
    ]
    port = int(environ.get("MASTER_PORT") or MASTER_PORT)
    if "RANK" in variables or "WORLD_SIZE" in variables:
        missing = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} - set(variables)
        if missing:
            names = " and ".join(sorted(missing))
            raise UsageError(
                f"{SCHEME} found {', '.join(variables)} in the environment, but no "
                f"{names}: torchrun sets all of them"
            )
        return _started_place(placement)
    set_up()
    runtime = module("torch_xla.runtime")
    rank, world_size = int(runtime.global_ordinal()), int(runtime.world_size())
    return ProcessPosition(
        rank, world_size, environ.get("MASTER_ADDR") or _master(), port
    )


def _started_place(placement: LaunchPlacement) -> ProcessPosition:
    """Return the place of a replica of a process that a launcher has started."""
    replica, count = replica_var.get()
    rank = placement.require_number(Field.RANK, "RANK") * count + replica
    world_size = placement.require_number(Field.WORLD_SIZE, "WORLD_SIZE") * count
    if placement.host is not None and placement.port is None:
        return ProcessPosition(rank, world_size, placement.host, MASTER_PORT)
    return ProcessPosition(rank, world_size, *placement.require_address())


def _master() -> str:
    """Return the address of the host that has device 0."""
    if module("torch_xla.runtime").device_type() != "TPU":
        return "127.0.0.1"  # other types are on one host, unless torchrun starts them
    return str(module("torch_xla._internal.tpu").discover_master_worker_ip())


def check_installed() -> None:
    """Raise if torch_xla is not installed, without importing it."""
    if importlib.util.find_spec("torch_xla") is None:
        module("torch_xla")


def module(name: str) -> Any:
    """Return a module of torch_xla."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{name} cannot be imported: {error}; XLA devices need torch_xla and the "
            "torch that it was built for (2.9 for 2.9)"
        ) from error
