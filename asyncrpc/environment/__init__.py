"""The environment of a process: what its launcher says of its place among the others.

Each launcher has variables of its own.  A reader for each turns a mapping of variables
into values, every one with its origin; `resolve` combines them in a fixed order.  All
of it is pure: the mapping is passed in, and nothing else is looked at.
"""

from asyncrpc.environment.placement import GivenPlace, LaunchPlacement
from asyncrpc.environment.resolving import READERS, read_all, resolve
from asyncrpc.environment.values import LaunchValue, Reading, Starts

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
