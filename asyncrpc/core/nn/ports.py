"""What the handle of a remote module needs of its worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.options import Options


class ModuleWorker(Protocol):
    """The worker that has a module's reference."""

    @property
    def options(self) -> Options:
        """The options of the worker."""

    @property
    def directory(self) -> Directory:
        """The workers that it knows."""

    def check_running(self) -> None:
        """Raise NotStartedError unless the worker is running."""

    def check_on_loop(self, used: str, /) -> None:
        """Raise UsageError unless this is the worker's loop."""

    def start_call(
        self,
        to: str,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        /,
        *,
        awaits: bool = False,
    ) -> CallFuture[Any]:
        """Start a call and return its future."""
