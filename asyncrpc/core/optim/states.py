"""The state of an optimizer over many owners, in the form of one in one process.

torch numbers parameters group by group.  An owner's optimizer numbers its own; here
these states are put together, and taken apart, by their places among all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from asyncrpc.core import param_groups
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.optim.groups import Group, numbers_of
from asyncrpc.core.optim.options import Options
from asyncrpc.core.param_groups import options_in, places_of, renumbered
from asyncrpc.errors import UsageError

State: TypeAlias = dict[str, Any]


def joined(
    groups: Sequence[Group],
    states: Mapping[WorkerId, State],
    options: Sequence[Options],
) -> State:
    """Return one state, in the form of torch's optimizer over all parameters."""
    together: dict[int, Any] = {}
    for owner, state in states.items():
        places = numbers_of(groups, owner)
        for number, value in state["state"].items():
            if type(number) is not int:
                raise UsageError(
                    f"each owner's optimizer keeps {number!r}, which belongs to no "
                    "parameter; take state_dict(per_owner=True)"
                )
            together[places[number]] = value
    first = next(iter(states.values()))["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    listed = [
        {**options_in(known), **own, "params": list(places)}
        for known, own, places in zip(first, options, places_of(sizes), strict=True)
    ]
    return {
        "state": {place: together[place] for place in sorted(together)},
        "param_groups": listed,
    }


def part_for(
    groups: Sequence[Group], state: Mapping[str, Any], owner: WorkerId
) -> State:
    """Return one owner's part of a state."""
    places = numbers_of(groups, owner)
    own = {place: number for number, place in enumerate(places)}
    sizes = [len(group["params"]) for group in groups]
    listed = renumbered(state["param_groups"], sizes, own)
    own_state = {own[at]: value for at, value in state["state"].items() if at in own}
    return {"state": own_state, "param_groups": listed}


def check_fits(groups: Sequence[Group], state: Mapping[str, Any]) -> None:
    """Refuse a state of other parameters."""
    param_groups.check_fits(state, [len(group["params"]) for group in groups])
