"""The start of this process's worker: the workers meet at a store of torch.

Each checks the device maps of all.

Source: torch.distributed.rpc.init_rpc and its TensorPipe backend, for the checks and
the first words of their texts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final, Self

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import (
    _create_store_from_options,
    rendezvous,
)

from asyncrpc.api import Worker, add_services
from asyncrpc.compat.nodes import RememberingAutograd
from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc import api
from asyncrpc.compat.rpc.agent import Agent, print_raised
from asyncrpc.compat.rpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    WorkerInfo,
)
from asyncrpc.compat.rpc.rref import RRef
from asyncrpc.compat.rpc.store_lock import locked_at
from asyncrpc.core.devices.backends import backend_of
from asyncrpc.core.hosting import LoopThread
from asyncrpc.core.members import Member, Rendezvous, RunningGroup
from asyncrpc.core.membership.launched_store import find_store, has_all_of_torch
from asyncrpc.core.membership.store_places import GivenStore
from asyncrpc.core.membership.stores import StoreRendezvous
from asyncrpc.core.options import DeviceOptions, Options
from asyncrpc.core.parts import Parts
from asyncrpc.errors import AsyncRpcError, UsageError

_CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class DeviceWishes:
    """What one worker tells the others about devices.

    Attributes:
        cuda_devices: number of CUDA devices of its process.
        devices: the devices that it may use, such as "cuda:0"; empty: any.
        maps: by the name of a peer: devices of this worker to devices of the peer.
    """

    name: str
    cuda_devices: int = 0
    devices: Sequence[str] = ()
    maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def of_options(cls, name: str, options: TensorPipeRpcBackendOptions) -> Self:
        """Return the wishes of a worker with these options."""
        maps = {
            peer: {
                str(own_device): str(their_device)
                for own_device, their_device in devices.items()
            }
            for peer, devices in options.device_maps.items()
        }
        devices = [str(device) for device in options.devices]
        return cls(name, backend_of(_CUDA).count(), devices, maps)

    def encode(self) -> str:
        """Return the wishes as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Return the wishes that `encode` wrote."""
        return cls(**json.loads(text))


def check_device_maps(all_: Sequence[DeviceWishes], *, is_static: bool = True) -> None:
    """Refuse maps that cannot be applied."""
    by_name = {wishes.name: wishes for wishes in all_}
    for wishes in all_:
        _check_devices(wishes)
        unknown = sorted(wishes.maps.keys() - by_name.keys())
        if unknown and is_static:
            raise ValueError(
                f"Node {wishes.name} has invalid target node names in its device maps: "
                f"{', '.join(unknown)}; the workers are {', '.join(sorted(by_name))}"
            )
        for target, map_ in wishes.maps.items():
            _check_map(wishes, by_name.get(target), target, map_)


def _check_devices(wishes: DeviceWishes) -> None:
    if len(set(wishes.devices)) < len(wishes.devices):
        listed = ", ".join(wishes.devices)
        raise ValueError(f"Node {wishes.name} has duplicated devices: {listed}")
    if absent := _absent(wishes.devices, wishes):
        raise ValueError(
            f"Node {wishes.name} has devices with invalid indices: "
            f"{_shortfall(absent, wishes)}"
        )


def _check_map(
    source: DeviceWishes,
    target: DeviceWishes | None,
    name: str,
    map_: Mapping[str, str],
) -> None:
    where = f"in its device map for {name}"
    if len(set(map_.values())) < len(map_):
        raise ValueError(
            f"Node {source.name} has duplicated target devices {where}: "
            f"{', '.join(map_.values())}"
        )
    ends = [("source", source, list(map_))]
    if target is not None:
        ends.append(("target", target, list(map_.values())))
    for kind, node, devices in ends:
        unexpected = [device for device in devices if device not in node.devices]
        if node.devices and unexpected:
            raise ValueError(
                f"Node {source.name} has unexpected {kind} devices {where}: "
                f"{', '.join(unexpected)}; worker {node.name} was told to use "
                f"{', '.join(node.devices)}"
            )
        if absent := _absent(devices, node):
            raise ValueError(
                f"Node {source.name} has {kind} devices with invalid indices {where}: "
                f"{_shortfall(absent, node)}"
            )


def _absent(devices: Iterable[str], node: DeviceWishes) -> list[str]:
    """Return the CUDA devices that a worker does not have.

    Devices of other types are checked on use.
    """
    absent = []
    for device in devices:
        type_, _, index = device.partition(":")
        if type_ == _CUDA and int(index or 0) >= node.cuda_devices:
            absent.append(device)
    return absent


def _shortfall(absent: Sequence[str], node: DeviceWishes) -> str:
    count = node.cuda_devices
    has = f"{count} CUDA device{'' if count == 1 else 's'}"
    return f"{', '.join(absent)}, and worker {node.name} has {has}"


logger = logging.getLogger(__name__)

_ENV: Final = "env://"
_KIND: Final = "kind"  # of the group: the first worker sets it
_DRAIN_S: Final = 3600.0  # torch's shutdown waits for calls without a limit
_CONNECTED_MAX: Final = 32  # others to which this worker connects at the start
_serial = 0
_serial_lock = threading.Lock()


def add_facade(parts: Parts) -> None:
    """Add what every worker has, with references and autograd of the facade's kinds."""
    add_services(parts, autograd_class=RememberingAutograd)
    references: Any = parts.references
    references.handles.handle_class = RRef
    parts.calls.shows_calls = False
    parts.on_raised = print_raised


class GrowingRendezvous:
    """Workers without a fixed number: each joins those that came before it.

    They join and leave one at a time (`locked_at`), so the members do not change while
    one of them reads the store.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._number = 0

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Publish the record; return the members that can admit this worker."""
        store = self._store
        self._number = store.add("members", 1)
        earlier = [
            Member.decode(store.get(f"member/{number}"))
            for number in range(1, self._number)
            if not store.check([f"left/{number}"])
        ]
        store.set(f"member/{self._number}", member.encode())
        return RunningGroup(earlier) if earlier else [member]

    async def leave(self, timeout_s: float) -> None:
        """Remove the record."""
        if self._number:
            self._store.set(f"left/{self._number}", "")


def open_store(
    options: RpcBackendOptions, rank: int, world_size: int | None
) -> tuple[Any, int]:
    """Return the store of a group, with a prefix of its own, and this worker's rank."""
    global _serial  # noqa: PLW0603  (each start in this process has other keys)
    where, rank = _by_launcher(options.init_method, rank, world_size)
    if world_size:
        store, rank, _ = next(rendezvous(where, rank=rank, world_size=world_size))
    else:
        store_options = SimpleNamespace(init_method=where)
        store = _create_store_from_options(store_options, rank)  # type: ignore[no-untyped-call]
    store.set_timeout(timedelta(seconds=options.rpc_timeout or 60.0))
    with _serial_lock:
        store = PrefixStore(f"asyncrpc/{_serial}", store)
        _serial += 1
    return store, rank


def _by_launcher(where: str, rank: int, world_size: int | None) -> tuple[str, int]:
    """Return the meeting point and the rank, under a launcher unknown to torch."""
    if where != _ENV or has_all_of_torch():
        return where, rank
    try:
        store = find_store(None if rank < 0 else rank, world_size)
    except UsageError as error:
        raise ValueError(f"env:// rendezvous: {_as_torch_says(str(error))}") from None
    return store.url, store.rank


def _as_torch_says(problem: str) -> str:
    """Return the problem in torch's words if a variable is missing."""
    field, is_missing, _ = problem.partition(" is missing: ")
    if not is_missing:
        return problem
    return f"environment variable {field.upper()} expected, but not set: {problem}"


def init_agent(
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
) -> Agent:
    """Start the worker of this process, and return its agent."""
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError("`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`")
    WorkerInfo(name, rank)  # refuses invalid names
    _check_group_kind(store, is_static=bool(world_size))
    where: Rendezvous = GrowingRendezvous(store)
    names: Sequence[str] | None = None
    wishes = DeviceWishes.of_options(name, rpc_backend_options)
    if not world_size:
        check_device_maps([wishes], is_static=False)
    else:
        names = _check_members(store, wishes, rank, world_size)
        given_store = GivenStore(lambda: store, is_host=rank == 0)
        where = StoreRendezvous(given_store, rank, world_size)
    host = LoopThread(f"asyncrpc-{name}", stops_at_exit=False)  # `agents` does
    worker = Worker(
        name,
        rank=rank,
        world_size=world_size or None,
        rendezvous=where,
        options=Options(
            threads=rpc_backend_options.num_worker_threads,
            membership="static" if world_size else "dynamic",
            devices=DeviceOptions(maps=wishes.maps),
            drain_timeout_s=_DRAIN_S,
        ),
    )
    worker.parts.extensions = [add_facade]
    turn = nullcontext() if world_size else locked_at(store)
    agent = Agent(worker, host, rpc_backend_options, store, names)
    agent.all_gather = api._all_gather  # noqa: SLF001  (torch's name)
    # Before others can call: their functions may make calls from here.
    agents.set_current(agent)
    try:
        with turn:
            host.run(_start(worker))
    except BaseException as error:
        agents.reset_current()
        host.stop()
        if not isinstance(error, AsyncRpcError):
            raise
        failed = str(error)
    else:
        return agent
    raise RuntimeError(failed)


def _check_group_kind(store: Any, *, is_static: bool) -> None:
    """Raise RuntimeError if the group was begun with the other kind of members."""
    own = b"static" if is_static else b"dynamic"
    if store.compare_set(_KIND, "", own) != own:
        raise RuntimeError(
            "RPC group mixes statically and dynamically initialized members which is "
            "not supported."
        )


async def _start(worker: Worker) -> None:
    """Start a worker; connect to the others, unless there are many.

    Programs give their first calls timeouts of milliseconds, without connecting.
    """
    await worker.__aenter__()
    other_names = [
        member.name for member in worker.known_members if member.name != worker.name
    ]
    if len(other_names) <= _CONNECTED_MAX:
        linking = (worker.parts.link_to(name) for name in other_names)
        await asyncio.gather(*linking, return_exceptions=True)


def _check_members(
    store: Any, own: DeviceWishes, rank: int, world_size: int
) -> Sequence[str]:
    """Read the devices of all workers, and check that they fit; return their names."""
    store.set(f"devices/{rank}", own.encode())
    seen: dict[str, int] = {}
    wishes: list[DeviceWishes] = []
    for other in range(world_size):
        wishes.append(DeviceWishes.decode(store.get(f"devices/{other}")))
        name = wishes[-1].name
        if name in seen:
            raise RuntimeError(
                f"RPC worker name {name} is not unique. Workers {seen[name]} and "
                f"{other} share the same name."
            )
        seen[name] = other
    check_device_maps(wishes)
    return [*seen]
