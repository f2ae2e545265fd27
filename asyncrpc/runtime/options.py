"""Options of a worker: every limit and time in one place, with its unit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from asyncrpc.errors import UsageError
from asyncrpc.serde import Policy
from asyncrpc.wire.reader import ReaderLimits

SECRET_VARIABLE = "ASYNCRPC_SECRET"  # noqa: S105  (a variable's name, no secret)


UNSET: Final = object()  # "the worker's own default", where None means "no limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How one call is made; see `Peer.using`.

    Attributes:
        timeout_s: seconds; None is no limit; left out: `Options.rpc_timeout_s`.
        out: a tensor that the result is received into.
        codec: how payloads are compressed, in both directions; empty: not at all.
    """

    timeout_s: Any = UNSET
    out: torch.Tensor | None = None
    codec: str = ""


PLAIN: Final = CallOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a worker behaves.  All times are seconds; None is no limit.

    Attributes:
        secret: the cluster's secret, text or bytes.  None: `ASYNCRPC_SECRET` of the
            environment, and if that is unset the worker serves only its own user on
            its own host.
        policy: `Policy.TRUSTED` (pickle allowed between authenticated workers) or
            `Policy.STRICT` (no pickle; only exposed or allowed functions).
        allow: under `STRICT`, patterns like `"shop.models:*"` of callable functions.
        listen: addresses to listen at.  None: a private Unix socket, and with a secret
            also TCP on every interface.
        interface: the network interface whose addresses are published; None: all.
        rpc_timeout_s: limit of every call that is given none.
        rendezvous_timeout_s: how long to wait for the other workers at start.
        connect_timeout_s: how long a connection may take, authentication included.
        drain_timeout_s: how long shutdown waits for calls in flight.
        threads: how many plain functions may run at once; threads that wait in a
            nested call do not count.
        inbound_calls_max: calls accepted and unfinished, over all peers; more are
            rejected.
        handshakes_max: connections that have not authenticated yet; more are closed.
        stream_items_max: items of a stream that its consumer has not taken yet.
        stream_bytes_max: bytes of the same; one item may exceed it.
        limits: what a peer may make this worker allocate for one message.
    """

    secret: str | bytes | None = field(default=None, repr=False)
    policy: Policy = Policy.TRUSTED
    allow: tuple[str, ...] = ()
    listen: tuple[str, ...] | None = None
    interface: str | None = None
    rpc_timeout_s: float | None = None
    rendezvous_timeout_s: float = 60.0
    connect_timeout_s: float = 10.0
    drain_timeout_s: float = 10.0
    threads: int = 16
    inbound_calls_max: int = 100_000
    handshakes_max: int = 256
    stream_items_max: int = 16
    stream_bytes_max: int = 32 << 20
    limits: ReaderLimits = field(default_factory=ReaderLimits)

    def __post_init__(self) -> None:
        """Refuse what could never work.

        Raises:
            UsageError: a number is out of its range; the message names it.
        """
        for name in ("threads", "inbound_calls_max", "handshakes_max"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"Options.{name} is at least 1, not {getattr(self, name)}"
                )
        if self.rpc_timeout_s is not None and not self.rpc_timeout_s > 0:
            raise UsageError("Options.rpc_timeout_s is positive, or None for no limit")

    @property
    def secret_bytes(self) -> bytes | None:
        """The secret as the handshake takes it."""
        if isinstance(self.secret, str):
            return self.secret.encode() or None
        return self.secret or None

    def with_environment(self, environ: Mapping[str, str] = os.environ) -> Options:
        """Fill in what the environment gives and the program did not."""
        if self.secret is None and environ.get(SECRET_VARIABLE):
            return replace(self, secret=environ[SECRET_VARIABLE])
        return self
