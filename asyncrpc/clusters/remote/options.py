"""What a program says of other hosts: how they are reached, and what runs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from asyncrpc.core.arguments import (
    check_choice,
    check_count,
    check_duration,
    check_kind,
    check_text,
    check_texts,
    wrong,
)

STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")  # of Ray
_PORT_MAX: Final = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """How `Cluster.ssh` reaches its hosts, and what runs there.

    What is None is as `~/.ssh/config` says, or as `ssh` would have it.

    Attributes:
        username: on the hosts, unless a host is given as `user@host`.
        port: of the servers, unless a host is given as `host:port`.
        client_keys: paths of private keys.
        known_hosts: path of a file with the keys of the hosts.
        jump: a host to connect through, as `user@host:port`; it is reached with the
            same keys.
        python: the interpreter there; None: at the path of the program's own.
        directory: where the program's working directory is found there; its main module
            and its modules are below it.  None: at the same path.
        environment: variables of the workers, beside those of the host.
        connect_timeout_s: seconds that a connection may take.
    """

    username: str | None = None
    port: int | None = None
    client_keys: Sequence[str] | None = None
    known_hosts: str | None = None
    jump: str | None = None
    python: str | None = None
    directory: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    connect_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: a field is out of range or has the wrong type.
        """
        for name in ("username", "known_hosts", "jump", "python", "directory"):
            if getattr(self, name) is not None:
                check_text(f"SshOptions.{name}", getattr(self, name))
        if self.port is not None:
            check_count("SshOptions.port", self.port, at_least=1, at_most=_PORT_MAX)
        if self.client_keys is not None:
            check_texts("SshOptions.client_keys", self.client_keys)
        if self.jump is not None:
            SshTarget.parse(self.jump)
        check_environment("SshOptions.environment", self.environment)
        check_duration("SshOptions.connect_timeout_s", self.connect_timeout_s)


def check_environment(name: str, value: object) -> None:
    """Raise UsageError unless an argument maps texts to texts."""
    check_kind(name, value, Mapping, "a mapping from strings to strings")
    assert isinstance(value, Mapping)
    for item in (*value.keys(), *value.values()):
        check_kind(f"each of {name}", item, str, "a string")


@dataclass(frozen=True, slots=True)
class SshTarget:
    """A host as it was given: `host`, `user@host`, `host:port`, or all of it."""

    text: str
    host: str
    username: str | None
    port: int | None

    @classmethod
    def parse(cls, text: str) -> SshTarget:
        """Read a text; UsageError: it is not of this form."""
        check_text("each of hosts", text)
        try:
            url = urlsplit(f"//{text}")
            if url.hostname and url.netloc == text and url.password is None:
                return cls(text, url.hostname, url.username, url.port)
        except ValueError:
            pass
        raise wrong("each of hosts", "host, user@host, host:port or [address]", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What `Cluster.slurm` asks Slurm for, and what runs there.

    Attributes:
        arguments: of `salloc`, such as `["--partition=gpu", "--gres=gpu:2"]`; not used
            inside a job, whose nodes are there.
        queue_timeout_s: seconds that the job may wait in Slurm's queue.
        python: the interpreter on the nodes; None: at the path of the program's own.
        directory: where the program's working directory is found there; None: at the
            same path.
        environment: variables of the workers, beside those of the program.
    """

    arguments: Sequence[str] = ()
    queue_timeout_s: float = 300.0
    python: str | None = None
    directory: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: a field is out of range or has the wrong type.
        """
        check_texts("SlurmOptions.arguments", self.arguments)
        check_duration("SlurmOptions.queue_timeout_s", self.queue_timeout_s)
        _check_place(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """How Ray places the bundles of `Cluster.ray`, and what runs there.

    Attributes:
        strategy: `PACK`, `SPREAD`, `STRICT_PACK` or `STRICT_SPREAD`, as Ray has them.
        placement_timeout_s: seconds that Ray may take to place them.
        runtime_env: of the actors, as Ray takes it; None: that of the program's job.
        python: the interpreter on the nodes; None: that of Ray there.
        directory: where the program's working directory is found there; None: at the
            same path.
        environment: variables of the workers, beside those of Ray's actors.
    """

    strategy: str = "PACK"
    placement_timeout_s: float = 120.0
    runtime_env: Mapping[str, Any] | None = None
    python: str | None = None
    directory: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: a field is out of range or has the wrong type.
        """
        check_choice("RayOptions.strategy", self.strategy, STRATEGIES)
        check_duration("RayOptions.placement_timeout_s", self.placement_timeout_s)
        kinds = (Mapping, type(None))
        check_kind("RayOptions.runtime_env", self.runtime_env, kinds, "a mapping")
        _check_place(self)


def _check_place(options: SlurmOptions | RayOptions) -> None:
    """Check what runs on the nodes, and where."""
    kind = type(options).__name__
    for name in ("python", "directory"):
        if getattr(options, name) is not None:
            check_text(f"{kind}.{name}", getattr(options, name))
    check_environment(f"{kind}.environment", options.environment)
