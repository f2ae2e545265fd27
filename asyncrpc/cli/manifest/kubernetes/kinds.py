"""The kinds of workload, each with the function that makes its objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from asyncrpc.cli.manifest.kubernetes.job import indexed_job
from asyncrpc.cli.manifest.kubernetes.pod import Object
from asyncrpc.cli.manifest.kubernetes.workload import Workload

KINDS: Final[Mapping[str, Callable[[Workload], list[Object]]]] = {
    "job": indexed_job,
}
