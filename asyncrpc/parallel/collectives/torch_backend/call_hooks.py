"""Hooks around the calls of a process group, and the check for NaN that is one of them.

torch 2.14 keeps hooks in its C++ process group, and calls them where C++ code begins a
collective.  A process group of Python is called directly, so it calls its own.

Source: torch/csrc/distributed/c10d/Hooks.hpp and hooks/NanCheckHook.cpp of torch 2.14.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch

Hook = Callable[[Any], object]

_DISTRIBUTED: Final[Any] = torch._C._distributed_c10d  # noqa: SLF001
# Torch's name of each operation, and which argument of its coroutine is sent; None: no
# argument.
_OPERATIONS: Final = {
    "all_reduce": ("ALLREDUCE", 0),
    "reduce": ("REDUCE", 0),
    "reduce_scatter": ("REDUCE_SCATTER", 1),
    "reduce_scatter_tensor": ("REDUCE_SCATTER_BASE", 1),
    "broadcast": ("BROADCAST", 0),
    "all_gather": ("ALLGATHER", 1),
    "all_gather_into_tensor": ("ALLGATHER_BASE", 1),
    "gather": ("GATHER", 1),
    "scatter": ("SCATTER", 1),
    "all_to_all": ("ALLTOALL", 1),
    "all_to_all_single": ("ALLTOALL_BASE", 1),
    "barrier": ("BARRIER", None),
    "send": ("SEND", 0),
    "recv": ("RECV", None),
}
_FROM_ROOT: Final = ("BROADCAST", "SCATTER")


class CallHooks:
    """The hooks of one process group, by the ids that a program gives them.

    Attributes:
        before: called before an operation begins, with what torch gives such hooks: its
            name, its tensors, its root.
        after: called after it has begun, with its name and its work.
    """

    def __init__(self, rank: int) -> None:
        self.before: dict[int, Hook] = {}
        self.after: dict[int, Hook] = {}
        self._calls = 0
        if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
            self.before[-1] = partial(_refuse_nan, rank)

    def call_before(
        self, operation: str, outs: Sequence[torch.Tensor], opts: Any, doing: Any
    ) -> Callable[[Any], None]:
        """Call the hooks before an operation; return what calls those after it."""
        name, index = _OPERATIONS[operation]
        names = getattr(_DISTRIBUTED, "HookOpName", None)
        common = {
            "name": getattr(names, name, name),
            "async_op": bool(getattr(opts, "asyncOp", False)),
            "op_id": self._calls,
        }
        self._calls += 1
        call = SimpleNamespace(
            input_tensors=[] if index is None else list(_tensors(doing.args[index])),
            output_tensors=list(outs),
            root=getattr(opts, "rootRank", -1),
            **common,
        )
        for hook in list(self.before.values()):
            hook(call)

        def call_after(work: Any) -> None:
            for hook in list(self.after.values()):
                hook(SimpleNamespace(work=work, **common))

        return call_after


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif value is not None:
        for item in value:
            yield from _tensors(item)


def _refuse_nan(rank: int, call: Any) -> None:
    name = getattr(call.name, "name", call.name)
    if name in _FROM_ROOT and call.root != rank:
        return  # there it is filled
    for tensor in call.input_tensors:
        if tensor.is_floating_point() and tensor.isnan().any():
            raise RuntimeError(
                f"rank {rank} gives {name.lower()} a tensor of shape "
                f"{tuple(tensor.shape)} that contains NaN; TORCH_DIST_NAN_CHECK=1 "
                "refuses that"
            )
