"""The Python blocks of a Markdown page, and the program that they make together.

A fence that opens with ```python is run; the blocks of a page share one namespace, in
their order, as a reader would type them.  One that cannot run is marked, and says why:

    <!-- not run: needs two hosts -->
    ```python no-run
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>.*)$")
REASON = re.compile(r"^\s*<!-- not run: \S.* -->\s*$")
LANGUAGES = {"python", "py", "python3", "pycon"}


class PageError(ValueError):
    """A block is marked in a way that no reader of the page was told of."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block to run.

    Attributes:
        line: number of the fence's line, from 1.
        source: its text, without the fence's indentation.
    """

    line: int
    source: str


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page that run, in their order.

    Raises:
        PageError: a block is not run and no reason is given in the line above, or its
            fence says something unknown, or never closes.
    """
    lines = page.splitlines()
    blocks: list[Block] = []
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        end = _end_of(lines, at, opening)
        above = lines[at - 1] if at else ""
        if _is_run(opening["info"].split(), above, at + 1):
            indent = len(opening["indent"])
            body = [line[indent:] for line in lines[at + 1 : end]]
            blocks.append(Block(at + 1, "\n".join(body) + "\n"))
        at = end + 1
    return blocks


def _end_of(lines: list[str], at: int, opening: re.Match[str]) -> int:
    for number in range(at + 1, len(lines)):
        closing = FENCE.match(lines[number])
        if closing is None or closing["info"].strip():
            continue
        if len(closing["ticks"]) >= len(opening["ticks"]):
            return number
    raise PageError(f"line {at + 1}: the fence never closes")


def _is_run(info: list[str], above: str, line: int) -> bool:
    if not info or info[0] not in LANGUAGES:
        return False
    match info:
        case ["python"]:
            return True
        case ["python", "no-run"] if REASON.match(above):
            return False
        case ["python", "no-run"]:
            raise PageError(
                f"line {line}: a block that is not run needs its reason in the line "
                "above: <!-- not run: reason -->"
            )
        case _:
            raise PageError(
                f"line {line}: ```{' '.join(info)} would not be run; write ```python"
            )
