"""One model for all web workers of a host: `ModelHost`.

A web server starts several workers, each of which imports the application.  None of
them can own a model that all share: each may be killed or reloaded at any time.  So the
model has its own process, which the first web worker starts and to which all attach.

Each web worker has one asyncrpc worker for its whole life; model processes come and go.
`machine.attachment` decides what to do, and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from types import NoneType, TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

from asyncrpc import Options, Peer, RRef
from asyncrpc.api import Worker
from asyncrpc.core.arguments import check_duration, check_kind, check_text
from asyncrpc.core.host.socket_directory import SocketDirectory
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.core.members import UNKNOWN_INCARNATION, Member
from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    NotStartedError,
    Outcome,
    ProcessFailedError,
    RejectedError,
    RemoteError,
    RendezvousTimeoutError,
    UsageError,
)
from asyncrpc.serving.model_host.hosted import ENDING, LOADING, READY, attach
from asyncrpc.serving.model_host.machine.attachment import (
    Attachment,
    AttachmentEvent,
    AttachmentState,
)
from asyncrpc.serving.model_host.order import (
    HostOrder,
    file_of,
    main_for,
    name_of_function,
)
from asyncrpc.serving.model_host.process import options_with
from asyncrpc.serving.model_host.slot import ModelSlot, Sighting
from asyncrpc.serving.model_host.starting import start_unless_held
from asyncrpc.tools.inspection.run_note import RunNoteFile

logger = logging.getLogger("asyncrpc")

T = TypeVar("T")

LINGER_S: Final = 10.0  # longer than a reload takes
START_TIMEOUT_S: Final = 300.0  # enough to load some GiB from a slow disk
NAME_CHARACTERS_MAX: Final = 64  # it is in the name of a directory, and in errors
VERSION_CHARACTERS_MAX: Final = 1024  # each web worker sends it
POLL_S: Final = 0.05  # no event tells that a foreign process listens, or has ended


class ModelHostStatus(NamedTuple):
    """The state of a web worker's attachment to the model process.

    Attributes:
        state: `"ready"`, or the step on the way there: `"seeking"`, `"starting"`,
            `"loading"`, `"leaving"`, `"resting"`, `"tripped"`; or `"closed"`.
        generation: identifies the process; empty: none is known.
        losses: how often the process was lost, or could not make its model.
        problem: the cause of the last loss; empty: there was no loss.
    """

    state: str
    generation: str
    losses: int
    problem: str


class ModelHost:
    """One model for all web workers of a host, in a process of its own.

    An asynchronous context manager, for the lifespan of each web worker.  The first web
    worker starts the process, the others find it; it outlives each of them, and ends
    `linger_s` seconds after the last one has left.  If it crashes, one of the web
    workers starts it again, and all attach anew.

    Tensors of requests and answers travel through shared memory.

    Example:
        >>> @asynccontextmanager
        ... async def lifespan(app):
        ...     async with serving.ModelHost("shop.model:make_model") as host:
        ...         app.state.host = host
        ...         yield
        >>> async def predict(request):
        ...     model = request.app.state.host.model
        ...     return await model.rpc_async().predict(rows)

    Source: the pattern of one model process behind forked web workers: Clipper
    (Crankshaw et al., NSDI 2017) has one per model, in a container.
    """

    def __init__(
        self,
        make_model: Callable[[], Any] | str,
        *,
        name: str = "model",
        version: str = "",
        linger_s: float = LINGER_S,
        start_timeout_s: float | None = START_TIMEOUT_S,
        options: Options | None = None,
    ) -> None:
        """Describe the model; `async with` finds or starts its process.

        Args:
            make_model: a function without arguments, at the top level of a module, or
                its name `"module:function"`, which this process then need not import.
                It runs once in the model's process; what it returns is the model.  A
                coroutine function is awaited there; an asynchronous context manager is
                entered there, and left when the process ends.
            name: of the model's worker.  Web workers that give the same name, function,
                file and interpreter share the model.
            version: any text that identifies the code and the weights.  A process of
                another version is replaced, as is one that has imported a file that
                has changed since.
            linger_s: seconds that the process waits for web workers once all have left.
            start_timeout_s: seconds to wait for the model at the start; None: no limit.
            options: of the model's worker and of this one, except secret and addresses;
                the model's worker uses those of the web worker that starts the process.

        Raises:
            UsageError: an argument has the wrong type, or is out of range; or no
                process can import the function.
        """
        self._function = name_of_function(make_model)
        check_text("name", name, at_most=NAME_CHARACTERS_MAX)
        check_kind("version", version, str, "a string")
        if version:
            check_text("version", version, at_most=VERSION_CHARACTERS_MAX)
        check_duration("linger_s", linger_s)
        if start_timeout_s is not None:
            check_duration("start_timeout_s", start_timeout_s)
        check_kind("options", options, (Options, NoneType), "an Options or None")
        self._name = name
        self._version = version
        self._linger_s = float(linger_s)
        self._start_timeout_s = start_timeout_s
        self._options = options or Options()
        self._machine = Attachment()
        self._changed = asyncio.Event()
        self._worker: Worker | None = None
        self._model: RRef[Any] | None = None
        self._generation = ""
        self._failure: AsyncRpcError | None = None  # how the last process was lost
        self._task: asyncio.Task[None] | None = None
        self._note: RunNoteFile | None = None  # by which `asyncrpc runs` finds it

    # --- the block -------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Find or start the model's process, and wait for the model.

        Raises:
            RemoteError: the function raised, in the model's process; the error has the
                traceback, and is an instance of the class that was raised as well.
            ProcessFailedError: the process cannot be started, or dies again and again.
            RendezvousTimeoutError: `start_timeout_s` passed before the model was ready.
            UsageError: the host was entered before, no private directory can be made,
                or the function's module does not exist.

        Cancellation:
            The web worker leaves; the process ends if no other uses it.
        """
        loop = loop_for("a ModelHost")
        if self._worker is not None:
            raise UsageError("a ModelHost is entered once; make a new one")
        slot, order = await asyncio.to_thread(self._prepare)
        self._sockets = SocketDirectory()
        own = f"web-{os.getpid()}-{secrets.token_hex(3)}"
        options = replace(self._options, membership="static")
        self._worker = Worker(
            own,
            rendezvous={own: (), self._name: ()},
            options=options_with(options, order.secret, self._sockets),
        )
        try:
            await self._worker.__aenter__()
            self._note = RunNoteFile(self._worker, slot.path)
            await asyncio.to_thread(self._note.write, self._worker.addresses)
            self._task = loop.create_task(
                self._run(slot, order), name=f"asyncrpc model host {self._name}"
            )
            self._task.add_done_callback(self._on_ended)
            await self._started()
        except BaseException:
            await self._close(0.0)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the model's process; calls in flight have `drain_timeout_s` to end.

        Raises:
            UsageError: it was entered on another event loop; it stays.
        """
        self._check_loop("ModelHost")
        await self._close(None if error is None else 0.0)

    def _prepare(self) -> tuple[ModelSlot, HostOrder]:
        """Find the slot; blocks this thread."""
        main = main_for(self._function)
        slot = ModelSlot.of(self._name, self._function, file_of(self._function))
        return slot, HostOrder(
            name=self._name,
            function=self._function,
            version=self._version,
            generation="",
            linger_s=self._linger_s,
            folder=str(slot.path),
            options=self._options,
            main=main,
            secret=slot.secret(),
        )

    async def _started(self) -> None:
        """Wait for the model at the start; raise at once if waiting cannot help."""
        assert self._task is not None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._until(
                    lambda: (
                        self._machine.state
                        in {AttachmentState.READY, AttachmentState.TRIPPED}
                        or isinstance(self._failure, RemoteError)
                    )
                )
        except TimeoutError:
            raise RendezvousTimeoutError(
                f"model {self._name!r} was not ready within {self._start_timeout_s:g} "
                f"s (start_timeout_s): {self._doing()}",
                missing=[self._name],
            ) from None
        if self._machine.state is not AttachmentState.READY:
            assert self._failure is not None
            raise self._failure

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until the state is as wanted, or the task that changes it has ended."""
        assert self._task is not None
        while not is_so():
            if self._task.done():
                raise self._closed()
            self._changed.clear()
            await self._changed.wait()  # `_run` sets it, and its end

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        self._changed.set()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("model %r cannot be used", self._name, exc_info=error)

    async def _close(self, drain_timeout_s: float | None) -> None:
        assert self._worker is not None
        self._machine.advance(AttachmentEvent.CLOSED)
        self._changed.set()
        try:
            if self._note is not None:  # the worker no longer answers observers
                await asyncio.to_thread(self._note.remove)
        finally:
            await self._leave(drain_timeout_s)

    async def _leave(self, drain_timeout_s: float | None) -> None:
        assert self._worker is not None
        try:
            # Calls in flight end first: the process must still see this web worker.
            await self._worker.shutdown(drain_timeout_s=drain_timeout_s)
        finally:
            self._model = None
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
            self._sockets.remove()

    # --- what programs ask -----------------------------------------------------------

    @property
    def worker(self) -> Worker:
        """The worker of this process: the same as long as the block lasts.

        Raises:
            NotStartedError: the host has not been entered.
        """
        if self._worker is None:
            raise NotStartedError("use `async with serving.ModelHost(...)` first")
        return self._worker

    @property
    def model(self) -> RRef[Any]:
        """A reference to the model.  Read it anew for each request.

        Raises:
            RejectedError: the model's process is not ready; the text says why.  Nothing
                was sent.
            NotStartedError: the host has not been entered.
        """
        _ = self.worker
        if self._model is None:
            raise self._rejected()
        return self._model

    @property
    def peer(self) -> Peer:
        """The worker of the model's process, to call functions there.

        Raises:
            RejectedError: as for `model`.
            NotStartedError: the host has not been entered.
        """
        _ = self.model
        return self.worker.peer(self._name)

    @property
    def status(self) -> ModelHostStatus:
        """The state of this web worker's attachment to the model's process."""
        machine = self._machine
        return ModelHostStatus(
            machine.state.name.lower(),
            self._generation,
            machine.losses,
            machine.problem,
        )

    async def wait_ready(self, timeout_s: float | None = None) -> RRef[Any]:
        """Wait until the model can be called, and return a reference to it.

        Args:
            timeout_s: seconds to wait; None: no limit.

        Raises:
            RejectedError: `timeout_s` passed, or the process has died so often that it
                is not started for a while.
            NotStartedError: the host has not been entered, or has been left.
            UsageError: `timeout_s` is not a finite number of seconds, or the host was
                entered on another event loop.

        Cancellation:
            Nothing has changed.
        """
        if timeout_s is not None:
            check_duration("timeout_s", timeout_s)
        self._check_loop("ModelHost.wait_ready")
        over = {AttachmentState.READY, AttachmentState.TRIPPED}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until(
                    lambda: self._machine.state in over | {AttachmentState.CLOSED}
                )
        return self.model

    def _check_loop(self, used: str) -> None:
        self.worker.parts.loop_guard.check_loop(used)

    def _rejected(self) -> AsyncRpcError:
        if self._machine.state is AttachmentState.CLOSED:
            return self._closed()
        return RejectedError(
            f"model {self._name!r} cannot be called now: {self._doing()}",
            outcome=Outcome.NOT_EXECUTED,
        )

    def _closed(self) -> NotStartedError:
        return NotStartedError(f"this web worker has left model {self._name!r}")

    def _doing(self) -> str:
        """Return what is being done in words, and why."""
        machine = self._machine
        problem = f"; before that {machine.problem}" if machine.problem else ""
        return f"{_DOING[machine.state]}{problem}"

    # --- what the machine decides ----------------------------------------------------

    async def _run(self, slot: ModelSlot, order: HostOrder) -> None:
        """Act on the state until this web worker leaves."""
        while self._machine.state is not AttachmentState.CLOSED:
            try:
                await self._step(slot, order)
            except OSError as error:  # of the slot's files
                failure = _process_failed(f"model {self._name!r}: {error}")
                self._lose(failure, str(error))
            self._changed.set()

    async def _step(self, slot: ModelSlot, order: HostOrder) -> None:
        match self._machine.state:
            case AttachmentState.SEEKING:
                await self._seek(slot, order)
            case AttachmentState.STARTING:
                await self._attach_when_it_listens(slot)
            case AttachmentState.LEAVING:
                await self._until_gone(slot)
            case _:
                await asyncio.sleep(self._machine.rest(self.worker.loop.time()))

    async def _seek(self, slot: ModelSlot, order: HostOrder) -> None:
        """Start a process, unless one runs."""
        named = replace(order, generation=secrets.token_hex(4))
        try:
            if await asyncio.to_thread(start_unless_held, slot, named):
                logger.info("model %r: its process is started", self._name)
        except ProcessFailedError as error:
            self._lose(error, str(error))
            return
        seen = await asyncio.to_thread(slot.look)
        is_ending = seen.note is not None and seen.note.is_ending
        if is_ending:
            self._generation = seen.note.generation if seen.note else ""
        self._machine.advance(
            AttachmentEvent.FOUND_ENDING if is_ending else AttachmentEvent.FOUND
        )

    async def _attach_when_it_listens(self, slot: ModelSlot) -> None:
        """Wait until the process listens, and stay attached to it until it ends."""
        seen = await asyncio.to_thread(slot.look)
        if not seen.is_held:
            self._lose(*self._died("before it listened"))
        elif seen.note is None or seen.note.generation == self._generation:
            await asyncio.sleep(POLL_S)  # the process is starting, or still ending
        elif seen.note.is_ending:
            self._generation = seen.note.generation
            self._machine.advance(AttachmentEvent.ENDING)
        else:
            await self._stay_attached(slot, seen)

    async def _stay_attached(self, slot: ModelSlot, seen: Sighting) -> None:
        assert seen.note is not None
        worker, pid = self.worker, seen.note.pid
        await self._hang_up()
        worker.parts.directory.add(
            [Member(self._name, -1, UNKNOWN_INCARNATION, seen.note.addresses)]
        )
        peer = worker.peer(self._name).using(timeout_s=None)
        try:
            async with contextlib.aclosing(peer.stream(attach, self._version)) as news:
                async for word, detail in news:
                    if word == ENDING:  # even if it has not accepted this web worker
                        self._generation = seen.note.generation
                    self._on_news(word, detail)
        except AuthenticationError as error:
            problem = "the secret in its directory was replaced: restart this program"
            self._lose(error, problem)
        except AsyncRpcError as error:
            if isinstance(error, RemoteError) and error.outcome is Outcome.EXECUTED:
                self._lose(error, f"{self._function}() raised {error.remote_type}")
                return
            still = await asyncio.to_thread(slot.look)
            if self._machine.state is AttachmentState.STARTING and still.is_held:
                # It did not accept this web worker: it is ending, or busy importing.
                await asyncio.sleep(POLL_S)
                return
            self._lose(*self._died(f"(pid {pid}): {error}"))
        finally:
            self._model = None

    async def _hang_up(self) -> None:
        """End the link to the previous process, which would still get calls."""
        link = self.worker.parts.directory.link_to(self._name)
        if link is not None:
            link.connection.close("another process has the model now")
            await asyncio.wait([link.connection.ended])

    def _on_news(self, word: str, detail: Any) -> None:
        machine = self._machine
        if word == LOADING:
            self._generation = detail
            machine.advance(AttachmentEvent.ATTACHED)
        elif word == READY:
            self._model = detail
            self._failure = None
            machine.load(self.worker.loop.time())
        elif word == ENDING:
            logger.info("model %r: its process ends: %s", self._name, detail)
            self._model = None
            machine.advance(AttachmentEvent.ENDING)
        self._changed.set()

    async def _until_gone(self, slot: ModelSlot) -> None:
        """Wait until a process that is shutting down has ended."""
        seen = await asyncio.to_thread(slot.look)
        is_another = seen.note is not None and seen.note.generation != self._generation
        if is_another or not seen.is_held:
            self._machine.advance(AttachmentEvent.GONE)
        else:
            await asyncio.sleep(POLL_S)

    def _died(self, how: str) -> tuple[AsyncRpcError, str]:
        problem = f"its process ended {how}"
        error = _process_failed(
            f"model {self._name!r}: {problem}; its output says why, unless it was "
            "killed (by the kernel, if memory ran out: see dmesg)"
        )
        return error, problem

    def _lose(self, failure: AsyncRpcError, problem: str) -> None:
        if self._machine.state is AttachmentState.CLOSED:
            return  # this web worker has ended the stream itself
        self._failure = failure
        self._machine.lose(self.worker.loop.time(), problem)
        logger.warning(
            "model %r: %s; %s", self._name, problem, _DOING[self._machine.state]
        )
        self._changed.set()


def _process_failed(problem: str) -> ProcessFailedError:
    return ProcessFailedError(problem, rank=0, exit_code=None, remote_traceback="")


_DOING: Final = {
    AttachmentState.SEEKING: "its process is being looked for",
    AttachmentState.STARTING: "its process is being started",
    AttachmentState.LOADING: "its process is making the model",
    AttachmentState.READY: "its process is ready",
    AttachmentState.LEAVING: "its process is ending, and another will be started",
    AttachmentState.RESTING: "its process is about to be started again",
    AttachmentState.TRIPPED: (
        "its process was lost too often, and will be started again after a while"
    ),
    AttachmentState.CLOSED: "this web worker has left it",
}
