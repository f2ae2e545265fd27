"""The reader of pages: what runs, and what must say why it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import Block, PageError, blocks_of
from tests.docs.run_page import main


def fenced(info: str, body: str = "x = 1", above: str = "") -> str:
    return f"{above}\n```{info}\n{body}\n```\n"


def test_python_blocks_run_and_others_do_not() -> None:
    page = fenced("python") + fenced("console") + fenced("") + fenced("text")
    assert blocks_of(page) == [Block(2, "x = 1\n")]


def test_block_in_a_list_loses_its_indentation() -> None:
    page = "1.  One:\n\n    ```python\n    if x:\n        y\n    ```\n"
    assert blocks_of(page) == [Block(3, "if x:\n    y\n")]


def test_page_about_pages_may_show_a_fence() -> None:
    assert blocks_of("````text\n```python\nx\n```\n````\n") == []


def test_block_that_does_not_run_needs_a_reason() -> None:
    page = fenced("python no-run", above="<!-- not run: needs two hosts -->")
    assert blocks_of(page) == []
    with pytest.raises(PageError, match=r"line 2: .* needs its reason"):
        blocks_of(fenced("python no-run"))
    with pytest.raises(PageError, match="needs its reason"):
        blocks_of(fenced("python no-run", above="<!-- not run: -->"))


@pytest.mark.parametrize("info", ["python3", "py", "pycon", "python norun"])
def test_misspelled_language_is_refused(info: str) -> None:
    with pytest.raises(PageError, match="write ```python"):
        blocks_of(fenced(info))


def test_fence_that_never_closes_is_found() -> None:
    with pytest.raises(PageError, match="line 1: the fence never closes"):
        blocks_of("```python\nx = 1\n")


def test_blocks_share_a_namespace_and_may_await(tmp_path: Path) -> None:
    out = tmp_path / "out"
    page = tmp_path / "page.md"
    page.write_text(
        fenced("python", "import asyncio\nloop = asyncio.get_running_loop()")
        + fenced("python", "assert await asyncio.sleep(0, 7) == 7")
        + fenced(
            "python",
            "assert loop is asyncio.get_running_loop()\n"
            f"open({str(out)!r}, 'w').close()",
        )
    )
    main(page)
    assert out.exists()


def test_failing_block_names_its_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n" + fenced("python", "a = 1\nraise KeyError(a)"))
    with pytest.raises(KeyError) as caught:
        main(page)
    assert (caught.traceback[-1].lineno + 1, str(caught.traceback[-1].path)) == (
        5,
        str(page),
    )
