"""Groups of parameters, as torch's optimizers take them, but of references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncrpc.core.arguments import listed, wrong
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.rref.handle import RRef
from asyncrpc.errors import UsageError

Group = dict[str, Any]
Parameters = Sequence[RRef[Any]] | Sequence[Mapping[str, Any]]

_KEY: Final = "params"  # torch's name for a group's parameters


def groups_of(parameters: Parameters) -> list[Group]:
    """Check parameters, and return them as groups."""
    name = "params_rref"
    entries = listed(name, parameters, "a list of RRefs, or of groups of them")
    if entries and isinstance(entries[0], Mapping):
        groups = [
            group_of(f"{name}[{index}]", entry) for index, entry in enumerate(entries)
        ]
    else:
        groups = [{_KEY: _checked(name, entries)}]
    if not any(group[_KEY] for group in groups):
        raise UsageError(f"{name} must have at least one parameter, but is empty")
    return groups


def group_of(name: str, entry: Any) -> Group:
    """Check a group, and return a copy."""
    wanted = f"a dictionary with {_KEY!r}, a list of RRefs"
    if not isinstance(entry, Mapping) or _KEY not in entry:
        raise wrong(name, wanted, entry)
    group, params = dict(entry), entry[_KEY]
    its_name = f"{name}[{_KEY!r}]"
    if not isinstance(params, RRef):
        params = listed(its_name, params, "a list of RRefs")
    group[_KEY] = _checked(its_name, [params] if isinstance(params, RRef) else params)
    return group


def _checked(name: str, parameters: list[Any]) -> list[Any]:
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, RRef):
            origin = "as asyncrpc.RRef(parameter) made on the worker that has it"
            raise wrong(f"{name}[{index}]", f"an RRef, {origin}", parameter)
    return parameters


def references_in(groups: Sequence[Group]) -> list[RRef[Any]]:
    """Return the parameters of all groups, in their order."""
    return [parameter for group in groups for parameter in group[_KEY]]


def owners_of(groups: Sequence[Group]) -> list[WorkerId]:
    """Return the owners of the parameters, each once, in the parameters' order."""
    return list(
        dict.fromkeys(parameter.owner_id for parameter in references_in(groups))
    )


def numbers_of(groups: Sequence[Group], owner: WorkerId) -> list[int]:
    """Return the places of an owner's parameters among all, in its own order.

    A place is torch's number of a parameter: group by group, from 0.
    """
    listed = references_in(groups)
    return [at for at, parameter in enumerate(listed) if parameter.owner_id == owner]


def part_of(group: Group, owner: WorkerId) -> Group:
    """Return a group with the parameters of one owner only."""
    return {
        **group,
        _KEY: [parameter for parameter in group[_KEY] if parameter.owner_id == owner],
    }
