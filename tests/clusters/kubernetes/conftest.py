"""The simulated cluster of the integration tests, with a firewall in each pod."""

from __future__ import annotations

from tests.integration.kubernetes.conftest import cluster

__all__ = ["cluster"]
