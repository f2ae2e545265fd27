"""Grants access to browsers and programs: by a session, a token, or from loopback.

A session begins with a token, or with the ticket in a link, which is good for one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from typing import Any, Final

from aiohttp import web

from asyncrpc.core.logs import LogLimit
from asyncrpc.core.loop.clock import Clock
from asyncrpc.core.transport.address import is_loopback
from asyncrpc.core.transport.sockets import user_of
from asyncrpc.serving.dashboard.machine.sessions import Attempts, Gate, Sessions
from asyncrpc.serving.listening import names_this_host

logger = logging.getLogger("asyncrpc")

COOKIE: Final = "asyncrpc_dashboard"
LOGIN_BYTES_MAX: Final = 4096
_FORWARDED: Final = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
_LOCAL_ONLY: Final = (
    "this group has no secret, so its dashboard is only for its user on this host: "
    "give it a token, or connect from loopback as the user of this process, by the "
    "name localhost, without a proxy"
)
_USED: Final = (
    "this link has signed in a browser, and works once: start `asyncrpc dashboard` "
    "again for another link, or sign in here"
)
_now_s: Final = Clock().now_s
# Nothing else: `[::1].evil.example` and `localhost@evil.example` are no hosts of ours.
_OWN_SITES: Final = ("same-origin", "none")


class Access:
    """Decides for requests, and answers those that sign in and out."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._sessions = Sessions(os.urandom)
        self._attempts = Attempts()
        self._log_limit = LogLimit()

    async def session_of(self, request: web.Request) -> str | None:
        """Return the owner of a request: a session or an address; None: no access."""
        if self._gate.takes == "nothing":
            return f"at {request.remote}" if await _is_local(request) else None
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._bearer(request, credentials.strip())
        key = request.cookies.get(COOKIE, "")
        return key if self._sessions.use(key, _now_s()) else None

    def _bearer(self, request: web.Request, token: str) -> str | None:
        address = request.remote or ""
        if self._gate.is_token(token):
            return f"program at {address}"
        self._on_failure(address)
        return None

    def _on_failure(self, address: str) -> float:
        """Count a wrong attempt; return the seconds that its address should wait."""
        now_s = _now_s()
        wait_s = self._attempts.wait_s(address, now_s)
        self._attempts.on_failure(address, now_s)
        more = self._log_limit.left_out("wrong", now_s)
        if more is not None:
            logger.warning(
                "dashboard: a wrong secret or token from %s%s", address, more
            )
        return wait_s

    def is_open(self, session: str) -> bool:
        """Return whether a session is still open."""
        is_of_browser = not session.startswith(("at ", "program at "))
        return not is_of_browser or self._sessions.use(session, _now_s())

    # --- requests --------------------------------------------------------------------

    async def state(self, request: web.Request) -> web.Response:
        """Return whether a browser is signed in, and how it can sign in."""
        takes = self._gate.takes
        is_in = await self.session_of(request) is not None
        why = None if is_in or takes != "nothing" else _LOCAL_ONLY
        return web.json_response(
            {
                "signed_in": is_in,
                "takes": takes,
                "why": why,
            }
        )

    async def sign_in(self, request: web.Request) -> web.Response:
        """Begin a session, if the token or the ticket is right."""
        if self._gate.takes == "nothing":
            return _refusal(403, _LOCAL_ONLY)
        fields = await _content(request)
        if fields is None:
            return _refusal(400, "to sign in, send a JSON object of strings")
        if not self._is_right(fields):
            return self._wrong(request, fields)
        key = self._sessions.open(_now_s())
        response = web.json_response({"signed_in": True})
        # Without a path, the cookie is for the directory of this request as the browser
        # sees it: the prefix of the application, even behind a proxy that changes it.
        response.set_cookie(
            COOKIE,
            key,
            path="",
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )
        return response

    def _wrong(self, request: web.Request, fields: dict[str, str]) -> web.Response:
        if wait_s := self._on_failure(request.remote or ""):
            wait = math.ceil(wait_s)
            return _refusal(
                429,
                f"too many wrong attempts; try again in {wait} s",
                {"Retry-After": str(wait)},
            )
        if "ticket" in fields:
            return _refusal(403, _USED)
        return _refusal(403, f"this is not the {self._name}")

    @property
    def _name(self) -> str:
        takes = self._gate.takes
        return "secret or the token" if takes == "either" else takes

    def _is_right(self, fields: dict[str, str]) -> bool:
        if "ticket" in fields:
            return self._gate.take_ticket(fields["ticket"])
        return self._gate.is_token(fields.get("token", "").strip())

    async def sign_out(self, request: web.Request) -> web.Response:
        """End the session of a browser."""
        key = request.cookies.get(COOKIE, "")
        response = web.json_response({})
        if self._sessions.use(key, _now_s()):
            self._sessions.close(key)
            response.del_cookie(COOKIE, path="")
        return response


def refused(gate: Gate) -> web.Response:
    """Return the answer to a request without access."""
    if gate.takes == "nothing":
        return _refusal(401, _LOCAL_ONLY)
    return _refusal(401, "sign in, or send the token as 'Authorization: Bearer TOKEN'")


def _refusal(
    status: int, text: str, headers: dict[str, str] | None = None
) -> web.Response:
    return web.json_response({"error": text}, status=status, headers=headers)


async def _content(request: web.Request) -> dict[str, str] | None:
    """Return the data with which a browser signs in; None if they are invalid."""
    if request.content_type != "application/json":
        return None
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > LOGIN_BYTES_MAX:
            return None
    try:
        content: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    is_right = isinstance(content, dict) and all(
        isinstance(value, str) for value in content.values()
    )
    return content if is_right else None


def is_foreign(request: web.Request) -> bool:
    """Return whether a page of another site makes a request that changes something.

    Browsers say so where the page is secure.  Elsewhere the content must be JSON, which
    they send to other sites only if those allow it.  The header `Origin` says nothing
    behind a proxy that changes the host.
    """
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in _OWN_SITES
    return request.content_type != "application/json"


async def _is_local(request: web.Request) -> bool:
    """Return whether a request is of this host and user, and not from a foreign page.

    A foreign page whose name resolves to this host sends that name as the host.
    """
    if any(name in request.headers for name in _FORWARDED):
        return False
    if request.headers.get("Sec-Fetch-Site", "none") not in _OWN_SITES:
        return False
    if not names_this_host(request) or request.transport is None:
        return False
    peer = request.transport.get_extra_info("peername")
    own = request.transport.get_extra_info("sockname")
    if not isinstance(peer, tuple):  # a Unix socket, whose file says who may connect
        return True
    if not is_loopback(peer[0]):
        return False
    user = await asyncio.to_thread(user_of, peer[:2], own[:2])
    return user in (None, 0, os.getuid())
