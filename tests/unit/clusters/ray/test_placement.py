"""Why bundles do not fit on the nodes of Ray."""

from __future__ import annotations

import pytest

from asyncrpc.clusters.ray.placement import NodeResources, misfit_of

CPU2 = {"CPU": 2.0}


def node(name: str, total: float, free: float | None = None) -> NodeResources:
    return NodeResources(name, {"CPU": total}, {"CPU": total if free is None else free})


NODES = [node("a", 2), node("b", 4, 1)]


@pytest.mark.parametrize(
    ("bundles", "strategy", "words"),
    [
        ([{"CPU": 1}, {"GPU": 1}], "PACK", "large enough for bundle 1 (GPU=1); "),
        ([{"CPU": 8}], "SPREAD", "no node is large enough for bundle 0 (CPU=8); "),
        ([{"CPU": 2}, {"CPU": 2}], "PACK", "is free now for bundle 1 (CPU=2); "),
        ([{"CPU": 2}, {"CPU": 1}], "PACK", "room now"),
        ([{"CPU": 1}] * 3, "STRICT_SPREAD", "needs 3 nodes"),
        ([{"CPU": 1}, {"CPU": 2}], "STRICT_SPREAD", "room now"),
        ([{"CPU": 2}, {"CPU": 2}], "STRICT_SPREAD", "is free now for bundle 1 (CPU=2)"),
        ([{"CPU": 3}, {"CPU": 3}], "STRICT_PACK", "none is so large"),
        ([{"CPU": 2}, {"CPU": 2}], "STRICT_PACK", "none has so much free"),
        ([{"CPU": 1}, {"CPU": 1}], "STRICT_PACK", "room now"),
        ([{"CPU": 1, "disk": 1}], "PACK", "bundle 0 (CPU=1 disk=1)"),
    ],
)
def test_text_names_the_bundles_and_the_reason(
    bundles: list[dict[str, float]], strategy: str, words: str
) -> None:
    assert words in misfit_of(bundles, strategy, NODES)


def test_text_shows_the_resources_of_the_nodes() -> None:
    assert "a: CPU=2, b: CPU=4" in misfit_of([{"CPU": 9}], "PACK", NODES)
    assert "a: CPU=2, b: CPU=1" in misfit_of([CPU2, CPU2], "PACK", NODES)


def test_text_stays_short() -> None:
    many = [node(f"n{number}", 1) for number in range(100)]
    why = misfit_of([CPU2] * 100, "PACK", many)
    assert "and 92 more" in why
    assert len(why) < 700


def test_bundles_fit_nowhere_without_nodes() -> None:
    why = misfit_of([CPU2], "PACK", [])
    assert "large enough for bundle 0" in why
    assert "the nodes have: none" in why
