"""How calls are used whose arguments travel, under either policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncrpc import Policy
from tests.integration.misuse.using import ANYTHING, Use
from tests.integration.misuse.wrong import OF_WORKERS, World

CANNOT_TRAVEL: Final = {
    "too many dimensions",
    "too large",
    "too deep",
    "unpicklable",
    *OF_WORKERS,
    "a generator",
    "raises in __reduce__",
    "raises in everything",
}
# What an error says of a worker's name or rank that nobody has.
UNKNOWN: Final = r"\b(to|name)\b|worker .* is unknown"
VALUES: Final = ANYTHING - CANNOT_TRAVEL
# What travels as a pickle.
PICKLED: Final = {
    *("raises in __repr__", "raises in __eq__", "raises in __hash__"),
    "a local function",
}
COUNT: Final = {"an integer", "an integer of 70 bits"}
FLAG: Final = {"true"}
CALLABLES: Final = {"a class", "a function"}
SAID: Final = {"args": r"args\[0\]", "kwargs": r"kwargs\['wrong'\]"}


def give_back(*args: Any, **kwargs: Any) -> Any:
    """Be called with anything."""
    return len(args), len(kwargs)


def items(*args: Any, **kwargs: Any) -> Any:
    yield len(args), len(kwargs)


def value_uses(policy: Policy = Policy.TRUSTED) -> Mapping[str, Use]:
    """Return the uses of what sends a user's values, between workers of a policy."""
    values = VALUES if policy is Policy.TRUSTED else VALUES - PICKLED
    called = CALLABLES | (values & {"a local function"})

    def use(make: Callable[[World], Any], function: Any = give_back) -> Use:
        return Use(
            make,
            right={"function": lambda _: function},
            fits={"function": called, "args": values, "kwargs": values},
            says=SAID,
        )

    return {
        "Peer.call": use(lambda world: world.peer.call),
        "Peer.remote": use(lambda world: world.peer.remote),
        "Peer.stream": use(lambda world: world.peer.stream, items),
        "PeerGroup.call": use(lambda world: world.a.group(["b"]).call),
    }
