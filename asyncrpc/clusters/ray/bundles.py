"""The interface to Ray: the only module that imports the library `ray`.

The library is imported at its first use, so that `asyncrpc.ray` can be imported without
it.  Calls of Ray that may block run in a thread; the loop
awaits object references.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from asyncrpc.clusters.ray.placement import NodeResources, Resources
from asyncrpc.clusters.threads import in_thread
from asyncrpc.core.arguments import (
    check_count,
    check_kind,
    check_sequence,
    is_seconds,
    wrong,
)
from asyncrpc.errors import UsageError

Handle: TypeAlias = Any  # Ray's handle of an actor: it has no public class

# Shown for every node, whether or not a bundle needs it.
BUNDLES_MAX: Final = 4096  # each has a task in the driver
_ALWAYS_SHOWN: Final = frozenset({"CPU", "GPU"})
_parents: Final[list[object]] = []  # in a forked child: the parent's driver of Ray


def library() -> Any:
    """Return the module `ray`, connected to a cluster."""
    try:
        import ray  # noqa: PLC0415  (an extra, and a second to import)
    except ImportError as error:
        raise UsageError(
            "asyncrpc.ray needs Ray: pip install 'asyncrpc-torch[ray]'"
        ) from error
    if not ray.is_initialized():
        raise UsageError(
            "Ray is not initialized in this process: call ray.init() first, with"
            ' address="auto" for the cluster that this host belongs to'
        )
    if ray.util.client.ray.is_connected():
        raise UsageError(
            "this program is connected by Ray Client (ray://), from outside of the"
            " cluster; run it in the cluster, for example by `ray job submit`"
        )
    if any(_driver(ray) is parent for parent in _parents):
        raise UsageError(
            "this process was forked from one that uses Ray, whose connection to the"
            " cluster it cannot share: start it by spawn or forkserver, and call"
            " ray.init() in it"
        )
    return ray


def _driver(ray: Any) -> object:
    worker = ray._private.worker.global_worker  # noqa: SLF001
    return getattr(worker, "core_worker", None)  # Ray Client has none


def _note_fork() -> None:
    """Note in a forked child that Ray's threads are the parent's."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        _parents.append(_driver(ray))


os.register_at_fork(after_in_child=_note_fork)


def is_pickling_for_ray() -> bool:
    """Return whether Ray is pickling in this thread, so that it counts references."""
    worker = library()._private.worker.global_worker  # noqa: SLF001
    inside: bool = worker.get_serialization_context().is_in_band_serialization()
    return inside


def check_bundles(bundles: Sequence[Resources]) -> None:
    """Raise UsageError unless these are resources that Ray can reserve."""
    check_sequence("bundles", bundles, "a sequence of resources")
    check_count("the number of bundles", len(bundles), at_least=1)
    check_count("the number of bundles", len(bundles), at_most=BUNDLES_MAX)
    for index, bundle in enumerate(bundles):
        _check_bundle(f"bundle {index}", bundle)


def _check_bundle(its_name: str, bundle: Any) -> None:
    wanted = 'resources, such as {"CPU": 1, "GPU": 1}'
    check_kind(its_name, bundle, Mapping, wanted)
    for name, amount in bundle.items():
        if not isinstance(name, str) or not is_seconds(amount) or not amount >= 0:
            raise wrong(its_name, wanted, bundle)
    if not any(bundle.values()):
        raise wrong(its_name, f"{wanted}, not all of them 0", bundle)


class Bundles:
    """A placement group: reserved resources, one bundle for each host server."""

    def __init__(self, resources: Sequence[Resources], strategy: str) -> None:
        self.resources = [dict(bundle) for bundle in resources]
        self.strategy = strategy
        self._ray = library()
        self._group: Any = None

    async def reserve(self, name: str) -> None:
        """Ask for the bundles; `placed` waits for them."""
        try:
            await in_thread(self._reserve, name)
        except ValueError as error:
            raise UsageError(f"Ray refuses the bundles: {error}") from error
        except self._ray.exceptions.RaySystemError as error:
            if "already exists" not in str(error):
                raise
            raise UsageError(
                f"a placement group {name!r} is in this namespace of Ray already"
            ) from error

    def _reserve(self, name: str) -> None:
        make = self._ray.util.placement_group
        self._group = make(self.resources, self.strategy, name)

    async def placed(self) -> None:
        """Wait until every bundle is placed, also again after the loss of a node."""
        await self._group.ready()

    @property
    def address(self) -> str:
        """Where the cluster of Ray is, for its other drivers."""
        address: str = self._ray.get_runtime_context().gcs_address
        return address

    @property
    def actor_errors(self) -> type[Exception]:
        """The class of Ray's errors about an actor that is gone."""
        error_class: type[Exception] = self._ray.exceptions.RayActorError
        return error_class

    async def remove(self) -> None:
        """Give the resources back; this ends actors that still run in them."""
        if self._group is not None:
            group, self._group = self._group, None
            await in_thread(self._ray.util.remove_placement_group, group)

    async def start_actor(
        self, index: int, cls: type, *, runtime_env: Mapping[str, Any] | None
    ) -> Handle:
        """Make the actor of one bundle, with all its resources."""
        return await in_thread(self._start_actor, index, cls, runtime_env)

    def _start_actor(
        self, index: int, cls: type, runtime_env: Mapping[str, Any] | None
    ) -> Handle:
        strategies = self._ray.util.scheduling_strategies
        resources = dict(self.resources[index])
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group,
                placement_group_bundle_index=index,
                placement_group_capture_child_tasks=False,
            ),
            "max_restarts": 0,  # the cluster decides
            "max_task_retries": 0,
        }
        if "memory" in resources:
            options["memory"] = resources.pop("memory")
        if resources:
            options["resources"] = resources
        if runtime_env is not None:
            options["runtime_env"] = dict(runtime_env)
        return self._ray.remote(cls).options(**options).remote()

    async def nodes(self) -> list[NodeResources]:
        """Return the relevant resources of the live nodes."""
        return await in_thread(self._nodes)

    def _nodes(self) -> list[NodeResources]:
        free = self._ray._private.state.available_resources_per_node()  # noqa: SLF001
        return [
            NodeResources(
                name=f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})",
                total=self._relevant(node["Resources"]),
                free=self._relevant(free.get(node["NodeID"], {})),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _relevant(self, resources: Resources) -> Resources:
        asked = {name for bundle in self.resources for name in bundle}
        return {
            name: amount
            for name, amount in resources.items()
            if name in asked | _ALWAYS_SHOWN
        }
