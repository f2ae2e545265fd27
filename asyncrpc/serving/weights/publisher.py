"""Publishes new weights to the replicas of a model, as canaries first, and rolls back.

There are two steps: all replicas receive the new weights besides those they serve; when
each has them completely, all begin to serve them.  So weights that one replica refuses
are not served by any.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, TypeVar

import torch
from torch import nn

from asyncrpc import current_worker
from asyncrpc.core.arguments import (
    check_count,
    check_kind,
    check_text,
    is_seconds,
    wrong,
)
from asyncrpc.core.worker import Worker
from asyncrpc.errors import (
    AsyncRpcError,
    PublishError,
    RemoteError,
    TransportError,
    UnknownWorkerError,
    UsageError,
    WorkerLostError,
)
from asyncrpc.extend import Deadline, Request, ServiceHost, ask, host_of
from asyncrpc.serving.weights.messages import (
    AbandonTransfer,
    AskVersions,
    CommitTransfer,
    RollBack,
    SendWeights,
    SetCanary,
    VersionReport,
)
from asyncrpc.serving.weights.served_model import VERSION_MAX, ServedModel
from asyncrpc.serving.weights.transfer import new_serial, stage_weights

T = TypeVar("T")

logger = logging.getLogger("asyncrpc")

REPLICAS_AT_ONCE_MAX: Final = 4  # that weights are sent to; each gets all of them
_GONE: Final = (WorkerLostError, TransportError, UnknownWorkerError)


@dataclass(frozen=True, slots=True)
class Publication:
    """Weights that replicas serve.

    Attributes:
        version: their number.
        replicas: names of the replicas that serve them, sorted.
        lost: names of the replicas that were lost meanwhile, sorted.
        canary: share of the calls that they get; 0: all replicas serve them.
    """

    version: int
    replicas: tuple[str, ...]
    lost: tuple[str, ...]
    canary: float


class Publisher:
    """Brings weights to the replicas of a model.

    Each replica serves a `ServedModel`.  Weights change between two batches, completely
    or not at all: a publisher that dies in the middle changes nothing.

    There is one publication at a time.  While one of this object is under way, the next
    waits; one of another publisher is refused.

    Example:
        >>> publisher = serving.Publisher(worker, "model-*")
        >>> await publisher.publish(net, canary=0.05)  # on one replica
        >>> await publisher.promote()  # or: await publisher.roll_back()
    """

    def __init__(self, worker: Worker | None, names: str) -> None:
        """Describe the publisher.

        Args:
            worker: the worker that sends the weights; None: the current one.
            names: a pattern of the replicas' names, as for `Replicas`.

        Raises:
            UsageError: an argument has the wrong type.
        """
        if worker is not None:
            check_kind("worker", worker, Worker, "a Worker or None")
        check_text("names", names)
        self._chosen_worker = worker
        self._names = names
        self._turn = asyncio.Lock()
        self._canary: tuple[Publication, dict[str, torch.Tensor]] | None = None

    # --- what a program calls --------------------------------------------------------

    async def publish(
        self,
        weights: nn.Module | Mapping[str, torch.Tensor],
        *,
        version: int | None = None,
        canary: float = 0.0,
        canaries: int = 1,
    ) -> Publication:
        """Make all replicas serve new weights, or some of them.

        The weights are copied first, in a thread: do not write to them until this
        returns, or pass a copy.

        Args:
            weights: a module, or its `state_dict`: the same names and shapes as those
                of the replicas' models; floating-point types are converted.
            version: their number; None: one more than the highest known.
            canary: share of the calls that go to them.  0: all replicas serve them;
                otherwise only `canaries` of them do, until `promote`.
            canaries: how many replicas serve them, with `canary`; fewer than there are
                replicas.

        Returns:
            The published version, and the replicas that serve it.

        Raises:
            PublishError: a replica refused the weights, so none serves them.
            UsageError: an argument has the wrong type, or is out of range; the weights
                were written to while they were copied; there is no replica, or only one
                for a canary.
            NotStartedError: the worker does not run.

        Cancellation:
            Before all replicas have the weights, nothing has changed; after that, some
            replicas may serve them.

        Example:
            >>> await publisher.publish(net.state_dict(), version=step)
        """
        tensors = _checked_state(weights)
        _check_canary(canary)
        check_count("canaries", canaries, at_least=1)
        if version is not None:
            check_count("version", version, at_most=VERSION_MAX)
        host = self._host("Publisher.publish")
        async with self._turn:
            reports = await self._reports(host)
            if version is None:
                known = [
                    number for report in reports.values() for number in _numbers(report)
                ]
                version = max(known) + 1
                if version > VERSION_MAX:
                    raise UsageError(
                        f"a replica has version {VERSION_MAX}, the highest that there"
                        " is: give this one a number, version=..."
                    )
            chosen = sorted(reports)
            if canary:
                chosen = _canaries(chosen, canaries)
            state = await _snapshot(host, tensors)
            publication = await self._bring(host, state, version, chosen, canary)
            self._canary = (publication, state) if canary else None
            return publication

    async def promote(self) -> Publication:
        """Make all replicas serve the weights that the canaries serve.

        Returns:
            The published version, and the replicas that serve it.

        Raises:
            UsageError: this object has published no canary, or it was rolled back.
            PublishError: a replica refused the weights; the canaries stay.
            NotStartedError: the worker does not run.

        Cancellation:
            As for `publish`.
        """
        host = self._host("Publisher.promote")
        async with self._turn:
            if self._canary is None:
                raise UsageError(
                    "there is no canary to promote; publish one, such as with"
                    " canary=0.05"
                )
            published, state = self._canary
            reports = await self._reports(host)
            version = published.version
            others = sorted(
                name for name, report in reports.items() if report.served != version
            )
            publication = await self._bring(host, state, version, others, 0.0)
            has_it = sorted(reports.keys() - set(others))
            answered, lost = await self._ask_all(
                host, has_it, lambda: SetCanary(version, 0.0)
            )
            self._canary = None
            return Publication(
                version,
                tuple(sorted({*publication.replicas, *answered})),
                tuple(sorted({*publication.lost, *lost})),
                0.0,
            )

    async def roll_back(self, version: int | None = None) -> dict[str, int]:
        """Make the replicas that serve a version return to the previous one.

        It does not wait for a publication under way: replicas give that up.  Any worker
        may call it.  A second call for the same version does nothing.

        Args:
            version: the version to withdraw; None: the highest that is served.

        Returns:
            The version that each replica serves now, by its name.

        Raises:
            PublishError: a replica keeps no earlier version.
            UsageError: `version` is not the number of a version; there is no replica.
            NotStartedError: the worker does not run.

        Cancellation:
            Some replicas may have returned to the previous version.
        """
        if version is not None:
            check_count("version", version, at_most=VERSION_MAX)
        host = self._host("Publisher.roll_back")
        reports = await self._reports(host)
        if version is None:
            version = max(report.served for report in reports.values())
        taken_back: int = version
        self._canary = None
        answered, _ = await self._ask_all(
            host, sorted(reports), lambda: RollBack(taken_back)
        )
        return {name: report.served for name, report in answered.items()}

    async def versions(self) -> dict[str, int]:
        """Return the version that each replica serves, by its name.

        Raises:
            UsageError: there is no replica.
            NotStartedError: the worker does not run.

        Cancellation:
            Nothing has changed.
        """
        reports = await self._reports(self._host("Publisher.versions"))
        return {name: report.served for name, report in reports.items()}

    # --- how -------------------------------------------------------------------------

    def _host(self, used: str) -> ServiceHost:
        worker = self._chosen_worker or current_worker()
        host = host_of(worker)
        host.check_on_loop(used)
        return host

    async def _reports(self, host: ServiceHost) -> dict[str, VersionReport]:
        """Return the versions that each replica reports."""
        names = [
            member.name
            for member in host.known_members
            if fnmatchcase(member.name, self._names)
        ]
        answers = await _gathered({name: _report_of(host, name) for name in names})
        reports = {
            name: report for name, report in answers.items() if report is not None
        }
        if not reports:
            raise UsageError(
                f"no worker matching {self._names!r} serves a model; enter"
                " `serving.Replica(worker, model=serving.ServedModel(net))` there"
            )
        return reports

    async def _bring(
        self,
        host: ServiceHost,
        state: Mapping[str, torch.Tensor],
        version: int,
        names: Sequence[str],
        canary: float,
    ) -> Publication:
        """Send weights to some replicas; make all of them serve these, or none."""
        serial = new_serial(host.random_bytes)
        turns = asyncio.Semaphore(REPLICAS_AT_ONCE_MAX)

        async def stage(name: str) -> AsyncRpcError | None:
            async with turns:
                try:
                    link = await host.link_to(name)
                    await stage_weights(link, serial, state, version)
                except AsyncRpcError as error:
                    return error
            return None

        try:
            failed = await _gathered({name: stage(name) for name in names})
            lost = [name for name in names if isinstance(failed[name], _GONE)]
            _check_none_refused(version, failed)
        except BaseException:
            await self._abandon(host, names, serial)
            raise
        there = [name for name in names if name not in lost]
        answered, more = await self._ask_all(
            host, there, lambda: CommitTransfer(serial, canary)
        )
        return Publication(
            version, tuple(sorted(answered)), tuple(sorted({*lost, *more})), canary
        )

    async def _abandon(
        self, host: ServiceHost, names: Sequence[str], serial: int
    ) -> None:
        """Tell replicas to drop the received weights, without waiting for them."""
        for name in names:
            link = host.open_link_to(name)
            if link is not None and not link.is_lost:
                with suppress(AsyncRpcError):
                    answer = link.ask(AbandonTransfer(serial))
                    answer.add_done_callback(
                        lambda future: future.cancelled() or future.exception()
                    )

    async def _ask_all(
        self,
        host: ServiceHost,
        names: Sequence[str],
        make: Callable[[], Request[VersionReport]],
    ) -> tuple[dict[str, VersionReport], list[str]]:
        """Send one request to several replicas; return answers and lost replicas."""

        async def ask_replica(name: str) -> VersionReport | AsyncRpcError:
            try:
                return await _asked(host, name, make())
            except AsyncRpcError as error:
                return error

        answers = await _gathered({name: ask_replica(name) for name in names})
        _check_none_refused(None, answers)
        reports = {
            name: answer
            for name, answer in answers.items()
            if isinstance(answer, VersionReport)
        }
        return reports, [name for name in names if name not in reports]


async def catch_up(
    served: ServedModel[Any], names: str, worker: Worker | None = None
) -> int:
    """Get the weights that other replicas serve, for a replica that starts.

    It takes the highest version that others serve, canaries excluded, if that is higher
    than its own.  Call it before the replica is ready.

    Args:
        served: the model; its worker has entered `Replica(model=served, ready=False)`.
        names: a pattern of the replicas' names.
        worker: of the model; None: the current one.

    Returns:
        The version that the model serves now.

    Raises:
        UsageError: an argument has the wrong type.
        AsyncRpcError: the other replica was lost, or refused.
        NotStartedError: the worker does not run.

    Cancellation:
        The model serves the same version as before.

    Example:
        >>> async with serving.Replica(model=served, ready=False) as replica:
        ...     await serving.catch_up(served, "model-*")
        ...     replica.make_ready()
    """
    check_kind("served", served, ServedModel, "a ServedModel")
    check_text("names", names)
    if worker is not None:
        check_kind("worker", worker, Worker, "a Worker or None")
    worker = worker or current_worker()
    host = host_of(worker)
    host.check_on_loop("catch_up")
    others = [
        member.name
        for member in host.known_members
        if fnmatchcase(member.name, names) and member.name != host.name
    ]
    reports = await _gathered({name: _report_of(host, name) for name in others})
    best = max(
        (
            (report.served, name)
            for name, report in reports.items()
            if report is not None and not report.canary
        ),
        default=(-1, ""),
    )
    if best[0] > served.version:
        await _asked(host, best[1], SendWeights(served.version))
    return served.version


async def _asked(host: ServiceHost, name: str, request: Request[T]) -> T:
    link = await host.link_to(name)
    return await ask(link, request)


async def _report_of(host: ServiceHost, name: str) -> VersionReport | None:
    """Return the versions of a worker; None: it serves no model, or is gone."""
    timeout_s = host.options.network.connect_timeout_s
    try:
        link = await host.link_to(name)
        deadline = Deadline.after(timeout_s, host.loop.time())
        return await ask(link, AskVersions(), deadline=deadline)
    except (RemoteError, *_GONE):
        return None


async def _gathered(jobs: Mapping[str, Awaitable[T]]) -> dict[str, T]:
    """Do several things at once; if one raises, cancel the others."""

    async def run(job: Awaitable[T]) -> T:
        return await job

    tasks = {}
    try:
        async with asyncio.TaskGroup() as group:
            for name, job in jobs.items():
                tasks[name] = group.create_task(run(job))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {name: task.result() for name, task in tasks.items()}


def _checked_state(weights: Any) -> Mapping[str, torch.Tensor]:
    """Return weights by name."""
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    wanted = "a torch.nn.Module or a state_dict of one"
    check_kind("weights", state, Mapping, wanted)
    if not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise wrong("weights", wanted, weights)
    if not all(isinstance(name, str) for name in state):
        raise wrong("weights", wanted, weights)
    return state


async def _snapshot(
    host: ServiceHost, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return a copy of weights, in the memory of the host."""
    before = [tensor._version for tensor in state.values()]  # noqa: SLF001  (the only counter)

    def copied() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in state.items()
            }

    copies = await host.run_in_thread(copied)
    if before != [tensor._version for tensor in state.values()]:  # noqa: SLF001
        raise UsageError(
            "the weights were written to while they were copied; wait for `publish`"
            " before the next step, or pass a copy"
        )
    return copies


def _canaries(names: Sequence[str], count: int) -> list[str]:
    if len(names) <= count:
        raise UsageError(
            f"canaries must be fewer than the number of replicas, {len(names)}"
        )
    return list(names[:count])


def _check_canary(share: Any) -> None:
    if not is_seconds(share) or not 0 <= share < 1:
        raise wrong("canary", "a number from 0 to below 1", share)


def _numbers(report: VersionReport) -> list[int]:
    return [report.served, *report.kept]


def _check_none_refused(version: int | None, answers: Mapping[str, object]) -> None:
    """Raise PublishError if an answer is an error, unless the replica was lost."""
    refused = {
        name: answer
        for name, answer in answers.items()
        if isinstance(answer, AsyncRpcError) and not isinstance(answer, _GONE)
    }
    if refused:
        raise _refused(version, refused)


def _refused(version: int | None, refused: Mapping[str, AsyncRpcError]) -> PublishError:
    name, error = next(iter(refused.items()))
    suffix = "" if version is None else f" version {version}, so none serves it"
    raised = PublishError(
        f"{len(refused)} of the replicas refused{suffix}; {name!r}: {error}",
        refused={name: str(refusal) for name, refusal in refused.items()},
    )
    raised.__cause__ = error
    return raised
