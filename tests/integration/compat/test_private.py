"""What programs take from torch's private modules and its agent, between processes."""

from __future__ import annotations

import copyreg
from collections import Counter
from typing import Any

import pytest
import torch

from asyncrpc.compat import rpc
from asyncrpc.compat.rpc import api, bindings, internal
from asyncrpc.compat.rpc.bindings import (
    _invoke_remote_builtin,
    _invoke_remote_python_udf,
    _invoke_rpc_builtin,
    _invoke_rpc_python_udf,
    _invoke_rpc_torchscript,
)
from asyncrpc.compat.rpc.rref_proxy import RRefProxy
from tests.integration.compat.playing import play

OTHER = "worker1"
UNSET_S = -1.0


class Holder:
    attribute = 3

    def __init__(self, value: int = 1) -> None:
        self.value = value

    def method(self) -> int:
        return self.value


class Marked:
    """Pickles as it is, unless a pickler says otherwise."""

    text = "as is"


def texts_of(*values: Any) -> list[Any]:
    return [getattr(value, "text", value) for value in values]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def scaled_value(rref: Any, factor: int) -> Any:
    return factor * rref.to_here()


@rpc.functions.async_execution
def later(x: int) -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(x + 1)
    return future


async def awaited(x: int) -> int:
    return x + 2


# --- picklers ------------------------------------------------------------------------


class Remarking(internal._InternalRPCPickler):  # noqa: SLF001
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._register_reducer(Marked, lambda _value: (str, ("by a reducer",)))
        self._register_reducer(Marked, lambda _value: (str, ("by another",)))

    def serialize(self, obj: Any) -> tuple[bytes, list[Any]]:
        self.calls[obj.func.__name__] += 1
        return super().serialize(obj)


def calls_go_through_the_programs_pickler() -> None:
    pickler, x = Remarking(), torch.ones(2, requires_grad=True)
    rref = rpc.remote(OTHER, doubled, (torch.ones(2),))
    with api._use_rpc_pickler(pickler):  # noqa: SLF001
        assert rpc.rpc_sync(OTHER, texts_of, (Marked(), 1)) == ["by a reducer", 1]
        assert rpc.rpc_async(OTHER, texts_of, (Marked(),)).wait() == ["by a reducer"]
        assert rpc.remote(OTHER, texts_of, (Marked(),)).to_here() == ["by a reducer"]
        assert rpc.rpc_sync(OTHER, scaled_value, (rref,), {"factor": 3}).tolist() == [
            6,
            6,
        ]
        assert rpc.rpc_sync(OTHER, later, (1,)) == 2
        assert rpc.rpc_sync(OTHER, awaited, (1,)) == 3
        assert rpc.rpc_sync(OTHER, torch.add, (x, 1)).tolist() == [2, 2]
        assert isinstance(rpc.remote(OTHER, Holder).to_here(), Holder)
        with pytest.raises(RuntimeError, match="not here"):
            rpc.rpc_sync(OTHER, refuse)
    assert pickler.calls == Counter(
        texts_of=3, scaled_value=1, later=1, awaited=1, Holder=1, refuse=1
    )
    assert rpc.rpc_sync(OTHER, texts_of, (Marked(),)) == ["as is"]


def refuse() -> None:
    raise RuntimeError("not here")


def test_a_pickler_of_the_program_packs_calls_and_their_references() -> None:
    play(calls_go_through_the_programs_pickler)


def packed_calls_carry_gradients() -> None:
    from asyncrpc.compat import autograd  # noqa: PLC0415  (needs the worker)

    x = torch.ones(2, requires_grad=True)
    with api._use_rpc_pickler(Remarking()), autograd.context() as context_id:  # noqa: SLF001
        y = rpc.rpc_sync(OTHER, doubled, (x,))
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2, 2]


def test_packed_tensors_keep_their_graph() -> None:
    play(packed_calls_carry_gradients)


def test_a_pickler_packs_tensors_beside_the_bytes_and_unpacks_them() -> None:
    tensor = torch.arange(3)
    data, table = internal.serialize({"x": tensor, "y": [tensor, 5]})
    assert len(table) == 1  # pickle writes one object once
    assert table[0] is tensor
    value = internal.deserialize(data, table)
    assert value["x"] is tensor
    assert value["y"] == [tensor, 5]
    assert torch.Tensor in internal._internal_rpc_pickler._dispatch_table  # noqa: SLF001
    assert torch.Tensor not in copyreg.dispatch_table


def test_a_name_that_cannot_be_found_unpacks_as_an_error() -> None:
    data, table = internal.serialize(Marked)
    value = internal.deserialize(data.replace(b"Marked", b"Absent"), table)
    assert isinstance(value, AttributeError)
    assert "same name" in str(value)


def test_error_of_a_packed_function_raises_again() -> None:
    failed = internal.RemoteException("text", KeyError)
    with pytest.raises(KeyError, match="text"):
        internal._handle_exception(failed)  # noqa: SLF001
    internal._handle_exception(5)  # noqa: SLF001


# --- torch's C++ functions -----------------------------------------------------------


def calls_by_torchs_bindings() -> None:
    to, x = rpc.get_worker_info(OTHER), torch.ones(2)
    call = internal.serialize(internal.PythonUDF(doubled, (x,), {}))
    marked = internal.serialize(internal.PythonUDF(later, (1,), {}))
    add, no = "aten::add", UNSET_S
    assert _invoke_rpc_builtin(to, add, no, x, other=1).wait().tolist() == [2, 2]
    assert _invoke_remote_builtin(to, add, no, x, 1).to_here().tolist() == [2, 2]
    assert _invoke_rpc_python_udf(to, *call, no, False).wait().tolist() == [2, 2]  # noqa: FBT003
    rref = _invoke_remote_python_udf(to, *call, no, False)  # noqa: FBT003
    assert rref.to_here().tolist() == [2, 2]
    assert _invoke_rpc_python_udf(to, *marked, no, True).wait() == 2  # noqa: FBT003
    with pytest.raises(RuntimeError, match=r"'absent.f' is compiled here: import"):
        _invoke_rpc_torchscript(OTHER, "absent.f", (), {}, no, False).wait()  # noqa: FBT003
    assert bindings._is_current_rpc_agent_set()  # noqa: SLF001
    assert isinstance(rref, bindings.PyRRef)


def test_torchs_bindings_call_by_name_and_by_pickle() -> None:
    play(calls_by_torchs_bindings)


# --- the agent -----------------------------------------------------------------------


def the_agent_answers() -> None:
    agent = api._get_current_rpc_agent()  # noqa: SLF001
    assert isinstance(agent, bindings.TensorPipeAgent)
    assert agent._get_device_map(rpc.get_worker_info(OTHER)) == {}  # noqa: SLF001
    assert agent._get_backend_options().num_worker_threads == 16  # noqa: SLF001
    assert agent.get_metrics()["agent.thread_pool_size"] == "16"
    assert agent.sync() is None  # type: ignore[func-returns-value]


def test_agent_has_the_attributes_of_torchs_agent() -> None:
    play(the_agent_answers)


# --- proxies -------------------------------------------------------------------------


def methods_of_proxies() -> None:
    for rref in (rpc.remote(OTHER, Holder), rpc.remote(OTHER, make_holder)):
        for proxy in (rref.rpc_sync(), rref.rpc_async(), rref.remote()):
            assert callable(proxy.absent)  # what is not there, the call says
            assert outcome(proxy.method) == 1
            for name in ("absent", "value"):
                with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
                    outcome(getattr(proxy, name))
            with pytest.raises(TypeError, match="not callable"):
                outcome(proxy.attribute)
        assert RRefProxy(rref, rpc.rpc_sync).method() == 1
        assert RRefProxy(rref, counted).method() == 1
    assert calls_counted == [OTHER, OTHER]


def make_holder() -> Holder:
    return Holder()


def outcome(method: Any) -> Any:
    result = method()
    if isinstance(result, rpc.RRef):
        return result.to_here()
    return result.wait() if isinstance(result, torch._C.Future) else result  # noqa: SLF001


calls_counted: list[str] = []


def counted(to: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for a function that a program has put in the place of `rpc_sync`."""
    calls_counted.append(to.name)
    return rpc.rpc_sync(to, *args, **kwargs)


def test_proxy_fails_at_the_method_call_as_torchs() -> None:
    play(methods_of_proxies)
