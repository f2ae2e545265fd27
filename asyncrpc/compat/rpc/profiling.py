"""Calls in torch's profilers, in the threads that make them.

Source: torch.distributed.rpc, for the names of the ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.autograd import profiler
from torch.jit import _builtins

if TYPE_CHECKING:
    from asyncrpc.compat.rpc.agent import Agent


class Shown:
    """A range from the start of a call to its end, if anybody profiles."""

    def __init__(self, name: str) -> None:
        self._range = profiler.record_function(name)
        self._is_future_s = False

    def __enter__(self) -> Self:
        self._range.__enter__()  # type: ignore[no-untyped-call]
        return self

    def until(self, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
        """Let the range end with a future, and not with the block."""
        self._is_future_s = True
        ended: torch.futures.Future[Any] = self._range._call_end_callbacks_on_future(  # noqa: SLF001
            future
        )
        return ended

    def __exit__(self, *_: object) -> None:
        if not self._is_future_s:
            self._range.__exit__(None, None, None)


class Hidden:
    """What a call is shown as while nobody profiles: not at all."""

    def __enter__(self) -> Self:
        return self

    def until(self, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
        """Return the future."""
        return future

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


_HIDDEN = Hidden()
_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled  # noqa: SLF001
_find_builtin: Callable[[Any], str | None] = _builtins._find_builtin  # noqa: SLF001


def shown(kind: str, function: Callable[..., Any], agent: Agent, to: str) -> Any:
    """Return what shows a call as a range."""
    is_watched = profiler._is_profiler_enabled or _is_profiled()  # noqa: SLF001
    if not is_watched:
        return _HIDDEN
    name = getattr(function, "__qualname__", None) or repr(function)
    name = str(_find_builtin(function) or name)
    return Shown(f"rpc_{kind}#{name}({agent.worker.name} -> {to})")
