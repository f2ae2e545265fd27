"""The table "Where is it decided?" names files that exist and what they define."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path("docs/explanation/architecture.md")
SECTION = re.compile(r"^## Where is it decided\?$(.*?)^## ", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
FILE = re.compile(r"asyncrpc/[\w/]+\.py")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
# Code of the third column that is no definition: an option, and a member of an enum.
OTHER_CODE = {"out=", "Sender.GUEST"}


def rows() -> list[list[str]]:
    section = SECTION.search(PAGE.read_text("utf-8"))
    assert section is not None
    lines = section.group(1).strip().splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines]


def defined_in(path: Path) -> Iterator[str]:
    """Yield the functions and classes of a file; methods as `Class.method`."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{node.name}.{member.name}"


def test_the_table_answers_thirty_questions() -> None:
    assert len(rows()) >= 30


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_names_files_and_functions_that_exist(row: list[str]) -> None:
    _, file, answer = row
    words = CODE.findall(answer)
    paths = [Path(word) for word in [*CODE.findall(file), *words] if FILE.match(word)]
    names = {word for word in words if NAME.fullmatch(word)} - OTHER_CODE
    assert paths
    assert names
    defined = {name for path in paths for name in defined_in(path)}
    assert names <= defined
