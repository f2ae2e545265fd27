"""The command line: reads arguments, calls the module that does the work."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from asyncrpc import __version__
from asyncrpc.cli.dashboard import add_dashboard
from asyncrpc.cli.doctor.command import add_doctor
from asyncrpc.cli.launch import Command, run_command
from asyncrpc.cli.looking import add_calls, add_stacks, add_status, add_why
from asyncrpc.cli.manifest.targets import add_manifest
from asyncrpc.cli.recorded import add_dump
from asyncrpc.cli.refs import add_refs
from asyncrpc.cli.runs.command import add_runs
from asyncrpc.cli.timeline import add_timeline
from asyncrpc.cli.top import add_top
from asyncrpc.cli.torch_dump import add_torch_dump
from asyncrpc.errors import AuthenticationError, ConnectError, UsageError
from asyncrpc.shortage import shortage_of

DISTRIBUTION: Final = "asyncrpc-torch"
_EXIT_USAGE: Final = 2  # as argparse does
_EXIT_SHORTAGE: Final = 1
_EXIT_PIPE: Final = 141  # as a shell reports SIGPIPE
_EXIT_INTERRUPT: Final = 130  # as it reports SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments, without the program's name; by default those of this
            process.

    Returns:
        The exit code.
    """
    arguments = make_parser().parse_args(argv)
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


def _run(arguments: argparse.Namespace) -> int:
    target: str = arguments.target
    if arguments.nproc < 1:
        raise UsageError(f"--nproc must be at least 1, not {arguments.nproc}")
    if arguments.grace is not None and not 0 < arguments.grace < math.inf:
        raise UsageError(f"--grace must be positive seconds, not {arguments.grace}")
    if not arguments.module and not Path(target).exists():
        raise UsageError(f"the file {target!r} does not exist; for a module, use -m")
    what = ("-m", target) if arguments.module else (target,)
    command = Command(
        arguments=(*what, *arguments.arguments),
        nprocs=arguments.nproc,
        threads=arguments.threads,
        grace_s=arguments.grace,
    )
    return asyncio.run(run_command(command, os.environ))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="asyncrpc", description="Asyncio-native RPC for PyTorch."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="start N processes of a script"))
    add_runs(commands.add_parser("runs", help="list the runs that are under way"))
    add_doctor(
        commands.add_parser(
            "doctor", help="check this host, or a group, and say what to do"
        )
    )
    add_why(commands.add_parser("why", help="say why a group is stuck"))
    add_stacks(commands.add_parser("stacks", help="show what its tasks wait for"))
    add_calls(commands.add_parser("calls", help="list its calls"))
    add_status(commands.add_parser("status", help="list its workers"))
    add_top(commands.add_parser("top", help="show how fast its workers work"))
    add_dashboard(commands.add_parser("dashboard", help="show all of it as a page"))
    add_refs(commands.add_parser("refs", help="list its remote references"))
    add_timeline(
        commands.add_parser("timeline", help="write what it did as a timeline")
    )
    add_dump(commands.add_parser("dump", help="write all its state into a file"))
    add_torch_dump(
        commands.add_parser("torch-dump", help="write its collectives for torchfrtrace")
    )
    add_manifest(commands.add_parser("manifest", help="write a scheduler's file"))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start N processes of a script on this host.  Each finds RANK, WORLD_SIZE, "
        "MASTER_ADDR and the rest as under torchrun, and one secret for all.  The "
        "first failure stops the others, and its exit code is that of asyncrpc run.  "
        "Meanwhile `asyncrpc status`, `why` and the like find its workers without an "
        "address."
    )
    parser.set_defaults(act=_run)
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="how many")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="T",
        help="threads that torch uses in each (default: an equal share of the cores)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL, for programs that save in between: see"
        " asyncrpc.Preemption (default: 1, and 2 after a failure)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="TARGET is a module"
    )
    parser.add_argument("target", metavar="TARGET", help="the script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
    )


def _version() -> str:
    torch_and_python = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{DISTRIBUTION} {__version__}, {torch_and_python}"
