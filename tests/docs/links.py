"""The links of a Markdown page, and the anchors that links may point to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FENCED = re.compile(r"^ *(`{3,}).*?^ *\1`* *$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)
NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


def links_of(page: str) -> list[str]:
    """Return the targets of a page's links; code holds none."""
    return LINK.findall(INLINE_CODE.sub("``", FENCED.sub("", page)))


def anchors_of(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    anchors: set[str] = set()
    for heading in HEADING.findall(FENCED.sub("", page)):
        slug = NOT_IN_ANCHORS.sub("", heading.lower()).replace(" ", "-")
        again = 0
        while (anchor := f"{slug}-{again}" if again else slug) in anchors:
            again += 1
        anchors.add(anchor)
    return anchors


def broken_links(path: Path) -> Iterator[str]:
    """Yield what is wrong with the links of a page to files and headings."""
    for link in links_of(path.read_text("utf-8")):
        if "://" in link or link.startswith("mailto:"):
            continue  # of others, and not ours to look at: tests stay on this host
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors_of(target.read_text("utf-8")):
            yield f"{link}: the page has no such heading"
