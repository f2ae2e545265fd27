"""How the layers of the encoder report a value that cannot be sent, and where it is.

The layer that meets such a value knows what is wrong with it; only the root knows where
it is.  So the layer raises `Unsendable` with the value, and the codec finds its path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

VISITED_MAX: Final = 20_000  # objects searched for a path; beyond, the error is vague


class Unsendable(Exception):  # noqa: N818 - never leaves serde
    """A value cannot be sent.

    Attributes:
        value: the value.
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
        root: the value that could not be encoded.
        wanted: the object to find, by identity.
        labels: what to call the elements of `root`; `value[i]` if there are none.
    """
    waiting: list[tuple[str, object]] = [("value", root)]
    if labels and isinstance(root, (list, tuple)):
        waiting = list(zip(labels, root, strict=False))
    seen: set[int] = set()
    for path, value in waiting:  # breadth first: the shortest path
        if value is wanted:
            return path
        if id(value) not in seen and len(waiting) < VISITED_MAX:
            seen.add(id(value))
            room = VISITED_MAX - len(waiting)
            parts = itertools.islice(_parts(value), room)
            waiting += [(path + step, part) for step, part in parts]
    return "value"


def parts_of(
    root: Sequence[object], labels: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """Yield parts of the labelled parts of `root`, each with its path."""
    for label, value in zip(labels, root, strict=False):
        for step, part in itertools.islice(_parts(value), VISITED_MAX):
            yield label + step, part


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
