"""Where a remote module runs: `"trainer0/cpu"`, parsed by our own rules.

    <worker>            the worker of this name, on its CPU
    <worker>/<device>   a device of it: `ps/cuda:0`
    <rank>/<device>     the worker of this rank; `rank:0/cpu` is torch's spelling

A name wins over a rank.  The worker itself checks whether it has the device.

Source: torch.distributed._remote_device, which also takes a device without a worker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.arguments import wrong
from asyncrpc.core.devices.names import CPU, DeviceName
from asyncrpc.errors import UsageError

_FORM: Final = re.compile(r"(?P<worker>[^/\s]+)(?:/(?P<device>[^/\s]+))?")
_RANK: Final = re.compile(r"(?:rank:)?(?P<rank>[0-9]+)")


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker and a device of it.

    Attributes:
        worker: name, or text that may be a rank.
        device: torch's name of it: `cpu`, `cuda:0`.
    """

    worker: str
    device: str

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Read `"worker"`, `"worker/device"` or `"rank/device"`."""
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        forms = "'worker', 'worker/device' or 'rank/device', such as 'ps/cpu'"
        problem = wrong("remote_device", forms, text)
        if match is None:
            raise problem
        try:
            device = DeviceName.parse(match["device"] or CPU)
        except UsageError:
            raise problem from None
        return cls(match["worker"], str(device))

    @property
    def rank(self) -> int | None:
        """The rank that the worker part may be; None if it is not a number."""
        match = _RANK.fullmatch(self.worker)
        return None if match is None else int(match["rank"])

    def __str__(self) -> str:
        return f"{self.worker}/{self.device}"
