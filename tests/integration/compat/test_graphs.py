"""The graph of a context, as programs walk it: two or three processes.

Each test is a scenario that worker0 plays; the others serve it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import Node

from asyncrpc.compat import autograd, rpc
from tests.integration.compat.playing import play

SENT = "torch::distributed::autograd::SendRpcBackward"
RECEIVED = "torch::distributed::autograd::RecvRpcBackward"
ACCUMULATES = "torch::autograd::AccumulateGrad"


def names_after(node: Any) -> list[str]:
    return [after.name() for after, _ in node.next_functions]


def names_in(nodes: dict[int, Any]) -> dict[int, tuple[str, list[str]]]:
    return {key: (node.name(), names_after(node)) for key, node in nodes.items()}


def graph_of(context_id: int) -> tuple[dict[int, Any], list[int]]:
    """Return what was sent from here, with names, and the ids of what has come."""
    context = autograd._retrieve_context(context_id)  # noqa: SLF001
    return names_in(context._send_functions()), list(context._recv_functions())  # noqa: SLF001


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def on_the_way(x: torch.Tensor, y: torch.Tensor, unused: torch.Tensor) -> Any:
    """Have x go on, and y not; return what takes part in the loss and what does not."""
    there: torch.Tensor = rpc.rpc_sync("worker2", product, (x, x + y))
    x.add_(1)
    return [there + y, x], unused * 2


# --- what is shown -------------------------------------------------------------------


def nodes_of_a_call() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        z = rpc.rpc_sync("worker1", product, (x, y * 2))
        here = autograd._current_context()  # noqa: SLF001
        ((request, sent),) = here._send_functions().items()  # noqa: SLF001
        ((response, received),) = here._recv_functions().items()  # noqa: SLF001
        assert (sent.name(), received.name()) == (SENT, RECEIVED)
        assert names_after(sent) == [ACCUMULATES, "MulBackward0"]
        assert sent.next_functions[0][0].variable is x
        assert z.grad_fn is received
        assert isinstance(sent, Node)
        assert isinstance(received, Node)
        again = autograd._retrieve_context(context_id)._send_functions()  # noqa: SLF001
        assert again[request] is sent

        there, came = rpc.rpc_sync("worker1", graph_of, (context_id,))
        assert came == [request]  # a message has the same id at both ends
        assert there == {response: (SENT, ["MulBackward0"])}
        autograd.backward(context_id, [z.sum()])
        gradients = autograd.get_gradients(context_id)
        assert gradients[x].tolist() == gradients[y].tolist() == [2.0, 2.0]
    assert here._recv_functions() == {}  # noqa: SLF001


def nodes_of_calls_to_itself_and_from_two() -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        a = rpc.rpc_sync("worker0", product, (x, x * 2))
        b = rpc.rpc_sync("worker1", product, (x, a))
        c = rpc.rpc_async("worker2", product, (x, b)).wait()
        here = autograd._current_context()  # noqa: SLF001
        sent, received = here._send_functions(), here._recv_functions()  # noqa: SLF001
        assert (len(sent), len(received)) == (4, 4)  # none hides another's
        assert {b.grad_fn, c.grad_fn} <= set(received.values())
        autograd.backward(context_id, [c.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [8.0, 8.0]  # 2x**4


def gradients_past_one_node() -> None:
    leaves = [torch.full((2,), value, requires_grad=True) for value in (2.0, 3.0, 5.0)]
    x, y, unused = leaves
    with autograd.context() as context_id:
        (z, w), _ = rpc.rpc_sync("worker1", on_the_way, (x, y * y, unused))
        autograd.backward(context_id, [(z * w).sum()])
        gradients = autograd.get_gradients(context_id)
    here = [tensor.detach().requires_grad_() for tensor in (x, y)]
    square = here[1] * here[1]
    z, w = here[0] * (here[0] + square) + square, here[0] + 1
    expected = torch.autograd.grad((z * w).sum(), here)
    assert set(gradients) == {x, y}
    assert torch.equal(gradients[x], expected[0])
    assert torch.equal(gradients[y], expected[1])


def test_a_call_has_a_node_for_each_message_at_both_ends() -> None:
    play(nodes_of_a_call)


def test_messages_of_several_workers_have_ids_of_their_own() -> None:
    play(nodes_of_calls_to_itself_and_from_two, nprocs=3)


def test_gradients_are_as_in_one_process_past_nodes_of_several_tensors() -> None:
    play(gradients_past_one_node, nprocs=3)
