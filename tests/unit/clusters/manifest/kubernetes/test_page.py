"""The page on Kubernetes names every kind of workload, and only options that exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from asyncrpc.clusters.manifest.kubernetes.command import add_arguments
from asyncrpc.clusters.manifest.kubernetes.kinds import KINDS

PAGE = (Path(__file__).parents[5] / "docs/how-to/run-on-kubernetes.md").read_text(
    "utf-8"
)


def test_page_lists_every_kind() -> None:
    assert set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)) == KINDS.keys()


def test_page_names_existing_options_only() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = set(re.findall(r"--[a-z-]+", parser.format_help()))
    lines = (line for line in PAGE.splitlines() if "kubectl create" not in line)
    assert set(re.findall(r"--[a-z][a-z-]+", "\n".join(lines))) <= known
