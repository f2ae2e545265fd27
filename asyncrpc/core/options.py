"""Options of a worker: every limit and time in one place, with its unit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Final

import torch

from asyncrpc.core.arguments import (
    UNSET,
    check_call_timeout,
    check_count,
    check_flag,
    check_kind,
    check_seconds,
    check_text,
    check_texts,
    is_seconds,
    wrong,
)
from asyncrpc.core.devices.maps import DeviceMap
from asyncrpc.core.devices.names import DeviceName
from asyncrpc.core.host.secret_file import read_secret
from asyncrpc.core.html import panel
from asyncrpc.core.serde import Compression, Policy, compression_named
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.tls import Tls
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.errors import UsageError

LANES_MAX: Final = 16  # of one link, whatever a peer asks for

SECRET_VARIABLE = "ASYNCRPC_SECRET"  # noqa: S105  (a variable's name, not a secret)
SECRET_FILE_VARIABLE = "ASYNCRPC_SECRET_FILE"  # noqa: S105  (likewise)
INTERFACE_VARIABLE = "ASYNCRPC_INTERFACE"
# `launch` sets it where it has made the secret: no other host can have that.
ONE_HOST_VARIABLE = "ASYNCRPC_ONE_HOST"
_LOOPBACK: Final = "127.0.0.0/8"
TOKEN_VARIABLE = "ASYNCRPC_TOKEN"  # noqa: S105  (likewise)

SPIN_MAX_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How one call is made; see `Peer.using`.

    Attributes:
        timeout_s: seconds; None is no limit; left out: `Options.rpc_timeout_s`.
        out: a tensor that the result is received into.
        idempotent: make the call again if its worker is lost; see
            `asyncrpc.idempotent`.
        codec: compresses the payloads of arguments and result, such as `"zstd"` or
            `"bf16"`; empty: no codec; None: the codec in `NetworkOptions.codecs`.
        device_map: from devices of this worker to devices of the callee, where the
            arguments' tensors go; results come back by the inverse map.  None: the map
            in `DeviceOptions.maps`.
    """

    timeout_s: Any = UNSET
    out: torch.Tensor | None = None
    codec: str | None = None
    idempotent: bool = False
    device_map: Mapping[Any, Any] | None = None

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_call_timeout("timeout_s", self.timeout_s)
        check_flag("idempotent", self.idempotent)
        if self.out is not None:
            check_kind("out", self.out, torch.Tensor, "a tensor or None")
        if self.codec is not None:
            check_kind("codec", self.codec, str, "the name of a codec or None")
            compression_named(self.codec)
        if self.device_map is not None:
            wanted = "a mapping from devices to devices, or None"
            check_kind("device_map", self.device_map, Mapping, wanted)
            DeviceMap.parse(self.device_map)


PLAIN: Final = CallOptions()


def with_options(options: CallOptions, changes: Mapping[str, Any]) -> CallOptions:
    """Return call options with some of their fields replaced."""
    names = [field.name for field in fields(CallOptions)]
    for name in changes:
        if name not in names:
            raise UsageError(
                f"there is no call option {name!r}; the options are {', '.join(names)}"
            )
    return replace(options, **changes)


def options_within(timeout_s: Any) -> CallOptions:
    """Return options that set only a timeout, in seconds; `UNSET` sets nothing."""
    if timeout_s is UNSET:
        return PLAIN
    check_call_timeout("timeout_s", timeout_s)
    return CallOptions(timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """How a worker is reached, and reaches others.

    Attributes:
        listen: addresses to listen at.  None: a private Unix socket, and with a secret
            also TCP on every interface.
        interface: the addresses to listen at and to publish, if the worker listens at
            every interface: names of interfaces, which may hold `*` and `?`, and
            networks such as `"10.0.0.0/8"`, separated by commas, best first.  None: the
            environment variable `ASYNCRPC_INTERFACE`; if that is unset, all, and in a
            process of `launch` that has a secret by `launch` alone, loopback.
        advertise: addresses that are published instead of the listening addresses, for
            a worker behind a NAT, a container's port mapping or a proxy.  None: the
            listening addresses.
        connect_timeout_s: how long a connection may take, authentication included; and
            how long a worker of a mapping, which nobody has met yet, is waited for.
        handshake_timeout_s: how long a connecting peer may take to authenticate and to
            send its HELLO.
        bulk_lanes: connections to a peer for payloads over 64 KiB, opened by the first
            such payload; 0: these payloads share the connection of small messages.
            None: 2 on TCP to another host, else 1.
        codecs: names of peers, or `"*"` for all others, mapped to the codec of calls
            that name no codec; see `Peer.using`.
        spin: whether the loop polls for an answer instead of sleeping, which saves 20
            to 50 us a call and takes a core meanwhile: `"off"`; `"adaptive"`, only
            while it pays; or the seconds to poll for after each write.
    """

    listen: tuple[str, ...] | None = None
    interface: str | None = None
    advertise: tuple[str, ...] | None = None
    connect_timeout_s: float = 10.0
    handshake_timeout_s: float = 5.0
    bulk_lanes: int | None = None
    codecs: Mapping[str, str] = field(default_factory=dict)
    spin: str | float = "adaptive"

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: a field is of another kind, or is not an address; the message
                names the field.
        """
        _check_texts(self, "listen", "advertise")
        for name in ("listen", "advertise"):
            for address in getattr(self, name) or ():
                Address.parse(address, f"each of NetworkOptions.{name}")
        wanted = "a string or None"
        check_kind("NetworkOptions.interface", self.interface, _TEXT_OR_NONE, wanted)
        _check_times(self, "connect_timeout_s", "handshake_timeout_s")
        _check_lanes(self.bulk_lanes)
        wanted = "a mapping from names of peers to codecs"
        check_kind("NetworkOptions.codecs", self.codecs, Mapping, wanted)
        for peer in self.codecs:
            self.compression_to(peer)
        _check_spin(self.spin)

    def compression_to(self, peer: str) -> Compression | None:
        """Internal: return the codec of calls to a peer that name no codec."""
        codec = self.codecs.get(peer, self.codecs.get("*", ""))
        name = "each codec in NetworkOptions.codecs"
        check_kind(name, codec, str, "the name of a codec")
        return compression_named(codec)


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessOptions:
    """When a peer counts as lost.

    Attributes:
        heartbeat_s: a peer that is silent for so long is asked for a sign of life.
        lost_after_s: how long a peer may be silent, or without a connection, before it
            is given up; at least twice `heartbeat_s`.  A process that is known to have
            ended is given up at once; a process that is known to be busy is never given
            up.
        sidecar: whether peers on other hosts can ask a small process, the sidecar,
            whether this process still runs.  It is started when the first such peer
            is known (`"auto"`), at once (`"on"`) or never (`"off"`).  For TCP addresses
            only.
    """

    heartbeat_s: float = 2.0
    lost_after_s: float = 10.0
    sidecar: str = "auto"

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: a time is too short, or `sidecar` is not one of its values.
        """
        _check_times(self, "heartbeat_s", "lost_after_s")
        _check_word("LivenessOptions.sidecar", self.sidecar, ("auto", "on", "off"))
        if not self.lost_after_s >= 2 * self.heartbeat_s:
            raise UsageError(
                "LivenessOptions.lost_after_s must be at least twice "
                f"LivenessOptions.heartbeat_s, that is {2 * self.heartbeat_s:g}, not "
                f"{self.lost_after_s!r}: a peer must have the time to answer"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """How many calls a worker accepts, and how much memory it uses.

    Attributes:
        on_loop_bytes_max: torch's elementwise functions and reductions run on the loop
            itself if their tensors have at most so many bytes together; 0: never.
        inbound_calls_max: calls accepted and unfinished, over all peers; further calls
            are rejected.
        inbound_bytes_max: bytes of the payloads of requests that arrive or are served,
            over all peers; payloads of up to 8 KiB are not counted.  Further callers
            wait.
        peer_bytes_max: bytes that one peer makes this worker hold besides the payloads
            above: its unfinished calls with their arguments, answers that it has not
            taken, references, autograd contexts, optimizers, and messages of groups
            that are not made yet; all peers together may have 16 times as much.
            Further calls are rejected.
        outbound_bytes_max: bytes of answers, and of items of streams, that peers have
            not taken, over all peers; one peer may have a sixteenth.  Further calls
            with large answers, and further items, wait.
        handshakes_max: connections that have not authenticated yet; never more than a
            quarter of the file descriptors that the process may have.  Beyond the
            limit, the oldest that has said nothing is closed, or else the oldest.
        stream_items_max: items of a stream that its consumer has not taken yet.
        stream_bytes_max: bytes of such items; a single item may exceed the limit.
        receive_pool_bytes: memory of received payloads that is kept for reuse once
            nothing refers to it; 0 keeps no memory.
        shared_memory_bytes: memory through which large payloads go to peers on this
            host, copied once; the worker may map as much memory again of each peer.
            0 uses no shared memory.
        references_max: values on this worker that it or other workers refer to;
            further calls of remote() are rejected.
        message: limits of the memory that one message may make this worker allocate.
    """

    on_loop_bytes_max: int = 16 << 10
    inbound_calls_max: int = 100_000
    inbound_bytes_max: int = 4 << 30
    peer_bytes_max: int = 160 << 20
    outbound_bytes_max: int = 1 << 30
    handshakes_max: int = 256
    stream_items_max: int = 16
    stream_bytes_max: int = 32 << 20
    receive_pool_bytes: int = 512 << 20
    shared_memory_bytes: int = 1 << 30
    references_max: int = 1_000_000
    message: MessageLimits = field(default_factory=MessageLimits)

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: a number is out of its range; the message names the field.
        """
        for limit in fields(self):
            if limit.name != "message":
                least = 0 if limit.name in _MAY_BE_ZERO else 1
                value = getattr(self, limit.name)
                check_count(f"LimitOptions.{limit.name}", value, at_least=least)
        wanted = "a MessageLimits"
        check_kind("LimitOptions.message", self.message, MessageLimits, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Which devices a worker has, and where tensors go.

    Attributes:
        names: the devices of this worker, such as `("cuda",)` or `("xla:0",)`.  Peers'
            tensors may be put on them.  A device that is missing at start is an error.
            None: every device of this process, except those of torch_xla.
        maps: names of peers, or `"*"` for all others, mapped to the device map of
            calls that have no device map; see `Peer.using`.
        exclusive: whether plain functions, backward passes, optimizer steps and
            copies from and to devices run one at a time, as torch_xla requires.
            None: True if one of `names` is an XLA device.
    """

    names: tuple[str, ...] | None = None
    maps: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    exclusive: bool | None = None

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: a field is of another kind, or is not a device or a device map.
        """
        _check_texts(self, "names")
        _ = self.parsed_names
        wanted = "a mapping from names of peers to device maps"
        check_kind("DeviceOptions.maps", self.maps, Mapping, wanted)
        for peer in self.maps:
            self.map_to(peer)
        wanted = "True, False or None"
        exclusive = self.exclusive
        check_kind("DeviceOptions.exclusive", exclusive, (bool, NoneType), wanted)

    def map_to(self, peer: str) -> DeviceMap | None:
        """Internal: return the device map of calls that have no map of their own."""
        device_map = self.maps.get(peer, self.maps.get("*"))
        if not device_map:
            return None
        name = f"the device map for {peer!r} in DeviceOptions.maps"
        check_kind(name, device_map, Mapping, "a mapping from devices to devices")
        return DeviceMap.parse(device_map, name)

    @property
    def parsed_names(self) -> tuple[DeviceName, ...] | None:
        """Internal: the devices of this worker; None: all devices of the process."""
        if self.names is None:
            return None
        return tuple(map(DeviceName.parse, self.names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a worker behaves.  All times are in seconds; None means no limit.

    Attributes:
        secret: the cluster's secret, a string or bytes.  None: what is in
            `secret_file`; without one, the environment variable `ASYNCRPC_SECRET`, or
            the file that `ASYNCRPC_SECRET_FILE` names.  If those are unset, the worker
            serves only its own user on its own host, and peers that `tls` verifies.
            With less than 16 characters the worker logs a warning, and refuses to
            listen for other hosts.
        secret_file: path of a file that holds the secret, read when the worker is made.
            It must be readable by its owner alone (mode 0600); a file of root may
            also be readable by a group, as Kubernetes mounts it.
        token: what `Worker.tokens.issue` of a member returned: with it and
            `join://host:port` of that member, a worker joins from outside without the
            secret, as a guest.  None: the environment variable `ASYNCRPC_TOKEN`.
        tls: certificates; TCP connections are encrypted, and with `Tls.verify_peer`
            need no secret.  None: TCP connections are not encrypted.
        policy: `Policy.TRUSTED` (pickle allowed between authenticated workers) or
            `Policy.STRICT` (no pickle; only exposed or allowed functions).
        allow: under `STRICT`, patterns like `"shop.models:*"` of callable functions.
        rpc_timeout_s: limit of every call without a timeout of its own.
        rendezvous_timeout_s: how long to wait for the other workers at start.
        drain_timeout_s: how long shutdown waits for calls in flight.
        membership: `"dynamic"`: workers may join a running group, and members tell
            each other about joins and leaves; `"static"`: the set of names is fixed at
            start, and other workers are refused.
        threads: how many plain functions may run at once; threads that wait in a
            nested call do not count.
        stall_after_s: once something here has waited for so long, the worker logs why,
            as `asyncrpc why` would say it: each stall once.  None: it logs nothing.
        network: how the worker is reached, and reaches others.
        liveness: when a peer counts as lost.
        limits: how many calls the worker accepts, and how much memory it uses.
        devices: which devices the worker has, and where tensors go.
    """

    secret: str | bytes | None = field(default=None, repr=False)
    secret_file: str | None = None
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    policy: Policy = Policy.TRUSTED
    allow: tuple[str, ...] = ()
    rpc_timeout_s: float | None = None
    rendezvous_timeout_s: float = 60.0
    drain_timeout_s: float = 10.0
    membership: str = "dynamic"
    threads: int = 16
    stall_after_s: float | None = None
    network: NetworkOptions = field(default_factory=NetworkOptions)
    liveness: LivenessOptions = field(default_factory=LivenessOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    devices: DeviceOptions = field(default_factory=DeviceOptions)

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: a field is of another kind, or out of its range; the message
                names the field.
        """
        _check_secret(self.secret)
        _check_secret_file(self.secret_file, self.secret)
        _check_token(self.token)
        check_kind("Options.tls", self.tls, (Tls, NoneType), "a Tls or None")
        check_kind("Options.policy", self.policy, Policy, "a Policy")
        check_texts("Options.allow", self.allow)
        if self.rpc_timeout_s is not None:
            wanted = "a positive number of seconds, or None for no limit"
            _check_time("Options.rpc_timeout_s", self.rpc_timeout_s, wanted)
        _check_times(self, "rendezvous_timeout_s")
        check_seconds("Options.drain_timeout_s", self.drain_timeout_s, at_least=0)
        _check_word("Options.membership", self.membership, ("dynamic", "static"))
        check_count("Options.threads", self.threads, at_least=1)
        if self.stall_after_s is not None:
            wanted = "a positive number of seconds, or None to log nothing"
            _check_time("Options.stall_after_s", self.stall_after_s, wanted)
        for name, kind in _GROUPS.items():
            wanted = f"a {kind.__name__}"
            check_kind(f"Options.{name}", getattr(self, name), kind, wanted)

    def _repr_html_(self) -> str:
        rows = list(_changed_fields(self, Options()))
        others = "all others have their defaults" if rows else "all have their defaults"
        columns = ("option", "value", "default") if rows else ()
        return panel("Options", columns=columns, rows=rows, note=others)

    @property
    def secret_bytes(self) -> bytes | None:
        """Internal: the secret as the handshake takes it."""
        if isinstance(self.secret, str):
            return self.secret.encode() or None
        return self.secret or None

    @property
    def is_guarded(self) -> bool:
        """Internal: whether peers that connect by TCP must authenticate."""
        vouched = self.tls is not None and self.tls.vouches_for_peers
        return vouched or self.secret_bytes is not None

    def with_environment(self, environ: Mapping[str, str] = os.environ) -> Options:
        """Internal: return options completed from the environment and files.

        Raises:
            UsageError: a file does not hold a secret, or others can read it; or the
                environment has two secrets that differ.
        """
        options = replace(
            self, secret=self._configured_secret(environ), secret_file=None
        )
        if options.token is None and environ.get(TOKEN_VARIABLE):
            options = replace(options, token=environ[TOKEN_VARIABLE])
        interface = options.network.interface or environ.get(INTERFACE_VARIABLE)
        has_own_secret = self.secret is not None or self.secret_file is not None
        if not interface and not has_own_secret and environ.get(ONE_HOST_VARIABLE):
            interface = _LOOPBACK
        if interface and interface != options.network.interface:
            network = replace(options.network, interface=interface)
            options = replace(options, network=network)
        return options

    def _configured_secret(self, environ: Mapping[str, str]) -> str | bytes | None:
        if self.secret is not None:
            return self.secret
        if self.secret_file is not None:
            return read_secret(self.secret_file, "Options.secret_file")
        text, path = environ.get(SECRET_VARIABLE), environ.get(SECRET_FILE_VARIABLE)
        if not path:
            return text or None
        secret = read_secret(path, SECRET_FILE_VARIABLE)
        if text and text.encode(errors="surrogateescape") != secret:
            raise UsageError(
                f"{SECRET_VARIABLE} and {SECRET_FILE_VARIABLE} ({path!r}) hold"
                " different secrets; unset one of them"
            )
        return secret


# Fields of `LimitOptions` that may be 0, which turns the feature off.
_MAY_BE_ZERO: Final = {"on_loop_bytes_max", "receive_pool_bytes", "shared_memory_bytes"}
_TEXT_OR_NONE: Final = (str, NoneType)
_GROUPS: Final = {
    "network": NetworkOptions,
    "liveness": LivenessOptions,
    "limits": LimitOptions,
    "devices": DeviceOptions,
}


def _changed_fields(
    options: Any, defaults: Any, prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield the fields that differ: their name, value and default; no secret."""
    for option in fields(options):
        value, default = getattr(options, option.name), getattr(defaults, option.name)
        name = f"{prefix}{option.name}"
        if is_dataclass(default):
            yield from _changed_fields(value, default, f"{name}.")
        elif value != default:
            yield name, repr(value) if option.repr else "(not shown)", repr(default)


def _check_times(options: object, *names: str) -> None:
    """Raise UsageError unless these fields are times above 0."""
    for name in names:
        field_name = f"{type(options).__name__}.{name}"
        _check_time(field_name, getattr(options, name), "a positive number of seconds")


def _check_time(name: str, value: Any, wanted: str) -> None:
    if not is_seconds(value) or not value > 0:
        raise wrong(name, wanted, value)


def _check_texts(options: object, *names: str) -> None:
    """Raise UsageError unless these fields are None or sequences of strings."""
    for name in names:
        value = getattr(options, name)
        if value is not None:
            check_texts(f"{type(options).__name__}.{name}", value)


def _check_word(name: str, value: Any, words: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in words:
        raise wrong(name, " or ".join(f'"{word}"' for word in words), value)


def _check_secret(secret: Any) -> None:
    """Raise UsageError unless the value is a secret; the error does not show it."""
    is_right = secret is None or isinstance(secret, bytes) or _is_utf8(secret)
    if not is_right:
        raise UsageError(
            "Options.secret must be a string of UTF-8, bytes or None; it is of type"
            f" {type(secret).__qualname__}, and not shown here"
        )


def _check_token(token: Any) -> None:
    """Raise UsageError unless the value is a token; the error does not show it."""
    if token is not None and not _is_utf8(token):
        raise UsageError(
            "Options.token must be a string of UTF-8 or None; it is of type"
            f" {type(token).__qualname__}, and not shown here"
        )


def _check_secret_file(path: Any, secret: Any) -> None:
    """Raise UsageError unless the value is a path, and the only source of a secret."""
    if path is None:
        return
    check_text("Options.secret_file", path)
    if secret is not None:
        raise UsageError("pass Options.secret or Options.secret_file, not both")


def _is_utf8(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_spin(spin: Any) -> None:
    if isinstance(spin, str):
        is_right = spin in ("off", "adaptive")
    else:
        is_right = is_seconds(spin) and 0 <= spin <= SPIN_MAX_S
    if not is_right:
        raise wrong(
            "NetworkOptions.spin",
            f'"off", "adaptive" or at most {SPIN_MAX_S:g} seconds (a loop that polls'
            " for longer only burns a core)",
            spin,
        )


def _check_lanes(count: Any) -> None:
    if count is not None and not (type(count) is int and 0 <= count <= LANES_MAX):
        raise wrong(
            "NetworkOptions.bulk_lanes",
            f"0 to {LANES_MAX}, or None to leave it to the transport",
            count,
        )
