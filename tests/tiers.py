"""Tiers: which tests a change is tested with, and how the others are divided.

The quick tier is for every change: minutes on two cores.  The deep tier is the rest.

- A test that is marked `slow` is deep.
- In a folder with a share in `SHARES` one property is tested in many cases: those that
  are not of that share are deep.  Each function keeps at least one quick case.
- All other tests are quick.

`--part N/OF` leaves the N-th of OF parts of the tier, so that several machines, or
several changes, can share the deep one.  The cases of one function are in one part:
they may share what was costly to make.

Both choices depend on names alone, so they are the same in every run and process.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self, TypeAlias

import pytest

Tier: TypeAlias = Literal["quick", "deep", "all"]

# Of the cases of each function, by the longest prefix of its node id: as many as let
# `make test` end within ten minutes on two cores.
SHARES: Final[Mapping[str, float]] = {
    "tests/docs/test_migration.py": 0.25,
    "tests/integration/": 0.1,
    "tests/numerics/": 0.25,
    "tests/simulation/": 0.5,
}
_PART: Final = re.compile(r"(\d+)/(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Part:
    """The `number`-th of `of` parts, from 1."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `N/OF`."""
        match = _PART.fullmatch(text)
        number, of = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= of:
            raise ValueError(f"a part must be like 2/4, not {text!r}")
        return cls(number, of)

    def has(self, node_id: str) -> bool:
        return _number_of(function_of(node_id)) % self.of == self.number - 1


def function_of(node_id: str) -> str:
    """Return the node id of a test without its case."""
    return node_id.partition("[")[0]


def share_of(node_id: str, shares: Mapping[str, float]) -> float:
    """Return which share of a function's cases is quick."""
    prefixes = [prefix for prefix in shares if node_id.startswith(prefix)]
    return shares[max(prefixes, key=len)] if prefixes else 1.0


def quick_among(
    node_ids: Iterable[str], shares: Mapping[str, float] = SHARES
) -> set[str]:
    """Return which of tests that are not slow are in the quick tier.

    A case that is quick stays so when others come, unless it was the only one.
    """
    cases: defaultdict[str, list[str]] = defaultdict(list)
    for node_id in node_ids:
        cases[function_of(node_id)].append(node_id)
    quick = set()
    for function, of_it in cases.items():
        below = share_of(function, shares) * _NUMBERS
        chosen = [node_id for node_id in of_it if _number_of(node_id) < below]
        quick.update(chosen or [min(of_it, key=_number_of)])
    return quick


_NUMBERS: Final = 1 << 64


def _number_of(text: str) -> int:
    """Return a number below `_NUMBERS` that looks drawn, and is always the same."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


# --- the plugin ----------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption(
        "--tier", choices=["quick", "deep", "all"], default="all", help="which tests"
    )
    group.addoption(
        "--part", type=_part, default=Part(), metavar="N/OF", help="a part of the tier"
    )


def _part(text: str) -> Part:
    try:
        return Part.parse(text)
    except ValueError as error:
        raise pytest.UsageError(f"--part: {error}") from None


@pytest.hookimpl(trylast=True)  # marks may be added until then
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    tier: Tier = config.getoption("tier")
    part: Part = config.getoption("part")
    quick = quick_among(item.nodeid for item in items if not is_slow(item))
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        fits = tier == "all" or (item.nodeid in quick) == (tier == "quick")
        (kept if fits and part.has(item.nodeid) else left).append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)


def is_slow(test: pytest.Item) -> bool:
    return test.get_closest_marker("slow") is not None
