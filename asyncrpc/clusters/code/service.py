"""A worker's part: it takes the program's files, and loads changed modules anew.

The files lie in a directory of the worker's own, which goes with it; Python looks there
first.  A peer that may send them may call any function: `Policy.STRICT` refuses them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from asyncrpc import Policy, extend
from asyncrpc.clusters.code.folders import digest_of
from asyncrpc.clusters.code.reloading import reload_modules
from asyncrpc.clusters.threads import in_thread
from asyncrpc.core.host.socket_directory import SocketDirectory
from asyncrpc.errors import UsageError

SERVICE: Final = "cluster_code"


@extend.message(SERVICE, "offer", by=extend.MEMBERS, about="the receiver")
class OfferCode(extend.Request[list[bytes]]):
    """Offer the files of the program; the answer: digests of contents that lack.

    Attributes:
        paths: of all files, relative to where Python looks for modules.
        digests: of their contents, in the same order.
    """

    paths: list[str]
    digests: list[bytes]


@extend.message(SERVICE, "put", by=extend.MEMBERS, about="the receiver")
class PutContents(extend.Request[None]):
    """Send contents that lack."""

    contents: list[bytes]


@extend.message(SERVICE, "use", by=extend.MEMBERS, about="the receiver")
class UseCode(extend.Request[list[str]]):
    """Ask to use what was offered; the answer: what was not replaced, as texts."""


class CodeService:
    """Takes files and uses them."""

    name = SERVICE

    def __init__(self, host: extend.ServiceHost) -> None:
        """Begin without files."""
        self._host = host
        self.routes = (
            extend.answers(OfferCode, self._on_offer),
            extend.answers(PutContents, self._on_put),
            extend.answers(UseCode, self._on_use),
        )
        self._directory: SocketDirectory | None = None
        self._offered: dict[str, bytes] = {}
        self._used: dict[str, bytes] = {}
        self._contents: dict[bytes, bytes] = {}
        self._to_load: list[str] = []  # changed, and not loaded anew yet

    async def _on_offer(self, _: extend.PeerLink, offer: OfferCode) -> list[bytes]:
        if self._host.options.policy is Policy.STRICT:
            raise UsageError(
                "code= needs Policy.TRUSTED: a worker of Policy.STRICT runs no code"
                " that a peer sends"
            )
        paths = [_checked(path) for path in offer.paths]
        self._offered = dict(zip(paths, offer.digests, strict=True))
        known = {*self._used.values(), *self._contents}
        return list(dict.fromkeys(d for d in offer.digests if d not in known))

    async def _on_put(self, _: extend.PeerLink, put: PutContents) -> None:
        wanted = {*self._offered.values()}
        for content in put.contents:
            digest = digest_of(content)
            if digest in wanted:  # no other is kept
                self._contents[digest] = content

    async def _on_use(self, _: extend.PeerLink, __: UseCode) -> list[str]:
        return await in_thread(self._use)

    def _use(self) -> list[str]:
        if self._directory is None:
            self._directory = SocketDirectory()
        root = self._directory.path / "code"
        former, wanted = self._used, dict(self._offered)
        kept = {digest: path for path, digest in former.items()}
        changed = [x for x, digest in wanted.items() if former.get(x) != digest]
        new = {
            path: self._contents[digest]
            if (digest := wanted[path]) in self._contents
            else (root / kept[digest]).read_bytes()
            for path in changed
        }
        for path, content in new.items():
            _write(root / path, content)
        for path in former.keys() - wanted.keys():
            (root / path).unlink(missing_ok=True)
        self._used = wanted  # only now: a disk may have been full
        self._contents.clear()
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
        importlib.invalidate_caches()
        self._to_load = [*dict.fromkeys([*self._to_load, *changed])]
        report = reload_modules(root, self._to_load)
        self._to_load = []
        return report

    def on_peer_lost(self, peer: extend.WorkerId, reason: str) -> None:
        """Nothing is held for a peer."""

    async def close(self) -> None:
        """Remove the files."""
        if self._directory is not None:
            await in_thread(self._directory.remove)


def _checked(path: str) -> str:
    """Return a path that stays below its root; UsageError: it does not."""
    parts: Sequence[str] = path.split("/")
    if not all(parts) or {".", ".."} & {*parts} or "\0" in path:
        raise UsageError(f"{path[:200]!r} is no path below the folder of the code")
    return path


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    # Compiled code of the same second and size would be taken for this file's.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
