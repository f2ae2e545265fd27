"""The page of a group of workers in torch's debug server.

torch's server has its own process, and a thread for each request.  So the page has no
worker: it looks at the group as an observer, on its own event loop.  torch's server
sends the result of a handler with status 200; the page sends its own answers, to refuse
requests without the token, and to forbid caching.

This module imports parts that only newer versions of torch have.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import io
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple

from torch.distributed.debug._frontend import (
    DebugHandler,
    HTTPRequestHandler,
    NavLink,
    Route,
)

from asyncrpc import Options
from asyncrpc.core.loop.clock import NS_PER_S, wall_ns
from asyncrpc.errors import AsyncRpcError
from asyncrpc.tools.inspection.collective_records import UNDER_WAY
from asyncrpc.tools.inspection.group import GroupView, view_of
from asyncrpc.tools.inspection.machine.graph import find_hangs
from asyncrpc.tools.inspection.machine.wording import duration, sentence
from asyncrpc.tools.inspection.observer import Observer

PATH: Final = "/asyncrpc"
ROWS_MAX: Final = 200  # of a table
_TEMPLATE: Final = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}asyncrpc{% endblock %}</h1>{% endblock %}
{% block content %}
{% for table in tables %}
<h2>{{ table.title | e }}</h2>
{% if table.rows %}
<table>
<tr>{% for name in table.heading %}<th>{{ name | e }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell | e }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% else %}
<p>{{ table.nothing | e }}</p>
{% endif %}
{% endfor %}
{% endblock %}
"""
_REFUSAL: Final = (
    "This page needs the token that its program gave to debug_handler: as the password "
    "here, with any user name, or as the header 'Authorization: Bearer TOKEN'.\n"
)


class ShownTable(NamedTuple):
    """A table of the page.

    Attributes:
        nothing: text if there are no rows.
    """

    title: str
    heading: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    nothing: str


class GroupPage(DebugHandler):
    """The page; see `debug_handler`.

    It holds the secret and the token, so its repr shows neither.
    """

    def __init__(
        self, address: str, options: Options, token: str, after_s: float
    ) -> None:
        self._address = address
        self._options = options
        self._token = token.encode()
        self._after_s = after_s

    def routes(self) -> list[Route]:
        """Return the route of the page."""
        return [Route(PATH, self._answer)]

    def nav_links(self) -> list[NavLink]:
        """Return the link for torch's navigation bar."""
        return [NavLink(PATH, "asyncrpc")]

    def templates(self) -> dict[str, str]:
        """Return the page's own template."""
        return {"asyncrpc.html": _TEMPLATE}

    def dump(self) -> str:
        """Return the page as text, for torch's periodic dumps to files."""
        lines = []
        for table in asyncio.run(self._tables()):
            lines.append(f"=== {table.title} ===")
            rows = [table.heading, *table.rows] if table.rows else [(table.nothing,)]
            lines += ["  ".join(row) for row in rows]
        return "\n".join(lines)

    def dump_filename(self) -> str:
        """Return the name of the dump in `enabled_dumps`."""
        return "asyncrpc"

    # --- requests --------------------------------------------------------------------

    def _answer(self, request: HTTPRequestHandler) -> bytes:
        if not self._is_let_in(request.headers.get("Authorization", "")):
            challenge = {"WWW-Authenticate": 'Basic realm="asyncrpc"'}
            text = _REFUSAL.encode()
            return _send(
                request, HTTPStatus.UNAUTHORIZED, "text/plain", text, challenge
            )
        tables = asyncio.run(self._tables())
        page = request.frontend.render_template("asyncrpc.html", tables=tables)
        return _send(request, HTTPStatus.OK, "text/html", page, {})

    def _is_let_in(self, header: str) -> bool:
        """Return whether a header has the token, compared in constant time."""
        scheme, _, rest = header.partition(" ")
        token = rest.strip().encode(errors="replace")
        if scheme.lower() == "basic":
            try:
                _, _, token = base64.b64decode(token, validate=True).partition(b":")
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(token, self._token)

    # --- what it shows ---------------------------------------------------------------

    async def _tables(self) -> list[ShownTable]:
        try:
            async with Observer(self._options) as observer:
                view = await view_of(observer, self._address, with_collectives=True)
        except AsyncRpcError as error:
            problem = f"the group cannot be looked at: {error}"
            return [ShownTable("Why it waits", (), [], problem)]
        reasons = _reasons(view, self._after_s)
        return [reasons, _calls(view), _collectives(view), _workers(view)]


def _send(
    request: HTTPRequestHandler,
    status: HTTPStatus,
    kind: str,
    body: bytes,
    headers: dict[str, str],
) -> bytes:
    """Send an answer; drop what torch's server would send and log after it."""
    request.send_response(status)
    request.send_header("Content-Type", f"{kind}; charset=utf-8")
    request.send_header("Content-Length", str(len(body)))
    request.send_header("Cache-Control", "no-store")
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)
    request.close_connection = True
    request.wfile = io.BytesIO()
    request.log_request = _log_nothing  # type: ignore[method-assign, assignment]
    return b""


def _log_nothing(*_: object) -> None:
    """Do nothing: torch's server would log status 200 for any answer."""


def _reasons(view: GroupView, after_s: float) -> ShownTable:
    graph = view.graph
    rows = [(sentence(graph, hang),) for hang in find_hangs(graph, after_s=after_s)]
    nothing = f"nothing waits longer than {duration(after_s)}"
    return ShownTable("Why it waits", ("reason",), rows[:ROWS_MAX], nothing)


def _calls(view: GroupView) -> ShownTable:
    calls = [
        (call.for_s, name, call.to, call.function)
        for name, snapshot in view.snapshots.items()
        for call in snapshot.made
    ]
    rows = [(duration(age), *rest) for age, *rest in sorted(calls, reverse=True)]
    heading = "age", "from", "to", "function"
    return ShownTable(
        "Calls in flight", heading, rows[:ROWS_MAX], "no call is under way"
    )


def _collectives(view: GroupView) -> ShownTable:
    rows = sorted(_under_way(view), key=lambda row: row[0])
    shown = [(duration(for_s), *rest) for for_s, *rest in reversed(rows)]
    heading = "age", "worker", "collective", "group", "at"
    return ShownTable(
        "Collectives under way", heading, shown[:ROWS_MAX], "no collective is under way"
    )


def _under_way(view: GroupView) -> Iterator[tuple[float, str, str, str, str]]:
    now_ns = wall_ns()
    for name, history in view.collectives.items():
        for collective in history.collectives:
            if collective.ended_ns != UNDER_WAY:
                continue
            for_s = max(0.0, (now_ns - collective.began_ns) / NS_PER_S)
            frame = collective.frames[0] if collective.frames else None
            at = "" if frame is None else f"{frame.file}:{frame.line}"
            title = f"{collective.operation} {collective.number}"
            yield for_s, name, title, history.groups[collective.group].label, at


def _workers(view: GroupView) -> ShownTable:
    rows = [
        (str(member.rank), name, view.state_of(name))
        for name, member in sorted(view.members.items())
    ]
    return ShownTable("Workers", ("rank", "name", "state"), rows[:ROWS_MAX], "none")
