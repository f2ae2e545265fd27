"""Which files of the package run, call by call."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Self

import asyncrpc

PACKAGE = Path(asyncrpc.__file__).parent.as_posix() + "/"


class Visits:
    """The file of each Python call of the package, in order, while it is set.

    Threads that begin meanwhile count as well; a thread that runs already does not.
    """

    def __init__(self) -> None:
        self.files: list[str] = []

    def __enter__(self) -> Self:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            self.files.append(file.removeprefix(PACKAGE))


def shortest(walks: list[Visits]) -> list[str]:
    """Return the walk through the fewest files.

    First walks introduce functions and start threads; a heartbeat may fall into any.
    """
    return min((walk.files for walk in walks), key=lambda files: len(set(files)))
