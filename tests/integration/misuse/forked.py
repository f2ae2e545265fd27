"""A child that `os.fork` made, in which everything of the parent's is used.

It has a copy of each object of the parent, and none of its threads; what it wrote to
the parent's sockets would be read as the parent's own words.  So writing there is
noticed, and told as what came of the attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import asyncrpc
from asyncrpc import Worker
from asyncrpc.core.transport.abc import Transport
from tests.integration.misuse.using import (
    HANGS_AFTER_S,
    NOTHING_RAISED,
    Call,
    HungError,
    Outcome,
    Use,
    outcome_of,
)

_TEXT_MAX: Final = 4000
_SILENT_S: Final = HANGS_AFTER_S + 10.0


class TouchedError(Exception):
    """A forked child used what is its parent's."""


async def in_a_forked_child(
    uses: Mapping[str, Use], calls: Mapping[str, Sequence[Call]], worker: Worker
) -> dict[str, list[Outcome]]:
    """Make calls in a child: half of each where no loop runs, half on one of its own.

    Returns:
        What came of each; of what has not ended in time, a `HungError`.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _attempt_all(uses, calls, worker, writer)
    os.close(writer)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in uses}
    try:
        async with _lines(reader) as read_line:
            while line := await read_line():
                name, kinds, text = json.loads(line)
                outcomes[name].append(_outcome(uses[name], kinds, text))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # noqa: ASYNC222  (it has ended)
    for name, use_calls in calls.items():
        while len(outcomes[name]) < len(use_calls):
            outcomes[name].append(Outcome(HungError, "nothing was told of it"))
    return outcomes


@contextlib.asynccontextmanager
async def _lines(reader: int) -> Any:
    """Return what gives the next line of a pipe; empty: there is none in time."""
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb")
    )

    async def next_line() -> bytes:
        try:
            return await asyncio.wait_for(stream.readline(), _SILENT_S)
        except TimeoutError:
            return b""

    try:
        yield next_line
    finally:
        transport.close()


def _outcome(use: Use, kinds: list[str], text: str) -> Outcome:
    if not kinds:
        return NOTHING_RAISED
    errors = [getattr(asyncrpc.errors, name) for name in asyncrpc.errors.__all__]
    known = {error.__name__: error for error in (*use.refusals, *errors)}
    kind = next((known[kind] for kind in kinds if kind in known), None)
    return Outcome(kind or type(kinds[0], (Exception,), {}), text)


def _attempt_all(
    uses: Mapping[str, Use],
    calls: Mapping[str, Sequence[Call]],
    worker: Worker,
    writer: int,
) -> NoReturn:
    """Make all attempts, tell the parent what came of each, and end."""
    try:
        touched = _notice_touching(worker)
        for name, use in uses.items():
            half = len(calls[name]) // 2
            for number, call in enumerate(calls[name]):
                if number < half:
                    kind, text = _as_far_as_it_goes(call)
                else:
                    kind, text = _on_own_loop(use, call, type(worker.loop))
                if touched:
                    kind, text = TouchedError, f"it touched {touched.pop()}"
                    touched.clear()
                kinds = [base.__name__ for base in kind.__mro__] if kind else []
                line = json.dumps([name, kinds, text[:_TEXT_MAX]])
                os.write(writer, line.encode() + b"\n")
    finally:
        os._exit(0)


Found = tuple[type[BaseException] | None, str]


def _as_far_as_it_goes(call: Call) -> Found:
    """Use it where no loop runs, until it would wait."""
    try:
        result = call()
        if hasattr(result, "__anext__"):
            result = result.__anext__()
        elif hasattr(result, "__aenter__") and not inspect.isawaitable(result):
            result = result.__aenter__()
        if inspect.isawaitable(result):
            result.__await__().__next__()
    except StopIteration:
        pass
    except BaseException as error:  # noqa: BLE001  (told to the parent)
        return type(error), str(error)
    return None, ""


def _on_own_loop(
    use: Use, call: Call, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> Found:
    """Use it on a loop that is the child's."""

    async def attempt() -> Outcome:
        return await outcome_of(lambda: use.finished(call()))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        outcome = runner.run(attempt())
    return outcome.kind, outcome.text


def _notice_touching(worker: Worker) -> list[str]:
    """Return a list, to which is added what of the parent's is touched from now on."""
    touched: list[str] = []
    gc.freeze()  # whatever of the parent's is garbage, is the parent's to collect
    # By their types: some objects lie of their class, or raise.
    parents = [
        thing for thing in gc.get_objects() if issubclass(type(thing), Transport)
    ]
    for kind in {type(parent) for parent in parents}:
        _note(kind, "send", parents, touched)
    if isinstance(worker.loop, asyncio.BaseEventLoop):  # uvloop's is not to be changed
        _note(type(worker.loop), "call_soon_threadsafe", [worker.loop], touched)
    return touched


def _note(kind: type, name: str, parents: list[Any], touched: list[str]) -> None:
    """Take note of each use of a method of what is the parent's."""
    original = getattr(kind, name)

    def noted(instance: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(instance is parents_own for parents_own in parents):
            return original(instance, *args, **kwargs)
        touched.append(f"the parent's {kind.__name__}, by {name}{args!r:.200}")
        return None

    setattr(kind, name, noted)
