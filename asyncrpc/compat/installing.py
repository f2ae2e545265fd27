"""The facade in the place of torch's modules, for a program that is not to be edited.

A finder, first on `sys.meta_path`, serves the names of torch's modules.  What it serves
are substitutes: modules that look up every name in the facade, at the time of the use,
and pass on what is assigned to them; so `rpc.api._ignore_rref_leak = False` reaches the
facade, and an enum of backends that has grown is seen.  torch's own modules are taken
out of `sys.modules`; their places as attributes (`torch.distributed.rpc`) are filled by
the import system, as for any module.

Replaced are `torch.distributed.rpc` and `torch.distributed.autograd`, with all that is
below them, the two modules that define DistributedOptimizer and RemoteModule, and the
class `profile` of torch's legacy profiler, whose events are also the callees'.  Of
these only those are imported anew that had been imported before: to import
`torch.distributed.optim` takes seconds, and a program that does will find the
substitute there.  What other modules of torch re-export is copied once more.

Invariants: the facade is imported before anything is taken away, as it has some records
(options, constants) from torch; while the finder is installed, no module of torch's
that it replaces is in `sys.modules`.

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
# Nothing of torch's stays below these, even where the facade has no such module.
_PACKAGES: Final = (_RPC, _AUTOGRAD)
_FACADE_RPC: Final = "asyncrpc.compat.rpc"
# Who re-exports a name, and which module defines it.  DistributedDataParallel looks for
# RRefs in what a module returns.
_REEXPORTED: Final[Mapping[tuple[str, str], str]] = {
    ("torch.distributed.optim", "DistributedOptimizer"): _OPTIMIZER,
    ("torch.distributed.nn", "RemoteModule"): _REMOTE_MODULE,
    ("torch.nn.parallel.distributed", "RRef"): _RPC,
}
# Names of modules that stay torch's, and whose they are here: a profiler that shows
# what callees do.
_PROFILER: Final = "torch.autograd.profiler_legacy"
_REPLACED: Final[Mapping[tuple[str, str], str]] = {
    (_PROFILER, "profile"): "asyncrpc.compat.profiler_legacy",
}
_NOTHING: Final = object()  # what a home has that lacks a name
# Modules that may go on with torch's own: torch's (the third are generated), ours, and
# another name of the main module.
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
    """Put the facade in the place of torch.distributed.rpc and what belongs to it.

    What this process imports afterwards from torch.distributed.rpc, or a module below
    it, from torch.distributed.autograd, torch.distributed.optim (DistributedOptimizer)
    or torch.distributed.nn (RemoteModule) is the facade's, and so it is in processes
    that it starts by multiprocessing or torch.multiprocessing.  Names that the facade
    has not raise an AttributeError or an ImportError that says so.  The `profile` of
    torch.autograd.profiler_legacy is the facade's, too.

    Call it before anything else is imported from torch's modules: what a module already
    holds under a name of its own stays torch's, and a RuntimeWarning names it.  Called
    again, it does nothing.

    Raises:
        RuntimeError: torch's own RPC is running in this process; nothing has changed.

    Thread safety:
        As an import: call it where the program begins.

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
    """Give the places back to torch's own modules; do nothing if it has them.

    What the program has imported in the meantime stays the facade's.

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
        name: whose place it takes.
        homes: the modules that it looks into, in this order.
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
        # The import system's own: the attributes of every module, and what is below.
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
    """Finds and loads substitutes, and keeps what they have displaced.

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
            ImportError: the module is torch's, and the facade has none like it.  (A
                ModuleNotFoundError would be lost: `from a import b` ignores it.)
        """
        if fullname in self._homes:
            # A package each: so `from a import b` asks here for a name that a has not,
            # and gets the reason, where it would swallow the AttributeError.
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
        """Do nothing: it looks up its names when they are used."""

    def displace(self) -> None:
        """Remove torch's modules from `sys.modules`, and names from others."""
        for name in self._replaced():
            self.displaced[name] = sys.modules.pop(name)
        for (module, name), home in _REPLACED.items():
            theirs = importlib.import_module(module)
            self.replaced[module, name] = getattr(theirs, name)
            setattr(theirs, name, getattr(importlib.import_module(home), name))

    def fill(self) -> None:
        """Import the substitutes that are expected to be there."""
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
    """Import the facade; say which of its modules have the names of which of torch's.

    What a module below the facade's package lacks is looked for in the package: torch's
    own re-exports it the same way.
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
    """Let modules of torch that are loaded have the names from who defines them now.

    Those that are not loaded will import them themselves.
    """
    for (module, name), defining in _REEXPORTED.items():
        if module in sys.modules:
            setattr(
                sys.modules[module],
                name,
                getattr(importlib.import_module(defining), name),
            )


# --- what was imported too early -----------------------------------------------------


def _holders(finder: SubstituteFinder) -> Iterator[str]:
    """Find names in the program's modules whose values stay torch's."""
    stale = {id(module) for module in finder.displaced.values()}
    stale |= set(_differing(finder.displaced))
    stale |= {id(value) for value in finder.replaced.values()}
    for name, module in list(sys.modules.items()):
        held = getattr(module, "__dict__", None)
        if name.startswith(_UNASKED) or not isinstance(held, dict):
            continue
        yield from (f"{name}.{one}" for one, v in list(held.items()) if id(v) in stale)


def _differing(displaced: Mapping[str, types.ModuleType]) -> Iterator[int]:
    """Yield the ids of functions and classes of torch's that the facade replaces."""
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
