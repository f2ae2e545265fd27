"""The program's part: it sends its files to workers, and finds out when they differ."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrpc.clusters.code.folders import (
    CodeFolder,
    CodeTree,
    digest_of,
    read_tree,
)
from asyncrpc.clusters.code.service import OfferCode, PutContents, UseCode
from asyncrpc.clusters.threads import in_thread
from asyncrpc.clusters.worker import WorkerStarted
from asyncrpc.errors import ClusterError, UsageError
from asyncrpc.extend import ServiceHost, ask

_PUT_BYTES: Final = 4 << 20  # of one message, if its files are smaller


@dataclass(frozen=True, slots=True)
class CodeUpdate:
    """What `Cluster.update_code` has done.

    Attributes:
        changed: paths of the files that were sent or removed.
        kept: what a worker still has of the former code, by its name: names that other
            modules have taken by `from ... import`, and objects of former classes.
            Workers that have nothing of it are left out.
    """

    changed: tuple[str, ...]
    kept: dict[str, tuple[str, ...]]


class CodeSender:
    """Sends the files of a program."""

    def __init__(self, host: ServiceHost, folders: Sequence[CodeFolder]) -> None:
        self._host, self._folders = host, folders
        self._tree = CodeTree({}, {})
        self._same: dict[str, Any] = {}  # specs of modules that are as sent
        self._updating = asyncio.Lock()

    async def read(self) -> None:
        """Read the files that workers get; UsageError: it is impossible."""
        self._tree = await in_thread(read_tree, self._folders)

    async def send_at_start(self, name: str, _: WorkerStarted) -> None:
        """Send the files to a worker that has started; again, if others came since."""
        sent = None
        while sent is not self._tree:
            sent = self._tree
            await self.send(name)

    async def send(self, name: str) -> list[str]:
        """Send the files to a worker; return what it still has of the former ones."""
        tree = self._tree
        link = await self._host.link_to(name)
        offer = OfferCode([*tree.digests], [*tree.digests.values()])
        missing = await ask(link, offer)
        for contents in _in_messages([tree.contents[digest] for digest in missing]):
            await ask(link, PutContents(contents))
        return await ask(link, UseCode())

    async def update(self, names: Sequence[str]) -> CodeUpdate:
        """Read the files anew and send what has changed.

        ClusterError: a worker could not load it; the others have.
        """
        async with self._updating:
            former = self._tree
            await self.read()
            self._same.clear()
            sending = map(self.send, names)
            reports = await asyncio.gather(*sending, return_exceptions=True)
            changed = tuple(self._tree.changed_from(former))
        kept: dict[str, tuple[str, ...]] = {}
        for name, report in zip(names, reports, strict=True):
            if isinstance(report, BaseException):
                raise ClusterError(
                    f"worker {name!r} has not loaded the code: {report}; the other"
                    " workers have it, unless they fail alike"
                ) from report
            if report:
                kept[name] = tuple(report)
        return CodeUpdate(changed, kept)

    def check(self, function: str) -> bool:
        """Return whether workers have the module of a function, as it is here.

        Args:
            function: as `module:name`, seen for the first time.

        UsageError: it has changed here since it was sent.
        """
        module = sys.modules.get(function.partition(":")[0])
        spec = getattr(module, "__spec__", None)
        if module is None or spec is None:
            return False
        if self._same.get(module.__name__) is spec:
            return True
        path = self._path_of(module)
        if path is None:
            return False
        digest = self._tree.digests.get(path)
        try:
            content = Path(str(module.__file__)).read_bytes()
        except OSError:
            content = b""
        if digest != digest_of(content):
            raise UsageError(
                f"module {module.__name__!r} has changed here since its code went to"
                " the workers, which would run the former: `await"
                " cluster.update_code()` sends it"
            )
        self._same[module.__name__] = spec
        return True

    def _path_of(self, module: Any) -> str | None:
        """Return the path of a module among the files; None: it is not of them."""
        file = getattr(module, "__file__", None)
        if not file:
            return None
        path = Path(file).resolve()
        for folder in self._folders:
            if path.is_relative_to(folder.path):
                return path.relative_to(folder.root).as_posix()
        return None


def _in_messages(contents: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield contents in lists that fit a message."""
    pending: list[bytes] = []
    size = 0
    for content in contents:
        if pending and size + len(content) > _PUT_BYTES:
            yield pending
            pending, size = [], 0
        pending.append(content)
        size += len(content)
    if pending:
        yield pending
