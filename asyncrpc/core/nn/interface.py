"""Interfaces of remote modules: classes that declare the methods of a module elsewhere.

    class Encoder(Protocol):
        async def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor: ...

    encoder = await module.typed(Encoder)
    y = await encoder.encode(x, scale=2.0)  # the signature is checked by mypy

An interface is an abstract class or a Protocol.  It declares its methods as they are
used here, where they are awaited: as `async def`, even if the module's methods are
plain.  An abstract class may also have methods with bodies; these run here.

The owner gets a description of the methods, and does not need the class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from asyncrpc.core.arguments import wrong
from asyncrpc.errors import UsageError

if TYPE_CHECKING:
    from asyncrpc.core.nn.remote_module import RemoteModule

T = TypeVar("T")
# Name; names by position, and how many of them must be given; names by keyword only,
# and the required ones.
Shape: TypeAlias = tuple[str, list[str], int, list[str], list[str]]


def implemented(interface: Callable[..., T], module: RemoteModule) -> T:
    """Return an object of the interface whose methods run on a remote module."""
    methods = {
        name: _remote(name, function) for name, function in methods_of(interface)
    }
    cls: Any = interface
    remote_class = type(f"Remote{cls.__name__}", (_Remote, cls), methods)
    remote: T = remote_class(interface, module)
    return remote


def methods_of(interface: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Return the methods of an interface, by name."""
    functions = dict(_declared(interface)) if isinstance(interface, type) else {}
    if not functions:
        wanted = "an abstract class or a Protocol with at least one method"
        raise wrong("interface", wanted, interface)
    for name, function in functions.items():
        if not inspect.iscoroutinefunction(function):
            raise UsageError(
                f"{interface.__name__}.{name} is not `async def`: a method of a remote "
                "module is awaited; declare it so, even if the module's method is plain"
            )
    return sorted(functions.items())


def _declared(interface: type) -> Iterator[tuple[str, Any]]:
    for cls in reversed(interface.__mro__):
        is_protocol = vars(cls).get("_is_protocol", False) and cls is not Protocol
        for name, value in vars(cls).items():
            is_public = not name.startswith("_") or name == "__call__"
            is_abstract = getattr(value, "__isabstractmethod__", False)
            if is_abstract or (is_protocol and is_public and inspect.isroutine(value)):
                yield name, getattr(interface, name)


def shapes_of(interface: Any) -> list[Shape]:
    """Return the signatures of an interface's methods, to be checked on an owner."""
    return [_shape(name, function) for name, function in methods_of(interface)]


def _shape(name: str, function: Callable[..., Any]) -> Shape:
    # Without self.
    parameters = list(inspect.signature(function).parameters.values())[1:]
    places = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    by_place = [parameter for parameter in parameters if parameter.kind in places]
    by_name = [
        parameter
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    return (
        name,
        [parameter.name for parameter in by_place],
        sum(_must(parameter) for parameter in by_place),
        [parameter.name for parameter in by_name],
        [parameter.name for parameter in by_name if _must(parameter)],
    )


def _must(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def problems_of(module: object, shapes: Sequence[Shape]) -> Iterator[str]:
    """Yield the differences of a module from an interface; called on its owner."""
    kind = type(module).__name__
    for name, by_place, needed, by_name, needed_names in shapes:
        method = getattr(module, name, None)
        if not callable(method):
            yield f"{kind} has no method {name!r}"
            continue
        signature = inspect.signature(method)
        try:
            signature.bind_partial(*by_place, **dict.fromkeys(by_name))
            signature.bind(*by_place[:needed], **dict.fromkeys(needed_names))
        except TypeError as error:
            yield f"{kind}.{name}{signature} does not accept the arguments: {error}"


def _remote(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def method(self: _Remote, *args: Any, **kwargs: Any) -> Any:
        return await self._module.run_method(name, args, kwargs)

    vars(method).pop("__isabstractmethod__", None)  # `wraps` has copied it
    return method


class _Remote:
    """An object of an interface; it travels in calls as its module does."""

    def __init__(self, interface: Any, module: RemoteModule) -> None:
        self._interface = interface
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return implemented, (self._interface, self._module)

    def __repr__(self) -> str:
        return f"<{self._interface.__name__} of {self._module!r}>"
