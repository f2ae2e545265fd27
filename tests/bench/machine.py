"""What was measured, and on what: the figures mean nothing without it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

import asyncrpc


def describe() -> str:
    """Return the machine and the versions in one line."""
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    huge = pages.read_text("utf-8").partition("[")[2].partition("]")[0]
    return ", ".join(
        (
            f"{_processor()}, {os.cpu_count()} cores",
            f"{_memory_gib()} GiB",
            f"Linux {platform.release()}, huge pages {huge or 'unknown'}",
            f"Python {platform.python_version()}",
            f"torch {torch.__version__}",
            f"uvloop {importlib.metadata.version('uvloop')}",
            f"asyncrpc {asyncrpc.__version__}",
        )
    )


def versions(packages: Iterable[str]) -> str:
    return ", ".join(
        f"{package} {importlib.metadata.version(package)}" for package in packages
    )


def load() -> float:
    """Return how many threads wanted a core in the last minute: best near 0."""
    return round(os.getloadavg()[0], 1)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
