"""torch's modes of a thread travel with calls: no_grad, inference mode, autocast.

A call runs its function under the modes that it was made under; `torch_modes` gives
them to each of its steps.  Most calls are made under default modes: these send nothing
and cost nothing.

Source: torch.no_grad, torch.inference_mode and torch.autocast, and their settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from asyncrpc.core.torch_modes import (
    AUTOCAST_DTYPES,
    DEFAULTS,
    Autocast,
    Modes,
    autocast_here,
    surrounded,
)
from asyncrpc.errors import MalformedError

_NO_GRAD: Final = 1
_INFERENCE: Final = 2
_NO_CACHE: Final = 4

_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}


def modes_here() -> Modes:
    """Return the modes of this thread, as far as they travel."""
    autocast: Autocast = {}
    if torch._C._is_any_autocast_enabled():  # noqa: SLF001
        autocast = autocast_here()
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        autocast,
        nesting=bool(autocast),
    )


class ThreadModes:
    """A `runtime.extensions.ThreadState`."""

    key = "m"

    def here(self) -> Any:
        """Return this thread's modes as they travel; None if all are defaults."""
        modes = modes_here()
        return None if modes == DEFAULTS else _lowered(modes)

    def surround(self, meta: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, run under the modes that came with the call."""
        return surrounded(function, _lifted(meta))


def _lowered(modes: Modes) -> list[Any]:
    flags = 0 if modes.grad else _NO_GRAD
    flags |= _INFERENCE if modes.inference else 0
    flags |= 0 if modes.cache else _NO_CACHE
    autocast = {
        kind: str(dtype).removeprefix("torch.")
        for kind, dtype in modes.autocast.items()
    }
    return [flags, autocast]


def _lifted(meta: Any) -> Modes:
    try:
        flags, autocast = meta
        dtypes = {str(kind): _DTYPES[dtype] for kind, dtype in autocast.items()}
        flags = int(flags)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise MalformedError(f"modes are malformed: {meta!r:.80}") from error
    # Device types that this torch does not know are left out.
    autocast = {
        kind: dtype for kind, dtype in dtypes.items() if kind in AUTOCAST_DTYPES
    }
    return Modes(
        not flags & _NO_GRAD,
        bool(flags & _INFERENCE),
        not flags & _NO_CACHE,
        autocast,
        nesting=bool(autocast),
    )
