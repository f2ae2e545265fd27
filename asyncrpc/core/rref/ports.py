"""What remote references need of their worker: its directory, and its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.options import UNSET
from asyncrpc.core.services import ports as runtime
from asyncrpc.core.services.ports import PeerLink


class Links(runtime.Links, Protocol):
    """How a worker gets a link that may not be there yet."""

    @property
    def is_closed(self) -> bool:
        """Return whether the worker has ended."""


class Calls(Protocol):
    """How calls begin."""

    def check_on_loop(self, used: str, /) -> None:
        """Raise UsageError unless this is the worker's loop."""

    def on_loop_thread(self, action: Callable[[], None], /) -> None:
        """Run `action` on the loop: now if this is its thread, else soon."""

    def meta_here(self) -> dict[str, Any]:
        """Return the metadata that this thread adds to a call."""

    def new_call(
        self, function: str, to: str, *, with_site: bool = False, kind: str = "async"
    ) -> CallFuture[Any]:
        """Make the future of a call that `begin` will start."""

    def begin(
        self,
        call: CallFuture[Any],
        target: str | list[Any] | None,
        values: tuple[list[Any], dict[str, Any]],
        *,
        timeout_s: Any = UNSET,
        meta: dict[str, Any] | None = None,
        on_link: Callable[[PeerLink], None] | None = None,
    ) -> None:
        """Send a call; its future completes when the answer comes."""


class Functions(Protocol):
    """The functions that peers may call."""

    def check_method(self, kind: type, name: str, /) -> None:
        """Refuse a method that peers may not call on values of a type."""
