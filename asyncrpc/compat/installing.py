"""The facade in place of torch's modules, for a program that is not edited.

A finder, first on `sys.meta_path`, serves the names of torch's modules.  It serves
substitutes: modules that look up every name in the facade, at the time of use, and pass
assignments on to it; so `rpc.api._ignore_rref_leak = False` reaches the facade, and an
extended enum of backends is seen.  torch's own modules are removed from `sys.modules`;
the import system sets the attributes (`torch.distributed.rpc`), as for any module.

Replaced are `torch.distributed.rpc` and `torch.distributed.autograd` with their
submodules, the two modules that define DistributedOptimizer and RemoteModule, and the
class `profile` of torch's legacy profiler, whose events are also the callees'.  Only
modules that had been imported before are imported again: importing
`torch.distributed.optim` takes seconds, and a later import finds the substitute.  Names
that other modules of torch re-export are copied again.

Invariants: the facade is imported before any module is removed, as it has some records
(options, constants) from torch; while the finder is installed, no module of torch that
it replaces is in `sys.modules`.

Source: PEP 451, for finders, loaders and what an import sets.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, Final

import torch

from asyncrpc.compat import children

__all__ = ["install", "uninstall"]

_RPC: Final = "torch.distributed.rpc"
_AUTOGRAD: Final = "torch.distributed.autograd"
_OPTIMIZER: Final = "torch.distributed.optim.optimizer"
_REMOTE_MODULE: Final = "torch.distributed.nn.api.remote_module"
# No module of torch stays below these, even if the facade has no such module.
_PACKAGES: Final = (_RPC, _AUTOGRAD)
_FACADE_RPC: Final = "asyncrpc.compat.rpc"
# The modules that re-export a name, and the module that defines it.
# DistributedDataParallel looks for RRefs in the result of a module.
_REEXPORTED: Final[Mapping[tuple[str, str], str]] = {
    ("torch.distributed.optim", "DistributedOptimizer"): _OPTIMIZER,
    ("torch.distributed.nn", "RemoteModule"): _REMOTE_MODULE,
    ("torch.nn.parallel.distributed", "RRef"): _RPC,
}
# Names in modules that stay torch's, and their definitions here: a profiler that shows
# events of callees.
_PROFILER: Final = "torch.autograd.profiler_legacy"
_REPLACED: Final[Mapping[tuple[str, str], str]] = {
    (_PROFILER, "profile"): "asyncrpc.compat.profiler_legacy",
}
_NOTHING: Final = object()  # the value of a name that a home lacks
# Modules that may keep torch's own names: torch's (the third are generated), ours, and
# the main module's other name.
_UNASKED: Final = ("torch.", "asyncrpc.", "_remote_module_", "__mp_main__")
# torch's modules, and C++ modules, that define what programs may have imported.
_DEFINING: Final = (
    *_PACKAGES,
    _OPTIMIZER,
    _REMOTE_MODULE,
    "torch._C._distributed_rpc",
    "torch._C._distributed_autograd",
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
    _export_again()
    children.cover()
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
    _export_again()
    children.uncover()


class Substitute(types.ModuleType):
    """A module that has the names of other modules, for reading and for writing.

    Args:
        name: name of the replaced module.
        homes: the modules that it searches, in this order.
    """

    def __init__(self, name: str, homes: Sequence[types.ModuleType]) -> None:
        super().__init__(name, f"asyncrpc's, in the place of {name}.")
        vars(self)["_homes"] = tuple(homes)
        vars(self)["__all__"] = [
            one
            for one in getattr(homes[0], "__all__", ())
            if not isinstance(getattr(homes[0], one), types.ModuleType)
        ]

    def _home_of(self, name: str) -> types.ModuleType | None:
        homes: tuple[types.ModuleType, ...] = vars(self)["_homes"]
        return next((home for home in homes if hasattr(home, name)), None)

    def __getattr__(self, name: str) -> Any:
        if not _is_dunder(name):
            for home in self.__dict__["_homes"]:
                found = getattr(home, name, _NOTHING)
                if found is not _NOTHING:
                    return found
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


def _missing(module: str, name: str) -> str:
    return (
        f"{module} is asyncrpc's here (by asyncrpc.compat.install), which has no "
        f"{name!r}: do without it, or run the program without asyncrpc.compat"
    )


class SubstituteFinder(MetaPathFinder, Loader):
    """Finds and loads substitutes, and keeps the modules that they replace.

    Args:
        homes: for each module of torch's, the facade's modules that have its names.
    """

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
        """Find the substitute for a module.

        Raises:
            ImportError: torch has the module, but not the facade.  (A
                ModuleNotFoundError would be lost: `from a import b` ignores it.)
        """
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
        return Substitute(spec.name, self._homes[spec.name])

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a substitute looks up its names when they are used."""

    def displace(self) -> None:
        """Remove torch's modules from `sys.modules`, and names from others."""
        for name in self._replaced():
            self.displaced[name] = sys.modules.pop(name)
        for (module, name), home in _REPLACED.items():
            theirs = importlib.import_module(module)
            self.replaced[module, name] = getattr(theirs, name)
            setattr(theirs, name, getattr(importlib.import_module(home), name))

    def fill(self) -> None:
        """Import the substitutes of modules that had been imported."""
        for name in self._homes:
            if name in self.displaced:
                importlib.import_module(name)

    def restore(self) -> None:
        """Put torch's modules back where they were."""
        for name in self._replaced():
            del sys.modules[name]
            _set_in_parent(name, None)
        sys.modules.update(self.displaced)
        for name, module in self.displaced.items():
            _set_in_parent(name, module)
        for (home, name), value in self.replaced.items():
            setattr(sys.modules[home], name, value)

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
    found = (one for one in sys.meta_path if isinstance(one, SubstituteFinder))
    return next(found, None)


def _homes() -> dict[str, list[types.ModuleType]]:
    """Import the facade; return its modules by the torch module that they replace.

    A name that a submodule of the facade lacks is looked up in the package: torch's own
    submodules re-export it the same way.
    """
    rpc = importlib.import_module(_FACADE_RPC)
    homes = {
        _RPC: [rpc],
        _AUTOGRAD: [importlib.import_module("asyncrpc.compat.autograd")],
        _OPTIMIZER: [importlib.import_module("asyncrpc.compat.optim")],
        _REMOTE_MODULE: [importlib.import_module("asyncrpc.compat.nn")],
    }
    for leaf in sorted(_below(sys.modules[_RPC]) & _below(rpc)):
        own = importlib.import_module(f"{_FACADE_RPC}.{leaf}")
        homes[f"{_RPC}.{leaf}"] = [own, rpc]
    return homes


def _below(package: types.ModuleType) -> set[str]:
    return {one.name for one in pkgutil.iter_modules(package.__path__)}


def _export_again() -> None:
    """Copy the names that loaded modules of torch re-export from the new definitions.

    Modules that are not loaded yet will import them themselves.
    """
    for (module, name), defining in _REEXPORTED.items():
        if module in sys.modules:
            setattr(
                sys.modules[module],
                name,
                getattr(importlib.import_module(defining), name),
            )


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
        yield from (f"{name}.{one}" for one, v in list(held.items()) if id(v) in stale)


def _differing(displaced: Mapping[str, types.ModuleType]) -> Iterator[int]:
    """Yield the ids of torch's functions and classes that the facade replaces."""
    for name, module in displaced.items():
        substitute = sys.modules.get(name)
        for key, value in vars(module).items():
            is_theirs = str(getattr(value, "__module__", "")).startswith(_DEFINING)
            if is_theirs and getattr(substitute, key, None) is not value:
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
