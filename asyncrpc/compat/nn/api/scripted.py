"""A RemoteModule that TorchScript can compile: its compiled methods call Python.

TorchScript knows only the references of torch's C++ RPC.  So the methods have the types
of an interface, and pass their arguments to Python methods (`torch.jit.ignore`), which
make the call, as any RemoteModule does.  The price is that they take the GIL.

A call begins in the thread, and in the autograd context, of the code that makes it;
another thread of TorchScript waits for it.

Source: torch.distributed.nn.jit, whose compiled methods call torch's C++ RPC.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol, cast

import torch
from torch import nn

NOT_PICKLED: Final = (
    "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled "
    "when using RPC"
)
NOT_SENT: Final = (
    "Passing a script RemoteModule over RPC is not supported. Please send the "
    "RemoteModule that it was compiled from, or its `module_rref`."
)

_METHODS: Final = """
class Scripted(Base):
    python: Future[Any]  # of `ScriptedCalls`; only a Future can hold a Python value

    @torch.jit.ignore
    def _now(self{typed}) -> {result}:
        return self.python.value().now(({names}))

    @torch.jit.ignore
    def _begin(self{typed}) -> int:
        return self.python.value().begin(({names}))

    @torch.jit.ignore
    def _end(self, number: int) -> {result}:
        return self.python.value().end(number)

    def _wait(self, number: int) -> {result}:
        return self._end(number)

    def forward(self{typed_with_defaults}) -> {result}:
        return self._now({names})

    @torch.jit.export
    def forward_async(self{typed_with_defaults}) -> Future[{result}]:
        return torch.jit._fork(self._wait, self._begin({names}))

    @torch.jit.export
    def __getstate__(self) -> Tuple[str, bool]:
        raise RuntimeError({not_pickled!r})

    @torch.jit.export
    def __setstate__(self, state: Tuple[str, bool]) -> None:
        raise RuntimeError({not_pickled!r})
"""

# By the interface's name in TorchScript.
_compiled_classes: dict[str, type[nn.Module]] = {}


class Runs(Protocol):
    """Makes the calls."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its worker; block."""

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Begin to run it."""


class ScriptedCalls:
    """The calls of one compiled module, by number: TorchScript cannot hold objects."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._numbers = itertools.count()
        self._begun: dict[int, torch.futures.Future[Any]] = {}

    def now(self, args: Sequence[Any]) -> Any:
        """Make a call and wait for it."""
        return self._runs.forward(*args)

    def begin(self, args: Sequence[Any]) -> int:
        """Begin a call; return its number."""
        number = next(self._numbers)
        self._begun[number] = self._runs.forward_async(*args)
        return number

    def end(self, number: int) -> Any:
        """Wait for a call."""
        return self._begun.pop(number).wait()


class Base(nn.Module):
    """The base of the classes of all interfaces."""

    __jit_ignored_attributes__ = ("save_to_buffer",)

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self.python: torch.futures.Future[Any] = torch.futures.Future()
        self.python.set_result(ScriptedCalls(runs))
        self.save_to_buffer = _refuse  # serde calls it for compiled modules


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Refuse to be sent."""
    raise RuntimeError(NOT_SENT)


def check_interface(interface: Any) -> None:
    """Refuse a class that is not an interface of TorchScript."""
    if not getattr(interface, "__torch_script_interface__", False):
        raise ValueError(
            f"module_interface_cls {interface} must be a type object decorated by "
            "@torch.jit.interface"
        )


def scriptable(interface: Any, runs: Runs) -> nn.Module:
    """Return a module for TorchScript to compile."""
    name = str(interface.__torch_script_interface__)
    if name not in _compiled_classes:
        _compiled_classes[name] = _compiled(name)
    return _compiled_classes[name](runs)


def _compiled(name: str) -> type[nn.Module]:
    """Return the class for an interface; TorchScript reads its source."""
    source, file = _source(name), f"<asyncrpc RemoteModule {name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    known = {"Base": Base, "__name__": "asyncrpc_remote_module_" + _plain(name)}
    exec(  # noqa: S102  (names and types of an interface of the program's own)
        "from typing import *\nimport torch\nfrom torch import Tensor\n"
        "from torch._jit_internal import Future\n",
        known,
    )
    exec(compile(source, file, "exec", dont_inherit=True), known)  # noqa: S102
    return cast("type[nn.Module]", known["Scripted"])


def _plain(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name)


def _source(name: str) -> str:
    interface: Any = torch.jit._state._python_cu.get_interface(name)  # noqa: SLF001
    schema = interface.getMethod("forward")
    arguments = schema.arguments[1:]  # without `self`
    types: Mapping[str, str] = {
        argument.name: str(argument.type) for argument in arguments
    }
    defaults = {
        argument.name: f" = {argument.default_value!r}"
        if argument.has_default_value()
        else ""
        for argument in arguments
    }
    return _METHODS.format(
        typed="".join(f", {argument}: {kind}" for argument, kind in types.items()),
        typed_with_defaults="".join(
            f", {argument}: {kind}{defaults[argument]}"
            for argument, kind in types.items()
        ),
        names="".join(f"{argument}, " for argument in types),
        result=str(schema.returns[0].type),
        not_pickled=NOT_PICKLED,
    )
