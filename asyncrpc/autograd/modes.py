"""torch's modes of a thread travel with calls: no_grad, inference mode, autocast.

A call runs its function under the modes that it was made under.  torch keeps modes per
thread, and an event loop has one thread for all its tasks: so the modes of a coroutine
are set for each of its steps, and taken away after it, with its own changes.

Most calls are made under default modes: these send nothing and cost nothing.

Source: torch.no_grad, torch.inference_mode and torch.autocast, and their settings.
"""

from __future__ import annotations

import types
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch

from asyncrpc.errors import MalformedError

_NO_GRAD: Final = 1
_INFERENCE: Final = 2
_NO_CACHE: Final = 4

# The kinds of devices that autocast knows, and the dtypes that it casts to by default.
_DEVICES: Final = {
    kind: torch.get_autocast_dtype(kind)
    for kind in ("cpu", "cuda", "xpu", "mps", "mtia", "xla", "hpu", "maia")
    if torch.amp.is_autocast_available(kind)
}
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
Autocast = dict[str, torch.dtype]


class Modes(NamedTuple):
    """torch's modes of a thread.

    Attributes:
        grad: whether operations are recorded.
        inference: whether they make tensors that are never recorded.
        cache: whether autocast caches its casts.
        autocast: the target dtype by device type, where it is on.
    """

    grad: bool
    inference: bool
    cache: bool
    autocast: Autocast


_NONE: Final = Modes(grad=True, inference=False, cache=True, autocast={})


def modes_here() -> Modes:
    """Return the modes of this thread."""
    autocast: Autocast = {}
    if torch._C._is_any_autocast_enabled():  # noqa: SLF001
        autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in _DEVICES
            if torch.is_autocast_enabled(kind)
        }
    return Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        autocast,
    )


class FunctionModes:
    """A context in which the thread has the modes of a function.

    It is entered for each step, in the thread of that step.  Changes by a step are
    there again in the next one, and the thread gets its own modes back.
    """

    __slots__ = ("_before", "_dtypes", "_guard", "modes")

    def __init__(self, modes: Modes) -> None:
        self.modes = modes
        self._before = modes
        self._dtypes: Autocast = {}  # by kind of device that is set here
        self._guard: Any = None

    def __enter__(self) -> None:
        """Give the thread the function's modes."""
        before, modes = modes_here(), self.modes
        self._before = before
        # It restores the earlier mode, whatever guards the step leaves open.
        self._guard = torch._C._InferenceMode(modes.inference)  # noqa: SLF001
        self._guard.__enter__()
        torch._C._set_grad_enabled(modes.grad)  # noqa: SLF001
        touched = modes.autocast.keys() | before.autocast.keys()
        self._dtypes = {kind: torch.get_autocast_dtype(kind) for kind in touched}
        if touched:
            torch.autocast_increment_nesting()
            _set_autocast(touched, modes, self._dtypes)

    def __exit__(self, *_: object) -> None:
        """Give the thread its own modes back; keep the function's for the next step."""
        before, after = self._before, modes_here()
        self.modes = after
        touched = after.autocast.keys() | self._dtypes.keys()
        if touched:
            _set_autocast(touched, before, _DEVICES | self._dtypes)
        if self._dtypes and torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self._guard.__exit__(None, None, None)
        self._guard = None


def _set_autocast(kinds: Iterable[str], modes: Modes, dtypes: Autocast) -> None:
    """Set autocast of some kinds of devices; `dtypes`: where it is off."""
    for kind in kinds:
        torch.set_autocast_dtype(kind, modes.autocast.get(kind, dtypes[kind]))
        torch.set_autocast_enabled(kind, kind in modes.autocast)
    torch.set_autocast_cache_enabled(modes.cache)


# --- functions -----------------------------------------------------------------------


def surrounded(function: Callable[..., Any], modes: Modes) -> Callable[..., Any]:
    """Return a function of the same kind that runs under `modes`, to its end.

    Coroutines and generators that it returns also run under them, in each of their
    steps.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        place = FunctionModes(modes)
        with place:
            result = function(*args, **kwargs)
        if isinstance(result, Coroutine):
            return _run(result, place)
        if isinstance(result, AsyncGenerator):
            return _items_later(result, place)
        return _items(result, place) if isinstance(result, Generator) else result

    return run


async def _run(coroutine: Coroutine[Any, Any, Any], place: FunctionModes) -> Any:
    return await steps(coroutine, place)


@types.coroutine
def steps(
    awaitable: Any, place: AbstractContextManager[Any]
) -> Generator[Any, Any, Any]:
    """Run a coroutine-like object; each of its steps has the function's modes.

    Cancellation:
        It is passed on to the object.
    """
    value, error = None, None
    while True:
        with place:
            try:
                awaited = (
                    awaitable.send(value) if error is None else awaitable.throw(error)
                )
            except StopIteration as end:
                return end.value
            finally:
                error = None  # its traceback holds this frame
        try:
            value = yield awaited
        except GeneratorExit:
            with place:
                awaitable.close()
            raise
        except BaseException as thrown:  # noqa: BLE001  (the coroutine's to handle)
            value, error = None, thrown


async def _items_later(
    source: AsyncGenerator[Any, Any], place: FunctionModes
) -> AsyncIterator[Any]:
    try:
        while True:
            try:
                item = await steps(source.__anext__(), place)
            except StopAsyncIteration:
                return
            yield item
    finally:
        await steps(source.aclose(), place)


def _items(source: Generator[Any, Any, Any], place: FunctionModes) -> Iterator[Any]:
    try:
        while True:
            with place:
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item
    finally:
        with place:
            source.close()


# --- messages ------------------------------------------------------------------------


class ThreadModes:
    """A `runtime.extensions.ThreadState`."""

    key = "m"

    def here(self) -> Any:
        """Return this thread's modes as they travel; None if all are defaults."""
        found = modes_here()
        return None if found == _NONE else _lowered(found)

    def surround(self, meta: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, run under the modes that came with the call.

        Raises:
            MalformedError: the modes are malformed.
        """
        return surrounded(function, _lifted(meta))


def _lowered(modes: Modes) -> list[Any]:
    flags = 0 if modes.grad else _NO_GRAD
    flags |= _INFERENCE if modes.inference else 0
    flags |= 0 if modes.cache else _NO_CACHE
    autocast = {
        kind: str(dtype).removeprefix("torch.")
        for kind, dtype in modes.autocast.items()
    }
    return [flags, autocast]


def _lifted(meta: Any) -> Modes:
    try:
        flags, autocast = meta
        found = {str(kind): _DTYPES[dtype] for kind, dtype in autocast.items()}
        flags = int(flags)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise MalformedError(f"modes are malformed: {meta!r:.80}") from error
    # Device types that this torch does not know are left out.
    autocast = {kind: dtype for kind, dtype in found.items() if kind in _DEVICES}
    return Modes(
        not flags & _NO_GRAD, bool(flags & _INFERENCE), not flags & _NO_CACHE, autocast
    )
