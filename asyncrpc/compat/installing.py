"""The facade in place of torch's modules, for a program that is not edited.

A finder, first on `sys.meta_path`, serves the names of torch's modules.  It serves
substitutes: modules that look up every name in the facade, at the time of use, and pass
assignments on to it; so `rpc.api._ignore_rref_leak = False` reaches the facade, and an
extended enum of backends is seen.  torch's own modules are removed from `sys.modules`;
the import system sets the attributes (`torch.distributed.rpc`), as for any module.

Replaced are `torch.distributed.rpc` and `torch.distributed.autograd` with their
submodules and the C++ modules below them, the two modules that define
DistributedOptimizer and RemoteModule, and the class `profile` of torch's legacy
profiler, whose events are also the callees'.  Only modules that had been imported
before are imported again: importing `torch.distributed.optim` takes seconds, and a
later import finds the substitute.

Other modules of torch, ShardedTensor's for one, have imported names from the replaced
ones: in those the names are set again.  In modules of the program they are not: a
warning lists them.

Invariants: the facade is imported before any module is removed, as it has some records
(options, constants) from torch; while the finder is installed, no module of torch that
it replaces is in `sys.modules`.

Processes of multiprocessing get the facade before the program's code runs.  A spawned
process is a new interpreter.  It unpickles its preparation data, imports the
program's main module as they direct, and then unpickles the function to run.  The main
module's imports must find the facade, and only the preparation data come earlier
without a change to the started interpreter.  So we add an entry to them
(`multiprocessing.spawn.get_preparation_data`) that pickles as a call of `exec`:
unpickling it installs the facade.  The process's own children get it the same way.

What was rejected: a `sitecustomize` or a `.pth` file changes every interpreter of the
environment, other programs' too; another executable (`multiprocessing.set_executable`)
is seen by the program, and by its debugger and profiler; a variable of the environment
is not read in a process that does not import asyncrpc; an entry among the
arguments of `Process` comes after the main module has been imported.

The entry brings the parent's import path along, as the interpreter does not have it
yet, and last the place of asyncrpc, which the program's own path may lack (`python -m`
finds it in the working directory, and a script's path does not have that).  Preparation
sets the path right afterwards.

Forked processes inherit the facade; the processes of a fork server get the entry, too.
Newer Pythons let the server itself import the main module, which is too early: we
prevent that.  Not covered are interpreters that the program starts on its own
(`subprocess`), and libraries with a copy of multiprocessing (loky): start those with
`-m asyncrpc.compat`, or call `asyncrpc.compat.install()` in them.

Source: PEP 451, for finders, loaders and what an import sets; multiprocessing.spawn of
Python 3.11 to 3.14 (`_main`, `prepare`).
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import torch

import asyncrpc

_ENTRY: Final = "asyncrpc.compat"  # a key of the preparation data that is ignored
_ASYNCRPC_IN: Final = str(Path(asyncrpc.__file__).parents[1])
_FIRST: Final = """
import sys
sys.path = {path!r}
from asyncrpc.compat import install
install()
"""
# The fork server imports this by default.
_PRELOADED: Final = "__main__"


class Installation:
    """Installs the facade where it is unpickled."""

    def __init__(self, path: list[str]) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, dict[str, Any]]]:
        """Pickle as code: the new process cannot find our functions yet."""
        return exec, (_FIRST.format(path=self._path), {})


class Preparation:
    """Replaces `get_preparation_data`, and adds the entry to its result."""

    def __init__(self, original: Callable[[str], dict[str, Any]]) -> None:
        self.original = original

    def __call__(self, name: str) -> dict[str, Any]:
        """Return the preparation data of a process."""
        prepared = self.original(name)
        path = [*prepared["sys_path"], _ASYNCRPC_IN]
        return {_ENTRY: Installation(path), **prepared}


def cover() -> None:
    """Install the facade in processes that are started from now on."""
    if not isinstance(spawn.get_preparation_data, Preparation):
        _set_preparation(Preparation(spawn.get_preparation_data))
        multiprocessing.set_forkserver_preload([])


def uncover() -> None:
    """Start processes as before, without the facade."""
    if isinstance(spawn.get_preparation_data, Preparation):
        _set_preparation(spawn.get_preparation_data.original)
        multiprocessing.set_forkserver_preload([_PRELOADED])


def _set_preparation(function: Callable[[str], dict[str, Any]]) -> None:
    vars(spawn)["get_preparation_data"] = function


__all__ = ["install", "uninstall"]

_RPC: Final = "torch.distributed.rpc"
_AUTOGRAD: Final = "torch.distributed.autograd"
_OPTIMIZER: Final = "torch.distributed.optim.optimizer"
_REMOTE_MODULE: Final = "torch.distributed.nn.api.remote_module"
# C++ modules: attributes of `torch._C`, which is not a package that imports them.
_C_RPC: Final = "torch._C._distributed_rpc"
_C_AUTOGRAD: Final = "torch._C._distributed_autograd"
# No module of torch stays below these, even if the facade has no such module.
_PACKAGES: Final = (_RPC, _AUTOGRAD)
_FACADE_RPC: Final = "asyncrpc.compat.rpc"
# Names in modules that stay torch's, and their definitions here: a profiler that shows
# events of callees.
_PROFILER: Final = "torch.autograd.profiler_legacy"
_REPLACED: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    (_PROFILER, "profile"): ("asyncrpc.compat.profiling", "legacy_profile"),
}
_NOTHING: Final = object()  # the value of a name that a home lacks
# Modules that nobody has to be told of: torch's (the third are generated), whose names
# are set again, ours, and the main module's other name.
_TORCH: Final = ("torch.", "_remote_module_")
_UNASKED: Final = (*_TORCH, "asyncrpc.", "__mp_main__")
_FOREIGN: Final = (types.ModuleType, TypeVar, ParamSpec, types.UnionType)
# torch's modules, and C++ modules, that define what programs may have imported.
_DEFINING: Final = (
    *_PACKAGES,
    _OPTIMIZER,
    _REMOTE_MODULE,
    _C_RPC,
    _C_AUTOGRAD,
)


def install() -> None:
    """Replace torch.distributed.rpc and its related modules by the facade.

    Later imports from torch.distributed.rpc and its submodules, from
    torch.distributed.autograd, torch.distributed.optim (DistributedOptimizer) and
    torch.distributed.nn (RemoteModule) get the facade, also in processes that this one
    starts with multiprocessing or torch.multiprocessing.  A name that the facade lacks
    raises an AttributeError or an ImportError that says so.  The `profile` of
    torch.autograd.profiler_legacy is the facade's, too.

    Call it before any other import from torch's modules: a name that a module has
    already imported stays torch's, and a RuntimeWarning lists it.  Called again, it
    does nothing.

    Raises:
        RuntimeError: torch's own RPC is running in this process; nothing has changed.

    Thread safety:
        As for an import: call it at the start of the program.

    Example:
        >>> import asyncrpc.compat
        >>> asyncrpc.compat.install()
        >>> import torch.distributed.rpc as rpc  # asyncrpc's

    Source: ours; `python -m asyncrpc.compat script.py` calls it for a script.
    """
    if _installed() is not None:
        return
    if torch._C._distributed_rpc._is_current_rpc_agent_set():  # noqa: SLF001
        raise RuntimeError(
            "torch's own RPC is running in this process: call "
            "asyncrpc.compat.install() before init_rpc"
        )
    finder = SubstituteFinder(_homes())
    finder.displace()
    sys.meta_path.insert(0, finder)
    finder.fill()
    cover()
    _warn_of(sorted(_holders(finder)))


def uninstall() -> None:
    """Restore torch's own modules; do nothing if they are in place.

    Names that the program has imported in the meantime stay the facade's.

    Raises:
        RuntimeError: the facade's RPC is running: call `rpc.shutdown()` first.
    """
    finder = _installed()
    if finder is None:
        return
    agents: Any = importlib.import_module(f"{_FACADE_RPC}.agent")
    if agents.is_set():
        raise RuntimeError(
            "RPC is running: call torch.distributed.rpc.shutdown() before "
            "asyncrpc.compat.uninstall()"
        )
    sys.meta_path.remove(finder)
    finder.restore()
    uncover()


class Substitute(types.ModuleType):
    """A module that has the names of other modules, for reading and for writing."""

    def __init__(
        self,
        name: str,
        homes: Sequence[types.ModuleType],
        original: types.ModuleType | None,
    ) -> None:
        super().__init__(name, f"asyncrpc's, in the place of {name}.")
        vars(self)["_homes"] = tuple(homes)
        vars(self)["_original"] = original
        vars(self)["__all__"] = [
            public_name
            for public_name in getattr(homes[0], "__all__", ())
            if not isinstance(getattr(homes[0], public_name), types.ModuleType)
        ]

    def _home_of(self, name: str) -> types.ModuleType | None:
        homes: tuple[types.ModuleType, ...] = vars(self)["_homes"]
        return next((home for home in homes if hasattr(home, name)), None)

    def __getattr__(self, name: str) -> Any:
        if not _is_dunder(name):
            for home in self.__dict__["_homes"]:
                value = getattr(home, name, _NOTHING)
                if value is not _NOTHING:
                    return value
            imported = getattr(self.__dict__["_original"], name, _NOTHING)
            if isinstance(imported, types.ModuleType):  # one that is replaced, or not
                imported = sys.modules.get(imported.__name__, _NOTHING)
            if _is_foreign(imported):
                return imported
        raise AttributeError(_missing(self.__name__, name), name=name, obj=self)

    def __setattr__(self, name: str, value: object) -> None:
        # The import system sets these: attributes of every module, and submodules.
        if _is_dunder(name) or isinstance(value, Substitute):
            super().__setattr__(name, value)
        else:
            setattr(self._home_of(name) or vars(self)["_homes"][0], name, value)

    def __delattr__(self, name: str) -> None:
        home = None if name in vars(self) else self._home_of(name)
        if home is None:
            super().__delattr__(name)
        else:
            delattr(home, name)

    def __dir__(self) -> list[str]:
        homes: tuple[types.ModuleType, ...] = vars(self)["_homes"]
        return sorted({*vars(self), *(name for home in homes for name in dir(home))})


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_foreign(value: object) -> bool:
    """Return whether a module of torch's has a value from another one."""
    if isinstance(value, _FOREIGN):
        return True
    return callable(value) and not _is_theirs(value) and hasattr(value, "__module__")


def _is_theirs(value: object) -> bool:
    """Return whether a function or class is defined by a module that is replaced."""
    return str(getattr(value, "__module__", "")).startswith(_DEFINING)


def _missing(module: str, name: str) -> str:
    return (
        f"{module} is asyncrpc's here (by asyncrpc.compat.install), which has no "
        f"{name!r}: do without it, or run the program without asyncrpc.compat"
    )


class SubstituteFinder(MetaPathFinder, Loader):
    """Finds and loads substitutes, and keeps the modules that they replace."""

    def __init__(self, homes: Mapping[str, Sequence[types.ModuleType]]) -> None:
        self._homes = homes
        self.displaced: dict[str, types.ModuleType] = {}
        self.replaced: dict[tuple[str, str], object] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find the substitute for a module."""
        if fullname in self._homes:
            # Each is a package: so `from a import b` asks here for a name that `a`
            # lacks, and gets the reason; it would swallow an AttributeError.
            origin = self._homes[fullname][0].__name__
            return ModuleSpec(fullname, self, origin=origin, is_package=True)
        package, _, leaf = fullname.rpartition(".")
        if package in self._homes:
            raise ImportError(_missing(package, leaf), name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Make the substitute."""
        homes = self._homes[spec.name]
        return Substitute(spec.name, homes, self.displaced.get(spec.name))

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a substitute looks up its names when they are used."""

    def displace(self) -> None:
        """Remove torch's modules from `sys.modules`, and names from others."""
        for name in self._replaced():
            self.displaced[name] = sys.modules.pop(name)
        for (module, name), (home, our_name) in _REPLACED.items():
            torch_module = importlib.import_module(module)
            self.replaced[module, name] = getattr(torch_module, name)
            setattr(
                torch_module, name, getattr(importlib.import_module(home), our_name)
            )

    def fill(self) -> None:
        """Load the substitutes of modules that had been loaded, and set their names.

        (The import system cannot: `torch._C` is no package.)
        """
        for name in self._homes:
            if name in self.displaced:
                module = Substitute(name, self._homes[name], self.displaced[name])
                module.__spec__ = self.find_spec(name)
                module.__path__ = []
                sys.modules[name] = module
                _set_in_parent(name, module)
        _rebind(self.displaced, sys.modules)

    def restore(self) -> None:
        """Put torch's modules, and their names in others, back where they were."""
        substitutes = {name: sys.modules.pop(name) for name in self._replaced()}
        for name in substitutes:
            _set_in_parent(name, None)
        sys.modules.update(self.displaced)
        for name, module in self.displaced.items():
            _set_in_parent(name, module)
        for (home, name), value in self.replaced.items():
            setattr(sys.modules[home], name, value)
        originals = {name: importlib.import_module(name) for name in substitutes}
        _rebind(substitutes, originals)

    def _replaced(self) -> list[str]:
        below = tuple(f"{package}." for package in _PACKAGES)
        return [
            name
            for name in sys.modules
            if name in self._homes or name.startswith(below)
        ]


def _set_in_parent(name: str, module: types.ModuleType | None) -> None:
    parent, _, leaf = name.rpartition(".")
    if parent not in sys.modules:
        return
    if module is not None:
        setattr(sys.modules[parent], leaf, module)
    elif leaf in vars(sys.modules[parent]):
        delattr(sys.modules[parent], leaf)


def _installed() -> SubstituteFinder | None:
    installed = (
        finder for finder in sys.meta_path if isinstance(finder, SubstituteFinder)
    )
    return next(installed, None)


def _homes() -> dict[str, list[types.ModuleType]]:
    """Import the facade; return its modules by the torch module that they replace.

    A name that a submodule of the facade lacks is looked up in the package: torch's own
    submodules re-export it the same way.
    """
    rpc = importlib.import_module(_FACADE_RPC)
    lock = importlib.import_module(f"{_FACADE_RPC}.store_lock")
    homes = {
        _RPC: [rpc],
        _AUTOGRAD: [importlib.import_module("asyncrpc.compat.autograd")],
        _OPTIMIZER: [importlib.import_module("asyncrpc.compat.optim"), rpc],
        _REMOTE_MODULE: [
            importlib.import_module("asyncrpc.compat.nn.api.remote_module"),
            importlib.import_module("asyncrpc.compat.nn"),
            rpc.internal,
        ],
        f"{_RPC}._utils": [lock, rpc],
        _C_RPC: [importlib.import_module(f"{_FACADE_RPC}.bindings")],
        _C_AUTOGRAD: [importlib.import_module("asyncrpc.compat.autograd")],
    }
    for leaf in sorted(_below(sys.modules[_RPC]) & _below(rpc)):
        own = importlib.import_module(f"{_FACADE_RPC}.{leaf}")
        homes[f"{_RPC}.{leaf}"] = [own, rpc, lock]
    return homes


def _below(package: types.ModuleType) -> set[str]:
    return {submodule.name for submodule in pkgutil.iter_modules(package.__path__)}


def _rebind(
    old: Mapping[str, types.ModuleType], new: Mapping[str, types.ModuleType]
) -> None:
    """Set names of other modules of torch that still have values of the old modules.

    Modules that are not loaded yet will import the new ones themselves.
    """
    values: dict[int, dict[str, object]] = {}
    for name, module in old.items():
        if name not in new:
            continue
        values[id(module)] = {name.rpartition(".")[2]: new[name]}
        for key in dir(module):
            old_value = getattr(module, key, _NOTHING)
            other = getattr(new[name], key, _NOTHING)
            if callable(old_value) and old_value is not other is not _NOTHING:
                values.setdefault(id(old_value), {})[key] = other
    for name, module in list(sys.modules.items()):
        if name.startswith(_TORCH) and name not in old:
            for key, value in list(vars(module).items()):
                if id(value) in values and not _is_dunder(key):
                    by_name = values[id(value)]  # two names may have one value
                    other = by_name.get(key, next(iter(by_name.values())))
                    setattr(module, key, other)


# --- imports before `install` --------------------------------------------------------


def _holders(finder: SubstituteFinder) -> Iterator[str]:
    """Yield names in the program's modules whose values are still torch's."""
    stale = {id(module) for module in finder.displaced.values()}
    stale |= set(_differing(finder.displaced))
    stale |= {id(value) for value in finder.replaced.values()}
    for name, module in list(sys.modules.items()):
        held = getattr(module, "__dict__", None)
        if name.startswith(_UNASKED) or not isinstance(held, dict):
            continue
        yield from (
            f"{name}.{attribute}"
            for attribute, v in list(held.items())
            if id(v) in stale
        )


def _differing(displaced: Mapping[str, types.ModuleType]) -> Iterator[int]:
    """Yield the ids of torch's functions and classes that the facade replaces."""
    for name, module in displaced.items():
        substitute = sys.modules.get(name)
        for key, value in vars(module).items():
            if _is_theirs(value) and getattr(substitute, key, None) is not value:
                yield id(value)


def _warn_of(holders: Iterable[str]) -> None:
    names = ", ".join(holders)
    if names:
        warnings.warn(
            "imported before asyncrpc.compat.install(), and so still torch's own: "
            f"{names}; call install() first, or run the program by "
            "`python -m asyncrpc.compat`",
            RuntimeWarning,
            stacklevel=3,
        )
