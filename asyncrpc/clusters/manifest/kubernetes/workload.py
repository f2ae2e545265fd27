"""The input of a manifest: a program, and the resources of each of its workers.

Quantities and names, as Kubernetes writes them.

Source: kubernetes/apimachinery, pkg/api/resource/quantity.go; RFC 1035, section 2.3.1.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from types import MappingProxyType
from typing import Final

from asyncrpc.errors import UsageError

LABEL_CHARACTERS_MAX: Final = 63  # RFC 1035: of one label of a name in the DNS
_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", re.ASCII)
_SUBDOMAIN_CHARACTERS_MAX: Final = 253
_QUANTITY: Final = re.compile(
    r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?",
    re.ASCII,
)
_POWERS: Final = {
    unit: 3 * index for index, unit in enumerate(["n", "u", "m", "", *"kMGTPE"], -3)
}
_BINARY: Final = {f"{letter}i": index for index, letter in enumerate("KMGTPE", 1)}


def check_label(subject: str, name: str, suffix: str = "") -> None:
    """Raise UsageError unless a name with its appended suffix is a DNS label.

    Args:
        name: begins with a letter; services must.
    """
    if _LABEL.fullmatch(name) is None:
        raise UsageError(
            f"{subject} must be a name of lower-case letters, digits and '-' that "
            f"begins with a letter and does not end with '-', not {name!r}"
        )
    characters_max = LABEL_CHARACTERS_MAX - len(suffix)
    if len(name) > characters_max:
        why = f", since pods are named {name[:8]}...{suffix}" if suffix else ""
        raise UsageError(
            f"{subject} must have at most {characters_max} characters{why}; "
            f"it has {len(name)}"
        )


def check_subdomain(subject: str, name: str) -> None:
    """Raise UsageError unless a name is valid for an object that is not in the DNS."""
    is_short = len(name) <= _SUBDOMAIN_CHARACTERS_MAX
    if not is_short or _SUBDOMAIN.fullmatch(name) is None:
        raise UsageError(
            f"{subject} must be a name of at most {_SUBDOMAIN_CHARACTERS_MAX} "
            f"lower-case letters, digits, '-' and '.', not {name!r}"
        )


def quantity(subject: str, text: str) -> Decimal:
    """Return the number that a quantity such as `500m` or `4Gi` stands for."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{subject} must be a quantity of Kubernetes, such as 500m, 2 or 4Gi, not "
            f"{text!r}"
        )
    number, unit = Decimal(match[1]), match[2] or ""
    if unit in _BINARY:
        number *= 1024 ** _BINARY[unit]
    elif unit in _POWERS:
        number = number.scaleb(_POWERS[unit])
    else:
        number = number.scaleb(int(unit[1:]))
    if number <= 0:
        raise UsageError(f"{subject} must be more than 0, not {text!r}")
    return number


def byte_quantity(subject: str, text: str) -> int:
    """Return the number of bytes that a quantity stands for."""
    number = quantity(subject, text)
    if number != number.to_integral_value():
        raise UsageError(
            f"{subject} must be a whole number of bytes, such as 512Mi or 4Gi, not "
            f"{text!r}" + ("; 'm' means thousandths" if text.endswith("m") else "")
        )
    return int(number)


WORKERS_MAX: Final = 100_000  # of an indexed Job: its controller's limit
PORT_MAX: Final = 65_535
RENDEZVOUS_PORT: Final = 29_500  # torchrun's, and Kubeflow's
SECRET_KEY: Final = "secret"  # noqa: S105  (the name of the file, not the secret)
SECRET_FOLDER: Final = "/var/run/secrets/asyncrpc"  # noqa: S105  (likewise)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_RESOURCE: Final = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", re.ASCII)
_OURS: Final = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX"),
        *("JOBSET_RESTART_ATTEMPT", "ASYNCRPC_RUN_ID", "ASYNCRPC_SECRET_FILE"),
    }
)


class ProbeKind(enum.Enum):
    """How the kubelet finds out whether a worker lives and is ready."""

    HTTP = "http"  # /healthz and /readyz of asyncrpc.serving
    TCP = "tcp"  # whether the worker listens
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PodProbe:
    """A kind of probe, and the port that it asks; 0 for none."""

    kind: ProbeKind = ProbeKind.NONE
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> PodProbe:
        """Read `http:8080`, `tcp:29600` or `none`."""
        word, colon, port = text.partition(":")
        kinds = {kind.value: kind for kind in ProbeKind}
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) <= PORT_MAX
        is_whole = text == "none" or (word != "none" and bool(colon) and is_port)
        if word not in kinds or not is_whole:
            raise UsageError(
                "--probe must be http:PORT (the program serves /healthz and /readyz), "
                f"tcp:PORT (the worker listens there) or none, not {text!r}"
            )
        return cls(kinds[word], int(port or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources that the container of a worker requests.

    Attributes:
        cpu: a quantity of cores; None: no request.
        memory: a quantity of bytes, which is also the limit; None: no request or limit.
        shared_memory: a quantity of bytes for /dev/shm, which count as the memory of
            the container.
        gpu_resource: name of the GPUs in the device plugin.
    """

    cpu: str | None = None
    memory: str | None = None
    shared_memory: str = "1Gi"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"

    def __post_init__(self) -> None:
        """Validate the fields."""
        if self.cpu is not None:
            quantity("--cpu", self.cpu)
        shared = byte_quantity("--shm", self.shared_memory)
        if self.memory is not None and shared >= byte_quantity("--memory", self.memory):
            raise UsageError(
                f"--shm {self.shared_memory} must be less than --memory {self.memory}: "
                "the content of /dev/shm counts as memory of the container"
            )
        if self.gpus < 0:
            raise UsageError(f"--gpus must be at least 0, not {self.gpus}")
        if _RESOURCE.fullmatch(self.gpu_resource) is None:
            raise UsageError(
                "--gpu-resource must be a name such as nvidia.com/gpu, not "
                f"{self.gpu_resource!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A program that is started once in each of several pods.

    Attributes:
        name: of all objects; a label of the DNS.
        command: the program with its arguments; process 1 of the container.
        workers: number of pods; each has one worker, ranks from 0.
        namespace: of all objects; None: that of `kubectl`.
        secret: name of the Secret, whose key `secret` is mounted as a file.
        grace_s: whole seconds from SIGTERM to SIGKILL.
        pre_stop_s: whole seconds before SIGTERM in which requests may still come.
        restarts: how often the whole, or one pod, is started again after a failure.
        user: id of the user; None: that of the image.
    """

    name: str
    image: str
    command: tuple[str, ...]
    workers: int
    namespace: str | None = None
    secret: str = ""
    port: int = RENDEZVOUS_PORT
    resources: Resources = Resources()
    probe: PodProbe = PodProbe()
    grace_s: int = 30
    pre_stop_s: int = 0
    restarts: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)
    user: int | None = None

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_label("NAME", self.name)
        if self.namespace is not None:
            check_label("--namespace", self.namespace)
        if not self.secret:
            object.__setattr__(self, "secret", f"{self.name}-secret")
        check_subdomain("--secret", self.secret)
        if not self.image or any(map(str.isspace, self.image)):
            raise UsageError(f"--image must be an image's name, not {self.image!r}")
        if not self.command or not all(self.command[:1]):
            raise UsageError("the program is missing; give it after --")
        _check_number("--workers", self.workers, 1, WORKERS_MAX)
        _check_number("--port", self.port, 1, PORT_MAX)
        _check_number("--grace", self.grace_s, 1)
        _check_number("--pre-stop", self.pre_stop_s, 0)
        _check_number("--restarts", self.restarts, 0)
        if self.user is not None:
            _check_number("--user", self.user, 0)
        for variable in self.environment:
            _check_variable(variable)
        frozen = MappingProxyType(dict(self.environment))
        object.__setattr__(self, "environment", frozen)

    def check_pod_names(self, middle: str = "", end: str = "") -> None:
        """Raise unless the names of all pods are labels of the DNS."""
        check_label("NAME", self.name, f"{middle}-{self.workers - 1}{end}")


def _check_number(
    subject: str, number: int, least: int, most: int | None = None
) -> None:
    if number < least or (most is not None and number > most):
        limit = "" if most is None else f" and at most {most}"
        raise UsageError(f"{subject} must be at least {least}{limit}, not {number}")


def _check_variable(name: str) -> None:
    if _VARIABLE.fullmatch(name) is None:
        raise UsageError(
            f"--env must be NAME=VALUE with a variable's name, not {name!r}"
        )
    if name == "ASYNCRPC_SECRET":
        raise UsageError(
            "--env must not hold the secret, because every reader of the manifest "
            "would know it: create a Secret, and name it by --secret"
        )
    if name in _OURS:
        raise UsageError(f"--env must not set {name}, which the manifest sets")
