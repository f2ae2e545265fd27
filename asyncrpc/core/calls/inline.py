"""Which calls of torch's own functions run on the loop: those that take microseconds.

A thread costs 20 to 60 us; adding two small tensors 3.  So a call runs on the loop if

*   its function is listed here: elementwise, or a reduction;
*   its arguments are numbers and plain tensors in host memory, of one shape or of one
    element, so that no broadcast makes a large result of small arguments;
*   no program has put a kernel of its own in the place of one of torch's;
*   their bytes together are at most `LimitOptions.on_loop_bytes_max`, 16 KiB unless set
    otherwise: 4,096 floats, which the slowest of these functions takes 30 us for; 0
    turns all of this off.

Inside an autograd context, and with keyword arguments, it runs in a thread as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

# fmt: off
_NAMES: Final = (
    "abs", "add", "amax", "amin", "any", "all", "argmax", "argmin", "ceil", "clamp",
    "cos", "div", "eq", "equal", "exp", "floor", "ge", "gt", "le", "log", "lt", "max",
    "maximum", "mean", "min", "minimum", "mul", "ne", "neg", "numel", "prod",
    "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square",
    "sub", "sum", "tanh", "true_divide",
)
# fmt: on
_CHEAP: Final = frozenset(
    getattr(home, name)
    for home in (torch, torch.Tensor)
    for name in _NAMES
    if hasattr(home, name)
)
_NUMBERS: Final = frozenset({int, float, bool})


def is_listed(function: Any) -> bool:
    """Return whether a function is one of torch's that are cheap on small tensors."""
    try:
        return function in _CHEAP
    except TypeError:  # callable, but not hashable
        return False


def is_short(args: Sequence[Any], bytes_max: int) -> bool:
    """Return whether a listed function takes only microseconds for these arguments."""
    shape = None
    for part in args:
        if type(part) is torch.Tensor:
            # A sparse tensor has no `nbytes`, and raises if asked.
            if part.layout is not torch.strided:
                return False
            bytes_max -= part.nbytes
            if bytes_max < 0 or not part.is_cpu or part.requires_grad:
                return False
            if part.numel() != 1:
                if shape is not None and part.shape != shape:
                    return False
                shape = part.shape
        elif type(part) not in _NUMBERS:
            return False
    return True
