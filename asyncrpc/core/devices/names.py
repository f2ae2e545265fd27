"""Names of devices: `"cuda:1"`, read by our own rules.

torch reads only the types that are registered with it, and takes `"tpu:1"` for
`"tpu:0"` where there is one device; here a name is kept as it is, and its backend knows
whether the device exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import torch

from asyncrpc.core.arguments import check_count, shown, wrong
from asyncrpc.errors import UsageError

_TYPE: Final = re.compile(r"[a-z][a-z_0-9]{0,30}")
_FORM: Final = re.compile(rf"(?P<type>{_TYPE.pattern})(?::(?P<index>[0-9]{{1,4}}))?")
INDEX_MAX: Final = 9999  # four digits
CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class DeviceName:
    """A device of some worker.

    Attributes:
        type: as torch names it: `cpu`, `cuda`, `xla`, `tpu`.
        index: from 0; None: all of the type, or the first, depending on the use.
    """

    type: str
    index: int | None = None

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: the type or the index is not valid; the message names it.
        """
        if not isinstance(self.type, str) or not _TYPE.fullmatch(self.type):
            raise wrong("type", "a type of device, such as 'cuda'", self.type)
        if self.index is not None:
            check_count("index", self.index, at_least=0, at_most=INDEX_MAX)

    @classmethod
    def parse(cls, name: Any) -> DeviceName:
        """Read `"cuda:1"`, `"cuda"`, a `torch.device`, or 1 for `"cuda:1"`.

        Raises:
            UsageError: the text has none of these forms.

        Source: torch.device, which takes these forms.
        """
        if type(name) is int and 0 <= name <= INDEX_MAX:
            return cls("cuda", name)
        text = str(name) if isinstance(name, _NAMES) else ""
        match = _FORM.fullmatch(text)
        if match is None:
            raise UsageError(
                f"device {shown(name)} is not understood; write 'type' or 'type:index',"
                " such as 'cpu', 'cuda:1' or 'xla:0'"
            )
        index = None if match["index"] is None else int(match["index"])
        if match["type"] == CPU and index:
            raise UsageError(f"device must be 'cpu' or 'cpu:0', not {text!r}")
        return cls(match["type"], None if match["type"] == CPU else index)

    @property
    def is_cpu(self) -> bool:
        """Return whether it is host memory."""
        return self.type == CPU

    @property
    def whole(self) -> str:
        """Its name with an index, as tensors have it; 0 without an index."""
        return CPU if self.is_cpu else f"{self.type}:{self.index or 0}"

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


_NAMES: Final = (str, torch.device, DeviceName)
