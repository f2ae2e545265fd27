"""Shows a group of workers on a page of torch's debug server, guarded by a token."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final

from asyncrpc.core.arguments import check_duration, check_kind
from asyncrpc.core.worker import Worker
from asyncrpc.errors import NotStartedError, UsageError
from asyncrpc.extend import host_of
from asyncrpc.serving.tokens import check_token

if TYPE_CHECKING:
    from torch.distributed.debug._frontend import DebugHandler

AFTER_S: Final = 10.0
_SCHEMES: Final = ("uds://", "tcp://")


def debug_handler(
    worker: Worker, *, token: str, after_s: float = AFTER_S
) -> DebugHandler:
    """Return a page for torch's debug server that shows the group of a worker.

    The page, `/asyncrpc`, says why the group waits, as `asyncrpc why` does, and lists
    its calls and collectives under way.  torch's server has no authentication, so the
    page has its own: the browser asks for the token as a password, with any user name;
    a program sends it as `Authorization: Bearer TOKEN`.  The server's process looks at
    the workers as an observer, including workers that are blocked.

    Like all traffic of torch's server, the token is sent unencrypted: reach the server
    through a tunnel.  Its other pages are not protected by the token.

    Args:
        worker: a running worker of this process, with the secret or certificates of
            its group.
        token: the password: at least 16 ASCII characters, as from
            `secrets.token_urlsafe()`; not the secret of the group.
        after_s: seconds after which a wait counts as too long.

    Returns:
        A handler for `start_debug_server(handlers=[...])` at rank 0; it can be pickled.

    Raises:
        NotStartedError: the worker does not run.
        UsageError: an argument has the wrong type; or the debug server of this torch
            takes no handlers.

    Example:
        >>> from torch.distributed.debug import start_debug_server
        >>> from torch.distributed.debug._debug_handlers import default_handlers
        >>> ours = serving.debug_handler(worker, token=os.environ["DEBUG_TOKEN"])
        >>> start_debug_server(handlers=[*default_handlers(), ours])

    Source: torch.distributed.debug of torch 2.13.
    """
    check_kind("worker", worker, Worker, "a Worker")
    check_token(token)
    check_duration("after_s", after_s)
    if worker.is_closed:
        raise NotStartedError(
            f"worker {worker.name!r} does not run: enter it before debug_handler"
        )
    options = worker.options
    secret = options.secret_bytes
    if secret is not None and hmac.compare_digest(secret, token.encode()):
        raise UsageError(
            "token must not be the secret of the group, because it is sent "
            "unencrypted; use secrets.token_urlsafe()"
        )
    try:
        from asyncrpc.serving.debug_page import GroupPage  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            "debug_handler needs a torch.distributed.debug that takes handlers, as in "
            f"torch 2.13: {error}"
        ) from error
    return GroupPage(_address_of(worker), options, token, after_s)


def _address_of(worker: Worker) -> str:
    """Return the address of a worker that suits another process of this host best."""
    known = (*worker.addresses, *host_of(worker).listening)
    if not known:
        raise UsageError(
            f"worker {worker.name!r} has no address, so it cannot be looked at"
        )
    return next(
        (address for address in known if address.startswith(_SCHEMES)), known[0]
    )
