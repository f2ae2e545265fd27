"""torch.distributed.autograd's names: contexts and backward passes, blocking.

Gradients are exact: results that the roots do not depend on cost nothing, where torch
would wait for ever.

Source: torch.distributed.autograd, version 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from asyncrpc.compat.nodes import RememberingAutograd
from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc import errors
from asyncrpc.compat.rpc.agent import Agent
from asyncrpc.core.autograd.contexts import Context, current_context_var
from asyncrpc.core.autograd.public import backward as run_backward
from asyncrpc.core.autograd.state import ContextState
from asyncrpc.core.calls.context import forget_deadline
from asyncrpc.core.ids import ContextId
from asyncrpc.errors import BackwardFailedError, InvalidContextError

__all__ = ["backward", "context", "get_gradients", "is_available"]

_NO_CONTEXT = (
    "Current thread doesn't have a valid autograd context. Please wrap your code "
    "using: `with torch.distributed.autograd.context() as context_id` to generate a "
    "valid context"
)


def is_available() -> bool:
    """Return whether distributed autograd can be used: always."""
    return True


def _service(agent: Agent) -> RememberingAutograd:
    service: Any = agent.worker.parts.service("autograd")
    assert isinstance(service, RememberingAutograd)
    return service


def _context(agent: Agent, context_id: int) -> Context:
    """Return the context that a number stands for."""
    for known in _service(agent).context_ids():
        if known.serial == context_id:
            return Context(_service(agent), known)
    raise RuntimeError(f"Could not find autograd context with id: {context_id}")


class context:  # noqa: N801  (torch's name)
    """A context manager: calls inside record what goes between workers.

    Example:
        >>> with dist_autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", f, args=(x,)).sum()
        ...     dist_autograd.backward(context_id, [loss])

    Source: torch.distributed.autograd.context.
    """

    def __enter__(self) -> int:
        """Open a context of this thread; return its number."""
        self._context = _opened()
        self._token = current_context_var.set(self._context)
        return self._context.id.serial

    def __exit__(self, *_: object) -> None:
        """End it here and on every worker that it reached."""
        current_context_var.reset(self._token)
        _release(self._context)


def _opened() -> Context:
    agent = agents.current()
    current = current_context_var.get()
    if current is not None and not current.is_of_pass:  # a hook may open its own
        raise RuntimeError("Already have an autograd context id for this thread.")
    serial = next(agent.context_ids)
    context = Context(_service(agent), ContextId(agent.worker.incarnation, serial))
    open_it = partial(context.service.open, context.id, agent.worker.id)
    if agent.host.is_here:
        open_it()
    else:  # whatever this thread does next comes to the loop after it
        agent.host.soon(open_it)
    return context


def _release(which: Context) -> None:
    if agents.is_set():  # whatever this thread does next comes to the loop after it
        agents.current().host.soon(lambda: which.service.release(which.id))


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,  # noqa: FBT001, FBT002  (torch's signature)
) -> None:
    """Run a backward pass on every worker that took part; block until it has ended.

    Args:
        context_id: of the context in which the roots were computed.
        roots: scalars of this worker that require a gradient.
        retain_graph: keep the graphs for another pass in this context.

    Raises:
        TypeError: the arguments are of the wrong types.
        RuntimeError: there is no such context, a root is not fit, or the pass failed;
            nothing has changed then.

    Source: torch.distributed.autograd.backward, in FAST mode, which waits for ever for
    a result that is not used.
    """
    agent = agents.current()
    if not isinstance(roots, list | tuple) or not isinstance(context_id, int):
        raise TypeError(
            "backward(): incompatible function arguments. The following argument types "
            "are supported: (contextId: int, roots: list[Tensor], retain_graph: bool = "
            "False) -> None"
        )
    _check_roots(roots)
    _run(agent, context_id, roots, retain_graph=bool(retain_graph))


def _check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Refuse what cannot be a root."""
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"{root} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError(f"{root} does not have a valid gradient function.")


def _run(
    agent: Agent, context_id: int, roots: Sequence[torch.Tensor], *, retain_graph: bool
) -> None:
    async def run() -> None:
        forget_deadline()
        which = _context(agent, context_id)
        await run_backward(which, list(roots), retain_graph, timeout_s=None)

    try:
        agent.host.run(run())
    except BackwardFailedError as error:
        text = str(error).removeprefix(f"Error on worker {error.worker!r}: ")
        _, _, problem = text.partition(": ")  # after the exception's type
        failed = f"Error on Node {agent.rank_of(error.worker)}: {problem}"
    except InvalidContextError as error:
        failed = f"Could not find autograd context with id: {context_id} ({error})"
    else:
        return
    raise RuntimeError(failed)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of a context on this worker, by the tensor they belong to.

    Raises:
        RuntimeError: there is no such context.

    Source: torch.distributed.autograd.get_gradients.
    """
    agent = agents.current()

    async def gather() -> dict[torch.Tensor, torch.Tensor]:
        context = _context(agent, context_id)
        return dict(await context.service.gathered(context.id))

    return agent.host.run(gather())


def backward_from_reference(rref: Any, context_id: int, retain_graph: bool) -> None:  # noqa: FBT001
    """Run a backward pass from a referenced tensor; see `RRef.backward`."""
    agent = agents.current()
    if rref.is_owner():
        value = rref.local_value()
        if not isinstance(value, torch.Tensor):
            raise RuntimeError("RRef should contain a tensor for .backward()")
        if context_id == -1:
            value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            return
        _run(agent, context_id, [value], retain_graph=retain_graph)
        return
    if context_id == -1:
        raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
    agent.host.do_at_once(lambda: _context(agent, context_id))  # refused here, at once
    agent.result_of(
        lambda: agent.start(
            rref.owner_name(),
            _backward_here,
            (rref, context_id, retain_graph),
            {},
            agent.rpc_timeout_s or None,
        )
    )


def _backward_here(rref: Any, context_id: int, retain_graph: bool) -> None:  # noqa: FBT001
    """Run a pass for another worker, from a value of this one."""
    backward_from_reference(rref, context_id, retain_graph)


# --- what torch keeps to itself, and programs use all the same -----------------------


class DistAutogradContext:
    """One context, as this worker knows it."""

    def __init__(self, agent: Agent, state: ContextState) -> None:
        self._agent = agent
        self._state = state

    def _context_id(self) -> int:
        return self._state.id.serial

    def _known_worker_ids(self) -> set[int]:
        me = self._agent.worker.name
        names = {peer.name for peer in self._state.peers} - {me}
        return {self._agent.rank_of(name) for name in names}

    def _send_functions(self) -> dict[int, Any]:
        agent, service = self._agent, _service(self._agent)
        nodes = agent.host.do_at_once(lambda: service.sent(self._state))
        rank = agent.rank
        return {
            _message_id(rank, message.serial): node for message, node in nodes.items()
        }

    def _recv_functions(self) -> dict[int, Any]:
        agent, service = self._agent, _service(self._agent)
        nodes = agent.host.do_at_once(lambda: service.received(self._state.id))
        return {
            _message_id(agent.rank_of(sender), serial): node
            for (sender, serial), node in nodes.items()
        }


def _message_id(rank: int, serial: int) -> int:
    """Return torch's id of a message, the same at both ends: who sent it, and which."""
    return (max(rank, 0) << agents.CONTEXT_BITS) + serial


def _new_context() -> DistAutogradContext:
    context = _opened()
    current_context_var.set(context)
    return _retrieve_context(context.id.serial)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    agent = agents.current()

    def find() -> DistAutogradContext:
        context = _context(agent, context_id)
        return DistAutogradContext(agent, context.service.state(context))

    return agent.host.do_at_once(find)


def _current_context() -> DistAutogradContext:
    context = current_context_var.get()
    if context is None:
        raise RuntimeError(_NO_CONTEXT)
    return _retrieve_context(context.id.serial)


def _is_valid_context(context_id: int) -> bool:
    agent = agents.current()
    ids = agent.host.do_at_once(_service(agent).context_ids)
    return any(known.serial == context_id for known in ids)


def _release_context(context_id: int) -> None:
    agent = agents.current()
    current = current_context_var.get()
    if current is not None and current.id.serial == context_id:
        current_context_var.set(None)
    _release(agent.host.do_at_once(lambda: _context(agent, context_id)))


def _get_max_id() -> int:
    rank = max(agents.current().rank, 0)
    return ((rank + 1) << agents.CONTEXT_BITS) - 1


def _init(worker_id: int) -> None:
    """Do nothing: autograd is part of the worker."""
    _ = worker_id


def _get_debug_info() -> dict[str, int]:
    if not agents.is_set():
        raise RuntimeError(errors.NOT_INITIALIZED)
    agent = agents.current()

    def count() -> dict[str, int]:
        service = _service(agent)
        return {
            "num_current_backward_passes": service.running_passes,
            "num_autograd_contexts": service.open_contexts,
        }

    return agent.host.do_at_once(count)
