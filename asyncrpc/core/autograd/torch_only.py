"""Decides whether work calls torch's own code only: the event loop runs nothing else.

User code may be anywhere in a graph or an optimizer: in hooks, Functions, subclasses of
tensors, modes, kernels.  So what is allowed is listed, by exact type and identity, and
the rest goes to a thread.  Nothing is remembered, since user code may come at any time.

Python cannot see the hooks of torch's own nodes.  But torch makes a `RemovableHandle`
for each hook, whatever it is for, and counts them: while none has been made in this
process, no hook is there.  Custom functions and saved tensors can be seen.  So one hook
sends all segments to threads.  A closer look is not to be had: to register a hook with
each node, and see what else is in its list, takes 57 us for 10 nodes, where the look
takes 16 and the way to a thread 20 to 60; and it finds no hooks of tensors.

What the interpreter calls between any two lines (the garbage collector, a tracer, the
filter of warnings) is not judged here.

Source: torch/utils/hooks.py; torch/csrc/autograd/python_cpp_function.h and
python_saved_variable_hooks.h.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from asyncrpc.core.calls.inline import has_torchs_kernels

_C: Any = torch._C  # noqa: SLF001

# Within it no attribute of a tensor calls `__torch_function__`, of its class or a mode.
without_functions: Any = _C.DisableTorchFunction

# No attribute and no operation of these calls Python.
PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN_OR_NONE: Final = PLAIN | {type(None)}

# Of each of torch's own nodes: the attributes with its saved tensors.  It may have more
# nodes inside if it is a `CopySlices`.
_NODES: Final[dict[type, tuple[str, ...]]] = {
    kind: tuple(name for name in vars(kind) if name.startswith("_raw_saved_"))
    for kind in vars(_C._functions).values()  # noqa: SLF001
    if isinstance(kind, type) and kind.__name__ != "CopySlices"
}


class _HookCount:
    """The hooks of this process.

    Attributes:
        own_handles: how many asyncrpc itself has registered.
    """

    own_handles = 0


_hooks: Final = _HookCount()  # like torch's counter, of the process


def own_node(kind: type) -> None:
    """List the node of a Function of asyncrpc, which saves no tensors."""
    _NODES[kind] = ()


def note_own_handle() -> None:
    """Note that asyncrpc itself has just registered a hook."""
    _hooks.own_handles += 1


def is_plain(tensor: object) -> bool:
    """Return whether a tensor is of no subclass, whose attributes may be user code."""
    return type(tensor) in PLAIN


def are_operators_torchs() -> bool:
    """Return whether operators on plain tensors call no user code in this thread."""
    return (
        not _C._len_torch_dispatch_stack()  # noqa: SLF001
        and not _C._len_torch_function_stack()  # noqa: SLF001
        and has_torchs_kernels()
    )


def _is_engine_torchs() -> bool:
    """Return whether torch's engine itself calls no user code: hooks or a compiler."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return (
        RemovableHandle.next_id == _hooks.own_handles
        and not _C.is_anomaly_enabled()
        and (
            compiled is None
            or not (
                compiled.compiled_autograd_enabled
                or compiled.compiled_autograd_enabled_force_eager
            )
        )
    )


def runs_torch_only(
    nodes: Iterable[Any], leaves: Iterable[Any], gradients: Iterable[Any]
) -> bool:
    """Return whether the engine calls no user code in these nodes."""
    return (
        _is_engine_torchs()
        and are_operators_torchs()
        and all(map(is_plain, gradients))
        and all(
            is_plain(leaf)
            and not leaf._backward_hooks  # noqa: SLF001
            and not leaf._post_accumulate_grad_hooks  # noqa: SLF001
            for leaf in leaves
        )
        and all(map(_is_torchs, nodes))
    )


def _is_torchs(node: Any) -> bool:
    names = _NODES.get(type(node))
    if names is None:
        return False
    try:
        return all(_is_plain_saved(getattr(node, name)) for name in names)
    except RuntimeError:  # freed: the engine will say so
        return False


def _is_plain_saved(saved: Any) -> bool:
    if type(saved) is tuple:
        return all(map(_is_plain_saved, saved))
    return saved is None or (
        saved.unpack_hook is None and type(saved.data) in _PLAIN_OR_NONE
    )
