"""Groups of parameters, as torch's optimizers take them, but of references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncrpc.errors import UsageError
from asyncrpc.ids import WorkerId
from asyncrpc.rref.handle import RRef

Group = dict[str, Any]
Parameters = Sequence[RRef[Any]] | Sequence[Mapping[str, Any]]

_KEY: Final = "params"  # torch's name for a group's parameters


def groups_of(parameters: Parameters) -> list[Group]:
    """Check parameters, and return them as groups.

    Raises:
        UsageError: there are none, or they are no RRefs.
    """
    listed: list[Any] = list(parameters)
    if listed and isinstance(listed[0], Mapping):
        groups = [dict(group) for group in listed]
    else:
        groups = [{_KEY: listed}]
    for group in groups:
        given = group.get(_KEY)
        group[_KEY] = [given] if isinstance(given, RRef) else list(given or ())
        _check(group[_KEY])
    if not any(group[_KEY] for group in groups):
        raise UsageError("an optimizer needs at least one parameter; it was given none")
    return groups


def _check(parameters: Sequence[Any]) -> None:
    for index, one in enumerate(parameters):
        if not isinstance(one, RRef):
            raise UsageError(
                f"parameter {index} is a {type(one).__name__}; a distributed optimizer "
                "takes RRefs: asyncrpc.RRef(parameter), made on the worker that has it"
            )


def owners_of(groups: Sequence[Group]) -> list[WorkerId]:
    """Return the owners of the parameters, each once, in the parameters' order."""
    return list(dict.fromkeys(one.owner_id for group in groups for one in group[_KEY]))


def numbers_of(groups: Sequence[Group], owner: WorkerId) -> list[int]:
    """Return the places of an owner's parameters among all, in its own order.

    A place is what torch numbers parameters by: group by group, from 0.
    """
    listed = [one for group in groups for one in group[_KEY]]
    return [at for at, one in enumerate(listed) if one.owner_id == owner]


def part_of(group: Group, owner: WorkerId) -> Group:
    """Return a group with the parameters of one owner only."""
    return {**group, _KEY: [one for one in group[_KEY] if one.owner_id == owner]}
