"""The environment of a process: its rank and the like, as set by its launcher.

Each launcher has its own variables.  A reader for each turns a mapping of variables
into values, each with its origin; `resolve` combines them in a fixed order.  All
functions are pure: the mapping is passed in, and nothing else is read.
"""

from typing import TYPE_CHECKING

from asyncrpc.core.environment.placement import GivenPlace, LaunchPlacement
from asyncrpc.core.environment.values import LaunchValue, Reading, Starts
from asyncrpc.core.on_demand import names_on_demand

if TYPE_CHECKING:
    from asyncrpc.core.environment.resolving import READERS, read_all, resolve
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        dict.fromkeys(
            ("READERS", "read_all", "resolve"), "asyncrpc.core.environment.resolving"
        ),
    )

__all__ = [
    "READERS",
    "GivenPlace",
    "LaunchPlacement",
    "LaunchValue",
    "Reading",
    "Starts",
    "read_all",
    "resolve",
]
