"""The command line: reads arguments, calls the module that does the work.

Only the module of the chosen command is loaded; `asyncrpc --help` loads none.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch

from asyncrpc import __version__
from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.errors import AuthenticationError, ConnectError, UsageError

DISTRIBUTION: Final = "asyncrpc-torch"
# By name: its help; a module below asyncrpc, and its function that adds arguments.
COMMANDS: Final = {
    "run": ("start N processes of a script", "tools.cli.launch", "add_run"),
    "runs": ("list the runs that are under way", "tools.cli.runs.command", "add_runs"),
    "doctor": (
        "check this host, or a group, and say what to do",
        "tools.cli.doctor.command",
        "add_doctor",
    ),
    "why": ("say why a group is stuck", "tools.cli.looking", "add_why"),
    "stacks": ("show what its tasks wait for", "tools.cli.looking", "add_stacks"),
    "calls": ("list its calls", "tools.cli.looking", "add_calls"),
    "status": ("list its workers", "tools.cli.looking", "add_status"),
    "top": ("show how fast its workers work", "tools.cli.top", "add_top"),
    "dashboard": ("show all of it as a page", "tools.cli.dashboard", "add_dashboard"),
    "refs": ("list its remote references", "tools.cli.refs", "add_refs"),
    "timeline": (
        "write what it did as a timeline",
        "tools.cli.timeline",
        "add_timeline",
    ),
    "dump": ("write all its state into a file", "tools.cli.recorded", "add_dump"),
    "torch-dump": (
        "write its collectives for torchfrtrace",
        "tools.cli.torch_dump",
        "add_torch_dump",
    ),
    "manifest": (
        "write a scheduler's file",
        "clusters.manifest.targets",
        "add_manifest",
    ),
}
_EXIT_USAGE: Final = 2  # as argparse does
_EXIT_SHORTAGE: Final = 1
_EXIT_PIPE: Final = 141  # as a shell reports SIGPIPE
_EXIT_INTERRUPT: Final = 130  # as it reports SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments, without the program's name; by default those of this
            process.
    """
    arguments = make_parser(is_complete=False).parse_args(argv)
    try:
        act: Callable[[argparse.Namespace], int] = arguments.act
        code = act(arguments)
        sys.stdout.flush()
    except (AuthenticationError, ConnectError, UsageError) as error:
        print(f"asyncrpc {arguments.command}: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except KeyboardInterrupt:  # Ctrl-C needs no traceback
        return _EXIT_INTERRUPT
    except BrokenPipeError:  # `asyncrpc status | head`: the reader has closed the pipe
        _drop_output()
        return _EXIT_PIPE
    except OSError as error:
        if not (why := shortage_of(error)):
            raise
        print(f"asyncrpc {arguments.command}: {why}", file=sys.stderr)
        _drop_output()
        return _EXIT_SHORTAGE
    return code


def _drop_output() -> None:
    """Drop what is not written yet, also by the interpreter at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _CommandParser(argparse.ArgumentParser):
    """The parser of one command, whose module is loaded when it is chosen."""

    add: Callable[[], None] | None = None  # adds its arguments

    def complete(self) -> None:
        """Add the arguments of the command, unless that is done."""
        add, self.add = self.add, None
        if add is not None:
            add()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        return super().parse_known_args(args, namespace)


def make_parser(*, is_complete: bool = True) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        is_complete: whether the parsers of all commands have their arguments; if not, a
            command's module is loaded when the command is parsed.
    """
    parser = argparse.ArgumentParser(
        prog="asyncrpc", description="Asyncio-native RPC for PyTorch."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        parser_class=_CommandParser,
    )
    for name, (help_, module, function) in COMMANDS.items():
        command = commands.add_parser(name, help=help_)
        command.add = partial(_add_arguments, command, module, function)
        if is_complete:
            command.complete()
    return parser


def _add_arguments(parser: argparse.ArgumentParser, module: str, function: str) -> None:
    getattr(import_module(f"asyncrpc.{module}"), function)(parser)


def _version() -> str:
    torch_and_python = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{DISTRIBUTION} {__version__}, {torch_and_python}"
