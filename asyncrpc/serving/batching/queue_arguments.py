"""Arguments that all queues of requests share, and their defaults."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch

from asyncrpc.core.arguments import (
    check_above,
    check_count,
    check_duration,
    check_text,
    listed,
    wrong,
)
from asyncrpc.errors import UsageError

WAITING_MAX: Final = 1024  # about a second of load for a batch of 32 in 30 ms
PRIORITY_STEP_S: Final = 1.0  # a less important request waits a second longer
Overflow: TypeAlias = Literal["newest", "oldest"]
OVERFLOWS: Final = ("newest", "oldest")
PRIORITY_MAX: Final = 100  # more levels than programs need; each level costs time
NAME_CHARACTERS_MAX: Final = 100


def check_queue(
    waiting_max: object,
    max_queue_age_s: Any,
    standing_queue_age_s: Any,
    priority_step_s: object,
) -> None:
    """Raise UsageError unless these are valid options of a queue."""
    check_count("waiting_max", waiting_max, at_least=1)
    check_duration("priority_step_s", priority_step_s)
    if max_queue_age_s is not None:
        check_age("max_queue_age_s", max_queue_age_s)
    if standing_queue_age_s is None:
        return
    check_age("standing_queue_age_s", standing_queue_age_s)
    if max_queue_age_s is None or standing_queue_age_s > max_queue_age_s:
        raise UsageError(
            f"standing_queue_age_s ({standing_queue_age_s:g}) needs max_queue_age_s and"
            f" must not exceed it ({max_queue_age_s})"
        )


def check_age(name: str, value: Any) -> None:
    """Raise UsageError unless an argument is a finite number of seconds above 0."""
    check_duration(name, value)
    check_above(name, value, 0)


def check_request(priority: object, client: object) -> None:
    """Raise UsageError unless these are valid options of a request."""
    if type(priority) is not int or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        wanted = f"an integer between {-PRIORITY_MAX} and {PRIORITY_MAX}"
        raise wrong("priority", wanted, priority)
    if client is not None:
        hashable("client", client)


def hashable(name: str, value: Any) -> Hashable:
    """Return a value that can be a key."""
    try:
        hash(value)
    except Exception as error:  # the value's own code
        raise wrong(name, "hashable, such as a string or a tuple", value) from error
    key: Hashable = value
    return key


def name_of(function: object) -> str:
    """Return the name of a function, for people."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def checked_answers(whose: str, answers: Any, count: int, asked: str) -> list[Any]:
    """Return what a function of many answers, if there is one for each, in order.

    Only what has an order of its own is taken for answers: a set has none, a dict's
    length is that of its keys, a string's that of its letters, and a named tuple's that
    of its fields.
    """
    if isinstance(answers, torch.Tensor | np.ndarray):
        is_ordered = answers.ndim > 0
    elif isinstance(answers, tuple):
        is_ordered = type(answers) is tuple
    else:
        is_ordered = isinstance(answers, Sequence) and not isinstance(
            answers, str | bytes | bytearray | memoryview
        )
    if not is_ordered:
        kind = type(answers)
        raise UsageError(
            f"{whose} must return a list with one answer for each of the {count}"
            f" {asked}, in order, or a tensor or array with that many rows, not an"
            f" object of type {kind.__module__}.{kind.__qualname__}"
        )
    if len(answers) != count:
        raise UsageError(
            f"{whose} returned {len(answers)} answers to {count} {asked}; it must "
            "return one for each, in order"
        )
    return list(answers)


def chosen_name(name: object, function: object) -> str:
    """Return the name that was given, or that of the function."""
    if name is None:
        return name_of(function)[:NAME_CHARACTERS_MAX]
    check_text("name", name, at_most=NAME_CHARACTERS_MAX)
    return str(name)


def batches_of(name: str, value: Iterable[Any], size_max: int) -> list[list[Any]]:
    """Return the batches that were given for warming up."""
    wanted = "batches: sequences of items"
    batches = [
        listed(f"each of {name}", batch, wanted)
        for batch in listed(name, value, wanted)
    ]
    for batch in batches:
        if not 1 <= len(batch) <= size_max:
            raise UsageError(
                f"each batch of {name} must have 1 to {size_max} items (max_size), "
                f"not {len(batch)}"
            )
    return batches


def checked_callable(name: str, value: Callable[..., Any] | None) -> None:
    """Raise UsageError unless an argument can be called, or is None."""
    if value is not None and not callable(value):
        raise wrong(name, "callable, or None", value)


def check_model(model: object) -> None:
    """Raise UsageError unless an object has the functions of a `SequenceModel`."""
    for method in ("enter", "step", "leave"):
        try:
            function = getattr(model, method, None)
        except Exception:  # noqa: BLE001  (the object's own code)
            function = None
        if not callable(function):
            wanted = "an object with functions `enter`, `step` and `leave`"
            raise wrong("model", wanted, model)
