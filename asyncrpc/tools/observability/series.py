"""The series of a metric: one figure for each set of values of its labels, bounded.

A program may call thousands of functions, and raise errors of classes that it makes at
run time.  Whatever it does, a metric has at most `SERIES_MAX` series, plus as many as
there are outcomes: further values count as `OTHER`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

OTHER: Final = "other"
SERIES_MAX: Final = 500  # of a metric; a histogram writes 21 lines for each
METHODS_MAX: Final = 100  # functions, or classes of optimizers, with their own series
OUTCOMES_MAX: Final = 20  # classes of errors with their own series
VALUE_CHARACTERS_MAX: Final = 200

F = TypeVar("F")


class Total:
    """A count that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class LabelCap:
    """The values of one label: a limited number, and `OTHER` for all further ones."""

    def __init__(self, values_max: int) -> None:
        self._values_max = values_max
        self._known: set[str] = {""}  # "no error" has its own series

    def shown(self, value: str) -> str:
        """Return the label that is shown for a value."""
        value = _printable(value)
        if value in self._known:
            return value
        if len(self._known) > self._values_max:
            return OTHER
        self._known.add(value)
        return value


class MetricSeries(Generic[F]):
    """The figures of one metric.

    Attributes:
        by_values: the figures by the values of the labels, as they are shown.
    """

    def __init__(self, make: Callable[[], F], caps: Sequence[LabelCap] = ()) -> None:
        """Begin without a series.

        Args:
            caps: for each label, the values with their own series; metrics may share a
                cap.
        """
        self.by_values: dict[tuple[str, ...], F] = {}
        self._make = make
        self._caps = caps

    def at(self, *values: str) -> F:
        """Return the figure for these values of the labels."""
        figure = self.by_values.get(values)
        # A value that is shown as another has no key, so the keys are bounded as well.
        return self._admitted(values) if figure is None else figure

    def _admitted(self, values: tuple[str, ...]) -> F:
        shown = tuple(
            cap.shown(value) for cap, value in zip(self._caps, values, strict=True)
        )
        if shown not in self.by_values and len(self.by_values) >= SERIES_MAX:
            shown = (OTHER, *shown[1:])
        figure = self.by_values.get(shown)
        if figure is None:
            figure = self.by_values[shown] = self._make()
        return figure


def _printable(value: str) -> str:
    """Return a value that can be written as UTF-8, and is not too long."""
    if len(value) > VALUE_CHARACTERS_MAX:
        value = value[:VALUE_CHARACTERS_MAX]
    return value if value.isascii() else value.encode(errors="replace").decode()
