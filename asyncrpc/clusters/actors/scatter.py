"""Arguments that are split among actors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, overload

import torch

from asyncrpc.core.arguments import check_sequence, wrong
from asyncrpc.errors import EncodeError, UsageError

T = TypeVar("T")


class _Scattered:
    """A value that is split when it is known among how many."""

    __slots__ = ("_value",)

    def __init__(self, value: Sequence[Any] | torch.Tensor) -> None:
        self._value = value

    def pieces(self, count: int) -> Sequence[Any]:
        """Return one part for each of `count` actors."""
        length, value = len(self._value), self._value
        if isinstance(value, torch.Tensor):
            if length < count:
                raise UsageError(
                    f"scatter has {length} rows for {count} actors; each needs one"
                )
            return value.tensor_split(count)
        if length != count:
            raise UsageError(f"scatter has {length} values for {count} actors")
        return value

    def __reduce__(self) -> NoReturn:
        """Refuse to travel: a part does."""
        raise EncodeError(
            "scatter(...) is an argument of its own for several actors: it cannot be "
            "inside another value, or go to one actor or a peer"
        )


@overload
def scatter(values: torch.Tensor) -> torch.Tensor: ...
@overload
def scatter(values: Sequence[T]) -> T: ...
def scatter(values: Any) -> Any:
    """Split an argument of a call among actors, instead of repeating it for each.

    Args:
        values: a sequence with one value for each actor; or a tensor of any shape but
            (), which is split along its first dimension into views of equal size, the
            first ones longer by 1 if need be (`torch.tensor_split`).

    Returns:
        What stands for the argument.  For type checkers it is one of the values.

    Raises:
        UsageError: `values` is neither a sequence nor a tensor with a dimension.  When
            it is used: there are more or fewer values than actors, or fewer rows.

    Example:
        >>> await counters.add(asyncrpc.scatter([1, 2, 3, 4]))
    """
    if not isinstance(values, torch.Tensor):
        check_sequence("values", values, "a sequence or a tensor")
    elif not values.dim():
        raise wrong("values", "a tensor with a dimension to split", values)
    return _Scattered(values)


def split(
    count: int, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each of `count` calls."""
    by_place = [_parts(value, count) for value in args]
    by_name = {name: _parts(value, count) for name, value in kwargs.items()}
    return [
        (
            tuple(parts[at] for parts in by_place),
            {name: parts[at] for name, parts in by_name.items()},
        )
        for at in range(count)
    ]


def _parts(value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, _Scattered):
        return value.pieces(count)
    return (value,) * count
