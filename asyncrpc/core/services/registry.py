"""The services of a worker: parts that talk to the same parts of its peers.

A process that never uses collectives, distributed optimizers or the inspection does not
load their code.  But any peer may send the first message to such a service, so a
`LaterService` keeps its place.  The code then loads in a thread, for that takes tens of
milliseconds, and what comes meanwhile waits in its order.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.services.extensions import (
    HoldsForPeers,
    RemembersLost,
    Service,
    WantsAddresses,
)
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.services.router import Route, Router
from asyncrpc.core.services.schema import WORKERS, Sender
from asyncrpc.errors import ClosedError, MalformedError

logger = logging.getLogger("asyncrpc")

S = TypeVar("S")

LOST_KEPT: Final = 4096
NOTICES_MAX: Final = 4096  # of one peer, that wait while the code loads

# Held while a thread loads code.  A fork waits for it: in the child, a module that was
# being imported would stay locked for ever.
LOADING_LOCK: Final = threading.RLock()
os.register_at_fork(
    before=LOADING_LOCK.acquire,
    after_in_parent=LOADING_LOCK.release,
    after_in_child=LOADING_LOCK.release,
)

# They add the services by which observers look at a worker.  The package that has them
# adds to this at import, for workers that are made by packages below it.
OBSERVATION: Final[list[Callable[[Any], None]]] = []


class Services:
    """The services of one worker, by name.

    Attributes:
        router: leads messages to them.
    """

    def __init__(self) -> None:
        self.router = Router()
        self._by_name: dict[str, Service] = {}
        self._holders: list[HoldsForPeers] = []

    def __iter__(self) -> Iterator[Service]:
        """Iterate over them in the order in which they were added."""
        return iter(tuple(self._by_name.values()))

    def add(self, service: Service) -> None:
        """Let other workers send messages to a part of this one."""
        self._by_name[service.name] = service
        self.router.add(service.name, service.routes)
        if isinstance(service, HoldsForPeers):
            self._holders.append(service)

    def add_later(
        self,
        name: str,
        module: str,
        make: Callable[[], Service],
        *,
        by: Sender = WORKERS,
    ) -> None:
        """Let other workers send messages to a part whose code is loaded when needed.

        Args:
            module: that has the service; a thread imports it when the first message
                comes, unless the program has done so.
            by: the kinds of peer that may send it messages; the same for all of them.
        """
        later = LaterService(name, module, make, self, by)
        self._by_name[name] = later
        self.router.later[name] = later.route

    def named(self, name: Any) -> Service:
        """Return the service with this name; load it, if it is not loaded."""
        service = self._by_name.get(name) if type(name) is str else None
        if service is None:
            raise MalformedError(f"there is no service {name!r:.80}")
        if isinstance(service, LaterService):
            return service.load()
        return service

    def of_kind(self, kind: type[S]) -> S | None:
        """Return the service of a class, None if there is none; load it if need be."""
        for service in self:
            if isinstance(service, LaterService):
                if service.name != getattr(kind, "name", None):
                    continue
                service = service.load()  # noqa: PLW2901  (which takes its place)
            if isinstance(service, kind):
                return service
        return None

    def held_for(self, peer: Incarnation) -> int:
        """Return how many bytes the services keep for a peer."""
        nbytes = 0  # asked for each payload: `sum` would make a generator
        for service in self._holders:
            nbytes += service.held_for(peer)
        return nbytes

    def on_listening(self, addresses: Sequence[str]) -> None:
        """Tell the services that want the addresses where the worker listens."""
        for service in self:
            if isinstance(service, WantsAddresses):
                service.on_listening(addresses)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Tell every service that a peer is gone."""
        for service in self:
            service.on_peer_lost(peer, reason)

    def on_peer_back(self, peer: WorkerId) -> None:
        """Tell every service that a lost peer is back."""
        for service in self:
            if isinstance(service, RemembersLost):
                service.on_peer_back(peer)


class LaterService:
    """Keeps the place of a service that is not loaded; a `Service`.

    Attributes:
        name: of the service.
        routes: it has none of its own.
    """

    def __init__(
        self,
        name: str,
        module: str,
        make: Callable[[], Service],
        services: Services,
        by: Sender,
    ) -> None:
        self.name = name
        self.routes: tuple[Route, ...] = ()
        self._module, self._make, self._services = module, make, services
        self._by = by
        self._service: Service | None = None
        self._loading: asyncio.Future[None] | None = None
        self._notices: list[Callable[[], None]] = []
        self._waiting: Counter[Incarnation] = Counter()  # notices of each sender
        self._lost: OrderedDict[str, tuple[WorkerId, str]] = OrderedDict()

    def load(self) -> Service:
        """Return the service, which takes its place now."""
        if self._service is not None:
            return self._service
        service = self._service = self._make()
        self._services.router.later.pop(self.name, None)
        self._services.add(service)
        for peer, reason in self._lost.values():
            service.on_peer_lost(peer, reason)
        for take in self._notices:
            take()
        return service

    def route(self, head: bytes, method: object, is_answered: bool) -> Route | None:  # noqa: FBT001
        """Return the route of a message; see `Router.later`."""
        if self._loading is None and _is_loaded(self._module):
            self.load()
            return None

        router = self._services.router

        async def reply(link: PeerLink, value: Any) -> Any:
            await asyncio.shield(self._load_in_thread())
            return await router.request(head).handle(link, value)

        def take(link: PeerLink, value: Any) -> None:
            self._load_in_thread()
            self._waiting[link.peer.incarnation] += 1
            if self._waiting[link.peer.incarnation] > NOTICES_MAX:
                raise MalformedError(
                    f"{NOTICES_MAX} notices of one worker to service {self.name!r} wait"
                    " until its code is loaded, which is the limit"
                )
            self._notices.append(lambda: _take(router.notice(head), link, value))

        handle = reply if is_answered else take
        return Route(
            *(self.name, f"{method!s:.80}", handle),
            is_answered=is_answered,
            takes_payload=True,
            by=self._by,
        )

    def _load_in_thread(self) -> asyncio.Future[None]:
        """Return when the service has been loaded; called on the loop."""
        if self._loading is not None:
            return self._loading
        loop = asyncio.get_running_loop()
        loading = self._loading = loop.create_future()

        def run() -> None:
            problem = None
            try:
                with LOADING_LOCK:
                    importlib.import_module(self._module)
            except Exception as error:  # noqa: BLE001  (raised where it is awaited)
                problem = error
            try:
                loop.call_soon_threadsafe(self._finish, loading, problem)
            except RuntimeError:  # the loop is closed
                return

        threading.Thread(target=run, name="asyncrpc-load", daemon=True).start()
        return loading

    def _finish(self, loading: asyncio.Future[None], problem: Exception | None) -> None:
        """Make the service, and take what waits for it."""
        if loading.done():  # the worker has ended
            return
        if problem is None:
            try:
                self.load()
            except Exception as error:  # noqa: BLE001  (raised where it is awaited)
                problem = error
        if problem is None:
            loading.set_result(None)
            return
        logger.error("the service %r cannot be loaded", self.name, exc_info=problem)
        self._loading = None  # the next message tries again
        self._notices.clear()
        self._waiting.clear()
        loading.set_exception(problem)
        loading.exception()  # it is logged

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Remember it for the service."""
        self._lost[peer.name] = peer, reason
        if len(self._lost) > LOST_KEPT:
            self._lost.popitem(last=False)

    def on_peer_back(self, peer: WorkerId) -> None:
        """Remember it for the service."""
        self._lost.pop(peer.name, None)

    async def close(self) -> None:
        """Load nothing more."""
        self._notices.clear()
        if self._loading is not None and not self._loading.done():
            self._loading.set_exception(ClosedError("the worker has ended"))
            self._loading.exception()


def _take(route: Route, link: PeerLink, value: Any) -> None:
    """Take a notice that has waited; it has no answer that could fail."""
    try:
        route.handle(link, value)
    except Exception as error:  # noqa: BLE001  (as of notices that do not wait)
        logger.warning(
            "a notice of %r could not be taken: %s: %s",
            link.peer.name,
            route.name,
            error,
        )


def _is_loaded(module: str) -> bool:
    """Return whether a module has been imported whole."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)
