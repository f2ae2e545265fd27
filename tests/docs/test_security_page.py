"""What the pages promise of security is tested: each claim names its tests.

A claim is a paragraph, an item of a list, or a row of a table.  Its tests are in a
footnote, or, of the table of attackers, in a column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

SECURITY: Final = Path("docs/explanation/security.md")
# Sections of other pages in which each paragraph, item and row is a claim.
SECTIONS: Final = {
    Path("docs/reference/serving.md"): "Who may ask",
    Path("docs/how-to/dashboard.md"): "Who may look",
    Path("docs/how-to/join-from-outside.md"): "What a token is worth",
}
# Elsewhere: what says it of one of these is a claim, or leads to the page.
ABOUT: Final = re.compile(
    r"[Oo]ther users |[Aa]nother user (?!than)|[Ss]trangers?\b|[Gg]uests? |page of"
    r" another site|may not look|without the secret|needs the secret"
)
TEACHING: Final = ("explanation", "how-to")
# What is no promise: advice, figures, and what other programs do.
PLAIN_SECTIONS: Final = {
    "How it is tested",
    "Over a network",
    "With certificates of your own",
}
PLAIN: Final = (
    "A peer that may call a worker runs code on it",  # what the page is about
    "`Policy.STRICT`: nothing is",  # its sentences are in the list below it, too
    "What `STRICT` does not promise",
    "What it costs, over TCP on loopback",
    "`torch.distributed.debug.start_debug_server` opens a port",
    "Files of `dump_dir` are written",
    "The page that [`serving.debug_handler`]",
    "torch's debug server, if you start it",
    "- torch's debug server, if you start it",
    "- Nothing hides who talks to whom",
    "- Revocation lists are not read",
    "Certificates are read once",
    "With a certificate for each worker",
    "An authority, and one certificate",
)
NOTE: Final = re.compile(r"\[\^([a-z0-9-]+)\]")
DEFINED: Final = re.compile(r"^\[\^([a-z0-9-]+)\]: (.*)$", re.MULTILINE)


class Claim(NamedTuple):
    """A part of a page.

    Attributes:
        section: the heading above it.
        text: of it.
    """

    section: str
    text: str


def claims_of(page: Path) -> Iterator[Claim]:
    """Yield the paragraphs, list items and rows of a page, without its code."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    text = re.sub(r"(?s)<!--.*?-->", "", DEFINED.sub("", text))
    section = ""
    for block in re.split(r"\n\s*\n|\n(?=[-|] |\d+\. )", text):
        stripped = block.strip()
        if stripped.startswith("#"):
            section = stripped.lstrip("# ")
        elif stripped and not stripped.startswith(("| | ", "| ---", "| attacker |")):
            yield Claim(section, stripped)


def named_in(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def is_there(test: str) -> bool:
    """Return whether a test exists: a file, or a function in it."""
    path, _, name = test.partition("::")
    if not Path(path).is_file():
        return False
    return not name or f"def {name}(" in Path(path).read_text("utf-8")


PAGES: Final = [
    page
    for folder in TEACHING
    for page in sorted(Path("docs", folder).glob("*.md"))
    if DEFINED.search(page.read_text("utf-8"))
]


@pytest.mark.parametrize("page", sorted({*PAGES, *SECTIONS}), ids=str)
def test_footnotes_name_existing_tests(page: Path) -> None:
    text = page.read_text("utf-8")
    defined = dict(DEFINED.findall(text))
    used = set(NOTE.findall(DEFINED.sub("", text)))
    assert used == set(defined)
    assert used
    for name, tests in defined.items():
        named = named_in(tests)
        assert named, name
        for test in named:
            assert is_there(test), f"{name}: {test}"


def test_every_claim_of_the_page_names_its_tests() -> None:
    claims = list(claims_of(SECURITY))
    assert len(claims) > 60
    for claim in claims:
        if claim.section in PLAIN_SECTIONS or claim.text.startswith(PLAIN):
            continue
        if claim.section.startswith("What an attacker can"):
            *_, column, _ = claim.text.split("|")
            known = {path.stem for path in Path("tests").rglob("test_*.py")}
            tests = set(named_in(column))
            assert tests <= known, claim.text
            is_whole = "everything that the worker can" in claim.text
            assert tests or is_whole, claim.text
        elif claim.section != "TLS" or not claim.text.startswith("|"):
            assert NOTE.search(claim.text), f"{claim.section}: {claim.text}"


@pytest.mark.parametrize(("page", "section"), SECTIONS.items(), ids=str)
def test_section_of_claims_names_its_tests(page: Path, section: str) -> None:
    asked = [claim for claim in claims_of(page) if claim.section == section]
    assert asked
    for claim in asked:
        if not claim.text.startswith("| the group has"):
            assert NOTE.search(claim.text), claim.text


def test_claims_of_other_pages_name_tests_or_link_to_the_page() -> None:
    for page in (page for each in TEACHING for page in Path("docs", each).glob("*.md")):
        for claim in claims_of(page) if page != SECURITY else ():
            if ABOUT.search(claim.text):
                is_tested = NOTE.search(claim.text) or SECURITY.name in claim.text
                assert is_tested, f"{page}: {claim.text}"
