"""`asyncrpc dashboard`: serve the dashboard of a group from outside."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from typing import Final

from asyncrpc.core.host.secret_file import read_secret
from asyncrpc.core.multiprocessing.environment import new_secret
from asyncrpc.core.transport.address import is_loopback
from asyncrpc.errors import UsageError
from asyncrpc.serving.dashboard import observing_dashboard
from asyncrpc.serving.dashboard.mounting import AFTER_S, EVERY_S
from asyncrpc.serving.listening import check_where, listening
from asyncrpc.tools.cli.observing import add_entrance, seconds
from asyncrpc.tools.cli.runs.choosing import others_in
from asyncrpc.tools.cli.runs.finding import GroupEntrance, entrance
from asyncrpc.tools.inspection.observer import Observer
from asyncrpc.tools.inspection.questions import ObserverQuestions

PORT: Final = 8265
HOST: Final = "127.0.0.1"
TOKEN_VARIABLE: Final = "ASYNCRPC_DASHBOARD_TOKEN"  # noqa: S105  (its name)


def add_dashboard(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc dashboard`."""
    parser.description = (
        "Serve a page that shows a group: workers, calls, references, training, "
        "collectives and hangs; until Ctrl-C or SIGTERM, after which the exit code is "
        "0.  Viewers sign in with the group's secret or the token.  On a terminal it "
        "prints a link that signs in one browser, once."
    )
    add_entrance(parser)
    parser.add_argument(
        "--host",
        default=HOST,
        metavar="HOST",
        help=f"address of the interface to listen at (default: {HOST})",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        metavar="PORT",
        help=f"to listen at; 0: a free one (default: {PORT})",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with a token that also gives access (default: "
        f"${TOKEN_VARIABLE}, if it is set)",
    )
    parser.add_argument(
        "--every",
        type=seconds,
        default=EVERY_S,
        metavar="S",
        help=f"seconds between two looks (default: {EVERY_S:g})",
    )
    parser.add_argument(
        "--after",
        type=seconds,
        default=AFTER_S,
        metavar="S",
        help=f"seconds that a wait may take (default: {AFTER_S:g})",
    )
    parser.set_defaults(act=lambda arguments: asyncio.run(_serve(arguments)))


async def _serve(arguments: argparse.Namespace) -> int:
    check_where(arguments.host, arguments.port)
    group_entrance = await asyncio.to_thread(entrance, arguments)  # it reads files
    token = _token(arguments)
    if (
        token is None
        and group_entrance.options.secret_bytes is None
        and not is_loopback(arguments.host)
    ):
        raise UsageError(
            f"--host {arguments.host} would show the group to everyone, as it has no "
            f"secret; give --token-file or set {TOKEN_VARIABLE}"
        )
    async with group_entrance.observer() as observer:
        address = await group_entrance.address_for(observer)
        await _look_who_is_there(group_entrance, observer, address)
        is_gated = token is not None or group_entrance.options.secret_bytes is not None
        # Only the user sees the terminal; a file of output others may read.
        ticket = new_secret() if is_gated and sys.stdout.isatty() else None
        app = observing_dashboard(
            observer,
            address,
            token=token,
            ticket=ticket,
            every_s=arguments.every,
            after_s=arguments.after,
        )
        async with listening(
            "asyncrpc dashboard", app, arguments.host, arguments.port, guards=True
        ) as port:
            link = f"http://{_shown(arguments.host)}:{port}/"
            print(link if ticket is None else f"{link}#ticket={ticket}", flush=True)
            if ticket is None and token is None:
                _say_where_the_secret_is(group_entrance)
            await _until_signal()
    return 0


def _say_where_the_secret_is(group_entrance: GroupEntrance) -> None:
    """Name the file, if `asyncrpc run` or a model's process has made the secret."""
    path = None if group_entrance.run is None else group_entrance.run.secret_path
    if group_entrance.run is not None and path is not None:
        print(
            f"sign in with the secret of {group_entrance.run.id}, which is in {path}",
            file=sys.stderr,
            flush=True,
        )


async def _look_who_is_there(
    group_entrance: GroupEntrance, observer: Observer, address: str
) -> None:
    """Report problems at once, and which workers of a run are in another group."""
    questions = ObserverQuestions(observer, address)
    try:
        known = {
            record.member.incarnation for record in await questions.first_records()
        }
    except TimeoutError:  # the worker is busy: the page will say so
        return
    finally:
        questions.close()
    if group_entrance.run is not None and (
        words := others_in(group_entrance.run, known)
    ):
        print(words, file=sys.stderr, flush=True)


def _token(arguments: argparse.Namespace) -> str | None:
    if arguments.token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    token = read_secret(arguments.token_file, "--token-file")
    try:
        return token.decode("ascii")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--token-file: {arguments.token_file!r} must hold ASCII characters"
        ) from error


def _shown(host: str) -> str:
    if host in ("", "0.0.0.0", "::"):  # noqa: S104  (all interfaces, this host's too)
        return "localhost"
    return f"[{host}]" if ":" in host else host


async def _until_signal() -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, ended.set)
    try:
        await ended.wait()
    finally:
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signal_number)
