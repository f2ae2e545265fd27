"""The functions that peers may call, by the names that they use, and where they run."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Final

from asyncrpc.core.calls.inline import is_listed
from asyncrpc.core.calls.modes import Mode, Target, mode_of
from asyncrpc.core.serde import FunctionTable
from asyncrpc.core.serde.by_value import MARK as CODE
from asyncrpc.core.serde.naming import import_module

KNOWN_MAX: Final = 4096  # programs call tens of functions


class Targets:
    """The functions that peers have called; found once, then remembered.

    One whose module has been reloaded since is found anew.
    """

    def __init__(self, functions: FunctionTable, *, may_run_on_loop: bool) -> None:
        self._functions = functions
        self._may_run_on_loop = may_run_on_loop
        self._by_name: dict[str, Target] = {}
        self._modes: dict[Callable[..., Any], Mode] = {}

    def target(self, name: str) -> Target:
        """Return what a peer may call by this name."""
        if name.startswith(CODE):
            return self._target_by_value(name)
        target = self._by_name.get(name)
        if target is None or not target.is_current:
            function = self._functions.resolve(name)
            module, _, simple = name.partition(":")
            look_up = vars(import_module(module, name)).get
            first = simple.partition(".")[0]
            target = Target(
                simple,
                function,
                mode_of(function),
                is_listed(function) and self._may_run_on_loop,
                name,
                look_up,
                first,
                look_up(first),
            )
            self._by_name[name] = target
        return target

    def _target_by_value(self, name: str) -> Target:
        received = self._functions.received(name)
        if received.target is None:
            code = self._functions.code
            assert code is not None  # or it would have refused
            received.target = Target(
                received.name.simple,
                received.function,
                mode_of(received.function),
                path=name,
                look_up=code.look_up,
                first=name,
                root=received,
                cached_in=received.cached_in,
            )
        return received.target  # type: ignore[no-any-return]

    def mode_of_method(self, method: Callable[..., Any]) -> Mode:
        """Decide where a method of a referenced object runs.

        Remembered by the function of its class: to find out takes 4 us.
        """
        function = getattr(method, "__func__", None)
        if type(function) is not types.FunctionType:
            return mode_of(method)
        mode = self._modes.get(function)
        if mode is None:
            mode = mode_of(method)
            if len(self._modes) < KNOWN_MAX:
                self._modes[function] = mode
        return mode
