"""The kinds of program that PyTorch's tutorials and examples build on RPC.

A parameter server that gathers a batch of gradients, data parallelism around a remote
embedding, a pipeline of two modules, an agent with observers, and a recurrent model in
three parts.
"""

import threading

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from spawning import free_port, run_ranks, show
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

WORKERS = 4
NAMES = ("master", "one", "two", "ps")
STEPS = 4


def seeded(seed, make, *sizes):
    torch.manual_seed(seed)
    return make(*sizes)


def parameter_rrefs(module_rref):
    return [rpc.RRef(parameter) for parameter in module_rref.local_value().parameters()]


def rounded(values):
    return [round(float(value), 4) for value in values]


# --- a batch: two trainers wait for the sum of their gradients -----------------------


class BatchServer:
    def __init__(self):
        self.model = seeded(1, nn.Linear, 4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.lock = threading.Lock()
        self.updated = torch.futures.Future()
        self.arrived = 0
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update(server_rref, gradients):
        self = server_rref.local_value()
        with self.lock:
            for parameter, gradient in zip(
                self.model.parameters(), gradients, strict=True
            ):
                parameter.grad += gradient / 2
            self.arrived += 1
            updated = self.updated
            if self.arrived == 2:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.arrived, self.updated = 0, torch.futures.Future()
                updated.set_result(self.model)
        return updated


def train_on_batches(server_rref, seed):
    x, y = seeded(seed, torch.randn, 8, 4), seeded(seed, torch.rand, 8, 2)
    model = server_rref.rpc_sync().get()
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model = rpc.rpc_sync(
            server_rref.owner(), BatchServer.update, args=(server_rref, gradients)
        )
        losses.append(loss.item())
    return rounded(losses)


def batch():
    server = rpc.remote("ps", BatchServer)
    futures = [
        rpc.rpc_async(name, train_on_batches, args=(server, seed))
        for seed, name in enumerate(("one", "two"))
    ]
    for future in futures:
        show("batch", future.wait())


# --- data parallelism around a remote embedding --------------------------------------


class Hybrid(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.dense = DistributedDataParallel(seeded(2, nn.Linear, 6, 3))

    def forward(self, indices, offsets):
        return self.dense(self.embedding.forward(indices, offsets))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        # Both trainers make theirs at once: a seed would be of both.
        weights = torch.linspace(-1, 1, 120).reshape(20, 6)
        self.bag = nn.EmbeddingBag.from_pretrained(weights, freeze=False, mode="sum")

    def forward(self, indices, offsets):
        return self.bag(indices, offsets)


def train_hybrid(rank, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    # Each trainer has an embedding of its own: steps of two would race for one.
    model = Hybrid(RemoteModule("ps/cpu", Bag))
    rrefs = model.embedding.remote_parameters()
    rrefs += [rpc.RRef(parameter) for parameter in model.dense.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    indices = torch.arange(12) + rank
    target = torch.tensor([0, 1, 2])
    losses = []
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            output = model(indices, torch.tensor([0, 4, 8]))
            loss = nn.functional.cross_entropy(output, target)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    dist.destroy_process_group()
    return rounded(losses)


def hybrid(address):
    futures = [
        rpc.rpc_async(name, train_hybrid, args=(rank, address))
        for rank, name in enumerate(("one", "two"))
    ]
    for future in futures:
        show("hybrid", future.wait())


# --- a pipeline of two modules, with several splits ----------------------------------


class Shard(nn.Module):
    def __init__(self, seed, inputs, outputs):
        super().__init__()
        self.lock = threading.Lock()
        self.layers = nn.Sequential(seeded(seed, nn.Linear, inputs, outputs), nn.Tanh())

    def forward(self, x_rref):
        x = x_rref.to_here()
        with self.lock:
            return self.layers(x)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def pipeline():
    first = rpc.remote("one", Shard, args=(4, 8, 16))
    second = rpc.remote("two", Shard, args=(5, 16, 2))
    # This asks for the type of the value.  In torch a first `rpc_async()` that waits
    # for the answer has lost its context, and so its gradients.
    rrefs = [
        rref
        for shard in (first, second)
        for rref in shard.remote().parameter_rrefs().to_here()
    ]
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.05)
    x, y = seeded(6, torch.randn, 12, 8), seeded(6, torch.rand, 12, 2)
    losses = []
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            outputs = []
            for part in x.split(3):
                middle = first.remote().forward(rpc.RRef(part))
                outputs.append(second.rpc_async().forward(middle))
            output = torch.cat(torch.futures.wait_all(outputs))
            loss = nn.functional.mse_loss(output, y)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    show("pipeline", rounded(losses))


# --- an agent, and observers that ask it what to do ----------------------------------


class Observer:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def run_episode(self, agent_rref, steps):
        for _ in range(steps):
            state = torch.rand(4, generator=self.generator)
            action = rpc.rpc_sync(
                agent_rref.owner(), Agent.select, args=(agent_rref, id_here(), state)
            )
            reward = float(action == int(state.argmax()) % 2)
            agent_rref.rpc_sync().report(id_here(), reward)


def id_here():
    return rpc.get_worker_info().id


class Agent:
    def __init__(self):
        self.rref = rpc.RRef(self)
        self.policy = seeded(7, nn.Linear, 4, 2)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)
        self.observers = [
            rpc.remote(name, Observer, args=(seed,))
            for seed, name in enumerate(("one", "two"))
        ]
        self.log_odds = {observer.owner().id: [] for observer in self.observers}
        self.rewards = {observer.owner().id: [] for observer in self.observers}

    @staticmethod
    def select(agent_rref, observer, state):
        self = agent_rref.local_value()
        log_odds = self.policy(state).log_softmax(0)
        action = int(log_odds.argmax())
        self.log_odds[observer].append(log_odds[action])
        return action

    def report(self, observer, reward):
        self.rewards[observer].append(reward)

    def run_episode(self, steps):
        futures = [
            observer.rpc_async().run_episode(self.rref, steps)
            for observer in self.observers
        ]
        torch.futures.wait_all(futures)

    def learn(self):
        pairs = [
            (odds, reward)
            for observer, all_odds in self.log_odds.items()
            for odds, reward in zip(all_odds, self.rewards[observer], strict=True)
        ]
        loss = sum(-odds * reward for odds, reward in pairs)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        total = sum(reward for _, reward in pairs)
        for kept in (*self.log_odds.values(), *self.rewards.values()):
            kept.clear()
        return total, round(loss.item(), 3)


def reinforcement():
    agent = Agent()
    for _ in range(STEPS):
        agent.run_episode(10)
        show("agent", *agent.learn())


# --- a recurrent model: an embedding, a cell here, and a decoder ---------------------


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = seeded(8, nn.Embedding, 11, 6)

    def forward(self, tokens):
        return self.table(tokens)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = seeded(9, nn.Linear, 5, 11)

    def forward(self, hidden):
        return self.linear(hidden)


def call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def remote_method(method, rref, *args):
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = rpc.remote("ps", Table)
        self.cell = seeded(10, nn.LSTM, 6, 5)
        self.decoder = rpc.remote("ps", Decoder)

    def forward(self, tokens, hidden):
        embedded = remote_method(Table.forward, self.table, tokens)
        output, hidden = self.cell(embedded, hidden)
        return remote_method(Decoder.forward, self.decoder, output), hidden

    def rrefs(self):
        here = [rpc.RRef(parameter) for parameter in self.cell.parameters()]
        there = [
            rpc.rpc_sync("ps", parameter_rrefs, args=(module,))
            for module in (self.table, self.decoder)
        ]
        return [*there[0], *here, *there[1]]


def recurrent():
    model = Recurrent()
    optimizer = DistributedOptimizer(torch.optim.SGD, model.rrefs(), lr=0.1)
    tokens = seeded(11, torch.randint, 0, 11, (6, 3))
    hidden = (torch.zeros(1, 3, 5), torch.zeros(1, 3, 5))
    losses = []
    for _ in range(STEPS):
        hidden = tuple(state.detach() for state in hidden)
        with dist_autograd.context() as context_id:
            output, hidden = model(tokens[:-1], hidden)
            loss = nn.functional.cross_entropy(
                output.flatten(0, 1), tokens[1:].flatten()
            )
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    show("recurrent", rounded(losses))


def main(rank):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=300)
    rpc.init_rpc(
        NAMES[rank], rank=rank, world_size=WORKERS, rpc_backend_options=options
    )
    if rank == 0:
        batch()
        hybrid(f"tcp://127.0.0.1:{free_port()}")
        pipeline()
        reinforcement()
        recurrent()
    rpc.shutdown()


if __name__ == "__main__":
    run_ranks(main, WORKERS)
