"""The program for Ray: an actor is a process, and a worker of this comparison."""

from __future__ import annotations

import sys
import time
from typing import Any

import ray

from tests.bench.clusters.rounds import (
    OUTSTANDING,
    Counter,
    computed,
    per_second,
    tell,
)


class Worker(Counter):
    def compute(self) -> float:
        return computed()

    def call(self, function: Any, value: int) -> Any:
        return function(value)


def started_s(count: int) -> float:
    begun_s = time.perf_counter()
    ray.init(num_cpus=count, logging_level="error", log_to_driver=False)
    workers = [ray.remote(Worker).remote() for _ in range(count)]
    ray.get([worker.compute.remote() for worker in workers])
    taken_s = time.perf_counter() - begun_s
    ray.shutdown()
    return taken_s


def main(seconds: float) -> None:
    figures = {f"start_{count}": started_s(count) for count in (1, 8, 32)}
    ray.init(num_cpus=64, logging_level="error", log_to_driver=False)
    actors = [ray.remote(Worker).remote() for _ in range(8)]
    counter, step = actors[0], 3
    figures["one"] = per_second(lambda: ray.get(counter.add.remote(1)), seconds)
    figures["many"] = per_second(
        lambda: ray.get([counter.add.remote(1) for _ in range(OUTSTANDING)]),
        seconds,
        OUTSTANDING,
    )
    figures["fan_8"] = per_second(
        lambda: ray.get([actor.add.remote(1) for actor in actors]), seconds
    )
    # 64 actors would be 64 processes: 8 calls to each of 8 take their place.
    figures["fan_64"] = per_second(
        lambda: ray.get([actor.add.remote(1) for actor in actors * 8]), seconds
    )

    def local(value: int) -> int:
        return value + step

    task = ray.remote(local)
    figures["closure"] = per_second(lambda: ray.get(task.remote(1)), seconds)
    ray.shutdown()
    tell(figures)


if __name__ == "__main__":
    main(float(sys.argv[1]))
