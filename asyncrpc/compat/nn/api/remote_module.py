"""A module on another worker that is an `nn.Module` here, and blocks.

    module = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
    y = module.forward(x)
    optimizer = DistributedOptimizer(SGD, module.remote_parameters(), lr=0.1)

A call sends it as a reference with a few attributes; any other pickling is refused.
The reference inside tells the two apart: calls take it out of the pickle, and in any
other pickler it raises.

Source: torch.distributed.nn.api.remote_module, version 2.13, for names and texts.
Improvements on it: `train(False)` has an effect, `train` and `eval` return the module
itself, a module that was sent can be called, a derived class can be sent, and a result
on a device keeps its shape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self

import torch
from torch import nn
from torch.distributed.remote_device import _remote_device
from torch.utils import _pytree as pytree

from asyncrpc.compat.nn.api import scripted
from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc import api
from asyncrpc.compat.rpc.options import WorkerInfo
from asyncrpc.compat.rpc.rref import RRef
from asyncrpc.core.rref.handle import RRef as Handle

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES: Final = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
# The other attributes of an object: a call does not send them, and does not warn.
_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING: Final = frozenset(
    {*vars(nn.Module()), "forward_async", "forward"}
)

_NO_SCRIPT: Final = (
    "TorchScript cannot compile a RemoteModule that was made without "
    "`_module_interface_cls`: it must know the types of `forward`"
)
_UNPICKLED: Final = (
    "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be "
    "unpickled when using RPC"
)

# Methods of `nn.Module` that torch's RemoteModule lacks; ours refuses more.
_UNSUPPORTED: Final = (
    *("add_module", "apply", "bfloat16", "buffers", "children", "cpu", "cuda"),
    *("double", "extra_repr", "float", "half", "ipu", "load_state_dict"),
    *("modules", "named_buffers", "named_children", "named_modules"),
    *("named_parameters", "parameters", "register_backward_hook"),
    *("register_buffer", "register_forward_hook", "register_forward_pre_hook"),
    *("register_parameter", "requires_grad_", "share_memory", "state_dict"),
    *("to", "type", "xpu", "zero_grad"),
)
_INSTEAD_OF: Final = {"parameters": ". Please use ``remote_parameters`` instead."}


class _UnsupportedMethod:
    """A method of `nn.Module` that a RemoteModule lacks."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        instead = _INSTEAD_OF.get(self.__name__, "")
        raise ValueError(
            f"Method ``{self.__name__}`` not supported for RemoteModule{instead}"
        )


@dataclass(frozen=True, slots=True)
class _Forward:
    """The two methods that run a module on its worker.

    They are bound to this object and not to the RemoteModule that has them: an object
    in a cycle would keep the module alive until the garbage collector runs.
    """

    module_rref: RRef[nn.Module]
    device: str
    is_device_map_set: bool

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        return api.rpc_async(*self._call(args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return api.rpc_sync(*self._call(args, kwargs))

    def _call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[WorkerInfo, Callable[..., Any], tuple[Any, ...]]:
        values = self.module_rref, self.device, self.is_device_map_set, args, kwargs
        return self.module_rref.owner(), _remote_forward, values


_GENERATED_METHODS: Final = (_Forward.forward_async, _Forward.forward)


class _RemoteModule(nn.Module):
    """A RemoteModule that TorchScript can compile if it has an interface."""

    on: str | int
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: list[Callable[..., Any]]
    module_rref: RRef[nn.Module]
    _interface: Any  # only if it is scriptable
    forward: Callable[..., Any]
    forward_async: Callable[..., torch.futures.Future[Any]]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        """Start making a module on another worker; return at once.

        Args:
            remote_device: this and the next three, as for `RemoteModule`.
            module_cls: makes the module there.
            args: of `module_cls`.
            kwargs: of `module_cls`.
            _module_interface_cls: has the types of the module's `forward`, for
                `torch.jit.script`; made by `torch.jit.interface`.

        Raises:
            ValueError: `_module_interface_cls` is not an interface.
        """
        super().__init__()
        self._place(remote_device)
        self._take(_module_interface_cls)
        values = module_cls, tuple(args or ()), dict(kwargs or {}), self.device
        self._refer(api.remote(self.on, _create_module, values))

    @staticmethod
    def init_from_module_rref(
        remote_device: str,
        module_rref: RRef[nn.Module],
        _module_interface_cls: Any = None,
    ) -> RemoteModule:
        """Return a RemoteModule for an existing module.

        Args:
            remote_device: as for the constructor.  Calls go to the reference's owner,
                even if this names another worker.
            module_rref: a reference to the module.
            _module_interface_cls: as for `_RemoteModule`.

        Raises:
            AssertionError: RPC has not been initialized.
            ValueError: `remote_device` is malformed, or the interface is not valid.

        Source: torch.distributed.nn.RemoteModule.init_from_module_rref.
        """
        module = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(module)
        module._place(remote_device)  # noqa: SLF001  (its other constructor)
        module._take(_module_interface_cls)  # noqa: SLF001
        module._refer(module_rref)  # noqa: SLF001
        return module

    def _place(self, remote_device: str) -> None:
        """Set the worker and its device from the text."""
        if not agents.is_set():
            raise AssertionError("RemoteModule only works in RPC.")
        place, agent = _remote_device(remote_device), agents.current()
        on = place.rank() if place.worker_name() is None else place.worker_name()
        if on is None:
            raise ValueError(
                f"remote_device {remote_device!r} names no worker. The valid format is "
                "'<workername>/<device>' or 'rank:<rank>/<device>'"
            )
        maps: Mapping[str, Any] = getattr(agent.options, "device_maps", {})
        self.on = on
        self.device = str(place.device())
        self.is_device_map_set = bool(maps.get(agent.get_worker_info(on).name))

    def _take(self, interface: Any) -> None:
        """Keep the interface, if there is one."""
        self.is_scriptable = interface is not None
        if interface is not None:
            scripted.check_interface(interface)
            self._interface = interface

    def _refer(self, module_rref: RRef[nn.Module]) -> None:
        """Keep the reference, and the methods that use it."""
        self.generated_methods = list(_GENERATED_METHODS)
        self.module_rref = module_rref
        self._install_generated_methods()

    def _install_generated_methods(self) -> None:
        runs = self._runs()
        self.forward_async, self.forward = runs.forward_async, runs.forward

    def _runs(self) -> _Forward:
        return _Forward(self.module_rref, self.device, self.is_device_map_set)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what TorchScript compiles in place of this.

        Raises:
            RuntimeError: the module has no interface.
        """
        if not self.is_scriptable:
            raise RuntimeError(_NO_SCRIPT)
        return scripted.scriptable(self._interface, self._runs())

    # --- its methods -----------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as `forward` does; a RemoteModule has no hooks."""
        return self.forward(*args, **kwargs)

    def remote_parameters(
        self,
        recurse: bool = True,  # noqa: FBT001, FBT002  (torch's signature)
    ) -> list[RRef[nn.Parameter]]:
        """Return a reference to each parameter, for a DistributedOptimizer.

        Args:
            recurse: include those of inner modules.

        Raises:
            Exception: the error of the module's constructor.

        Source: torch.distributed.nn.RemoteModule.remote_parameters.
        """
        owner, values = self.module_rref.owner(), (self.module_rref, recurse)
        references: list[RRef[nn.Parameter]] = api.rpc_sync(owner, _param_rrefs, values)
        return references

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module."""
        return self.module_rref

    def train(
        self,
        mode: bool = True,  # noqa: FBT001, FBT002  (torch's signature)
    ) -> Self:
        """Set the module's mode, for all workers that share it; `eval` calls this.

        Args:
            mode: training, or evaluation.

        Raises:
            Exception: the error of the module's constructor.
        """
        api.rpc_sync(self.module_rref.owner(), _set_mode, (self.module_rref, mode))
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module_rref.owner_name()}/{self.device})"

    # --- pickling --------------------------------------------------------------------

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        """Let a call send the chosen attributes only; see `_Travelling`."""
        state: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name in _REMOTE_MODULE_PICKLED_ATTRIBUTES or name == "_interface":
                state[name] = value
            elif name not in _REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING:
                _say_ignored(name)
        state["module_rref"] = _Travelling(self.module_rref)
        return _receive, (self.__class__, state)

    def __copy__(self) -> NoReturn:
        """Refuse: a copy would be made by a pickle.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(scripted.NOT_PICKLED)

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled outside a call.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(scripted.NOT_PICKLED)

    def __setstate__(self, state: Any) -> NoReturn:
        """Refuse to be unpickled outside a call.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(_UNPICKLED)


for _name in _UNSUPPORTED:
    setattr(_RemoteModule, _name, _UnsupportedMethod(_name))


class RemoteModule(_RemoteModule):
    """A module that is made and run on another worker.

    `forward(*args, **kwargs)` runs it and blocks; `forward_async` starts it and returns
    a `torch.futures.Future`.  Both take what the module's own `forward` takes, and are
    recorded in the autograd context they are called in.

    It is an `nn.Module`, so that another can have it as an attribute; methods that need
    its parameters here are refused.  Calls send it like a reference, without copying
    the module, which is freed when no worker refers to it any more.

    Args:
        remote_device: `"worker1/cpu"`, `"rank:1/cuda:0"`, or `"worker1"`, on the
            host's memory.  On any other device, tensors in the arguments are moved
            there, and those in the result back, unless the worker has a device map.
        module_cls: makes the module there; it is sent by name.
        args: of `module_cls`.
        kwargs: of `module_cls`.

    An error while the module is made is raised when it is used: a ValueError if it is
    not an `nn.Module`.

    Raises:
        AssertionError: RPC has not been initialized.
        ValueError: `remote_device` is malformed.
        RuntimeError: the worker or the device does not exist.

    Example:
        >>> module = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
        >>> y = module.forward_async(torch.randn(128, 20)).wait()

    Source: torch.distributed.nn.RemoteModule.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


# --- what runs on the owner ----------------------------------------------------------


def _create_module(
    module_cls: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
) -> nn.Module:
    """Make a module on a device of this worker."""
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(  # noqa: TRY004  (torch's)
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class "
            f"nn.Module>, but it returns an instance of {type(module)}."
        )
    return module.to(device)


def _remote_forward(
    module_rref: RRef[nn.Module],
    device: str,
    is_device_map_set: bool,  # noqa: FBT001  (travels in a call)
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a module of this worker; tensors are sent through host memory."""
    module, place = module_rref.local_value(), torch.device(device)
    if place.type == "cpu":
        return module.forward(*args, **kwargs)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda value: value.to(place), (tuple(args), dict(kwargs))
    )
    result = module.forward(*args, **kwargs)
    if is_device_map_set:
        return result
    return pytree.tree_map_only(torch.Tensor, lambda value: value.cpu(), result)


def _param_rrefs(
    module_rref: RRef[nn.Module],
    recurse: bool,  # noqa: FBT001  (travels in a call)
) -> list[RRef[nn.Parameter]]:
    """Return a reference to each parameter of a module of this worker."""
    return [
        RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)
    ]


def _set_mode(
    module_rref: RRef[nn.Module],
    mode: bool,  # noqa: FBT001  (travels in a call)
) -> None:
    """Set the mode of a module of this worker."""
    module_rref.local_value().train(mode)


# --- how it is sent ------------------------------------------------------------------


class _Travelling(Handle[nn.Module]):
    """The reference of a RemoteModule in a pickle; a call's pickler takes it out.

    It is a second reference, of another type, for a message that is being encoded.  It
    is not counted, so it must not outlive the message.
    """

    __slots__ = ()

    def __init__(self, module_rref: RRef[nn.Module]) -> None:
        self._service, self._shared = module_rref._service, module_rref._shared  # noqa: SLF001
        self.rref_id = module_rref.rref_id

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise RuntimeError(scripted.NOT_PICKLED)


def _receive(kind: type[_RemoteModule], state: Mapping[str, Any]) -> _RemoteModule:
    """Make a RemoteModule from the attributes that were sent, and no others."""
    module = kind.__new__(kind)
    vars(module).update(state)
    module._install_generated_methods()  # noqa: SLF001  (its third constructor)
    return module


def _say_ignored(name: str) -> None:
    """Log that an attribute is not sent."""
    print(  # noqa: T201  (torch's, and programs' tests read it)
        f"The new attribute ``{name}`` of RemoteModule is ignored during RPC pickling. "
        "To pickle this attribute, please add it to "
        "``_REMOTE_MODULE_PICKLED_ATTRIBUTES``. Otherwise, please explicitly add it to "
        "``_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING``.",
        file=sys.stderr,
    )
