"""Tests that are scenarios on a simulated network, played once with each seed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from tests.simulated import LIMIT_S, play


def simulated(
    seeds: Iterable[int] = (0,), limit_s: float = LIMIT_S
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Make a test of a scenario, whose other parameters are fixtures as ever."""

    def of(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def test(**fixtures: Any) -> None:
            for seed in seeds:
                play(partial(scenario, **fixtures), seed, limit_s)

        signature = inspect.signature(scenario)
        _, *others = signature.parameters.values()  # the network is the first
        vars(test).update(__signature__=signature.replace(parameters=others))
        test.__name__, test.__qualname__ = scenario.__name__, scenario.__qualname__
        test.__module__, test.__doc__ = scenario.__module__, scenario.__doc__
        return test

    return of
