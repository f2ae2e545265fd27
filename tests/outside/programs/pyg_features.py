"""torch_geometric: features of a graph in two partitions, looked up across workers."""

import os

import torch
from spawning import run_ranks, show
from torch_geometric.distributed import LocalFeatureStore
from torch_geometric.distributed import rpc as pyg
from torch_geometric.distributed.dist_context import DistContext
from torch_geometric.distributed.local_feature_store import RPCCallFeatureLookup
from torch_geometric.distributed.rpc import RPCRouter

NODES = 20


def main(rank):
    context = DistContext(rank, rank, 2, 2, "dist-features")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    pyg.init_rpc(context, address, port)
    show("initialized", pyg.rpc_is_initialized())

    mine = torch.arange(NODES // 2) + rank * NODES // 2
    store = LocalFeatureStore()
    store.put_global_id(mine, group_name=None)
    store.put_tensor(mine[:, None] * torch.ones(3), group_name=None, attr_name="x")
    store.node_feat_pb = torch.arange(NODES) // (NODES // 2)
    store.num_partitions, store.partition_idx = 2, rank
    store.meta = {"is_hetero": False}

    workers = pyg.rpc_partition_to_workers(context, 2, rank)
    show("partitions", workers)
    router = RPCRouter(workers)
    store.set_rpc_router(router)
    call_id = pyg.rpc_register(RPCCallFeatureLookup(store))
    pyg.global_barrier()
    wanted = torch.randperm(NODES)
    features = store.lookup_features(wanted, is_node_feat=True).wait()
    show(
        "features",
        bool((features[:, 0] == wanted).all()),
        tuple(features.shape),
        call_id,
    )
    gathered = pyg.global_all_gather({"rank": rank})
    show("gathered", sorted(value["rank"] for value in gathered.values()))
    pyg.shutdown_rpc(id=context.worker_name, graceful=True)
    show("initialized", pyg.rpc_is_initialized())


if __name__ == "__main__":
    run_ranks(main, 2)
