"""PyTorch's test cases for one implementation; importing this module makes them.

The implementation and how ranks are started are read from the environment, at import: a
rank that is spawned imports this module to find its test case, in a process of its own,
and the environment is what it shares with the process that started it.

The suites are those that the torch wheel ships; nothing of them is copied.  Each gets a
fixture, which says what `init_rpc` is called with, and ranks that are forked.

The fixture of the suites that lose messages adds a backend, which replaces torch's enum
of them, and tests of other suites notice.  So those suites are made when one of their
tests is run, in its process.

Source: test/distributed/rpc/test_tensorpipe_agent.py of PyTorch, which makes the same
classes.  It spawns each rank, which imports torch: eleven seconds a test on two cores,
where a fork takes less than one.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Container, Mapping
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
    "TensorPipeAgentCudaRpcTest": "rpc.rpc_test",
    "CudaDistAutogradTest": "rpc.dist_autograd_test",
    "CudaRemoteModuleTest": "nn.api.remote_module_test",
    "RemoteModuleTest": "nn.api.remote_module_test",
    "ThreeWorkersRemoteModuleTest": "nn.api.remote_module_test",
    "ParameterServerTest": "rpc.examples.parameter_server_test",
    "ReinforcementLearningRpcTest": "rpc.examples.reinforcement_learning_rpc_test",
    "DdpUnderDistAutogradTest": "ddp_under_dist_autograd_test",
    "DdpComparisonTest": "ddp_under_dist_autograd_test",
}
FAULTY_SUITES: Final = {
    "FaultyAgentRpcTest": "rpc.faulty_agent_rpc_test",
    "FaultyAgentDistAutogradTest": "rpc.dist_autograd_test",
}

MARKED: Final = Marks(lambda: os.environ.get(MARKS))
SUBSTITUTION: Final = install(os.environ.get(IMPLEMENTATION, "torch"), MARKED)


def _fixture() -> type:
    """Return PyTorch's fixture, or one that needs only what is documented."""
    if os.environ.get(IMPLEMENTATION, "torch") == "torch":
        module = importlib.import_module(
            f"{FOLDER}.rpc.tensorpipe_rpc_agent_test_fixture"
        )
        fixture: type = module.TensorPipeRpcAgentTestFixture
        return fixture
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


def _faulty_fixture() -> type:
    """Return PyTorch's fixture for suites that lose messages."""
    module = importlib.import_module(f"{FOLDER}.rpc.faulty_rpc_agent_test_fixture")
    fixture: type = module.FaultyRpcAgentTestFixture
    return fixture


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
            self.exit_codes = tuple(process.exitcode for process in self.processes)
            super()._check_return_codes(*args)

    return Ranks


def _imported(suites: Mapping[str, str]) -> tuple[dict[str, type], dict[str, str]]:
    """Return the suites as torch has them, and why the others do not import."""
    imported: dict[str, type] = {}
    why: dict[str, str] = {}
    for name, module in suites.items():
        try:
            imported[name] = getattr(
                importlib.import_module(f"{FOLDER}.{module}"), name
            )
        except Exception as error:  # noqa: BLE001  (what a suite says is shown)
            why[name] = f"{module} does not import: {type(error).__name__}: {error}"
    return imported, why


def _case_class(name: str, raw: type, fixture: type) -> type[TestCase]:
    return type(name, (raw, fixture, STARTER), {"__module__": __name__})


STARTER: Final = _starter()
RAW, NOT_IMPORTED = _imported({**SUITES, **FAULTY_SUITES})
CASES = {
    name: _case_class(name, RAW[name], fixture)
    for fixture in [_fixture()]
    for name in SUITES
    if name in RAW
}
globals().update(CASES)  # where a spawned rank finds them
SUBSTITUTION.imported()


def __getattr__(name: str) -> type[TestCase]:
    """Make a suite that loses messages, when it is asked for."""
    if name not in FAULTY_SUITES or name not in RAW:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    case_class = globals()[name] = _case_class(name, RAW[name], _faulty_fixture())
    return case_class


def noticed(known: Container[str]) -> dict[str, list[str]]:
    """Return what a reader of the results may wonder about."""
    loader = TestLoader()
    tests = [
        f"{suite}.{test}"
        for suite, raw in RAW.items()
        if "Cuda" not in suite
        for test in loader.getTestCaseNames(raw)
    ]
    return {
        "not_imported": list(NOT_IMPORTED.values()),
        "not_classified": [name for name in tests if name not in known],
        "not_compiled": SUBSTITUTION.not_compiled,
        "missing_at_import": sorted(MARKED.met),
    }


def case(name: str) -> TestCase:
    """Return the test "SUITE.TEST"."""
    suite, _, test = name.partition(".")
    if suite not in RAW:
        raise LookupError(NOT_IMPORTED.get(suite, f"there is no suite {suite}"))
    case_class: type[TestCase] = getattr(sys.modules[__name__], suite)
    return case_class(test)
