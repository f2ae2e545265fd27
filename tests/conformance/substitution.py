"""Puts the facade in the place of torch's own RPC, before a test module is imported.

For "torch" nothing is done.  For "asyncrpc", in each process:

1. the facade is imported, while torch's own modules are still in place;
2. torch's entry points are poisoned: they raise and leave a mark, so that nothing can
   pass by way of torch's RPC;
3. proxies take the places of torch's modules, in `sys.modules` and as attributes of
   their parents (`import a.b.c as x` reads the attribute), and a few attributes are
   replaced.  A name that the facade has not becomes a placeholder.

The tables below are the one place that knows what stands for what.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.conformance.placeholders import Marks, Missing
from tests.conformance.proxies import Proxy

IMPLEMENTATIONS: Final = ("torch", "asyncrpc")

RPC: Final = "torch.distributed.rpc"
AUTOGRAD: Final = "torch.distributed.autograd"
MODULES: Final[Mapping[str, str]] = {
    RPC: "asyncrpc.compat.rpc",
    AUTOGRAD: "asyncrpc.compat.autograd",
}
# Submodules that the suites import or name.  What the facade's submodule lacks is taken
# from the facade's package: torch's own re-exports it the same way.
SUBMODULES: Final = (
    *("api", "backend_registry", "constants", "functions", "internal", "options"),
    *("rref_proxy", "server_process_global_profiler", "_utils"),
)
REMOTE_MODULE: Final = "torch.distributed.nn.api.remote_module"
PROFILER: Final = "torch.autograd.profiler_legacy"
NN: Final = ("asyncrpc.compat.nn.api.remote_module", "asyncrpc.compat.nn")
ATTRIBUTES: Final[Mapping[tuple[str, str], Sequence[str]]] = {
    ("torch.distributed.optim", "DistributedOptimizer"): ("asyncrpc.compat.optim",),
    ("torch.distributed.nn", "RemoteModule"): NN,
    (REMOTE_MODULE, "RemoteModule"): NN,
    (REMOTE_MODULE, "_RemoteModule"): NN,
    (PROFILER, "profile"): ("asyncrpc.compat.profiling",),
}
OUR_NAMES: Final = {(PROFILER, "profile"): "legacy_profile"}  # where they differ
# Conveniences of the suites that say nothing about an implementation: torch's own, if
# the facade has none.
LENT: Final[Mapping[str, Sequence[str]]] = {
    RPC: ("is_available",),
    AUTOGRAD: ("is_available",),
    f"{RPC}.internal": ("RPCExecMode", "_build_rpc_profiling_key", "PythonUDF"),
}
POISONED: Final[Mapping[str, Sequence[str]]] = {
    "torch._C._distributed_rpc": (
        *("TensorPipeAgent", "_delete_all_user_and_unforked_owner_rrefs"),
        *("_destroy_rref_context", "_get_current_rpc_agent", "_invoke_remote_builtin"),
        *("_invoke_remote_python_udf", "_invoke_remote_torchscript"),
        *("_invoke_rpc_builtin", "_invoke_rpc_python_udf", "_invoke_rpc_torchscript"),
        *("_rref_context_get_debug_info", "_set_and_start_rpc_agent"),
    ),
    RPC: ("_get_debug_info", "_init_rpc_backend", "init_rpc"),
    f"{RPC}.api": (
        *("_all_gather", "_barrier", "_invoke_rpc", "_wait_all_workers"),
        *("get_worker_info", "remote", "rpc_async", "rpc_sync", "shutdown"),
    ),
    "torch._C._distributed_autograd": (
        *("_current_context", "_get_debug_info", "_init", "_new_context"),
        *("_release_context", "_retrieve_context", "backward", "get_gradients"),
    ),
}
# Modules that may hold a poisoned function under another name.
HOLDERS: Final = (
    RPC,
    AUTOGRAD,
    "asyncrpc.compat",
    *(name for name in POISONED if "._C." in name),
)


@dataclass(slots=True)
class Substitution:
    """What was noticed while test modules were imported."""

    # Functions of test modules that TorchScript refused.
    not_compiled: list[str] = field(default_factory=list)
    undo: Callable[[], None] = lambda: None

    def imported(self) -> None:
        """Note that test modules are imported: now a missing name fails its test."""
        self.undo()


def install(implementation: str, marks: Marks) -> Substitution:
    """Make what is imported from torch's RPC modules the implementation's."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown: {implementation!r}; known: {IMPLEMENTATIONS}")
    if implementation == "torch":
        marks.importing = False
        return Substitution()
    _import_torch()
    by_name = {name: _facade(name, facade) for name, facade in MODULES.items()}
    for below in SUBMODULES:
        by_name[f"{RPC}.{below}"] = _facade(f"{RPC}.{below}", f"{MODULES[RPC]}.{below}")
        by_name[f"{RPC}.{below}"] += by_name[RPC]
    by_name[f"{RPC}._testing"] = [_faulty_backend(), *by_name[RPC]]
    attributes = {
        place: [module for module in map(_module, names) if module is not None]
        for place, names in ATTRIBUTES.items()
    }
    for name, names in LENT.items():
        by_name[name] = [*by_name[name], _lent(name, names)]
    _poison(marks)
    _put_modules(by_name, marks)
    _put_attributes(attributes, marks)
    done = Substitution()
    _forgive_scripts(done, marks)
    return done


def _import_torch() -> None:
    """Import whatever of torch may import its RPC, before that is another's."""
    for name in (
        *POISONED,
        *MODULES,
        f"{RPC}._utils",
        f"{RPC}.rref_proxy",
        f"{RPC}.server_process_global_profiler",
        *(module for module, _ in ATTRIBUTES),
        "torch.nn.parallel.distributed",
        "torch.testing._internal.common_distributed",
    ):
        if "._C." not in name:  # those are attributes, there once torch is imported
            importlib.import_module(name)


def _module(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it imports is not
        return None


def _facade(name: str, facade: str) -> list[types.ModuleType]:
    module = _module(facade)
    if module is None and name == RPC:
        raise ModuleNotFoundError(f"there is no {facade}", name=facade)
    return [] if module is None else [module]


def _faulty_backend() -> types.ModuleType:
    """Import the backend that loses messages, which the package has not."""
    return importlib.import_module("tests.conformance.faulty")


def _lent(name: str, names: Sequence[str]) -> types.ModuleType:
    lent = types.ModuleType(f"lent by {name}")
    vars(lent).update(
        {attribute: getattr(sys.modules[name], attribute) for attribute in names}
    )
    return lent


def _poison(marks: Marks) -> None:
    """Replace torch's entry points in each of its modules that holds them."""
    for module_name, names in POISONED.items():
        for name in names:
            bitter = _bitter(f"{module_name}.{name}", marks)
            sweet = getattr(sys.modules[module_name], name)
            for holder_name, holder in list(sys.modules.items()):
                if holder_name.startswith(HOLDERS):
                    for held, value in list(vars(holder).items()):
                        if value is sweet:
                            setattr(holder, held, bitter)


def _bitter(name: str, marks: Marks) -> Callable[..., Any]:
    def leaked(*_args: Any, **_kwargs: Any) -> Any:
        marks.leaked(name)

    return leaked


def _put_modules(
    by_name: Mapping[str, Sequence[types.ModuleType]], marks: Marks
) -> None:
    proxies: dict[str, types.ModuleType] = {}
    for name, modules in by_name.items():
        proxies[name] = sys.modules[name] = Proxy(name, modules, proxies, marks)
    for name, proxy in proxies.items():
        parent, _, leaf = name.rpartition(".")
        if parent not in proxies:  # a proxy finds those below it by itself
            setattr(sys.modules[parent], leaf, proxy)


def _put_attributes(
    attributes: Mapping[tuple[str, str], Sequence[types.ModuleType]], marks: Marks
) -> None:
    for (module, name), homes in attributes.items():
        ours = OUR_NAMES.get((module, name), name)
        had = [getattr(home, ours) for home in homes if hasattr(home, ours)]
        value = had[0] if had else Missing(f"{module}.{name}", marks)
        setattr(sys.modules[module], name, value)
    reference = getattr(sys.modules[RPC], "RRef")  # noqa: B009  (of a proxy)
    if isinstance(reference, type):  # DDP looks for RRefs in what a module returns
        vars(sys.modules["torch.nn.parallel.distributed"])["RRef"] = reference


def _forgive_scripts(done: Substitution, marks: Marks) -> None:
    """Let test modules import whose scripts mention RRefs; those compile for torch's.

    Their tests are of class c, and fail by a placeholder.
    """
    torch = sys.modules["torch"]
    compiler: Callable[..., Any] = torch.jit.script

    def script(target: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compiler(target, *args, **kwargs)
        except Exception:  # noqa: BLE001  (whatever a compiler says about a foreign class)
            name = getattr(target, "__qualname__", repr(target))
            done.not_compiled.append(name)
            return lambda *_args, **_kwargs: marks.missing(f"TorchScript {name}")

    def undo() -> None:
        marks.importing = False
        torch.jit.script = compiler

    torch.jit.script = script
    done.undo = undo
