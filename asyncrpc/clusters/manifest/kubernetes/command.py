"""`asyncrpc manifest k8s`: reads the arguments, and writes the objects.

Objects as text: YAML where PyYAML is installed, else JSON, which YAML includes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from typing import Any, Final

from asyncrpc.clusters.manifest.kubernetes.kinds import KINDS
from asyncrpc.clusters.manifest.kubernetes.workload import (
    RENDEZVOUS_PORT,
    PodProbe,
    Resources,
    Workload,
)
from asyncrpc.errors import UsageError

FORMATS: Final = ("yaml", "json")


def default_format() -> str:
    """Return the format that is used if none is given."""
    return "json" if importlib.util.find_spec("yaml") is None else "yaml"


def as_text(objects: Sequence[dict[str, Any]], form: str) -> str:
    """Return objects as `kubectl apply -f -` reads them."""
    if form == "json":
        everything = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return json.dumps(everything, indent=2) + "\n"
    try:
        import yaml  # noqa: PLC0415  (an extra)
    except ImportError:
        raise UsageError(
            "YAML needs PyYAML: `pip install 'asyncrpc-torch[manifest]'`, or use "
            "--format json"
        ) from None

    class Dumper(yaml.SafeDumper):
        """Writes repeated objects in full: a reader need not know anchors."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    text: str = yaml.dump_all(
        objects, Dumper=Dumper, sort_keys=False, explicit_start=True
    )
    return text


HELP = "objects of Kubernetes for kubectl"
_DESCRIPTION: Final = (
    "Write the objects that start a program once in each of several pods.  The secret "
    "is not among them: `kubectl create secret generic NAME-secret "
    '--from-literal=secret="$(openssl rand -hex 32)"`.'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this target."""
    parser.description = _DESCRIPTION
    add = parser.add_argument
    add("--kind", choices=[*KINDS], default="job", help="what starts the pods")
    add("--image", required=True, help="the container's image")
    add("--workers", type=int, required=True, metavar="N", help="number of pods")
    add("--namespace", help="of all objects (default: that of kubectl)")
    add("--secret", default="", help="name of the Secret (default: NAME-secret)")
    add("--port", type=int, default=RENDEZVOUS_PORT, help="of the meeting point")
    add("--probe", default="none", help="http:PORT, tcp:PORT or none")
    add("--user", type=int, help="id of the user in the container")
    _add_resources(parser)
    _add_lifetime(parser)
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the container; may be repeated",
    )
    add("--format", choices=FORMATS, help="yaml, or json where PyYAML is missing")
    add("name", metavar="NAME", help="of all objects")
    add("program", nargs="+", metavar="PROGRAM", help="after --, with its arguments")


def _add_resources(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("resources of each container").add_argument
    usual = Resources()
    add("--cpu", help="cores, such as 4 or 500m")
    add("--memory", help="bytes, such as 16Gi")
    add("--shm", default=usual.shared_memory, help="size of /dev/shm; part of --memory")
    add("--gpus", type=int, default=0, metavar="N", help="number of GPUs")
    add("--gpu-resource", default=usual.gpu_resource, help="what the plugin calls them")


def _add_lifetime(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("end and restart").add_argument
    add("--grace", type=int, default=30, metavar="S", help="from SIGTERM to SIGKILL")
    add("--pre-stop", type=int, default=0, metavar="S", help="before SIGTERM")
    add("--restarts", type=int, default=3, metavar="N", help="after failures")


def manifest(arguments: argparse.Namespace) -> str:
    """Return the objects as text."""
    objects = KINDS[arguments.kind](_workload(arguments))
    return as_text(objects, arguments.format or default_format())


def _workload(arguments: argparse.Namespace) -> Workload:
    return Workload(
        name=arguments.name,
        image=arguments.image,
        command=tuple(arguments.program),
        workers=arguments.workers,
        namespace=arguments.namespace,
        secret=arguments.secret,
        port=arguments.port,
        resources=Resources(
            cpu=arguments.cpu,
            memory=arguments.memory,
            shared_memory=arguments.shm,
            gpus=arguments.gpus,
            gpu_resource=arguments.gpu_resource,
        ),
        probe=PodProbe.parse(arguments.probe),
        grace_s=arguments.grace,
        pre_stop_s=arguments.pre_stop,
        restarts=arguments.restarts,
        environment=dict(map(_variable, arguments.env)),
        user=arguments.user,
    )


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--env must be NAME=VALUE, not {text!r}")
    return name, value
