"""What a browser asks for: which rows of a view, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from asyncrpc.errors import UsageError

PER_PAGE: Final = 50
PER_PAGE_MAX: Final = 200
PAGE_MAX: Final = 1_000_000
NAMES_MAX: Final = 100  # workers that are requested by name
TEXT_MAX: Final = 200  # characters of a name, or of a searched text
_ORDERS: Final = {"up": True, "down": False}


@dataclass(frozen=True, slots=True)
class ViewQuery:
    """Which rows of a view, and in which order.

    Attributes:
        sort: the key by which the rows are sorted.
        is_up: whether the least is first.
        page: from 1.
        workers: names of the wanted workers; empty: all.
        find: only rows with this text, in any case; empty: all.
        is_thorough: whether the workers may be held briefly to find out more.
    """

    sort: str
    is_up: bool
    page: int = 1
    per_page: int = PER_PAGE
    workers: frozenset[str] = frozenset()
    find: str = ""
    is_thorough: bool = False


def read_query(
    parameters: Iterable[tuple[str, str]],
    *,
    keys: Collection[str],
    sort: str,
    is_up: bool,
) -> ViewQuery:
    """Return what the parameters of a URL ask for."""
    texts: dict[str, str] = {}
    workers: list[str] = []
    for name, value in parameters:
        if name == "worker":
            workers.append(_text(name, value))
        elif name not in _KNOWN:
            raise UsageError(
                f"the parameter {name[:TEXT_MAX]!r} is unknown; known: "
                f"{', '.join(('worker', *_KNOWN))}"
            )
        elif name in texts:
            raise UsageError(f"{name} must be given once")
        else:
            texts[name] = value
    if len(workers) > NAMES_MAX:
        raise UsageError(f"worker may be given {NAMES_MAX} times, not {len(workers)}")
    chosen = _one_of("sort", texts.get("sort", sort), keys) if keys else sort
    is_other = chosen != sort
    default = "down" if is_other or not is_up else "up"
    return ViewQuery(
        chosen,
        _ORDERS[_one_of("order", texts.get("order", default), _ORDERS)],
        _number("page", texts.get("page", "1"), PAGE_MAX),
        _number("per_page", texts.get("per_page", str(PER_PAGE)), PER_PAGE_MAX),
        frozenset(workers),
        _text("find", texts.get("find", "")).casefold(),
        _one_of("thorough", texts.get("thorough", "no"), ("yes", "no")) == "yes",
    )


_KNOWN: Final = ("sort", "order", "page", "per_page", "find", "thorough")


def _text(name: str, value: str) -> str:
    if len(value) > TEXT_MAX:
        raise UsageError(
            f"{name} must have at most {TEXT_MAX} characters, not {len(value)}"
        )
    return value


def _one_of(name: str, value: str, known: Collection[str]) -> str:
    if value not in known:
        raise UsageError(
            f"{name} must be one of {', '.join(known)}, not {value[:TEXT_MAX]!r}"
        )
    return value


def _number(name: str, value: str, at_most: int) -> int:
    is_number = value.isascii() and value.isdigit() and len(value) <= len(str(at_most))
    if not is_number or not 1 <= int(value) <= at_most:
        raise UsageError(
            f"{name} must be from 1 to {at_most}, not {value[:TEXT_MAX]!r}"
        )
    return int(value)
