"""torchrl: RPCCollector gathers frames of environments in two other processes."""

import warnings

from spawning import free_port, show
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.collectors.distributed import RPCCollector
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv


def make_policy():
    env = ContinuousActionVecMockEnv()
    size = env.observation_spec["observation"].shape[-1]
    layer = nn.Linear(size, env.action_spec.shape[-1])
    return TensorDictModule(layer, in_keys=["observation"], out_keys=["action"])


def main():
    collector = RPCCollector(
        [ContinuousActionVecMockEnv] * 2,
        make_policy(),
        collector_class=Collector,
        total_frames=120,
        frames_per_batch=40,
        launcher="mp",
        sync=True,
        tcp_port=str(free_port()),
    )
    sizes = [batch.numel() for batch in collector]
    collector.update_policy_weights_()
    collector.shutdown()
    show("frames", sizes)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
