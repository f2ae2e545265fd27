"""A module that lives on another worker.

    m = asyncrpc.nn.RemoteModule("ps/cpu", torch.nn.Linear, args=(4, 2))
    y = await m.forward_async(x)
    optimizer = DistributedOptimizer(torch.optim.SGD, await m.remote_parameters(), 0.1)

It is not an `nn.Module`.  The parameters of an `nn.Module` are local: `parameters()`,
`state_dict()` and `to()` of a model that contains this one would silently pass over its
parameters.  Methods that could not keep their promise are refused, by name.  A method
of the module's own is called through an interface (`typed`), or by name.

Where it runs is parsed by our own rules:

    <worker>            the worker of this name, on its CPU
    <worker>/<device>   a device of it: `ps/cuda:0`
    <rank>/<device>     the worker of this rank; `rank:0/cpu` is torch's spelling

A name wins over a rank.  The worker itself checks whether it has the device.

Source: torch.distributed.nn.api.remote_module; torch.distributed._remote_device, which
also takes a device without a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self, TypeVar, cast

import torch
from torch import nn

from asyncrpc.core.arguments import (
    check_flag,
    check_kind,
    check_sequence,
    shown,
    wrong,
)
from asyncrpc.core.calls.futures import CallFuture, refuse_on_loop
from asyncrpc.core.devices.names import CPU, DeviceName
from asyncrpc.core.nn import interface as interfaces
from asyncrpc.core.nn import owner
from asyncrpc.core.parts import Parts
from asyncrpc.core.rref.handle import RRef, service_of
from asyncrpc.core.worker import current_worker
from asyncrpc.errors import UnknownWorkerError, UsageError

_FORM: Final = re.compile(r"(?P<worker>[^/\s]+)(?:/(?P<device>[^/\s]+))?")
_RANK: Final = re.compile(r"(?:rank:)?(?P<rank>[0-9]+)")


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker and a device of it.

    Attributes:
        worker: name, or text that may be a rank.
        device: torch's name of it: `cpu`, `cuda:0`.
    """

    worker: str
    device: str

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Read `"worker"`, `"worker/device"` or `"rank/device"`."""
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        forms = "'worker', 'worker/device' or 'rank/device', such as 'ps/cpu'"
        problem = wrong("remote_device", forms, text)
        if match is None:
            raise problem
        try:
            device = DeviceName.parse(match["device"] or CPU)
        except UsageError:
            raise problem from None
        return cls(match["worker"], str(device))

    @property
    def rank(self) -> int | None:
        """The rank that the worker part may be; None if it is not a number."""
        match = _RANK.fullmatch(self.worker)
        return None if match is None else int(match["rank"])

    def __str__(self) -> str:
        return f"{self.worker}/{self.device}"


T = TypeVar("T")

_NAME_MAX: Final = 1000  # characters of a method's name
_PLACED: Final = "make a new RemoteModule there, and load the state"
# What to do instead of methods of `nn.Module` that a remote module does not have.
_INSTEAD_OF: Final = {
    "do it in a function that is called on the owner with `module_rref`": (
        *("add_module", "apply", "children", "extra_repr", "get_submodule", "modules"),
        *("named_children", "named_modules", "register_backward_hook"),
        *("register_buffer", "register_forward_hook", "register_forward_pre_hook"),
        *("register_full_backward_hook", "register_full_backward_pre_hook"),
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        *("register_module", "register_parameter", "register_state_dict_post_hook"),
        *("register_state_dict_pre_hook", "requires_grad_", "set_submodule"),
    ),
    "use `await m.state_dict()`": (
        *("buffers", "get_buffer", "get_extra_state", "named_buffers"),
    ),
    "use `await m.load_state_dict(state)`": ("set_extra_state",),
    "use `await m.remote_parameters()`": ("parameters",),
    "use `await m.named_remote_parameters()`": ("get_parameter", "named_parameters"),
    _PLACED: ("cpu", "cuda", "ipu", "mtia", "to_empty", "xpu"),
    "use `await m.to(dtype)`": ("type",),
    "use `await m.to(torch.bfloat16)`": ("bfloat16",),
    "use `await m.to(torch.float16)`": ("half",),
    "use `await m.to(torch.float32)`": ("float",),
    "use `await m.to(torch.float64)`": ("double",),
    "let the function that makes the module compile it": ("compile",),
    "its memory is on another worker": ("share_memory",),
    "gradients gather in autograd contexts; there is nothing to do": ("zero_grad",),
}


class _UnavailableMethod:
    """A method of `nn.Module` that a remote module cannot have."""

    __slots__ = ("_instead", "_name")

    def __init__(self, name: str, instead: str) -> None:
        self._name = name
        self._instead = instead

    def __get__(self, _module: object, _owner: type) -> Callable[..., NoReturn]:
        return self._refuse

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UsageError(
            f"RemoteModule has no {self._name}(): the module is on another worker; "
            f"{self._instead}"
        )


class RemoteModule:
    """A handle of a module that is made on another worker.

    Any number of workers may hold a handle: it travels in calls like a reference.  The
    module is freed when no handle is left.

    Thread safety: plain methods from any thread; coroutines on the worker's loop.

    Example:
        >>> m = asyncrpc.nn.RemoteModule("ps", torch.nn.Linear, args=(4, 2))
        >>> y = await m.forward_async(torch.ones(1, 4))

    Source: torch.distributed.nn.RemoteModule.
    """

    __slots__ = ("__weakref__", "_device", "_rref")

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start making a module on another worker; return at once.

        An error on the owner, such as a missing device, is raised when the module is
        used or awaited.

        Args:
            remote_device: `"worker"`, `"worker/device"` or `"rank/device"`.
            module_cls: makes the module there; travels by name.
            args: positional arguments of `module_cls`.
            kwargs: keyword arguments of `module_cls`.

        Raises:
            NotStartedError: there is no running worker here.
            UnknownWorkerError: no worker has the name or rank in `remote_device`.
            UsageError: `remote_device` is malformed, or an argument has the wrong type.
            EncodeError: an argument cannot travel.
        """
        placement = Placement.parse(remote_device)
        _check_class(module_cls)
        _check_arguments(() if args is None else args, kwargs)
        worker = current_worker().parts
        # By name, so that the error about an argument that cannot travel names it.
        values = {
            "module_cls": module_cls,
            "args": list(args or ()),
            "kwargs": dict(kwargs or {}),
            "device": placement.device,
        }
        to = _name_of(worker, placement)
        self._rref: RRef[nn.Module] = worker.start_remote(to, owner.create, (), values)
        self._device = placement.device

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str, module_rref: RRef[nn.Module]
    ) -> RemoteModule:
        """Return a handle of a module that exists already.

        Args:
            remote_device: where the module is, as for the constructor.
            module_rref: a reference to it.

        Raises:
            UsageError: `module_rref` is not a reference, or is on another worker than
                `remote_device` says.
            UnknownWorkerError: no worker has the name or rank in `remote_device`.

        Source: torch.distributed.nn.RemoteModule.init_from_module_rref.
        """
        placement = Placement.parse(remote_device)
        check_kind("module_rref", module_rref, RRef, "an RRef of a module")
        name, at = (
            _name_of(_worker_of(module_rref), placement),
            module_rref.owner_name(),
        )
        if name != at:
            raise UsageError(
                f"remote_device {shown(remote_device)} is on worker {name!r}, but "
                f"module_rref is on {at!r}"
            )
        return _restore(placement.device, module_rref)

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until the module has been made; return this object.

        Raises:
            Exception: the error of the module's constructor.
        """
        return self._ready().__await__()

    async def _ready(self) -> Self:
        await self._call(owner.ready)
        return self

    # --- running it ------------------------------------------------------------------

    def forward_async(self, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Start the module's forward pass; return its future.

        Inside an autograd context the result is differentiable.  If the module is on a
        device, tensors are moved there, and the results back to host memory; or, if
        this worker has a device map for the owner (`DeviceOptions.maps`), to the device
        in the map.

        Args:
            *args: positional arguments of the module.
            **kwargs: keyword arguments of the module.

        Returns:
            A future of the module's result.

        Raises:
            EncodeError: an argument cannot travel.

        Source: torch.distributed.nn.RemoteModule.forward_async.
        """
        return self._start("__call__", args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and block this thread until the result is there.

        Args:
            *args: positional arguments of the module.
            **kwargs: keyword arguments of the module.

        Raises:
            UsageError: called on an event loop; use `await m.forward_async(...)` there.
            Exception: the error of the module.

        Source: torch.distributed.nn.RemoteModule.forward.
        """
        refuse_on_loop("RemoteModule.forward()", "use `await m.forward_async(...)`")
        return self.forward_async(*args, **kwargs).wait()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, as `forward` does."""
        return self.forward(*args, **kwargs)

    # --- its other methods -----------------------------------------------------------

    async def typed(self, interface: Callable[..., T]) -> T:
        """Return this module as an object of an interface, for typed calls.

        An interface is an abstract class or a Protocol whose methods are declared
        `async def`: here they are awaited, even if they are plain on the module.  Type
        checkers check the calls; the owner checks once that the module has the methods,
        and that they accept the arguments of the interface.

        The returned object keeps the module alive, and travels in calls as this object
        does, to workers that can import the interface.

        Args:
            interface: the class.

        Returns:
            An instance of it.

        Raises:
            UsageError: `interface` is not an interface, or the module lacks its
                methods.
            OwnerLostError: the owner is gone.
            Exception: the error of the module's constructor.

        Cancellation:
            Nothing changes.

        Example:
            >>> class Encoder(Protocol):
            ...     async def encode(self, x: Tensor, scale: float) -> Tensor: ...
            >>> encoder = await m.typed(Encoder)
            >>> y = await encoder.encode(x, scale=2.0)

        Source: torch.distributed.nn.RemoteModule's `_module_interface_cls`, which is
        for TorchScript.
        """
        shapes = interfaces.shapes_of(interface)
        name = getattr(interface, "__name__", repr(interface))
        await self._call(owner.check, name, shapes)
        return interfaces.implemented(interface, self)

    async def run_method(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a method of the module by its name; see `typed` for checked calls.

        Args:
            name: of the method.
            args: positional arguments; tensors are moved as by `forward_async`.
            kwargs: keyword arguments; tensors are moved likewise.

        Returns:
            The result of the method.

        Raises:
            AttributeError: the module has no method of this name.
            UsageError: an argument has the wrong type.
            EncodeError: an argument cannot travel.
            Exception: the error of the method.

        Cancellation:
            A coroutine function there is cancelled, a thread is not.
        """
        if type(name) is not str or not name.isidentifier() or len(name) > _NAME_MAX:
            raise wrong("name", "the name of a method", name)
        _check_arguments(args, kwargs)
        _worker_of(self._rref).check_on_loop("RemoteModule.run_method")
        return await self._start(name, tuple(args), dict(kwargs or {}))

    # --- the module ------------------------------------------------------------------

    @property
    def module_rref(self) -> RRef[nn.Module]:
        """A reference to the module."""
        return self._rref

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return a reference to the module."""
        return self._rref

    async def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:  # noqa: FBT001, FBT002  (torch's)
        """Return references to the parameters, for a `DistributedOptimizer`.

        Args:
            recurse: include those of inner modules.

        Raises:
            OwnerLostError: the owner is gone.
            Exception: the error of the module's constructor.

        Cancellation:
            Nothing changes.

        Source: torch.distributed.nn.RemoteModule.remote_parameters.
        """
        check_flag("recurse", recurse)
        parameters: list[RRef[nn.Parameter]] = await self._call(
            owner.parameters, recurse
        )
        return parameters

    async def named_remote_parameters(
        self,
        recurse: bool = True,  # noqa: FBT001, FBT002  (torch's)
    ) -> list[tuple[str, RRef[nn.Parameter]]]:
        """Return references to the parameters with their names, to make groups.

        Args:
            recurse: include those of inner modules.

        Raises:
            OwnerLostError: the owner is gone.
            Exception: the error of the module's constructor.

        Cancellation:
            Nothing changes.

        Example:
            >>> named = await m.named_remote_parameters()
            >>> biases = [one for name, one in named if name.endswith("bias")]
        """
        check_flag("recurse", recurse)
        parameters: list[tuple[str, RRef[nn.Parameter]]] = await self._call(
            owner.named_parameters, recurse
        )
        return parameters

    async def to(self, dtype: torch.dtype) -> Self:
        """Cast the module's floating-point parameters and buffers, in place.

        The cast is visible to all users of the module.  The parameters stay the same
        objects, so references to them hold.  An optimizer that has stepped keeps a
        state of the old dtype: make a new one, as in torch.

        Args:
            dtype: a floating-point dtype.  A module does not change its device, because
                other handles keep sending tensors to the device that they know.

        Raises:
            UsageError: `dtype` is not a dtype; the text says what to do for a device.
            OwnerLostError: the owner is gone.

        Cancellation:
            The module may have been cast.
        """
        if not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"dtype must be a torch.dtype, not {shown(dtype)}: a module stays on "
                f"its device; {_PLACED}"
            )
        await self._call(owner.cast, dtype)
        return self

    async def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002  (torch's)
        """Set the module's mode, for all users of it.

        Args:
            mode: training, or evaluation.

        Raises:
            OwnerLostError: the owner is gone.

        Cancellation:
            The mode may have been set.
        """
        check_flag("mode", mode)
        await self._call(owner.train, mode)
        return self

    async def eval(self) -> Self:
        """Set the module's mode to evaluation; as `train(False)`.

        Raises:
            OwnerLostError: the owner is gone.

        Cancellation:
            The mode may have been set.
        """
        return await self.train(mode=False)

    async def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the module's state, in the host's memory.

        No optimizer step changes it between two of its tensors.

        Raises:
            OwnerLostError: the owner is gone.

        Cancellation:
            Nothing changes.
        """
        state: dict[str, torch.Tensor] = await self._call(owner.state)
        return state

    async def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Copy a state into the module.

        Args:
            state_dict: tensors of the shapes that the module has, by name.
            strict: the names must be exactly the module's.

        Returns:
            The names that were missing, and those that were unexpected.

        Raises:
            RuntimeError: names or shapes do not fit; fitting tensors may be changed.
            UsageError: an argument has the wrong type.
            OwnerLostError: the owner is gone.

        Cancellation:
            The state may have been loaded.
        """
        check_kind("state_dict", state_dict, Mapping, "a dictionary of tensors")
        check_flag("strict", strict)
        missing, unexpected = await self._call(
            owner.load_state, dict(state_dict), strict
        )
        return missing, unexpected

    # --- travel ----------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel in calls as the reference, which refuses any other pickling."""
        return _restore, (self._device, self._rref)

    def __repr__(self) -> str:
        return f"<RemoteModule on '{self._rref.owner_name()}/{self._device}'>"

    def _start(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallFuture[Any]:
        """Start a method of the module, in one round trip."""
        _worker_of(self._rref).check_running()  # else the error would blame the owner
        if self._device == "cpu":
            return getattr(self._rref.rpc_async(), name)(*args, **kwargs)  # type: ignore[no-any-return]
        worker, to = _worker_of(self._rref), self._rref.owner_name()
        stays = worker.options.devices.map_to(to) is not None
        values = (self._rref, self._device, name, args, kwargs, stays)
        return worker.start_call(to, owner.run_method, values)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on the owner, with the module's reference."""
        to, values = self._rref.owner_name(), (self._rref, *args)
        return await _worker_of(self._rref).start_call(
            to, function, values, awaits=True
        )


for _instead, _names in _INSTEAD_OF.items():
    for _name in _names:
        setattr(RemoteModule, _name, _UnavailableMethod(_name, _instead))


def _check_class(module_cls: object) -> None:
    """Raise UsageError unless an argument may make a module."""
    is_other = isinstance(module_cls, type) and not issubclass(module_cls, nn.Module)
    if is_other or not callable(module_cls):
        wanted = "a subclass of torch.nn.Module, or a function that makes a module"
        raise wrong("module_cls", wanted, module_cls)


def _check_arguments(args: object, kwargs: object) -> None:
    """Raise UsageError unless these are positional and keyword arguments."""
    check_sequence("args", args, "a list of arguments")
    if kwargs is not None:
        check_kind("kwargs", kwargs, Mapping, "a dictionary of arguments")
        if not all(type(name) is str for name in cast("Mapping[Any, Any]", kwargs)):
            raise wrong("kwargs", "a dictionary with strings as keys", kwargs)


def _restore(device: str, rref: RRef[nn.Module]) -> RemoteModule:
    """Make a handle of a module that exists."""
    module = RemoteModule.__new__(RemoteModule)
    module._device = device  # noqa: SLF001  (its other constructor)
    module._rref = rref  # noqa: SLF001
    return module


def _worker_of(rref: RRef[Any]) -> Parts:
    """Return the worker that holds this handle; not always the current one."""
    return service_of(rref).worker


def _name_of(worker: Parts, placement: Placement) -> str:
    """Return the name of the worker that a placement means."""
    directory, rank = worker.directory, placement.rank
    is_known = directory.known_incarnation(placement.worker) is not None
    is_name = is_known or rank is None
    try:
        return directory.member(placement.worker if is_name else rank).name  # type: ignore[arg-type]
    except UnknownWorkerError as error:
        error.args = (f"remote_device, and so module_rref: {error}",)
        raise
