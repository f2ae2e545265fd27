"""Autograd contexts: the crossings and gradients of one distributed pass.

Which context is current is a context variable: every task has its own, and a function
that runs for a call joins its caller's.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Self

from asyncrpc.core.ids import ContextId
from asyncrpc.errors import NotStartedError, UsageError

if TYPE_CHECKING:
    from asyncrpc.core.autograd.service import AutogradService

current_context_var: Final[ContextVar[Context | None]] = ContextVar(
    "asyncrpc_autograd_context", default=None
)


class Context:
    """A handle of an autograd context; from `asyncrpc.autograd.context()`.

    Attributes:
        id: the same on every worker that takes part.
    """

    __slots__ = ("_service", "_token", "id", "is_of_pass")

    def __init__(
        self,
        service: AutogradService,
        context_id: ContextId,
        *,
        is_of_pass: bool = False,
    ) -> None:
        self._service = service
        self._token: Any = None
        self.id = context_id
        # Current in user code of a pass or a step, whose calls take no part in it.
        self.is_of_pass = is_of_pass

    @property
    def service(self) -> AutogradService:
        """Internal: the worker's service that keeps this context's state."""
        return self._service

    async def __aenter__(self) -> Self:
        """Make this the current context of the task.

        Raises:
            InvalidContextError: the context has ended.
            NotStartedError: the context's worker has been shut down.
            UsageError: the context has been entered before; or this is not the worker's
                loop.
        """
        self._service.check_on_loop("autograd.context")
        if self._token is not None:
            raise UsageError(
                "this autograd context has been entered before: make a new one, "
                "`async with asyncrpc.autograd.context() as ctx:`"
            )
        self._service.open(self.id, self._service.me)
        self._token = current_context_var.set(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the context on every worker that it reached; they are not waited for.

        Raises:
            UsageError: this is not the worker's loop; the context has not ended.
        """
        with suppress(NotStartedError):  # the end of the worker has ended it
            self._service.check_on_loop("autograd.context")
        with suppress(ValueError):  # a task with variables of its own ends it
            current_context_var.reset(self._token)
        self._service.release(self.id)

    def __repr__(self) -> str:
        return f"<autograd context {self.id}>"
