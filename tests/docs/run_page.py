"""Run the blocks of one page.

Blocks may `await` at their top level: then the page is run inside one event loop.  The
page is a module of its own, `page`, found by that name: what is defined in it can be
called by name, and processes that the page starts can import nothing of it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

from tests.docs.blocks import Block, blocks_of


def compile_block(path: Path, block: Block) -> CodeType:
    """Compile a block so that tracebacks show the page's own lines."""
    source = "\n" * block.line + block.source
    code: CodeType = compile(source, path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return code


async def run_page(codes: Sequence[CodeType], module: types.ModuleType) -> None:
    """Run blocks in one event loop, in one namespace."""
    for code in codes:
        result = eval(code, vars(module))  # noqa: S307  our own documentation
        if inspect.iscoroutine(result):
            await result


def main(path: Path) -> None:
    """Run a page: in an event loop if any block awaits, else without one."""
    codes = [compile_block(path, block) for block in blocks_of(path.read_text("utf-8"))]
    module = types.ModuleType("page")
    sys.modules["page"] = module  # functions are sent by the name of their module
    if any(code.co_flags & inspect.CO_COROUTINE for code in codes):
        asyncio.run(run_page(codes, module))
        return
    for code in codes:
        exec(code, vars(module))  # noqa: S102  likewise


def run_apart(page: Path, folder: Path, printed: Path, errors: Path) -> None:
    """Run a page in a process of its own.

    Args:
        page: the page.
        folder: where it runs.
        printed: the file that gets its standard output.
        told: the file that gets its standard error.
    """
    for path, descriptor in ((printed, 1), (errors, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # for what it starts
    main(page)
