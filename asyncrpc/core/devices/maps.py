"""Device maps: where a caller's tensors go at the callee, and back.

A map holds for the arguments of a call; results come back by its inverse, so it must
not map two devices to one.  A device that is not in it keeps its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asyncrpc.core.devices.names import CPU, DeviceName
from asyncrpc.errors import MalformedError, UsageError

DEVICES: Final = "d"  # in the meta of a request: its map, if it has one
ENTRIES_MAX: Final = 256
ANY: Final = "*"  # on the wire: every device that has no entry of its own


class DeviceMap:
    """From devices of one worker to those of another.

    Attributes:
        takes_host: whether tensors of the host's memory go to a device.
        wire: its form on the wire.
    """

    __slots__ = ("takes_host", "wire")

    def __init__(self, pairs: dict[str, str]) -> None:
        self.wire = pairs
        self.takes_host = pairs.get(CPU, CPU) != CPU

    @classmethod
    def parse(cls, names: Mapping[Any, Any], name: str = "device map") -> DeviceMap:
        """Read a map of device names.

        Source: torch's TensorPipeRpcBackendOptions.set_device_map.
        """
        pairs: dict[str, str] = {}
        for from_name, to_name in names.items():
            at = ANY if from_name == ANY else DeviceName.parse(from_name).whole
            to = DeviceName.parse(to_name).whole
            if pairs.get(at, to) != to:
                raise UsageError(f"{name} maps {at} to both {pairs[at]} and {to}")
            pairs[at] = to
        if len(set(pairs.values())) < len(pairs):
            all_to = list(pairs.values())
            to = next(to for to in all_to if all_to.count(to) > 1)
            sources = " and ".join(at for at in pairs if pairs[at] == to)
            raise UsageError(
                f"{name} maps both {sources} to {to}, so results on {to} could not be "
                "mapped back; map each device to a different one"
            )
        return cls(pairs)

    @classmethod
    def from_wire(cls, value: Any) -> DeviceMap:
        """Read the `wire` of a peer's map, unchecked."""
        is_map = type(value) is dict and len(value) <= ENTRIES_MAX
        if not is_map or any(
            type(part) is not str for pair in value.items() for part in pair
        ):
            raise MalformedError(f"a device map must be a map, not {value!r:.60}")
        try:
            return cls.parse(value)
        except UsageError as error:
            raise MalformedError(f"a device map is malformed: {error}") from error

    def target(self, device: str) -> str:
        """Return where tensors of a device go: to the same name, if not in the map."""
        target = self.wire.get(device)
        if target is None:
            target = device if device == CPU else self.wire.get(ANY, device)
        return target

    def inverse(self) -> DeviceMap:
        """Return the map of the way back; `"*"` has no inverse."""
        return DeviceMap({to: at for at, to in self.wire.items() if at != ANY})

    def __repr__(self) -> str:
        return f"DeviceMap({self.wire})"


IDENTITY: Final = DeviceMap({})
TO_HOST: Final = DeviceMap({ANY: CPU})
