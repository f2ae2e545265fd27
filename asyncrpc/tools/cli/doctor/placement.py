"""The values that `env://` finds in this process, their sources, and what is missing.

The facts of this process are gathered first; `diagnose` then decides from the variables
and these facts only.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrpc import Options
from asyncrpc.core.environment import LaunchPlacement, LaunchValue, read_all, resolve
from asyncrpc.core.environment.torchrun import BY_HAND
from asyncrpc.core.environment.values import Field, spoken
from asyncrpc.core.transport.address import is_loopback
from asyncrpc.core.transport.interfaces import host_addresses
from asyncrpc.errors import UsageError
from asyncrpc.tools.cli.table import columns_here, lines_of


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about this process and its host.

    Attributes:
        addresses: at which other hosts may reach this one, the best first.
        trouble: what is wrong with the options that the environment sets.
    """

    has_secret: bool
    addresses: tuple[str, ...]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of `env://` in this process.

    Attributes:
        launcher: what has started this process; "" if that is not known.
        values: the values found; if they are contradictory, all of them.
        problems: why `env://` fails here.
        warnings: what may go wrong later.
    """

    launcher: str
    outer: tuple[str, ...]
    values: tuple[LaunchValue, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def host_facts(options: Options | UsageError) -> HostFacts:
    """Gather the facts about this process and its host."""
    if isinstance(options, UsageError):
        return HostFacts(has_secret=False, addresses=(), trouble=str(options))
    try:
        addresses = host_addresses(options.network.interface)
    except UsageError as error:
        return HostFacts(has_secret=False, addresses=(), trouble=str(error))
    return HostFacts(options.secret is not None, tuple(map(str, addresses)))


def diagnose(
    environ: Mapping[str, str], facts: HostFacts, *, launcher_pid: int | None = None
) -> Diagnosis:
    """Decide what is missing, and what may go wrong."""
    problems = [facts.trouble] if facts.trouble else []
    try:
        placement = resolve(environ, launcher_pid=launcher_pid)
    except UsageError as error:
        problems.append(str(error))
        values = tuple(_all_values(environ))
        return Diagnosis("", (), values, tuple(problems), ())
    problems += _missing(placement)
    values = tuple(
        placement.values[field] for field in Field if field in placement.values
    )
    warnings = tuple(_of_network(placement, facts))
    return Diagnosis(
        placement.launcher, placement.outer, values, tuple(problems), warnings
    )


def _all_values(environ: Mapping[str, str]) -> Iterable[LaunchValue]:
    with contextlib.suppress(UsageError):
        for reading in read_all(environ):
            yield from reading.values


def _missing(placement: LaunchPlacement) -> Iterable[str]:
    rank, size = placement.rank, placement.world_size
    missing = []
    if rank is None:
        missing.append("its rank (RANK)")
    if size is None:
        missing.append("the number of workers (WORLD_SIZE)")
    if placement.host is None:
        missing.append("the host of the meeting point (MASTER_ADDR)")
    if placement.port is None:
        missing.append("the port of the meeting point (MASTER_PORT)")
    if missing:
        yield f"env:// does not find {spoken(missing)} ({placement.advice()})"
    if rank is not None and size is not None and rank >= size:
        yield f"rank {rank} is not in a world of {size} workers"


def _of_network(placement: LaunchPlacement, facts: HostFacts) -> Iterable[str]:
    """Yield what prevents connections with other hosts."""
    if facts.trouble or is_one_host(placement):
        return
    if not facts.has_secret:
        yield (
            "no secret: workers of other hosts are refused; set ASYNCRPC_SECRET to the "
            "same 32 random bytes everywhere (openssl rand -hex 32), or "
            "ASYNCRPC_SECRET_FILE to a file of mode 600 that holds them, or use TLS"
        )
    if all(map(is_loopback, facts.addresses)):
        yield (
            "this host has no address but loopback: other hosts cannot reach it; give "
            "it a network interface"
        )


def is_one_host(placement: LaunchPlacement) -> bool:
    """Return whether all workers are on one host, as far as is known."""
    if placement.host is not None and is_loopback(placement.host):
        return True
    size = placement.world_size
    return size is None or size in {1, placement.local_world_size}


def as_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis for programs."""
    values: list[dict[str, Any]] = [
        {
            "field": value.field.value,
            "value": value.content,
            "origin": value.origin,
            "launcher": value.launcher,
            "derived": value.is_derived,
        }
        for value in diagnosis.values
    ]
    return {
        "launcher": diagnosis.launcher,
        "outer": diagnosis.outer,
        "values": values,
        "problems": diagnosis.problems,
        "warnings": diagnosis.warnings,
    }


def as_text(diagnosis: Diagnosis) -> str:
    """Return a diagnosis for people: a table, then what to do."""
    around = f", inside {' and '.join(diagnosis.outer)}" if diagnosis.outer else ""
    lines = [f"started by {diagnosis.launcher}{around}"]
    if diagnosis.launcher in {"", BY_HAND}:
        others = _other_launchers(diagnosis)
        lines = [f"no launcher is known to have started this process{others}"]
    rows = [
        (
            value.field.value,
            str(value.content),
            f"derived from {value.origin}" if value.is_derived else value.origin,
            value.launcher,
        )
        for value in diagnosis.values
    ]
    if rows:
        lines += [
            "",
            *lines_of([("what", "value", "from", "launcher"), *rows], wraps=True),
        ]
    for title, texts in (
        ("problem", diagnosis.problems),
        ("warning", diagnosis.warnings),
    ):
        for text in texts:
            lines += ["", *paragraph(f"{title}: {text}")]
    if not diagnosis.problems:
        lines += ["", "a worker can start here by env://"]
    return "\n".join(lines)


def paragraph(text: str) -> list[str]:
    """Return a text as lines, all but the first indented."""
    return textwrap.wrap(
        text,
        columns_here(),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _other_launchers(diagnosis: Diagnosis) -> str:
    launchers = sorted({value.launcher for value in diagnosis.values} - {BY_HAND})
    if diagnosis.launcher or not launchers:
        return ""
    return f", though variables of {spoken(launchers)} are set"
