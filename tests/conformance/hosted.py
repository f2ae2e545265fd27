"""GPUs that the host plays, so that tests of them run on a machine without one.

What a test puts on "cuda" stays in host memory.  So kernels and streams are not tested,
but what data parallel training computes is, and that nobody waits for ever.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import wraps
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

DEVICES: Final = 8
HOST: Final = torch.device("cpu")


class HostMode(TorchFunctionMode):
    """Leaves on the host what torch is asked to put on a GPU."""

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with the host in the place of GPUs."""
        if func is torch.Tensor.cuda:
            return args[0].clone()  # a GPU has a copy
        if func is torch.device and type(args[0]) is int:
            return HOST
        moved, named = _hosted(args, kwargs or {}, 1 if func is torch.Tensor.to else -1)
        return func(*moved, **named)


def _hosted(args: Any, kwargs: Any, at: int) -> Any:
    """Return arguments with the host for GPUs; number `at` may be a GPU's number."""
    moved = [_host(value, number == at) for number, value in enumerate(args)]
    return moved, {
        name: _host(value, name == "device") for name, value in kwargs.items()
    }


def _host(value: Any, is_device: bool) -> Any:  # noqa: FBT001
    is_number = is_device and type(value) is int
    is_name = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return HOST if is_number or is_name else value


def put_in_place() -> None:
    """Let the host play GPUs in this process, and in those that it forks."""
    # It asks torch for real ones, when it is imported.
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    common.TEST_CUDA = True
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: DEVICES
    cuda.current_device = lambda: HOST
    cuda.stream = cuda.device = lambda _one: nullcontext()
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(cuda, name, lambda *_, **__: None)
    module: Any = nn.Module
    module.cuda = lambda self, _device=None: self
    module.to = _moving(module.to)
    parallel: Any = nn.parallel.DistributedDataParallel
    parallel.__init__ = _without_devices(parallel.__init__)
    mode: Any = HostMode()
    mode.__enter__()


def _moving(method: Any) -> Any:
    @wraps(method)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved, named = _hosted(args, kwargs, 0)
        return method(self, *moved, **named)

    return to


def _without_devices(method: Any) -> Any:
    @wraps(method)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        method(self, *args, **kwargs)

    return init
