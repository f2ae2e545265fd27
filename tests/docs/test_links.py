"""Links between pages lead somewhere, and every page can be reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.links import anchors_of, broken_links, links_of

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
PAGES = [
    README,
    REPOSITORY / "CHANGELOG.md",
    REPOSITORY / "examples" / "README.md",
    *sorted(REPOSITORY.glob("docs/**/*.md")),
]


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda p: p.relative_to(REPOSITORY).as_posix()
)
def test_links_resolve(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_every_page_is_reachable_from_the_readme() -> None:
    reached: set[Path] = set()
    todo = [README]
    while todo:
        page = todo.pop().resolve()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        names = [link.partition("#")[0] for link in links_of(page.read_text("utf-8"))]
        todo += [page.parent / name for name in names if name and "://" not in name]
    assert {page.resolve() for page in PAGES} - reached == set()


def test_index_lists_every_decision_by_its_number() -> None:
    index = (REPOSITORY / "docs" / "index.md").read_text("utf-8")
    rows = re.findall(r"^- \[(\d+)\. .*\]\(adr/(.*)\)$", index, re.MULTILINE)
    decisions = sorted((REPOSITORY / "docs" / "adr").iterdir())
    assert rows == [(str(int(path.name[:4])), path.name) for path in decisions]


def test_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# Two words\n")
    page.write_text(
        "# One\n[a](other.md#two-words) [b](gone.md) [c](other.md#gone) [d](#one)\n"
        "`[e](in-code.md)` [f](https://example.org/gone)\n\n```text\n[g](fenced.md)\n```\n"
    )
    assert list(broken_links(page)) == [
        "gone.md: there is no such file",
        "other.md#gone: the page has no such heading",
    ]


def test_anchors_are_those_of_github() -> None:
    page = "# A `code` word\n## What's new?\n## Same\n## Same\n```text\n# none\n```\n"
    assert anchors_of(page) == {"a-code-word", "whats-new", "same", "same-1"}
