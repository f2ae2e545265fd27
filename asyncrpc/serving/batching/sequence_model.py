"""The interface of a model whose sequences enter and leave between steps."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeAlias, TypeVar

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Of one sequence: the items of a step, and whether it was the last one.
SequenceStep: TypeAlias = tuple[Sequence[T], bool]


class SequenceModel(Protocol[R, S, T_co]):
    """A model that works on several sequences at once, a step at a time.

    Its functions are plain ones, which run in a thread, or coroutines, which run on the
    loop; never two at the same time.

    Example:
        >>> class Model:
        ...     def enter(self, prompts):
        ...         return [self.prefill(prompt) for prompt in prompts]
        ...
        ...     def step(self, states):
        ...         tokens = self.decode(states)  # one for each
        ...         return [([token], token == self.end) for token in tokens]
        ...
        ...     def leave(self, state):
        ...         self.cache.free(state.blocks)
    """

    def enter(
        self, requests: list[R], /
    ) -> Sequence[S | BaseException] | Awaitable[Sequence[S | BaseException]]:
        """Make the states of new sequences; for a language model, from its prompts.

        Args:
            requests: of the callers, at least one.

        Returns:
            The state of each, in order; an exception in the place of one fails only
            that request.

        Raises:
            Exception: no state was made.  If there were several requests, each is tried
                again alone.
        """

    def step(
        self, states: list[S], /
    ) -> (
        Sequence[SequenceStep[T_co] | BaseException]
        | Awaitable[Sequence[SequenceStep[T_co] | BaseException]]
    ):
        """Go one step with each of several sequences.

        Args:
            states: at least one; others each time, in any order.

        Returns:
            For each, in order, its items of this step, which may be none, and whether
            it was the last one.  An exception in its place fails only that request.

        Raises:
            Exception: it is raised for all requests of the step.
        """

    def leave(self, state: S, /) -> Awaitable[None] | None:
        """Drop the state of a sequence that is over; called once for each state."""
