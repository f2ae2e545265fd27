"""PyTorch's test cases for one implementation; importing this module makes them.

The implementation and how ranks are started are read from the environment, at import: a
rank that is spawned imports this module to find its test case, in a process of its own,
and the environment is what it shares with the process that started it.

The suites are those that the torch wheel ships; nothing of them is copied.  Each gets a
fixture, which says what `init_rpc` is called with, and ranks that are forked.

Source: test/distributed/rpc/test_tensorpipe_agent.py of PyTorch, which makes the same
classes.  It spawns each rank, which imports torch: eleven seconds a test on two cores,
where a fork takes less than one.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Container
from typing import Any, Final
from unittest import TestCase, TestLoader

from tests.conformance.placeholders import Marks
from tests.conformance.substitution import install

IMPLEMENTATION: Final = "CONFORMANCE_IMPL"  # names in the environment
START: Final = "CONFORMANCE_START"
MARKS: Final = "CONFORMANCE_MARKS"

FOLDER: Final = "torch.testing._internal.distributed"
SUITES: Final = {
    "RpcTest": "rpc.rpc_test",
    "TensorPipeAgentRpcTest": "rpc.rpc_test",
    "DistAutogradTest": "rpc.dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": "rpc.dist_autograd_test",
    "DistOptimizerTest": "rpc.dist_optimizer_test",
    "TensorPipeAgentCudaRpcTest": "rpc.rpc_test",  # for the one test that needs no GPU
    "RemoteModuleTest": "nn.api.remote_module_test",
    "ThreeWorkersRemoteModuleTest": "nn.api.remote_module_test",
    "ParameterServerTest": "rpc.examples.parameter_server_test",
    "ReinforcementLearningRpcTest": "rpc.examples.reinforcement_learning_rpc_test",
    "DdpUnderDistAutogradTest": "ddp_under_dist_autograd_test",
    "DdpComparisonTest": "ddp_under_dist_autograd_test",
}

MARKED: Final = Marks(lambda: os.environ.get(MARKS))
SUBSTITUTION: Final = install(os.environ.get(IMPLEMENTATION, "torch"), MARKED)


def _fixture() -> type:
    """Return PyTorch's fixture, or one that needs only what is documented."""
    if os.environ.get(IMPLEMENTATION, "torch") == "torch":
        module = importlib.import_module(f"{FOLDER}.rpc.tensorpipe_rpc_agent_test_fixture")
        found: type = module.TensorPipeRpcAgentTestFixture
        return found
    base: type = importlib.import_module(
        f"{FOLDER}.rpc.rpc_agent_test_fixture"
    ).RpcAgentTestFixture
    rpc = sys.modules["torch.distributed.rpc"]
    members: dict[str, object] = {
        "rpc_backend": property(lambda _: rpc.BackendType["TENSORPIPE"]),
        "rpc_backend_options": property(
            lambda self: rpc.TensorPipeRpcBackendOptions(init_method=self.init_method)
        ),
        "get_shutdown_error_regex": lambda _: ".*",
        "get_timeout_error_regex": lambda _: "RPC ran for more than",
    }
    return type("FacadeFixture", (base,), members)


def _starter() -> type:
    """Return the base of all test cases, which starts a process for each rank."""
    base: Any = importlib.import_module(
        "torch.testing._internal.common_distributed"
    ).MultiProcessTestCase

    class Ranks(base):  # type: ignore[misc]  # torch ships no types for its tests
        """Starts ranks as asked for, and remembers how they ended."""

        exit_codes: tuple[int | None, ...] = ()

        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def _spawn_processes(self) -> None:
            if os.environ.get(START) == "spawn":
                super()._spawn_processes()
            else:  # nothing has started a thread here: see `running`
                self._start_processes(multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, *args: Any) -> None:
            self.exit_codes = tuple(one.exitcode for one in self.processes)
            super()._check_return_codes(*args)

    return Ranks


def _made() -> tuple[dict[str, type[TestCase]], dict[str, str]]:
    """Return the suites, and why each of the others does not import."""
    made: dict[str, type[TestCase]] = {}
    why: dict[str, str] = {}
    fixture, starter = _fixture(), _starter()
    for name, module in SUITES.items():
        try:
            raw = getattr(importlib.import_module(f"{FOLDER}.{module}"), name)
        except Exception as error:  # noqa: BLE001  (what a suite says is shown)
            why[name] = f"{module} does not import: {type(error).__name__}: {error}"
            continue
        made[name] = type(name, (raw, fixture, starter), {"__module__": __name__})
    return made, why


CASES, NOT_IMPORTED = _made()
globals().update(CASES)  # where a spawned rank finds them
SUBSTITUTION.imported()


def noticed(known: Container[str]) -> dict[str, list[str]]:
    """Return what a reader of the results may wonder about.

    Args:
        known: tests that have a class.  Another version of torch may have others.
    """
    loader = TestLoader()
    tests = [
        f"{suite}.{test}"
        for suite, made in CASES.items()
        if "Cuda" not in suite
        for test in loader.getTestCaseNames(made)
    ]
    return {
        "not_imported": list(NOT_IMPORTED.values()),
        "not_classified": [name for name in tests if name not in known],
        "not_compiled": SUBSTITUTION.not_compiled,
        "missing_at_import": sorted(MARKED.met),
    }


def case(name: str) -> TestCase:
    """Return the test "SUITE.TEST".

    Raises:
        LookupError: there is no such suite, or it does not import.
        ValueError: it has no such test.
    """
    suite, _, test = name.partition(".")
    if suite not in CASES:
        raise LookupError(NOT_IMPORTED.get(suite, f"there is no suite {suite}"))
    return CASES[suite](test)
