"""Ray: an actor in a process that Ray starts; tensors through its object store.

Rank 0 is the driver; rank 1 has nothing to do.  The driver blocks in `ray.get`, which
takes less time than awaiting.  `TCP only` has two nodes of a cluster on this host, each
with an object store of its own: a tensor goes from one to the other as between hosts.

Source: https://docs.ray.io/en/latest/ray-core/actors/async_api.html.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

import torch
import uvloop

from tests.bench import workloads as w
from tests.bench.harness import Budget, measure, per_second
from tests.bench.sides import awaiting
from tests.bench.sides.side import Arguments, start

STORE_BYTES: Final = 4 << 30
CALLS_MAX: Final = 1000  # that the actor runs at the same time: Ray's default
PLACE: Final = "callee"  # a resource that only the second node has
OPTIONS: Final = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
QUIET: Final = {"logging_level": "warning", "log_to_driver": False}


class Callee:
    """The functions of the workloads, as methods that are awaited."""

    async def nothing_async(self) -> None:
        await w.nothing_async()

    async def shape_of(self, tensor: torch.Tensor) -> list[int]:
        return w.shape_of(tensor)

    async def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        return w.echo(tensor)


class Answer:
    """What is awaited for a result: it blocks, for nothing else is on this loop."""

    def __init__(self, get: Callable[[Any], Any], reference: Any) -> None:
        self._get = get
        self._reference = reference

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self._get(self._reference)


@contextlib.contextmanager
def one_node(ray: Any) -> Iterator[None]:
    ray.init(address="local", **OPTIONS, **QUIET)  # not one that is here already
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def two_nodes(ray: Any) -> Iterator[None]:
    from ray.cluster_utils import Cluster  # noqa: PLC0415  (see `main`)

    cluster = Cluster(initialize_head=True, head_node_args=OPTIONS)
    try:
        cluster.add_node(object_store_memory=STORE_BYTES, resources={PLACE: 1})
        ray.init(address=cluster.address, **QUIET)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


async def main(arguments: Arguments) -> None:
    if arguments.rank:
        return
    torch.set_num_threads(1)
    # Tensors are read where they lie in the object store, as arrays are; it warns that
    # they must not be written.  Ray looks for this when it is imported.
    warnings.filterwarnings("ignore", "Zero-copy tensor")
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
    import ray  # noqa: PLC0415

    is_tcp = arguments.kind == "tcp"
    with (two_nodes if is_tcp else one_node)(ray):
        callee = (
            ray.remote(Callee)
            .options(
                max_concurrency=CALLS_MAX, resources={PLACE: 1} if is_tcp else None
            )
            .remote()
        )

        def call(function: str, *args: Any) -> Answer:
            return Answer(ray.get, getattr(callee, function).remote(*args))

        async def kept_actor(budget: Budget) -> list[float]:
            counter = ray.remote(w.Counter).remote()
            times_s = measure(lambda: ray.get(counter.add.remote(1)), budget)
            return [per_second(times_s)]

        workloads = awaiting.measured(call) | {"rref_method": kept_actor}
        await awaiting.lead(workloads, arguments)


if __name__ == "__main__":
    sys.exit(start(lambda arguments: uvloop.run(main(arguments))))
