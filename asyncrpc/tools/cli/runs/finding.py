"""Where an observer enters a group: at an address, or at a worker of a run."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asyncrpc import Options
from asyncrpc.core.host.run_places import places_here
from asyncrpc.errors import AuthenticationError, ConnectError, UsageError
from asyncrpc.tools.cli.runs.choosing import choose
from asyncrpc.tools.cli.runs.command import now_s
from asyncrpc.tools.cli.runs.listing import LiveRun, is_stopped, list_runs, users_of
from asyncrpc.tools.inspection.beside import look_beside
from asyncrpc.tools.inspection.local_socket import names_of
from asyncrpc.tools.inspection.machine.wording import duration
from asyncrpc.tools.inspection.observer import Observer
from asyncrpc.tools.inspection.records import NoAnswer
from asyncrpc.tools.inspection.run_note import RunNote, entry_in

ADDRESS_VARIABLE: Final = "ASYNCRPC_ADDRESS"
_TRIED_MAX: Final = 8  # workers of a run that are tried; each may take seconds


@dataclass(frozen=True, slots=True)
class GroupEntrance:
    """How a group is entered.

    Attributes:
        address: of a worker; empty: that of a worker of the run.
        run: the run whose workers are asked; None: an address is given.
    """

    options: Options
    address: str = ""
    run: LiveRun | None = None

    def observer(self) -> Observer:
        """Return an observer of the group, and of its users if it is a model."""
        run = self.run
        if run is None:
            return Observer(self.options)
        return Observer(self.options, find_beside=lambda: users_of(run))

    async def address_for(self, observer: Observer) -> str:
        """Return the address of a worker that answers."""
        if self.run is None:
            return self.address
        return await _address_in(self.run, observer)


def entrance(
    arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> GroupEntrance:
    """Return the group that a command means; blocks this thread.

    It is given by ADDRESS or --run, or both: a worker with the secret of the run;
    otherwise by the variable with an address, by the run to which this process belongs,
    or by the only run of this user.
    """
    if arguments.address and arguments.run:  # a run of several groups has one secret
        run = entrance_of(_run_meant(arguments.run, environ), environ)
        return GroupEntrance(run.options, arguments.address)
    address = arguments.address
    if not address and not arguments.run:
        address = environ.get(ADDRESS_VARIABLE)
    if address:
        return GroupEntrance(Options().with_environment(environ), address)
    return entrance_of(_run_meant(arguments.run, environ), environ)


def _run_meant(wanted: str | None, environ: Mapping[str, str]) -> LiveRun:
    listing = list_runs(places_here(environ))
    own = entry_in(environ)
    if wanted is None:
        for run in listing.runs:
            if run.path == own:
                return run
    return choose(listing, wanted, now_s())


def entrance_of(run: LiveRun, environ: Mapping[str, str]) -> GroupEntrance:
    """Return how the group of a run is entered."""
    if not run.notes:
        age = duration(max(0.0, now_s() - run.record.began_s))
        raise UsageError(
            f"run {run.id} has no listening worker (yet): it began {age} ago; see its "
            "output"
        )
    secret = run.secret_path
    options = Options(secret_file=str(secret)) if secret else Options()
    return GroupEntrance(options.with_environment(environ), run=run)


async def _address_in(run: LiveRun, observer: Observer) -> str:
    places = await asyncio.to_thread(_places, run)
    if not places:
        raise ConnectError(f"the workers of run {run.id} have no address")
    problems: list[Exception] = []
    for _, address in places:
        try:
            (await observer.connect(address)).close()
        except (ConnectError, AuthenticationError) as error:
            problems.append(error)
        else:
            return address
    for note, address in places:
        names = names_of(note.incarnation, [address])
        answer = await asyncio.to_thread(look_beside, names)
        if not isinstance(answer, NoAnswer):
            return address
    raise _none_answers(run, [note for note, _ in places], problems)


def _places(run: LiveRun) -> list[tuple[RunNote, str]]:
    """Return workers with an address each; stopped processes come last."""
    able = sorted(run.notes, key=lambda note: run.is_here and is_stopped(note))
    return [(note, _best(note.addresses)) for note in able if note.addresses][
        :_TRIED_MAX
    ]


def _best(addresses: Sequence[str]) -> str:
    """Return the address that needs no network, if there is one."""
    return min(addresses, key=lambda address: not address.startswith("uds:"))


def _none_answers(
    run: LiveRun, tried: Sequence[RunNote], problems: Sequence[Exception]
) -> Exception:
    names = ", ".join(note.name for note in tried)
    if all(isinstance(problem, AuthenticationError) for problem in problems):
        return AuthenticationError(
            f"the workers of run {run.id} ({names}) have another secret than the run: "
            "set ASYNCRPC_SECRET to theirs, and give the ADDRESS of one"
        )
    return ConnectError(
        f"no worker of run {run.id} answers: tried {names}; the first: {problems[0]}"
    )
