"""Why bundles do not fit: the text of an error, from numbers."""

from __future__ import annotations

import pytest

from asyncrpc.clusters.ray.machine.placement import NodeResources, find_misfit

CPU2 = {"CPU": 2.0}


def node(name: str, total: float, free: float | None = None) -> NodeResources:
    return NodeResources(name, {"CPU": total}, {"CPU": total if free is None else free})


NODES = [node("a", 2), node("b", 4, 1)]


@pytest.mark.parametrize(
    ("bundles", "strategy", "misfits", "words"),
    [
        ([{"CPU": 1}, {"GPU": 1}], "PACK", (1,), "large enough for bundle 1 (GPU=1)"),
        ([{"CPU": 8}], "SPREAD", (0,), "no node is large enough"),
        ([{"CPU": 2}, {"CPU": 2}], "PACK", (1,), "not enough is free now for bundle 1"),
        ([{"CPU": 2}, {"CPU": 1}], "PACK", (), "room now"),
        ([{"CPU": 1}] * 3, "STRICT_SPREAD", (2,), "needs 3 nodes"),
        ([{"CPU": 1}, {"CPU": 2}], "STRICT_SPREAD", (), "room now"),
        ([{"CPU": 2}, {"CPU": 2}], "STRICT_SPREAD", (1,), "not enough is free now"),
        ([{"CPU": 3}, {"CPU": 3}], "STRICT_PACK", (0, 1), "none is so large"),
        ([{"CPU": 2}, {"CPU": 2}], "STRICT_PACK", (0, 1), "none has so much free"),
        ([{"CPU": 1}, {"CPU": 1}], "STRICT_PACK", (), "room now"),
        ([{"CPU": 1, "disk": 1}], "PACK", (0,), "CPU=1 disk=1"),
    ],
)
def test_misfit_names_its_bundles_and_the_reason(
    bundles: list[dict[str, float]],
    strategy: str,
    misfits: tuple[int, ...],
    words: str,
) -> None:
    misfit = find_misfit(bundles, strategy, NODES)
    assert misfit.bundles == misfits
    assert words in misfit.why


def test_misfit_shows_the_resources_of_the_nodes() -> None:
    assert "a: CPU=2, b: CPU=4" in find_misfit([{"CPU": 9}], "PACK", NODES).why
    assert "a: CPU=2, b: CPU=1" in find_misfit([CPU2, CPU2], "PACK", NODES).why


def test_misfit_text_stays_short() -> None:
    many = [node(f"n{number}", 1) for number in range(100)]
    why = find_misfit([CPU2] * 100, "PACK", many).why
    assert "and 92 more" in why
    assert len(why) < 700


def test_bundles_fit_nowhere_without_nodes() -> None:
    misfit = find_misfit([CPU2], "PACK", [])
    assert misfit.bundles == (0,)
    assert "the nodes have: none" in misfit.why
