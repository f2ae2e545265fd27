"""Hooks for other layers: serde knows nothing of remote references."""

from __future__ import annotations

from typing import Any, Protocol


class Hooks(Protocol):
    """Turns values of another layer into trees and back.

    Attributes:
        handled: the types whose instances (and subclasses' instances) go to `lower`.
    """

    @property
    def handled(self) -> tuple[type, ...]: ...

    def lower(self, value: Any) -> Any:
        """Return what is sent: lists, dictionaries, strings, integers, bytes.

        Called once per object and message, however often the object occurs in it.
        """
        ...

    def lift(self, tree: Any) -> Any:
        """Return the value that a peer lowered to `tree`; trust nothing in it."""
        ...
