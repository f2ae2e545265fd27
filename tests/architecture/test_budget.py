"""The core, each part that stands on it, tests and docs have a ceiling of lines."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.sources import REPOSITORY

BUDGET: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("budget.toml").read_text(encoding="utf-8")
)
SLACK = 300  # so that a ceiling follows what is removed


def lines_of(pattern: str) -> int:
    files = (path for path in REPOSITORY.glob(pattern) if path.is_file())
    return sum(path.read_bytes().count(b"\n") for path in files)


@pytest.mark.parametrize("part", BUDGET)
def test_part_is_within_its_ceiling(part: str) -> None:
    ceiling, lines = BUDGET[part]["lines"], lines_of(BUDGET[part]["files"])
    assert lines <= ceiling, "remove lines, or say in `raised` what they buy"


@pytest.mark.parametrize("part", BUDGET)
def test_ceiling_follows_what_is_removed(part: str) -> None:
    ceiling, lines = BUDGET[part]["lines"], lines_of(BUDGET[part]["files"])
    assert ceiling - lines <= SLACK, f"lower the ceiling to {lines}"


def test_every_folder_has_a_ceiling() -> None:
    folders = {path.parent.name for path in REPOSITORY.glob("asyncrpc/*/__init__.py")}
    assert folders <= set(BUDGET)


def test_raised_ceilings_say_what_they_buy() -> None:
    for part in BUDGET.values():
        assert all(isinstance(text, str) and text for text in part["raised"])
