"""Groups of parameters, as torch's optimizers have and save them.

torch numbers parameters group by group; the number of a parameter is its *place*.  An
owner that has only some of the parameters numbers these separately.

Source: torch.optim.Optimizer.state_dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from asyncrpc.errors import UsageError

OF_PARAMETERS: Final = frozenset(("params", "param_names"))  # not options of a group


def options_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group: all but its parameters."""
    return {name: group[name] for name in group if name not in OF_PARAMETERS}


def places_of(sizes: Iterable[int]) -> Iterator[range]:
    """Yield the places of each group's parameters."""
    place = 0
    for size in sizes:
        yield range(place, place + size)
        place += size


def renumbered(
    groups: Sequence[Mapping[str, Any]],
    sizes: Iterable[int],
    number_of: Mapping[int, int],
) -> list[dict[str, Any]]:
    """Return groups that hold the numbers of one owner's parameters."""
    return [
        {
            **options_in(group),
            "params": [number_of[place] for place in places if place in number_of],
        }
        for group, places in zip(groups, places_of(sizes), strict=True)
    ]


def check_fits(state: Mapping[str, Any], sizes: Sequence[int]) -> None:
    """Refuse a state that belongs to other parameters."""
    try:
        saved = [len(group["params"]) for group in state["param_groups"]]
        places = set(state["state"])
    except (KeyError, TypeError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UsageError(
            f"state_dict is not the state of an optimizer: {problem}; pass the result "
            "of state_dict(), of this optimizer or of torch's"
        ) from error
    if saved != list(sizes) or not places <= set(range(sum(sizes))):
        raise UsageError(
            f"the state has groups of {saved} parameters, but the optimizer has "
            f"groups of {list(sizes)}"
        )
