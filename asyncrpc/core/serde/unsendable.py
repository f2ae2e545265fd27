"""How the layers of the encoder report a value that cannot be sent, and where it is.

The layer that meets such a value knows what is wrong with it; only the root knows where
it is.  So the layer raises `Unsendable` with the value, and the codec finds its path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Final

VISITED_MAX: Final = 20_000  # objects searched for a path; beyond, the error is vague


class Unsendable(Exception):  # noqa: N818 - never leaves serde
    """A value cannot be sent.

    Attributes:
        problem: what is wrong with it and what to do.
    """

    def __init__(self, value: object, problem: str) -> None:
        super().__init__(problem)
        self.value = value
        self.problem = problem


class TooDeep(Exception):  # noqa: N818 - never leaves serde
    """Containers are nested too deep, as they are in a cycle."""


def path_to(root: object, wanted: object, labels: Sequence[str]) -> str:
    """Return where in `root` an object is: `args[1]['x'].foo`.

    Args:
        labels: what to call the elements of `root`; `value[i]` if there are none.
            "function, args" names the first element of an element separately.
    """
    paths = _walk(root, labels, lambda _: True)
    return next((path for path, value in paths if value is wanted), "value")


def path_outside(
    root: object, wanted: Container[int], barrier: type, labels: Sequence[str]
) -> str | None:
    """Return where in `root`, and not in a `barrier`, an object of these ids is."""
    paths = _walk(root, labels, lambda value: not isinstance(value, barrier))
    return next((path for path, value in paths if id(value) in wanted), None)


def _walk(
    root: object, labels: Sequence[str], enters: Callable[[object], bool]
) -> Iterator[tuple[str, object]]:
    """Yield the parts of `root`, breadth first: the shortest path comes first."""
    waiting: list[tuple[str, object]] = [("value", root)]
    if labels and isinstance(root, (list, tuple)):
        waiting = list(_labelled(root, labels))
    seen: set[int] = set()
    for path, value in waiting:
        yield path, value
        if id(value) not in seen and len(waiting) < VISITED_MAX and enters(value):
            seen.add(id(value))
            room = VISITED_MAX - len(waiting)
            parts = itertools.islice(_parts(value), room)
            waiting += [(path + step, part) for step, part in parts]


def parts_of(
    root: Sequence[object], labels: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """Yield parts of the labelled parts of `root`, each with its path."""
    for label, value in _labelled(root, labels):
        if label not in labels:
            yield label, value
            continue
        for step, part in itertools.islice(_parts(value), VISITED_MAX):
            yield label + step, part


def _labelled(
    root: Sequence[object], labels: Sequence[str]
) -> Iterator[tuple[str, object]]:
    for label, value in zip(labels, root, strict=False):
        first, _, rest = label.rpartition(", ")
        if not first or not isinstance(value, (list, tuple)) or not value:
            yield rest, value
            continue
        yield first, value[0]
        for index, part in enumerate(value[1:]):
            yield f"{rest}[{index}]", part


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    try:
        yield from list(_parts_of(value))
    except BaseException:  # noqa: BLE001  (the value's own code, or other threads write)
        return


def _parts_of(value: object) -> Iterator[tuple[str, Any]]:
    kind = type(value)  # `__class__` may name another
    if issubclass(kind, dict):
        for key, part in list(value.items()):  # type: ignore[attr-defined]
            yield f"[{key!r:.40}]", part
            yield f" key {key!r:.40}", key
    elif issubclass(kind, (list, tuple)):
        for index, part in enumerate(value):  # type: ignore[arg-type]
            yield f"[{index}]", part
    elif issubclass(kind, (set, frozenset)):
        for part in value:  # type: ignore[attr-defined]
            yield " element", part
    for name, part in list(getattr(value, "__dict__", {}).items()):
        yield f".{name}", part
