"""A peer: another worker, as seen from this one."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
)
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from asyncrpc.errors import UsageError
from asyncrpc.runtime.calls import streams
from asyncrpc.runtime.calls.context import effective_deadline
from asyncrpc.runtime.calls.futures import task_here
from asyncrpc.runtime.calls.tracing import stream_trace, with_span
from asyncrpc.runtime.options import PLAIN, UNSET, CallOptions, with_options

if TYPE_CHECKING:
    from asyncrpc.runtime.peers.starter import CallStarter

P = ParamSpec("P")
T = TypeVar("T")


class Peer:
    """Another worker, by name; from `Worker.peer`.  It holds no connection itself."""

    __slots__ = ("_calls", "_on_stream", "_options", "name")

    def __init__(
        self,
        calls: CallStarter,
        name: str,
        options: CallOptions = PLAIN,
        on_stream: Callable[[streams.StreamReceiver], None] | None = None,
    ) -> None:
        self._calls = calls
        self._options = options
        self._on_stream = on_stream  # given the receiver of a stream
        self.name = name

    def using(self, **options: Any) -> Peer:
        """Return this peer with other options for the calls made through it.

        Args:
            **options: `timeout_s`, `out`, `codec`, `device_map` and `idempotent`; an
                option that is left out stays as it is.  `timeout_s`: seconds.  `out`: a
                tensor of the result's shape and dtype, in host memory, which
                    the result is received into and which the call returns.  If it is
                    contiguous, the bytes arrive there straight from the socket;
                    otherwise, or if the result's order differs or it comes through
                    shared memory, they are copied once more.  It must not require a
                    gradient, nor be used before the call has ended.  If the call fails
                    or is cancelled, its content is undefined; but it is no longer
                    written to.
                `codec`: makes payloads smaller, in both directions: `"lz4"`, `"zstd"`
                    (lossless), `"fp16"`, `"bf16"`, `"int8"` (for float tensors), one of
                    each, such as `"bf16+zstd"`; `"bf16"` refuses tensors that it would
                    harm, `"bf16+keep"` sends them as they are; `""`: no codec.
                `device_map`: from devices of this worker to devices of the peer, where
                    the arguments' tensors go; results come back by the inverse map.
                `idempotent`: whether the function may run twice: then a `call` whose
                    worker is lost is made again; see `asyncrpc.idempotent`.

        Raises:
            UsageError: there is no such option; there is no such codec, or its package
                is not installed; or a value has the wrong type.

        Example:
            >>> await worker.peer("ps").using(timeout_s=2.0).call(step, batch)
            >>> rows = torch.empty(1000, 64)
            >>> await worker.peer("ps").using(out=rows).call(read_rows, 1000)
        """
        return Peer(self._calls, self.name, with_options(self._options, options))

    @overload
    async def call(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def call(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    async def call(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `function` on this peer and return its result.

        A coroutine function runs on the peer's event loop, any other in its threads.
        Tensors are sent without a copy: do not write to one until the call returns.

        Args:
            function: importable on the peer; its qualified name is what is sent.
            *args: its arguments.  Tensors of any shape, dtype and strides; numbers,
                text, containers, numpy arrays; references.  Anything else is pickled,
                which the policy `STRICT` refuses.
            **kwargs: its keyword arguments; as `*args`.

        Returns:
            What `function` returned.  Tensors keep shape and dtype.

        Raises:
            RemoteError: `function` raised; also an instance of the class that it
                raised, where this worker has that class.
            DeadlineExceededError: the enclosing `asyncrpc.deadline` (seconds) passed.
                The peer knows the deadline too, and stops at it.
            WorkerLostError: the peer is gone; `outcome` says whether a retry is safe.
            EncodeError: an argument cannot be sent.  Nothing was sent.
            UsageError: `out` cannot receive a result, see `using`.  Nothing was sent.
            OutMismatchError: the result does not fit into `out`.
            RejectedError: the peer refused the call; it was not run.

        Cancellation:
            The peer is told and a coroutine there is cancelled; a thread cannot be.
            This returns at once, without waiting for either.

        Example:
            >>> async with asyncrpc.deadline(2.0):
            ...     loss = await worker.peer("ps").call(step, batch, lr=0.1)

        Source: torch.distributed.rpc.rpc_async; unlike there, "no limit" is None, not
        0, and a call can be cancelled.
        """
        return await self._calls.start_call(
            self.name, function, args, kwargs, options=self._options, awaits=True
        )

    def remote(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `function` on this peer, keep its result there, return an RRef at once.

        An error of the function is raised when the value of the reference is fetched.

        Args:
            function: as for `call`; a class makes an object of it there.
            *args: as for `call`.
            **kwargs: as for `call`.

        Returns:
            An `RRef` to the result, before the function has run.

        Raises:
            EncodeError: an argument cannot be sent, and the peer is connected; if the
                peer is not connected yet, using the reference raises it.
            UsageError: this peer has an `out`, but no result is sent back.

        Source: torch.distributed.rpc.remote.
        """
        self._refuse_out("remote", "`await rref.to_here(out=...)`")
        return self._calls.start_remote(
            self.name, function, args, kwargs, options=self._options
        )

    @overload
    def stream(
        self,
        function: Callable[P, AsyncIterator[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncGenerator[T, None]: ...
    @overload
    def stream(
        self,
        function: Callable[P, Iterator[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncGenerator[T, None]: ...
    async def stream(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Run a generator on this peer and yield its items as they come.

        The generator runs ahead by a bounded number of items and bytes
        (`LimitOptions.stream_items_max`, `stream_bytes_max`), then waits to be
        consumed.  Closing this iterator early closes the generator: its `finally`
        blocks run.  In a loop that may `break`, use `contextlib.aclosing`.

        Args:
            function: an asynchronous generator function, or a plain one, which is then
                stepped in threads.
            *args: as for `call`.
            **kwargs: as for `call`.

        Yields:
            The items, in order.

        Raises:
            RemoteError: the generator raised, after the items yielded so far.
            WorkerLostError: the peer is gone.
            DeadlineExceededError: the enclosing deadline passed, or `timeout_s` of
                `using`, which limits the whole stream.
            RejectedError: `function` is not a generator function.
            UsageError: this peer has an `out`, which cannot receive many items.

        Cancellation:
            The generator is closed; this does not wait for it.

        Example:
            >>> async for row in worker.peer("ps").stream(read_rows, "table"):
            ...     print(row)
        """
        self._refuse_out("stream", "`call`")
        calls = self._calls
        calls.loop_guard.check_on_loop("Peer.stream")
        target, values = calls.describe(function, args, kwargs)
        meta: dict[str, Any] | None = calls.meta_here()
        timeout_s = self._options.timeout_s
        if timeout_s is UNSET:
            timeout_s = calls.options.rpc_timeout_s
        deadline = effective_deadline(timeout_s, calls.loop.time())
        called = (target or "a callable").rpartition(":")[2]
        with stream_trace(calls.tracer, called, self.name) as trace:
            link = await streams.link_by(deadline, calls, self.name, called)
            stream = streams.StreamReceiver(
                link,
                called,
                self.name,
                limits=calls.options.limits,
                began_s=calls.now_s(),
                task=task_here(calls.loop),
            )
            if self._on_stream is not None:
                self._on_stream(stream)
            if trace is not None:
                trace.count = lambda: stream.received
                meta = with_span(meta, trace.span)
            items = streams.consume(
                stream,
                lambda limit: link.start_stream(
                    stream, target, values, limit, meta, options=self._options
                ),
                deadline,
                calls.on_loop_thread,
            )
            try:
                async for item in items:
                    yield item
                    if not calls.loop_guard.is_on_loop:  # another loop resumes this
                        calls.loop_guard.check_on_loop("Peer.stream")
            finally:
                await items.aclose()

    def _refuse_out(self, what: str, instead: str) -> None:
        if self._options.out is not None:
            raise UsageError(
                f"`{what}` cannot receive a result into out=; use {instead}"
            )

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} of {self._calls.name!r}>"
