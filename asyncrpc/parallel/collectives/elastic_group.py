"""`ElasticGroup`: a group whose members come and go, one generation after the other.

Source: torch.distributed.elastic; torchft's quorum for each step.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

from asyncrpc.core.arguments import check_choice, check_count, check_seconds, check_text
from asyncrpc.core.worker import Worker
from asyncrpc.errors import UsageError
from asyncrpc.extend import host_of, service_of
from asyncrpc.parallel.collectives import argument_checks
from asyncrpc.parallel.collectives.elastic import ElasticSeries
from asyncrpc.parallel.collectives.group import TIMEOUT_S, Group, group_over
from asyncrpc.parallel.collectives.machine.reconfiguration import (
    EXCLUDED,
    NEWCOMER_STEP,
    OUTSIDE,
    Application,
)
from asyncrpc.parallel.collectives.machine.views import View
from asyncrpc.parallel.collectives.service import CollectivesService

Quorum: TypeAlias = Literal["majority", "any"]
QUORUMS: Final = ("majority", "any")
NAME_CHARACTERS_MAX: Final = 255
STEP_MAX: Final = (1 << 62) - 1


class ElasticGroup:
    """Workers that come and go while they take part in collectives; from `join_group`.

    `current` is the `Group` of the present generation, whose members and ranks do not
    change.  When a member is lost, or a worker wants to come in, the members make the
    next generation by `reconfigure`, between two steps of their programs.  If a member
    is lost or reconfigures during a collective, the collective fails at all others
    within a moment; so they call `reconfigure` as well.

    Attributes:
        worker: as given.
        name: as given.
        current: the collectives of the present generation.
        generation: counts the generations of the group, from 1.
        steps: for each rank, how far its program was when the generation began; -1: it
            had no state yet.

    Example:
        >>> group = await asyncrpc.join_group(worker, "training", min_size=2)
        >>> while step < 1000:
        ...     try:
        ...         if group.has_changed:
        ...             await group.reconfigure(step=step)
        ...         await group.current.all_reduce(gradient, "avg")
        ...         step += 1
        ...     except (RankLostError, GroupChangedError):
        ...         await group.reconfigure(step=step)

    Source: torch.distributed.elastic, whose agents start all workers anew; torchft,
    whose quorum is made by a server.
    """

    current: Group
    generation: int
    steps: tuple[int, ...]

    def __init__(
        self,
        worker: Worker,
        series: ElasticSeries,
        view: View,
        timeout_s: float | None,
    ) -> None:
        """Internal: `join_group` makes it."""
        self.worker = worker
        self.name = series.name
        self._series = series
        self._timeout_s = timeout_s
        self._service = service_of(worker, CollectivesService)
        self._is_closed = False
        self._begin(view)

    def _begin(self, view: View) -> None:
        matching = self._series.current = self._service.open_view(self.name, view)
        self._matching = matching
        self.current = group_over(self.worker, self.name, self._timeout_s, matching)
        self.generation = view.generation
        self.steps = view.steps

    @property
    def source(self) -> int | None:
        """The rank whose state all others take; None: all have the same already.

        It is the first rank with the highest step.  If no rank has a state yet, it is
        rank 0.
        """
        farthest = max(self.steps)
        if farthest == min(self.steps) >= 0:
            return None
        return self.steps.index(farthest)

    @property
    def newcomers(self) -> tuple[str, ...]:
        """Names of the workers that wait to be let in, as far as is known here."""
        return self._series.machine.newcomers

    @property
    def has_changed(self) -> bool:
        """Whether a newcomer waits, or a member is lost, has left or reconfigures.

        Other members may not know it yet.  It costs nothing to ask at each step.
        """
        return self._matching.lost is not None or bool(self.newcomers)

    async def reconfigure(
        self,
        *,
        step: int = 0,
        min_size: int = 1,
        quorum: Quorum = "majority",
        timeout_s: float | None = None,
    ) -> Group:
        """Agree with the other members on the next generation; return its group.

        Every remaining member calls it, between two steps.  All of them get the same
        members in the same order: first those of this generation, in their order, then
        the newcomers that wait.  No member leads, so any may die meanwhile; it is left
        out.  The call closes the present group, with all groups that were made of its
        ranks: collectives in them that other members still wait for fail with a
        `GroupChangedError` that names this worker.

        Args:
            step: how far the program is, in any unit; others get it as `steps`.  -1:
                it has no state yet.
            min_size: wait until there are so many members, for newcomers if need be.
            quorum: `"majority"`: go on only with more than half of this generation's
                members, or half of them and its rank 0; members that have left do not
                count.  So if the network is cut, at most one side goes on.  `"any"`: go
                on with the remaining members.  If one of them asks for a majority, all
                need it.
            timeout_s: seconds to wait for the others; None: as for collectives.

        Returns:
            The group, which is `current` from now on.

        Raises:
            CollectiveTimeoutError: members did not come in time; the error names them.
                The call may be repeated.
            QuorumLostError: too few members are left.  The call may be repeated with
                another `quorum`, or `min_size`.
            GroupChangedError: the others took this worker to be lost and have gone on
                without it: call `join_group` again.
            UsageError: a call runs already, the group is closed, an argument is wrong,
                or this is not the worker's event loop.

        Cancellation:
            This worker counts as absent until it calls again; the present group stays
            closed.

        Source: c10d's `reconfigure`; the view changes of virtual synchrony.
        """
        host_of(self.worker).check_on_loop("ElasticGroup.reconfigure")
        application = application_of(step, min_size, quorum)
        if timeout_s is None:
            timeout_s = self._timeout_s
        else:
            check_seconds("timeout_s", timeout_s, at_least=0)
        series, machine = self._series, self._series.machine
        if machine.state is EXCLUDED:
            raise series.excluded()
        if self._is_closed or machine.state is OUTSIDE:
            raise UsageError(
                f"group {self.name!r} is closed at worker {self.worker.name!r}: call "
                "join_group again"
            )
        self._service.close_whole(self._matching, "reconfigures")
        self.current.close()
        if machine.view.generation == self.generation:
            view = await series.come(application, timeout_s)
        else:
            view = machine.view  # others went on with this worker after it gave up
        self._begin(view)
        return self.current

    def close(self) -> None:
        """Leave the group for good: the others go on without this worker.  Idempotent.

        Raises:
            UsageError: the worker runs, and this is not its event loop.
        """
        if not self._is_closed and not self.worker.is_closed:
            host_of(self.worker).check_on_loop("ElasticGroup.close")
            self._service.close_whole(self._matching, "has left")
            self._series.leave()
            self._service.elastic.drop(self._series)
        self._is_closed = True
        self.current.close()

    async def __aenter__(self) -> Self:
        """Return the group.

        Raises:
            UsageError: the worker has ended, or this is not its event loop.

        Cancellation:
            It never waits.
        """
        host_of(self.worker).check_on_loop("ElasticGroup")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the group.

        Raises:
            UsageError: this is not the worker's event loop.

        Cancellation:
            It never waits.
        """
        self.close()

    def __repr__(self) -> str:
        return (
            f"<ElasticGroup {self.name!r}, generation {self.generation}, rank "
            f"{self.current.rank} of {self.current.size}>"
        )


async def join_group(
    worker: Worker,
    name: str,
    *,
    step: int = NEWCOMER_STEP,
    min_size: int = 1,
    timeout_s: float | None = TIMEOUT_S,
) -> ElasticGroup:
    """Become a member of the elastic group of a name; return it.

    If there is a group of the name, this waits until its members let this worker in:
    at their next `ElasticGroup.reconfigure`.  Otherwise the workers that call this
    begin one, as soon as there are `min_size` of them; they are ordered by rank.

    Args:
        worker: the worker of this process; it must be running.
        name: of the group, a non-empty string.
        step: how far the program is, from a checkpoint for example; -1: it begins.
        min_size: wait until the group has so many members.
        timeout_s: seconds to wait, and seconds that a collective of the group may take;
            None: no limit.

    Raises:
        CollectiveTimeoutError: this worker was not let in in time; the error names the
            workers that it waited for.
        QuorumLostError: there were fewer than `min_size` workers; or all members of the
            group were lost meanwhile: the next call begins another group.
        UsageError: this worker is in the group already, or an argument is wrong.
        NotStartedError: `worker` is not running.

    Cancellation:
        The others no longer wait for this worker.

    Example:
        >>> group = await asyncrpc.join_group(worker, "training", min_size=4)

    Source: torch.distributed.elastic's rendezvous.
    """
    check_text("name", name, at_most=NAME_CHARACTERS_MAX)
    argument_checks.check_group(worker, name, timeout_s)
    application = application_of(step, min_size, "majority")
    service = service_of(worker, CollectivesService)
    series = service.elastic.series(name)
    if series.machine.state not in (OUTSIDE, EXCLUDED):
        raise UsageError(
            f"worker {worker.name!r} is already in group {name!r}: use its "
            "`reconfigure`, or close it first"
        )
    try:
        view = await series.come(application, timeout_s)
    except BaseException:
        if series.machine.state is OUTSIDE:
            service.elastic.drop(series)
        raise
    return ElasticGroup(worker, series, view, timeout_s)


def application_of(step: int, min_size: int, quorum: str) -> Application:
    """Return the request of a program."""
    check_count("step", step, at_least=NEWCOMER_STEP, at_most=STEP_MAX)
    check_count("min_size", min_size, at_least=1, at_most=STEP_MAX)
    check_choice("quorum", quorum, QUORUMS)
    return Application(step, min_size, quorum == "majority")
