"""tensordict and transformers: containers as values, and the gradients in them."""

import torch
from spawning import run_ranks, show
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass
from tensordict.nn import TensorDictModule, TensorDictParams
from torch.distributed import autograd, rpc
from transformers import BatchEncoding, BertConfig, BertModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput


@tensorclass
class Step:
    state: torch.Tensor
    reward: torch.Tensor
    note: str


def give(value):
    return value


def twice(value):
    """Return a container of the same kind with twice its floating-point tensors."""
    if isinstance(value, TensorDict | LazyStackedTensorDict | Step):
        return value.apply(lambda tensor: tensor * 2)
    return type(value)(
        {k: v * 2 for k, v in value.items() if isinstance(v, torch.Tensor)}
    )


def tensordict(rows):
    return TensorDict(
        {"a": rows, "deep": {"b": rows.sum(1), "text": NonTensorData("x")}},
        [2],
        names=["batch"],
    )


def containers():
    rows = torch.arange(6.0).reshape(2, 3)
    hidden = (rows, rows * 2)
    yield "TensorDict", tensordict(rows)
    yield "locked", tensordict(rows).lock_()
    yield "shared", TensorDict({"a": rows, "same": rows, "view": rows[:, 1]}, [2])
    yield "lazy stack", LazyStackedTensorDict(*map(tensordict, (rows, rows + 1)))
    yield "tensorclass", Step(rows, rows.sum(1), "note", batch_size=[2])
    yield "TensorDictParams", TensorDictParams(TensorDict({"w": rows.clone()}))
    yield "ModelOutput", BaseModelOutput(last_hidden_state=rows, hidden_states=hidden)
    yield "with None", SequenceClassifierOutput(logits=rows)
    yield "BatchEncoding", BatchEncoding({"input_ids": rows.long()})
    yield "in a list", [tensordict(rows), {"out": BaseModelOutput(rows)}, rows]


def leaves(value):
    """Return the tensors of a container, in the order of its keys."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Step):
        value = value.to_tensordict()
    if hasattr(value, "items"):
        value = [part for _, part in sorted(value.items())]
    if not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in leaves(part)]


def described(value):
    tensors = leaves(value)
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return (
        type(value).__name__,
        [type(t).__name__ for t in tensors],
        [t.tolist() for t in tensors],
        [t.requires_grad for t in tensors],
        [places.index(place) for place in places],
        getattr(value, "is_locked", None),
        getattr(value, "names", None),
    )


def values():
    for name, value in containers():
        ways = {
            "result": rpc.rpc_sync("callee", give, args=(value,)),
            "reference": rpc.remote("callee", give, args=(value,)).to_here(),
        }
        for way, got in ways.items():
            show(name, way, described(got)[:4], described(got) == described(value))


def gradients():
    for name, make in {
        "TensorDict": lambda rows: TensorDict({"a": rows * 3, "b": rows[0] * 2}),
        "lazy stack": lambda rows: LazyStackedTensorDict(
            TensorDict({"a": rows * 3}), TensorDict({"a": rows * 5})
        ),
        "tensorclass": lambda rows: Step(
            rows * 3, rows.sum(1) * 2, "x", batch_size=[2]
        ),
        "ModelOutput": lambda rows: BaseModelOutput(last_hidden_state=rows * 3),
    }.items():
        rows = torch.arange(6.0).reshape(2, 3).requires_grad_()
        with autograd.context() as context:
            got = rpc.rpc_sync("callee", twice, args=(make(rows),))
            loss = sum(tensor.sum() for tensor in leaves(got))
            autograd.backward(context, [loss])
            show(name, "gradient", autograd.get_gradients(context)[rows].tolist())


def modules():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = torch.arange(6).reshape(2, 3)
    model = BertModel(config)
    here = model(tokens).last_hidden_state
    there = rpc.remote("callee", give, args=(model,))
    output = there.rpc_sync().forward(tokens)
    show(type(output).__name__, torch.allclose(output.last_hidden_state, here))
    copied = there.to_here()
    same = [module(tokens).pooler_output for module in (copied, model)]
    show(type(copied).__name__, torch.equal(*same))
    layer = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["a"], out_keys=["c"])
    rows = tensordict(torch.ones(2, 3))
    far = rpc.remote("callee", give, args=(layer,)).rpc_sync().forward(rows)
    show(
        type(far).__name__, sorted(far.keys()), torch.equal(far["c"], layer(rows)["c"])
    )


def main(rank):
    rpc.init_rpc(("callee", "caller")[rank], rank=rank, world_size=2)
    if rank == 1:
        values()
        gradients()
        modules()
    rpc.shutdown()


if __name__ == "__main__":
    run_ranks(main, 2)
