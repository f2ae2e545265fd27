"""How processes of one host, and queues between them, are used."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncrpc import UsageError, xla
from asyncrpc.errors import ProcessFailedError
from asyncrpc.multiprocessing import Processes, Queue, launch, spawn
from tests.integration.misuse.beside import SEQUENCES, in_thread
from tests.integration.misuse.targets import rank_of
from tests.integration.misuse.uses_values import CALLABLES, CANNOT_TRAVEL, FLAG
from tests.integration.misuse.using import ANYTHING, Use
from tests.integration.misuse.wrong import SECONDS, World

_METHOD: Final[set[str]] = set()
# What pickle cannot send to another process of this host.
_CANNOT_BE_PICKLED: Final = (CANNOT_TRAVEL | {"a local function"}) - {
    *("too many dimensions", "too large"),
}
_STARTED: Final = {"fn": CALLABLES, "args": SEQUENCES, "nprocs": {"an integer"}}


@functools.cache
def _processes(purpose: str) -> Processes[Any]:
    """Return processes of one purpose; they end by themselves."""
    del purpose
    return launch(rank_of, method="forkserver", join=False)


async def _entered(_: World) -> list[int]:
    async with launch(rank_of, method="forkserver", join=False) as processes:
        pass
    return await processes.wait_async()


async def _launch_on_xla(_: World) -> None:
    try:
        await in_thread(xla.launch)(rank_of)
    except UsageError as error:
        assert "cannot be imported: No module named 'torch_xla'" in str(error)  # noqa: PT017


async def _terminated(_: World) -> None:
    processes = _processes("to be terminated")
    processes.terminate()
    with contextlib.suppress(ProcessFailedError):  # or they had ended
        await processes.wait_async()


def _of_queue(method: str) -> Callable[..., Any]:
    """Return a method of a queue that is made for it, and has an item."""
    function = getattr(Queue, method)

    @functools.wraps(function)
    def use(*args: Any, **kwargs: Any) -> Any:
        queue: Queue[Any] = Queue(2)
        try:
            queue.put_nowait("item")
            return function(queue, *args, **kwargs)
        finally:
            queue.close()

    return _without_self(use)


def _of_queue_async(method: str) -> Callable[..., Any]:
    function = getattr(Queue, method)

    @functools.wraps(function)
    async def use(*args: Any, **kwargs: Any) -> Any:
        queue: Queue[Any] = Queue(2)
        try:
            queue.put_nowait("item")
            return await function(queue, *args, **kwargs)
        finally:
            queue.close()

    return _without_self(use)


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function have the signature of a bound method."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


async def _close(queue: Queue[Any]) -> None:
    queue.close()


USES: Final[Mapping[str, Use]] = {
    "multiprocessing.launch": Use(
        lambda _: in_thread(launch),
        needs_worker=False,
        right={"fn": lambda _: rank_of, "method": lambda _: "forkserver"},
        fits={
            **_STARTED,
            "method": _METHOD,
            "threads_per_process": {"none", "an integer"},
            "timeout_s": SECONDS | {"infinite"},
            "secret": {
                *("none", "text", "empty text", "text with a surrogate", "too large")
            },
            "host_store": FLAG,
            "daemon": FLAG,
            "join": FLAG,
        },
    ),
    "multiprocessing.spawn": Use(
        lambda _: in_thread(spawn),
        needs_worker=False,
        right={"fn": lambda _: rank_of, "start_method": lambda _: "forkserver"},
        fits={**_STARTED, "start_method": _METHOD, "daemon": FLAG, "join": FLAG},
    ),
    "xla.launch": Use(
        lambda _: in_thread(xla.launch),
        needs_worker=False,
        right={"fn": lambda _: rank_of},
        # What cannot be pickled is not found where there is no torch_xla.
        fits={
            "fn": CALLABLES | {"a local function", "raises in everything"},
            "args": SEQUENCES,
            "nprocs": {"none", "an integer"},
        },
        says={"args": r"\bargs\b|torch_xla cannot be imported"},
        rightly=_launch_on_xla,
    ),
    "multiprocessing.Processes.wait": Use(
        lambda _: in_thread(_processes("to be waited for").wait), needs_worker=False
    ),
    "multiprocessing.Processes.wait_async": Use(
        lambda _: _processes("to be awaited").wait_async, needs_worker=False
    ),
    "multiprocessing.Processes.join": Use(
        lambda _: in_thread(_processes("to be joined").join),
        needs_worker=False,
        fits={"timeout_s": SECONDS | {"infinite"}},
    ),
    "multiprocessing.Processes.terminate": Use(
        lambda _: _processes("to be terminated").terminate,
        needs_worker=False,
        fits={"grace_s": SECONDS - {"none"}},
        rightly=_terminated,
    ),
    "multiprocessing.Processes.__aenter__": Use(
        lambda _: _processes("to be entered").__aenter__,
        rightly=_entered,
        needs_worker=False,
    ),
    "multiprocessing.Queue": Use(
        lambda _: Queue,
        needs_worker=False,
        fits={"maxsize": {"an integer"}},
        finish=_close,
    ),
    "multiprocessing.Queue.put": Use(
        lambda _: in_thread(_of_queue("put")),
        needs_worker=False,
        right={"item": lambda _: 1},
        fits={
            "item": ANYTHING - _CANNOT_BE_PICKLED,
            "timeout_s": SECONDS | {"infinite"},
        },
    ),
    "multiprocessing.Queue.put_nowait": Use(
        lambda _: _of_queue("put_nowait"),
        needs_worker=False,
        right={"item": lambda _: 1},
        fits={"item": ANYTHING - _CANNOT_BE_PICKLED},
    ),
    "multiprocessing.Queue.put_async": Use(
        lambda _: _of_queue_async("put_async"),
        needs_worker=False,
        right={"item": lambda _: 1},
        fits={"item": ANYTHING - _CANNOT_BE_PICKLED},
    ),
    "multiprocessing.Queue.get": Use(
        lambda _: in_thread(_of_queue("get")),
        needs_worker=False,
        fits={"timeout_s": SECONDS | {"infinite"}},
    ),
    "multiprocessing.Queue.get_nowait": Use(
        lambda _: _of_queue("get_nowait"), needs_worker=False
    ),
    "multiprocessing.Queue.get_async": Use(
        lambda _: _of_queue_async("get_async"), needs_worker=False
    ),
    "multiprocessing.Queue.qsize": Use(
        lambda _: _of_queue("qsize"), needs_worker=False
    ),
    "multiprocessing.Queue.empty": Use(
        lambda _: _of_queue("empty"), needs_worker=False
    ),
    "multiprocessing.Queue.full": Use(lambda _: _of_queue("full"), needs_worker=False),
    "multiprocessing.Queue.close": Use(
        lambda _: _of_queue("close"), needs_worker=False
    ),
}
