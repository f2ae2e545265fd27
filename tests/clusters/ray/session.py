"""A Ray cluster of several nodes on this host, and a driver that plays scenarios.

    $ python -m tests.clusters.ray.session

It prints the address of the cluster, then reads names of scenarios, a line each, and
answers each with a line of JSON: null, or the traceback.  Ray leaves threads and
descriptors in a driver, so this is a process of its own; and as a cluster takes seconds
to start, all tests share one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import ray
from ray.cluster_utils import Cluster

import asyncrpc

STORE_BYTES = 100_000_000
CPUS_EACH = 2


class Nodes:
    """The cluster: a head, one more node, and others that scenarios add."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": CPUS_EACH,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
            },
        )
        self.add()
        self.address: str = self.cluster.address

    def add(self, **resources: float) -> Any:
        """Add a node and return it; it can be used at once."""
        return self.cluster.add_node(
            num_cpus=CPUS_EACH, object_store_memory=STORE_BYTES, resources=resources
        )

    def connect(self) -> None:
        ray.init(address=self.address, logging_level="warning", log_to_driver=False)

    @contextlib.contextmanager
    def one_more(self, **resources: float) -> Iterator[Any]:
        """Have another node meanwhile."""
        node = self.add(**resources)
        try:
            yield node
        finally:
            self.remove(node)

    def remove(self, node: Any) -> None:
        """Take a node away, with all that runs on it, if it is still there."""
        if node in self.cluster.worker_nodes:
            self.cluster.remove_node(node, allow_graceful=False)


def main() -> None:
    # Ray prints; the answers have the pipe for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tests.clusters.ray.played import PLAYED  # noqa: PLC0415  (it needs Ray)

    nodes = Nodes()
    nodes.connect()
    print(json.dumps(nodes.address), file=answers, flush=True)
    try:
        for line in sys.stdin:
            failure = None
            try:
                asyncrpc.run(PLAYED[line.strip()](nodes))
            except BaseException:  # noqa: BLE001  (the test shows it)
                failure = traceback.format_exc()
            print(json.dumps(failure), file=answers, flush=True)
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
