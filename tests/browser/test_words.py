"""Numbers in words, and where the nodes of a drawing stand: functions of the page."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

from tests.browser.conftest import Open
from tests.browser.groups import ShownGroup
from tests.browser.pages import DashboardPage

GRAPHS = 60
DASH = "\N{EN DASH}"
MICRO = "\N{MICRO SIGN}"
WORDS: list[tuple[str, Any, str]] = [
    ("count", 1204, "1,204"),
    ("rate", 0, "0"),
    ("rate", 0.01, "<0.1"),
    ("rate", 0.44, "0.4"),
    ("rate", 9.96, "10"),
    ("rate", 1204.4, "1,204"),
    ("latency", 0, "0"),
    ("latency", 2.4e-7, f"0.24 {MICRO}s"),
    ("latency", 2.4e-4, f"240 {MICRO}s"),
    ("latency", 9.999e-4, "1.00 ms"),
    ("latency", 0.0315, "31.5 ms"),
    ("latency", 0.9999, "1.00 s"),
    ("latency", 41, "41.0 s"),
    ("latency", 1200, "20 min"),
    ("age", 0.04, "0.0 s"),
    ("age", 41, "41 s"),
    ("age", 119.6, "120 s"),
    ("age", 12000, "3 h 20 min"),
    ("age", 180_000, "2 d 2 h"),
    ("bytes", 0, "0 B"),
    ("bytes", 1000, "1,000 B"),
    ("bytes", 1023.7, "1 KiB"),
    ("bytes", 1.25 * 2**20, "1.3 MiB"),
    ("bytes", 99.7 * 2**30, "100 GiB"),
    ("bytes", 1023.9 * 2**30, "1 TiB"),
    ("traffic", 2048, "2 KiB/s"),
    ("share", 0.125, "13 %"),
    ("ranks", [], "none"),
    ("ranks", [5, 0, 1, 2, 3], f"0{DASH}3, 5"),
    ("ranks", list(range(0, 40, 2)), "0, 2, 4, 6, 8, 10, 12, 14, and 12 more"),
    *(
        (how, None, DASH)
        for how in ("count", "rate", "latency", "age", "bytes", "share")
    ),
]


def test_numbers_are_written_in_words(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    for how, value, words in WORDS:
        assert page.written(how, value) == words, (how, value)


def lay_out(page: DashboardPage, nodes: list[Any], edges: list[Any]) -> Any:
    return page.page.evaluate(
        """async ([nodes, edges]) => {
          const layers = new URL("static/layers.js", document.baseURI);
          const { layOut } = await import(layers);
          const drawing = layOut(nodes, edges, { gapX: 20, gapY: 30 });
          return {
            ...drawing,
            places: Object.fromEntries(drawing.places),
            turned: edges.flatMap((edge, at) => (drawing.turned.has(edge) ? [at] : [])),
            ways: edges.map((edge) => drawing.ways.get(edge) ?? null),
          };
        }""",
        [nodes, edges],
    )


def is_apart(box: dict[str, float], other: dict[str, float]) -> bool:
    return (
        box["x"] + box["width"] <= other["x"]
        or other["x"] + other["width"] <= box["x"]
        or box["y"] + box["height"] <= other["y"]
        or other["y"] + other["height"] <= box["y"]
    )


def draw_graph(seed: int) -> tuple[list[Any], list[Any]]:
    dice = random.Random(seed)
    count = dice.randint(1, 14)
    nodes = [
        {"id": f"n{at}", "width": 100, "height": dice.randint(20, 60)}
        for at in range(count)
    ]
    pairs = [(a, b) for a in range(count) for b in range(count)]
    chosen = dice.sample(pairs, min(len(pairs), dice.randint(0, 2 * count)))
    return nodes, [{"from": f"n{a}", "to": f"n{b}"} for a, b in chosen]


def test_drawing_leads_down_without_overlaps(busy: ShownGroup, open_page: Open) -> None:
    page = open_page(busy)
    page.open("overview")
    for seed in range(GRAPHS):
        nodes, edges = draw_graph(seed)
        check_drawing(nodes, edges, lay_out(page, nodes, edges))


def check_drawing(nodes: list[Any], edges: list[Any], drawing: Any) -> None:
    places = [drawing["places"][node["id"]] for node in nodes]
    for place in places:
        assert 0 <= place["x"] <= place["x"] + place["width"] <= drawing["width"] + 1e-6
        assert (
            0 <= place["y"] <= place["y"] + place["height"] <= drawing["height"] + 1e-6
        )
    assert all(is_apart(box, other) for box, other in combinations(places, 2))
    for at, edge in enumerate(edges):
        if edge["from"] == edge["to"] or at in drawing["turned"]:
            continue
        above, below = drawing["places"][edge["from"]], drawing["places"][edge["to"]]
        assert above["y"] + above["height"] < below["y"]
        for bend in drawing["ways"][at] or []:
            assert all(is_apart(bend, place) for place in places)
    assert_no_cycle(
        [edge for at, edge in enumerate(edges) if at not in drawing["turned"]]
    )


def assert_no_cycle(edges: list[Any]) -> None:
    """What leads down has no cycle, so a drawing of a graph without one turns none."""
    left = [edge for edge in edges if edge["from"] != edge["to"]]
    while left:
        targets = {edge["to"] for edge in left}
        after = [edge for edge in left if edge["from"] in targets]
        assert len(after) < len(left)
        left = after
