"""torch's modes of a thread: whose they are, while many coroutines share the thread.

torch keeps per thread whether gradients are recorded, inference mode, autocast, the
default device, function and dispatch modes, and the hooks of saved tensors.  What a
coroutine holds of these over an `await` would reach whatever the thread runs next.  So
every step of a coroutine that asyncrpc runs begins with the defaults and with what its
own earlier steps have left, and what asyncrpc does itself has the defaults alone.

Nearly always a thread has the defaults.  To see that takes 0.2 us; only where it is not
so are modes taken off the thread, and put back.

Source: torch.autograd.grad_mode, torch.amp, torch.overrides and
torch.utils._python_dispatch, and the thread-locals behind them.
"""

from __future__ import annotations

import types
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import torch
from torch import _C

P = ParamSpec("P")
T = TypeVar("T")

# The kinds of devices that autocast knows, and the dtypes that it casts to by default.
AUTOCAST_DTYPES: Final = {
    kind: torch.get_autocast_dtype(kind)
    for kind in ("cpu", "cuda", "xpu", "mps", "mtia", "xla", "hpu", "maia")
    if torch.amp.is_autocast_available(kind)
}
Autocast = dict[str, torch.dtype]

is_inference = torch.is_inference_mode_enabled
_InferenceGuard: Any = _C._InferenceMode  # noqa: SLF001
_set_grad = _C._set_grad_enabled  # noqa: SLF001
function_count = _C._len_torch_function_stack  # noqa: SLF001
_function_at: Any = _C._get_function_stack_at  # noqa: SLF001
_push_function: Any = _C._push_on_torch_function_stack  # noqa: SLF001
_pop_function: Any = _C._pop_torch_function_stack  # noqa: SLF001
dispatch_count = _C._len_torch_dispatch_stack  # noqa: SLF001
_push_dispatch: Any = _C._push_on_torch_dispatch_stack  # noqa: SLF001
_pop_dispatch: Any = partial(_C._pop_torch_dispatch_stack, None)  # noqa: SLF001
_push_hooks: Any = _C._autograd._push_saved_tensors_default_hooks  # noqa: SLF001
_pop_hooks: Any = _C._autograd._pop_saved_tensors_default_hooks  # noqa: SLF001
_top_hooks: Any = _C._autograd._top_saved_tensors_default_hooks  # noqa: SLF001
_set_default_device_by: Any = torch._GLOBAL_DEVICE_CONTEXT  # noqa: SLF001
_core: Any = _C  # some of its functions have no types
_has_functions: Callable[[], bool] = _core._is_torch_function_enabled  # noqa: SLF001
_has_hooks: Callable[[], bool] = _core._autograd._saved_tensors_hooks_is_enabled  # noqa: SLF001


def has_defaults(
    _grad: Callable[[], bool] = torch.is_grad_enabled,
    _inference: Callable[[], bool] = is_inference,
    _autocast: Callable[[], bool] = _C._is_any_autocast_enabled,  # noqa: SLF001
    _functions: Callable[[], int] = function_count,
    _dispatches: Callable[[], int] = dispatch_count,
    _hooks: Callable[[bool], Any] = _top_hooks,
) -> bool:
    """Return whether this thread has none of torch's modes.

    A default device is one: torch has it as a function mode.
    """
    return _grad() and not (
        _functions() or _dispatches() or _inference() or _autocast() or _hooks(False)  # noqa: FBT003
    )


class Switches(NamedTuple):
    """What is turned off in a thread.

    Attributes:
        functions: state of `__torch_function__`, which DisableTorchFunction turns off.
        hooks_error: the text of `disable_saved_tensors_hooks`; None: they are enabled.
    """

    functions: Any
    hooks_error: str | None

    def put(self) -> None:
        """Give them to this thread."""
        _core._set_torch_function_state(self.functions)  # noqa: SLF001
        if self.hooks_error is None:
            _C._autograd._saved_tensors_hooks_enable()  # noqa: SLF001
        else:
            _C._autograd._saved_tensors_hooks_disable(self.hooks_error, False)  # noqa: FBT003, SLF001


_ALL_ON: Final = Switches(_core._TorchFunctionState.ENABLED, None)  # noqa: SLF001


def _taken_switches() -> Switches | None:
    switches = Switches(
        _core._get_torch_function_state(),  # noqa: SLF001
        _C._autograd._saved_tensors_hooks_get_disabled_error_message(),  # noqa: SLF001
    )
    if switches == _ALL_ON:
        return None
    _ALL_ON.put()
    return switches


class Modes(NamedTuple):
    """torch's modes of a thread.

    Attributes:
        grad: whether operations are recorded.
        inference: whether they make tensors that are never recorded.
        cache: whether autocast caches its casts.
        autocast: the target dtype by device type, where it is on.
        nesting: how many autocasts are open.
        functions: torch function modes; the default device is one.
        default_device: of these, that of `torch.set_default_device`.
        dispatches: dispatch modes, such as FakeTensorMode.
        hooks: of saved tensors, by pairs.
        switches: what is turned off; None: nothing.
    """

    grad: bool = True
    inference: bool = False
    cache: bool = True
    autocast: Autocast = {}  # noqa: RUF012  (never changed)
    nesting: int = 0
    functions: tuple[Any, ...] = ()
    default_device: Any = None
    dispatches: tuple[Any, ...] = ()
    hooks: tuple[Any, ...] = ()
    switches: Switches | None = None


DEFAULTS: Final = Modes()
_INFERENCE: Final = Modes(grad=False, inference=True)
_UNBEGUN: Final = object()


def default_device_here() -> Any:
    """Return what `torch.set_default_device` has set in this thread; None: nothing.

    It is the program's, for all that the thread runs, and stays while modes are taken.
    """
    return getattr(_set_default_device_by, "device_context", None)


def take(default_device: Any) -> Modes | None:
    """Take the modes off this thread; None if it has none but a default device."""
    switches = _taken_switches()
    functions = tuple(_function_at(at) for at in range(function_count()))
    base = () if default_device is None else (default_device,)
    is_on = _C._is_any_autocast_enabled()  # noqa: SLF001
    modes = Modes(
        torch.is_grad_enabled(),
        is_inference(),
        torch.is_autocast_cache_enabled(),
        autocast_here() if is_on else {},
        _set_nesting(0) if is_on else 0,
        () if functions == base else functions,
        None if functions == base else default_device_here(),
        _popped(_pop_dispatch, dispatch_count()),
        _taken_hooks(),
        switches,
    )
    if modes == DEFAULTS:
        return None
    if modes.functions:
        _popped(_pop_function, len(functions))
        _have_functions(base, default_device)
    if is_on or not modes.cache:
        _set_autocast(modes.autocast.keys(), {})
        torch.set_autocast_cache_enabled(True)
    if modes.inference:
        _set_inference(to=False)
    if not torch.is_grad_enabled():
        _set_grad(True)  # noqa: FBT003
    return modes


def put(modes: Modes) -> None:
    """Give this thread, which has the defaults, these modes."""
    if modes.inference:
        _set_inference(to=True)
    if torch.is_grad_enabled() is not modes.grad:
        _set_grad(modes.grad)
    if modes.autocast:
        _set_nesting(modes.nesting)
        _set_autocast(modes.autocast.keys(), modes.autocast)
    torch.set_autocast_cache_enabled(modes.cache)
    for hooks in modes.hooks:
        _push_hooks(*hooks)
    for mode in modes.dispatches:
        _push_dispatch(mode)
    if modes.functions:
        _popped(_pop_function, function_count())
        _have_functions(modes.functions, modes.default_device)
    if modes.switches is not None:
        modes.switches.put()


def autocast_here() -> Autocast:
    """Return what this thread casts to, by device type."""
    return {
        kind: torch.get_autocast_dtype(kind)
        for kind in AUTOCAST_DTYPES
        if torch.is_autocast_enabled(kind)
    }


def _set_autocast(kinds: Any, to: Autocast) -> None:
    for kind in kinds:
        torch.set_autocast_dtype(kind, to.get(kind, AUTOCAST_DTYPES[kind]))
        torch.set_autocast_enabled(kind, kind in to)


def _set_nesting(count: int) -> int:
    """Make autocast believe that `count` are open; return how many were.

    It forgets its casts when the last is left: they are of parameters that others may
    change meanwhile.
    """
    before = torch.autocast_increment_nesting() - 1
    for _ in range(count - before - 1):
        torch.autocast_increment_nesting()
    now = before + 1
    while now > count:
        now = torch.autocast_decrement_nesting()
    if not count:
        torch.clear_autocast_cache()
    return before


def _set_inference(*, to: bool) -> None:
    """Set inference mode, for which torch has guards only.

    A guard sets back the whole state that was there when it was entered, whatever is
    there when it is left.  So the inner one, left last, sets what the outer has made.
    """
    outer, inner = _InferenceGuard(to), _InferenceGuard(to)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)


def _have_functions(functions: tuple[Any, ...], default_device: Any) -> None:
    for mode in functions:
        _push_function(mode)
    _set_default_device_by.device_context = default_device


def _popped(pop: Callable[[], Any], count: int) -> tuple[Any, ...]:
    return tuple(pop() for _ in range(count))[::-1]


def _taken_hooks() -> tuple[Any, ...]:
    hooks: list[Any] = []
    while (pair := _top_hooks(False)) is not None:  # noqa: FBT003
        hooks.append(pair)
        _pop_hooks()
    return tuple(reversed(hooks))


class FunctionModes:
    """A context in which the thread has the modes of one function alone.

    It is entered for each step, in the thread of that step.  Changes by a step are
    there again in the next one, and the thread gets its own modes back.
    """

    __slots__ = ("_default_device", "_thread_modes", "modes")

    def __init__(self, modes: Modes | None = None) -> None:
        self.modes = modes
        self._thread_modes: Modes | None = None
        self._default_device: Any = None

    def __enter__(self) -> None:
        """Give the thread the function's modes."""
        if has_defaults():
            self._default_device = None
        else:
            self._default_device = default_device_here()
            self._thread_modes = take(self._default_device)
        if self.modes is not None:
            put(self.modes)

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Give the thread its own modes back; keep the function's for the next step."""
        # Where it waits, what it has turned off would reach others.
        is_plain = has_defaults() and (
            kind is not None or (_has_functions() and _has_hooks())
        )
        self.modes = None if is_plain else take(self._default_device)
        if self._thread_modes is not None:
            thread_modes, self._thread_modes = self._thread_modes, None
            put(thread_modes)


def drop_modes() -> None:
    """Take off what a function has left: this thread had the defaults before it."""
    if not has_defaults():
        take(None)


def with_defaults(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate what asyncrpc does itself: it has torch's defaults, whoever calls it."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if has_defaults():
            return function(*args, **kwargs)
        with FunctionModes():
            return function(*args, **kwargs)

    return run


def undisturbed(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate what asyncrpc does within autograd: no mode of the program sees it.

    Gradients may be off there, as autograd has them, so `with_defaults` would act on
    each call.  What `set_default_device` sets changes nothing that names its device.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        base = default_device_here() is not None
        if function_count() <= base and not dispatch_count():
            return function(*args, **kwargs)
        # Autograd's gradients are of inference mode as well.
        with FunctionModes(_INFERENCE if is_inference() else None):
            return function(*args, **kwargs)

    return run


def plain_steps(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine function of asyncrpc itself: its steps have the defaults.

    Only where it is given tensors of inference mode they have that, as torch lets
    nothing else write to them.
    """

    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        place = FunctionModes(_modes_to_write((*args, *kwargs.values())))
        result: T = await steps(function(*args, **kwargs), place)
        return result

    return run


@with_defaults
def _modes_to_write(values: Iterable[Any]) -> Modes | None:
    for value in values:
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, torch.Tensor) and part.is_inference():
                return _INFERENCE
    return None


def modes_here() -> Modes | None:
    """Return the modes of this thread, which keeps them; None: the defaults."""
    if has_defaults():
        return None
    modes = take(default_device_here())
    if modes is not None:
        put(modes)
    return modes


# --- functions of users --------------------------------------------------------------


def surrounded(
    function: Callable[..., Any], modes: Modes | None = None
) -> Callable[..., Any]:
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


async def alone(awaitable: Awaitable[T]) -> T:
    """Await what is of the program; each of its steps has its own modes alone."""
    whole = _whole(awaitable)
    del awaitable  # a future that fails holds its error, and that would hold this frame
    result: T = await steps(whole, FunctionModes())
    return result


async def _whole(awaitable: Awaitable[T]) -> T:
    try:
        return await awaitable
    finally:
        del awaitable  # as above


@types.coroutine
def steps(
    awaitable: Any, place: AbstractContextManager[Any], awaited: Any = _UNBEGUN
) -> Generator[Any, Any, Any]:
    """Run a coroutine-like object; each of its steps has the function's modes."""
    value, error = None, None
    if awaited is not _UNBEGUN:
        place.__exit__(None, None, None)
    while True:
        if awaited is not _UNBEGUN:
            try:
                value = yield awaited
            except GeneratorExit:
                with place:
                    awaitable.close()
                raise
            except BaseException as thrown:  # noqa: BLE001  (the coroutine's to handle)
                value, error = None, thrown
            awaited = None  # a future that fails holds its error, and that this frame
        try:
            with place:
                awaited = (
                    awaitable.send(value) if error is None else awaitable.throw(error)
                )
        except StopIteration as end:
            return end.value
        finally:
            value = error = None  # its traceback holds this frame


def driven_by(generator: types.GeneratorType[Any, Any, Any]) -> Any:
    """Return the coroutine that a `steps` runs; None for any other generator."""
    frame: types.FrameType | None = generator.gi_frame
    if frame is None or frame.f_code is not steps.__code__:
        return None
    return frame.f_locals["awaitable"]


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


# The names of kernels written in Python.  Those of torch itself are for other devices,
# and, from the first `vmap` of the process on, for tensors inside of one.
_IMPLEMENTED: Any = torch.library._impls  # noqa: SLF001
_ELSEWHERE: Final = frozenset(
    ("Meta", "CUDA", "XPU", "MTIA", "HPU", "MPS", "FuncTorchBatched")
)


class _Kernels:
    """What this process has registered with torch, as far as it has been looked at."""

    count = -1
    are_torchs = False


_kernels: Final = _Kernels()  # like torch's own table, of the process


def has_torchs_kernels() -> bool:
    """Return whether no kernel of torch's own operators was replaced.

    To look at all names takes 0.2 ms, so they are looked at when their number has
    changed: as many that went as came since the last look are not noticed.
    """
    if len(_IMPLEMENTED) != _kernels.count:
        _kernels.count = len(_IMPLEMENTED)
        _kernels.are_torchs = not any(
            name.startswith("aten/") and name.rpartition("/")[2] not in _ELSEWHERE
            for name in list(_IMPLEMENTED)
        )
    return _kernels.are_torchs
