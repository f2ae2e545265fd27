"""What a terminal or a notebook shows while a cluster starts: one line, then nothing.

    cluster: 6 of 8 workers run, waiting for w3, w5 (4 s)

Where output goes to a file or a pipe, nothing is shown.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from html import escape
from typing import Any, Final

REDRAW_S: Final = 0.5  # seconds are counted
DELAY_S: Final = 0.2  # what is quicker needs no line
NAMES_MAX: Final = 3
WIDTH_MAX: Final = 79  # a line that wraps cannot be taken back


class ProgressLine:
    """The last line of a terminal, or one below a cell, as long as something starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text = ""  # what stands there
        self._cell: Any = None  # where IPython shows it

    @contextmanager
    def shown(self, describe: Callable[[], str]) -> Iterator[None]:
        """Show a text and the seconds inside the block, anew every half second."""
        is_terminal = sys.stderr is not None and bool(sys.stderr.isatty())
        if not (is_terminal or _is_in_notebook()):
            yield
            return
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        timers: list[asyncio.TimerHandle] = []  # one: the next

        def draw() -> None:
            timers[:] = [loop.call_later(REDRAW_S, draw)]
            self._replace(f"{describe()} ({loop.time() - began_s:.0f} s)"[:WIDTH_MAX])

        timers.append(loop.call_later(DELAY_S, draw))
        try:
            yield
        finally:
            timers[0].cancel()
            self._replace("")

    def hide(self) -> None:
        """Take the line away before others are written, on any thread."""
        if self._text and self._cell is None:
            self._replace("")

    def _replace(self, text: str) -> None:
        with self._lock:
            if text == self._text:
                return
            before, self._text = self._text, text
            if _is_in_notebook():
                self._show_in_cell(text)
                return
            written = f"\r{text:<{len(before)}}" + ("" if text else "\r")
            # The program may have closed the stream.
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(written)
                sys.stderr.flush()

    def _show_in_cell(self, text: str) -> None:
        display = importlib.import_module("IPython.display")  # loaded already
        html = f"<em>{escape(text)}</em>" if text else ""
        shown = {"text/html": html, "text/plain": text}
        if self._cell is None:
            self._cell = display.display(shown, raw=True, display_id=True)
        else:
            self._cell.update(shown, raw=True)
        if not text:
            self._cell = None


def _is_in_notebook() -> bool:
    return type(sys.stderr).__module__.partition(".")[0] == "ipykernel"


def starting(name: str, ready: int, absent: list[str]) -> str:
    """Return the text for workers that start, of which these cannot be called yet."""
    shown, rest = absent[:NAMES_MAX], len(absent) - NAMES_MAX
    names = ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
    return f"{name}: {ready} of {ready + len(absent)} workers run, waiting for {names}"
