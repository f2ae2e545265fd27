"""The accelerator that these tests run on: `ASYNCRPC_TEST_DEVICE`, else the fake one.

fake    two devices made of host memory, and a ledger of who used them
tpu     TorchTPU on a PJRT plugin
xla     torch_xla
cuda    a GPU
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from asyncrpc import DeviceOptions, Options, Worker
from asyncrpc.testing import fake_device

T = TypeVar("T")

TYPE: Final = os.environ.get("ASYNCRPC_TEST_DEVICE", "fake")
IS_FAKE: Final = TYPE == "fake"
EXCLUSIVE: Final = [True, False] if IS_FAKE else [TYPE == "xla"]


def set_up() -> fake_device.Ledger | None:
    """Make the devices usable in this process; return who is to use them how."""
    if IS_FAKE:
        return fake_device.install()
    if TYPE == "tpu" and not _is_known_to_torch(TYPE):
        loader: Any = importlib.import_module("torch_tpu._loader")
        loader._init_device("tpu")  # noqa: SLF001  (there is no public way)
    if TYPE == "xla":
        importlib.import_module("torch_xla")
    return None


def _is_known_to_torch(type_: str) -> bool:
    try:
        torch.device(type_)
    except RuntimeError:
        return False
    return True


def options(*, is_exclusive: bool, **others: Any) -> Options:
    """Return the options of a worker with these devices."""
    return Options(
        devices=DeviceOptions(names=(TYPE,), exclusive=is_exclusive, **others)
    )


class Hands:
    """Uses devices in a thread of a worker, as programs have to."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def do(self, job: Callable[[], T]) -> T:
        """Run something."""
        return await self._worker.parts.run_in_thread(job)

    async def put(self, tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Return a copy of a tensor of the host on a device."""
        return await self.do(lambda: tensor.to(f"{TYPE}:{index}"))

    async def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in host memory."""
        return await self.do(lambda: tensor.detach().cpu())
