"""Checks of clocks, the network, secrets, and access by debuggers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from asyncrpc.core.transport.address import is_loopback
from asyncrpc.tools.checkup.machine.facts import (
    ClockFacts,
    NetworkFacts,
    SecretFacts,
    TracingFacts,
)
from asyncrpc.tools.checkup.machine.findings import CheckFinding, note, ok, wrong

# Reading the time from these takes some 20 ns, in the process itself; other sources
# need a system call and a device, and take a microsecond or more.
QUICK_SOURCES: Final = frozenset(
    {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "timebase"}
)
_LATE_S: Final = (
    0.1  # of a wall's clock: logs of two hosts do not fit together any more
)
_MTU_MIN: Final = 1280  # of IPv6
_SECRET_BYTES_MIN: Final = 16
_ADMINS_ONLY: Final = 2  # of Yama's scopes: from here on only root attaches


def check_clocks(facts: ClockFacts) -> Iterator[CheckFinding]:
    """Check the source of the clocks, and whether the wall clock is synchronised."""
    if not facts.source:
        yield ok("monotonic clock", "its source is not told here")
    elif facts.source in QUICK_SOURCES:
        yield ok("monotonic clock", facts.source)
    else:
        better = [source for source in facts.available if source in QUICK_SOURCES]
        how = (
            f"as root: `echo {better[0]} > /sys/devices/system/clocksource/clocksource0"
            "/current_clocksource`"
            if better
            else "the kernel offers no quicker one: `dmesg | grep -i tsc` says why"
        )
        observation = f"{facts.source}: slow to read"
        yield note("monotonic clock", observation, f"each call reads it: {how}")
    yield _of_wall(facts)


def _of_wall(facts: ClockFacts) -> CheckFinding:
    error = "" if facts.error_s is None else f", within {_seconds(facts.error_s)}"
    if facts.is_synchronised is None:
        return ok("wall clock", "whether it is synchronised is not told here")
    if not facts.is_synchronised:
        return note(
            "wall clock",
            "not synchronised",
            "certificates and the times of logs rely on it: start chronyd or "
            "systemd-timesyncd (of a virtual machine: on its host)",
        )
    if facts.error_s is not None and facts.error_s > _LATE_S:
        advice = "`chronyc sources` or `timedatectl timesync-status` says why"
        return note("wall clock", f"synchronised{error}", advice)
    return ok("wall clock", f"synchronised{error}")


def _seconds(count: float) -> str:
    return f"{count:.2g} s" if count >= 1 else f"{count * 1e3:.2g} ms"


def check_network(facts: NetworkFacts) -> Iterator[CheckFinding]:
    """Check the addresses at which other hosts reach this one."""
    if facts.trouble:
        yield wrong("interface", "none is chosen", facts.trouble)
        return
    outside = [address for address in facts.advertised if not is_loopback(address)]
    if not outside:
        observation = "no address but loopback"
        if facts.is_one_host:
            yield ok("interface", observation)
            return
        advice = "other hosts cannot reach this one: give it a network interface"
        yield note("interface", observation, advice)
        return
    yield _of_choice(facts, outside)
    yield from _of_packets(facts, outside[0])


def _of_choice(facts: NetworkFacts, outside: list[str]) -> CheckFinding:
    names = {
        address: interface.name
        for interface in facts.interfaces
        for address in interface.addresses
    }
    first = outside[0]
    versions = {"IPv6" if ":" in address else "IPv4" for address in outside}
    observation = f"{names.get(first, '?')} {first} ({' and '.join(sorted(versions))})"
    others = sorted(
        {names.get(address, "?") for address in outside} - {names.get(first, "?")}
    )
    if facts.chosen_by:
        return ok("interface", f"{observation}, by {facts.chosen_by}")
    if not others:
        return ok("interface", observation)
    observation = f"{observation}, then {', '.join(others)}"
    if facts.is_one_host:
        return ok("interface", observation)
    return note(
        "interface",
        observation,
        "workers try the addresses in this order: if another interface is meant, "
        f"name it, as in ASYNCRPC_INTERFACE={others[0]}",
    )


def _of_packets(facts: NetworkFacts, first: str) -> Iterator[CheckFinding]:
    for interface in facts.interfaces:
        if first in interface.addresses and interface.mtu is not None:
            observation = f"{interface.mtu} bytes on {interface.name}"
            if interface.mtu < _MTU_MIN:
                advice = "large tensors take many small packets: raise the MTU"
                yield note("MTU", observation, advice)
            else:
                yield ok("MTU", observation)
            return


def check_secrets(facts: SecretFacts) -> Iterator[CheckFinding]:
    """Check the secrets that prove a worker's identity, and who can read them."""
    tls = "TLS" if facts.has_tls else "no TLS"
    if facts.secret_bytes is None:
        yield ok("secret", f"none, {tls}")
    elif facts.secret_bytes < _SECRET_BYTES_MIN:
        yield note(
            "secret",
            f"{facts.secret_bytes} bytes by {facts.origin}, {tls}",
            "an eavesdropper can guess a short secret: `openssl rand -hex 32`",
        )
    else:
        yield ok("secret", f"{facts.secret_bytes} bytes by {facts.origin}, {tls}")
    for file in facts.files:
        if file.problem:
            yield wrong(file.what, file.path, file.problem)
        else:
            yield ok(file.what, f"{file.path}: only its owner can read it")


def check_tracing(facts: TracingFacts) -> Iterator[CheckFinding]:
    """Check whether a debugger may attach to the process."""
    scope = facts.ptrace_scope
    if scope is None or not scope or (facts.is_root and scope <= _ADMINS_ONLY):
        yield ok("debuggers", "may attach (py-spy, gdb)")
        return
    who = "only root" if scope <= _ADMINS_ONLY else "no process"
    yield note(
        "debuggers",
        f"{who} may attach (ptrace_scope {scope})",
        "`asyncrpc why` looks without them; where it advises `py-spy dump`, run that "
        "as root",
    )
