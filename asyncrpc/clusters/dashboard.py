"""The dashboard of a cluster: loaded when it is asked for, as it needs aiohttp."""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack

from asyncrpc.api import Worker
from asyncrpc.serving.dashboard import dashboard
from asyncrpc.serving.listening import check_where, listening


async def serve_dashboard(
    stack: AsyncExitStack, worker: Worker, host: str, port: int
) -> str:
    """Serve the dashboard of a worker until `stack` ends; return its address."""
    check_where(host, port)
    token = secrets.token_urlsafe()
    app = dashboard(worker, token=token)
    serving = listening("Cluster.dashboard", app, host, port)
    port = await stack.enter_async_context(serving)
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/#token={token}"
