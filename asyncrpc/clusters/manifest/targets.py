"""The targets of `asyncrpc manifest`, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from asyncrpc.clusters.manifest import slurm
from asyncrpc.clusters.manifest.kubernetes import command as kubernetes


class ManifestTarget(Protocol):
    """The interface of a target's module."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this target."""

    def manifest(self, arguments: argparse.Namespace) -> str:
        """Return the text of the file."""


TARGETS: Final[Mapping[str, ManifestTarget]] = {"slurm": slurm, "k8s": kubernetes}


def add_manifest(parser: argparse.ArgumentParser) -> None:
    """Add the command `manifest` to the command line."""
    parser.description = "Write the file with which a scheduler starts a program."
    targets = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    for name, target in TARGETS.items():
        command = targets.add_parser(name, help=target.HELP)
        command.add_argument(
            "--file",
            type=Path,
            metavar="PATH",
            help="where to write; default: standard output",
        )
        target.add_arguments(command)
        command.set_defaults(act=_write, manifest=target.manifest)


def _write(arguments: argparse.Namespace) -> int:
    write: Callable[[argparse.Namespace], str] = arguments.manifest
    text = write(arguments)
    path: Path | None = arguments.file
    if path is None:
        print(text, end="")
    else:
        path.write_text(text, encoding="utf-8")
    return 0
