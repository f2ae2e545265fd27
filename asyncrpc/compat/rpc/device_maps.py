"""The device maps of all workers of a group, which each worker checks at its start.

Source: torch.distributed.rpc's TensorPipe backend, for the checks and the first words
of their texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

from asyncrpc.compat.rpc.options import TensorPipeRpcBackendOptions
from asyncrpc.core.devices.backends import backend_of

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
