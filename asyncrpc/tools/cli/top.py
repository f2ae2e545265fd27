"""`asyncrpc top`: how fast the workers of a group work."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Iterator
from typing import Any, Final

from asyncrpc.tools.cli.observing import (
    TROUBLE,
    add_observing,
    check_group,
    print_json,
    print_silent,
    print_table,
    silent_records,
)
from asyncrpc.tools.cli.table import line_of, lines_of
from asyncrpc.tools.inspection.group import GroupAnswers
from asyncrpc.tools.inspection.group_answers import events_of
from asyncrpc.tools.inspection.machine.rates import (
    CallRates,
    by_function,
    rates_of,
)
from asyncrpc.tools.inspection.machine.spans import WorkerEvents
from asyncrpc.tools.inspection.observer import Observer

WINDOW_S: Final = 5.0  # the time over which rates are computed
EVERY_S: Final = 2.0
_MIB: Final = 1 << 20
_CLEAR: Final = "\x1b[H\x1b[2J"  # ANSI: to the upper left, and nothing below


def add_top(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc top`."""
    parser.description = (
        f"Show how fast each worker of a group works, over the last {WINDOW_S:g} s, "
        "until Ctrl-C.  With --once, with --json, or if the output is not a terminal, "
        "show it once; then the exit code is 0 if all have answered, else 1."
    )
    parser.add_argument("--once", action="store_true", help="show it once, and end")
    parser.add_argument(
        "--functions", action="store_true", help="by function instead of by worker"
    )
    parser.add_argument(
        "--training",
        action="store_true",
        help="backward passes, optimizer steps and collectives instead of calls",
    )
    add_observing(parser, _top)


async def _top(observer: Observer, address: str, arguments: argparse.Namespace) -> int:
    if arguments.json or arguments.once or not sys.stdout.isatty():
        group_answers = await _ask_rates(observer, address, arguments)
        if arguments.json:
            print_json(_rates_record(group_answers))
        else:
            print_table(
                list(_rates_rows(group_answers, arguments)), "no worker is known"
            )
            print_silent(group_answers.silent)
        return TROUBLE if group_answers.silent else 0
    while True:
        group_answers = await _ask_rates(observer, address, arguments)
        lines = lines_of(list(_rates_rows(group_answers, arguments)))
        lines += [
            line_of(f"no answer from {name}: {no_answer.trouble.value}")
            for name, no_answer in sorted(group_answers.silent.items())
        ]
        print(_CLEAR + "\n".join(lines), flush=True)
        await asyncio.sleep(EVERY_S)


async def _ask_rates(
    observer: Observer, address: str, arguments: argparse.Namespace
) -> GroupAnswers[WorkerEvents]:
    kinds = ["calls", "served", "passes", "steps", "collectives"]
    group_answers = await events_of(
        observer, address, names=arguments.worker, kinds=kinds
    )
    check_group(arguments, group_answers.members)
    return group_answers


def _rates_rows(
    group_answers: GroupAnswers[WorkerEvents], arguments: argparse.Namespace
) -> Iterator[tuple[str, ...]]:
    if arguments.functions:
        yield ("worker", "function", "calls/s", "failed/s", "p50", "p99")
        for name, events in sorted(group_answers.answers.items()):
            functions = by_function(events.recent, window_s=WINDOW_S)
            ordered = sorted(functions.items(), key=lambda item: -item[1].per_s)
            for function, served in ordered:
                yield (name, function or "?", *_shown_rates(served))
        return
    rates = {
        name: rates_of(events.recent, window_s=WINDOW_S)
        for name, events in sorted(group_answers.answers.items())
    }
    if arguments.training:
        yield ("worker", "passes/s", "steps/s", "collectives/s")
        for name, here in rates.items():
            trained = here.passes_per_s, here.steps_per_s, here.collectives_per_s
            yield (name, *map(_shown, trained))
        return
    yield (
        *("worker", "made/s", "failed/s", "p50", "p99", "MiB/s"),
        *("served/s", "p50", "p99"),
    )
    for name, here in rates.items():
        yield (
            name,
            *_shown_rates(here.made),
            _shown(here.made.bytes_per_s / _MIB),
            _shown(here.served.per_s),
            _shown_s(here.served.p50_s),
            _shown_s(here.served.p99_s),
        )


def _shown_rates(rates: CallRates) -> tuple[str, str, str, str]:
    return (
        _shown(rates.per_s),
        _shown(rates.failed_per_s),
        _shown_s(rates.p50_s),
        _shown_s(rates.p99_s),
    )


def _shown(number: float) -> str:
    if not number:
        return "-"
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"  # noqa: PLR2004


def _shown_s(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _rates_record(group_answers: GroupAnswers[WorkerEvents]) -> dict[str, Any]:
    workers = {}
    for name, events in sorted(group_answers.answers.items()):
        functions = by_function(events.recent, window_s=WINDOW_S)
        workers[name] = {
            **_numbers(rates_of(events.recent, window_s=WINDOW_S)),
            "functions": {key: _numbers(rates) for key, rates in functions.items()},
        }
    return {"workers": workers, "silent": silent_records(group_answers.silent)}


def _numbers(rates: Any) -> dict[str, Any]:
    """Return rates for JSON, which has no nan."""
    shown: dict[str, Any] = {}
    for name, value in rates._asdict().items():
        if isinstance(value, float):
            shown[name] = None if math.isnan(value) else value
        else:
            shown[name] = _numbers(value)
    return shown
