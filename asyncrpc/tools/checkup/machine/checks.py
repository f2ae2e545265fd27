"""All checks of one process."""

from __future__ import annotations

from asyncrpc.tools.checkup.machine.facts import ProcessFacts
from asyncrpc.tools.checkup.machine.findings import CheckFinding
from asyncrpc.tools.checkup.machine.resources import (
    check_files,
    check_memory,
    check_pages,
    check_shared_memory,
)
from asyncrpc.tools.checkup.machine.software import (
    check_loop,
    check_threads,
    check_timeouts,
    check_versions,
)
from asyncrpc.tools.checkup.machine.surroundings import (
    check_clocks,
    check_network,
    check_secrets,
    check_tracing,
)


def check_all(facts: ProcessFacts) -> list[CheckFinding]:
    """Return the findings of all checks, in the order of a table."""
    return [
        *check_versions(facts.versions),
        *check_loop(facts.loop),
        *check_threads(facts.threads),
        *check_timeouts(facts.timeouts),
        *check_memory(facts.memory),
        *check_files(facts.files),
        *check_shared_memory(facts.shared_memory),
        *check_pages(facts.pages),
        *check_clocks(facts.clocks),
        *check_network(facts.network),
        *check_secrets(facts.secrets),
        *check_tracing(facts.tracing),
    ]
