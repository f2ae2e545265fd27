"""The program and the command of docs/how-to/run-on-kubernetes.md."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from asyncrpc.tools.cli.main import main
from tests.clusters.kubernetes.controllers import NAMESPACE

_PAGE: Final = Path(__file__).parents[3] / "docs/how-to/run-on-kubernetes.md"
_PROGRAM: Final = re.compile(r"^```python no-run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND: Final = re.compile(r"^\$ asyncrpc (manifest k8s .*) > \S+$", re.MULTILINE)


def program() -> str:
    """Return the source of the page's program."""
    (source,) = _PROGRAM.findall(_PAGE.read_text("utf-8"))
    return str(source)


def command() -> list[str]:
    """Return the arguments of the page's command."""
    (text,) = _COMMAND.findall(_PAGE.read_text("utf-8"))
    return shlex.split(text)


def objects_of(arguments: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Run `asyncrpc manifest k8s`; return the objects that it writes."""
    file = folder / "manifest.json"
    more = ["--format", "json", "--namespace", NAMESPACE, "--file", str(file)]
    assert main([*arguments[:2], *more, *arguments[2:]]) == 0
    return list(json.loads(file.read_text("utf-8"))["items"])
