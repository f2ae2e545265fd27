"""The device, this replica and the others; the names of `asyncrpc.xla`."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from asyncrpc import collectives, multiprocessing
from asyncrpc.core.arguments import check_callable, check_count, check_kind, wrong
from asyncrpc.core.devices import pjrt
from asyncrpc.core.devices.backends import backend_of
from asyncrpc.core.loop import loops
from asyncrpc.core.multiprocessing.launcher import check_task
from asyncrpc.core.worker import current_worker
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.initial import broadcast

_SEED_STEP: Final = 1_000_003  # between replicas: a prime, so that seeds seldom meet
_SEED_MAX: Final = (1 << 63) - 1
_REPLICA_MAX: Final = (1 << 32) - 1
_making: Final = threading.Lock()


def device_type() -> str:
    """Return the type of device that this process uses, such as `"TPU"`.

    If `PJRT_DEVICE` is not set, the type is chosen and logged: a TPU, else a plugin
    that is installed, else the CPU.

    Raises:
        UsageError: `PJRT_DEVICE` names a type that is not available.

    Source: torch_xla.runtime.device_type.
    """
    return pjrt.set_up()


def global_ordinal() -> int:
    """Return the number of this replica among all: from 0.

    A replica is a process; on TPU v2 and v3 a thread of one.

    Raises:
        UsageError: torch_xla cannot be imported.

    Source: torch_xla.runtime.global_ordinal; unlike there, it is the rank in a process
    that torchrun started, even if the runtime knows only one process.
    """
    return pjrt.place().rank


def device() -> str:
    """Return the XLA device of this replica, such as `"xla:0"`.

    Where replicas are threads of a process, each has a device; a worker is told of it
    by `DeviceOptions(names=(xla.device(),))`, and then shares its lock with no other
    replica.

    Source: torch_xla.device.
    """
    return f"xla:{pjrt.replica_var.get()[0]}"


def world_size() -> int:
    """Return the number of replicas.

    Raises:
        UsageError: torch_xla cannot be imported.

    Source: torch_xla.runtime.world_size; it differs as `global_ordinal` does.
    """
    return pjrt.place().world_size


def local_ordinal() -> int:
    """Return the index of this replica among those of its host.

    Raises:
        UsageError: torch_xla cannot be imported.

    Source: torch_xla.runtime.local_ordinal.
    """
    pjrt.set_up()
    return int(pjrt.module("torch_xla.runtime").local_ordinal())


async def broadcast_master_param(module: nn.Module, group: Group) -> None:
    """Give a module the parameters and buffers of rank 0.

    So each replica may make the module itself, with different random numbers.

    Args:
        module: the same at every rank, on any device.
        group: the ranks.

    Raises:
        UsageError: an argument has the wrong type, or this is not the event loop of the
            group's worker.
        CollectiveError: a rank failed or was lost; all ranks fail.

    Cancellation:
        The call fails on all ranks; some parameters may be those of rank 0.

    Source: torch_xla.core.xla_model.broadcast_master_param, which uses the device.
    """
    check_kind("module", module, nn.Module, "a torch.nn.Module")
    check_kind("group", group, Group, "a Group")
    group.host.check_on_loop("broadcast_master_param")
    tensors = [parameter.detach() for parameter in module.parameters()]
    await broadcast(group, [*tensors, *module.buffers()], 0)


async def rendezvous(
    tag: str, payload: bytes = b"", replicas: Sequence[int] = ()
) -> list[bytes]:
    """Wait until all replicas have called this, and return the payloads of all.

    This is `collectives.rendezvous` of the current worker, with torch_xla's arguments.
    The devices compute nothing for it.

    Args:
        tag: the purpose.
        payload: the bytes that this replica brings.
        replicas: the ranks that take part; empty: all.

    Returns:
        The payload of each, in the order of `replicas`, or of their ranks.

    Raises:
        UsageError: `replicas` is not a sequence of ranks.
        AsyncRpcError: an error of `collectives.rendezvous`.

    Cancellation:
        The call also fails for the others.

    Source: torch_xla.core.xla_model.rendezvous.
    """
    worker = current_worker()
    if not _are_ranks(replicas):
        raise wrong("replicas", "a list or a tuple of ranks of replicas", replicas)
    return await collectives.rendezvous(worker, tag, payload, list(replicas) or None)


def _are_ranks(replicas: object) -> bool:
    if not isinstance(replicas, Sequence) or isinstance(replicas, str | bytes):
        return False
    return all(type(rank) is int for rank in replicas)


def with_rng_lock(make: Callable[[], nn.Module]) -> nn.Module:
    """Call a function while no other thread makes a module by this function.

    torch's global random generator belongs to the process: replicas that run as threads
    would draw from it in an order that differs from run to run.

    Args:
        make: returns a module.

    Returns:
        The module.

    Raises:
        UsageError: `make` cannot be called.
        Exception: the error of `make`.

    Example:
        >>> model = xla.with_rng_lock(lambda: Net().to("xla"))
    """
    check_callable("make", make)
    with _making:
        return make()


def generator(seed: int, *, replica: int | None = None) -> torch.Generator:
    """Return a generator of random numbers for one replica, on the host.

    Its numbers are the same in each run, and different for each replica, whatever other
    threads do.

    Args:
        seed: of the program; of 64 bits.
        replica: its number; None: that of this replica, by `global_ordinal`.

    Raises:
        UsageError: an argument is out of range; or `replica` is None, and torch_xla
            cannot be imported.
    """
    check_count("seed", seed, at_least=-(1 << 63), at_most=_SEED_MAX)
    if replica is not None:
        check_count("replica", replica, at_least=0, at_most=_REPLICA_MAX)
    number = global_ordinal() if replica is None else replica
    # As torch reads a seed: modulo 2^64.
    return torch.Generator().manual_seed((seed + _SEED_STEP * number) % (1 << 64))


def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Let the device add up the gradients over all replicas, and step.

    Call it where the device may be used: by `asyncrpc.devices.run`, or with
    `asyncrpc.devices.lock`.

    Args:
        optimizer: of parameters on this replica's XLA device.

    Raises:
        UsageError: `optimizer` is not an optimizer.  Or there are several replicas, and
            the device cannot reduce over them: torch_xla would silently step each by
            its own gradients.

    Source: torch_xla.core.xla_model.optimizer_step.
    """
    check_kind("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    kind, size = pjrt.set_up(), world_size()
    native = int(pjrt.module("torch_xla.runtime").world_size())
    if size > native:
        raise UsageError(
            f"{size} processes take part, but each {kind} runtime sees only {native}, "
            "so gradients would not be reduced across processes; use asyncrpc.ddp"
        )
    if kind == "CPU" and native > 1:
        raise UsageError(
            f"PJRT on the CPU cannot reduce over {native} replicas; use asyncrpc.ddp"
        )
    pjrt.module("torch_xla.core.xla_model").optimizer_step(optimizer)
    pjrt.module("torch_xla").sync()


def launch(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), *, nprocs: int | None = None
) -> list[Any]:
    """Run `fn(rank, *args)` for each XLA device of this host.

    Each call runs in a process of its own.  Where a process has several devices, as on
    TPU v2 and v3, the calls run in threads of it, each with one device, which `device`
    names, and with an event loop of its own if `fn` is a coroutine function.

    Args:
        fn: as for `asyncrpc.multiprocessing.launch`.
        args: the arguments after the rank.
        nprocs: how many processes; None: one for each chip of a TPU, else one.

    Returns:
        The result for each device, by rank.

    Raises:
        ProcessFailedError: a process failed.
        UsageError: an argument is wrong, see `asyncrpc.multiprocessing.launch`; or
            torch_xla is not installed.  Nothing was started.

    Source: torch_xla.launch.
    """
    check_task(fn, args, 1 if nprocs is None else nprocs)
    pjrt.check_installed()
    if nprocs is None:
        nprocs = 1
        if pjrt.set_up() == "TPU":
            nprocs = int(pjrt.module("torch_xla._internal.tpu").num_local_processes())
    per_process = multiprocessing.launch(
        partial(_replicas, fn, nprocs), args, nprocs=nprocs
    )
    return [result for results in per_process for result in results]


def _replicas(fn: Callable[..., Any], of: int, rank: int, *args: Any) -> list[Any]:
    """Run a function for each device of this process; return the results."""
    if pjrt.set_up() == "TPU" and of > 1:
        pjrt.module("torch_xla._internal.pjrt").initialize_multiprocess(rank, of)
    runtime = pjrt.module("torch_xla.runtime")
    count = int(runtime.addressable_runtime_device_count())
    if count == 1:
        return [_outcome(fn, rank, args)]
    running: list[Future[Any]] = []
    for at in range(count):
        running.append(Future())
        work = partial(_outcome, fn, rank * count + at, args)
        # A daemon: when one has failed, the process does not wait for the others.
        threading.Thread(
            target=_replica,
            args=(running[-1], (at, count), work),
            name=f"asyncrpc-replica-{at}",
            daemon=True,
        ).start()
    wait(running, return_when=FIRST_EXCEPTION)
    failed = [
        future for future in running if future.done() and future.exception() is not None
    ]
    return [future.result() for future in failed or running]


def _replica(
    running: Future[Any], place: tuple[int, int], work: Callable[[], Any]
) -> None:
    """Run a job in a thread with one of the devices of this process."""
    pjrt.replica_var.set(place)
    backend_of("xla").choose(place[0])
    try:
        running.set_result(work())
    except BaseException as error:  # noqa: BLE001  (the waiting task raises it)
        running.set_exception(error)


def _outcome(fn: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> Any:
    outcome = fn(rank, *args)
    return loops.run(outcome) if inspect.iscoroutine(outcome) else outcome
