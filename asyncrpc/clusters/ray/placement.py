"""Which bundles of a placement group do not fit, and why: for the text of an error.

Ray says only that a placement group is pending.  Its needs and the nodes' resources are
known, so the reason can be computed: a bundle is too large for every node, or for the
free resources, or there are too few nodes for the strategy.

These are pure functions over numbers, without Ray.  The search is first fit by the
largest bundle, so it may miss a placement that Ray would find: it is used only after
Ray has found none in time, and the text says "now".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

Resources: TypeAlias = Mapping[str, float]

SHOWN_MAX: Final = 8  # bundles and nodes in the text of an error
_ROUNDING: Final = 1e-4  # Ray counts in units of 1/10,000


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The resources of a live node.

    Attributes:
        name: of the node, for the text.
    """

    name: str
    total: Resources
    free: Resources


def misfit_of(
    bundles: Sequence[Resources], strategy: str, nodes: Sequence[NodeResources]
) -> str:
    """Return which bundles do not fit on the nodes, and why, as text."""
    impossible = [
        index
        for index, bundle in enumerate(bundles)
        if not any(_fits(bundle, node.total) for node in nodes)
    ]
    if impossible:
        why = f"no node is large enough for {_named(bundles, impossible)}"
        return f"{why}; {_totals(nodes)}"
    if strategy == "STRICT_PACK":
        return _misfit_on_one(bundles, nodes)
    unplaced = _left_over(bundles, nodes, one_each=strategy == "STRICT_SPREAD")
    if not unplaced:
        return f"the nodes have room now; {_frees(nodes)}"
    if strategy == "STRICT_SPREAD" and len(bundles) > len(nodes):
        return (
            f"STRICT_SPREAD needs {len(bundles)} nodes, one for each bundle, and there"
            f" are {len(nodes)}; without a node: {_named(bundles, unplaced)}"
        )
    return f"not enough is free now for {_named(bundles, unplaced)}; {_frees(nodes)}"


def _misfit_on_one(bundles: Sequence[Resources], nodes: Sequence[NodeResources]) -> str:
    """Return the misfit if all bundles must be on one node."""
    needed = _sum(bundles)
    together = f"STRICT_PACK needs one node with {_shown(needed)} for all bundles"
    if not any(_fits(needed, node.total) for node in nodes):
        return f"{together}, and none is so large; {_totals(nodes)}"
    if any(_fits(needed, node.free) for node in nodes):
        return f"the nodes have room now; {_frees(nodes)}"
    return f"{together}, and none has so much free; {_frees(nodes)}"


def _left_over(
    bundles: Sequence[Resources], nodes: Sequence[NodeResources], *, one_each: bool
) -> list[int]:
    """Return the indices of the bundles for which first fit finds no room."""
    rooms = [dict(node.free) for node in nodes]
    unplaced = []
    order = sorted(range(len(bundles)), key=lambda index: -sum(bundles[index].values()))
    for index in order:
        room = next(
            (candidate for candidate in rooms if _fits(bundles[index], candidate)), None
        )
        if room is None:
            unplaced.append(index)
            continue
        if one_each:
            rooms = [other for other in rooms if other is not room]
        for name, amount in bundles[index].items():
            room[name] = room.get(name, 0.0) - amount
    return sorted(unplaced)


def _fits(needed: Resources, room: Resources) -> bool:
    return all(
        room.get(name, 0.0) + _ROUNDING >= amount for name, amount in needed.items()
    )


def _sum(bundles: Iterable[Resources]) -> Resources:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _named(bundles: Sequence[Resources], indices: Sequence[int]) -> str:
    named = [f"bundle {index} ({_shown(bundles[index])})" for index in indices]
    return _listed(named)


def _totals(nodes: Sequence[NodeResources]) -> str:
    return "the nodes have: " + _listed([f"{n.name}: {_shown(n.total)}" for n in nodes])


def _frees(nodes: Sequence[NodeResources]) -> str:
    return "free are: " + _listed([f"{n.name}: {_shown(n.free)}" for n in nodes])


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN_MAX} more" if len(texts) > SHOWN_MAX else ""
    return (", ".join(texts[:SHOWN_MAX]) or "none") + more


def _shown(resources: Resources) -> str:
    return (
        " ".join(
            f"{name}={amount:g}" for name, amount in sorted(resources.items()) if amount
        )
        or "nothing"
    )
