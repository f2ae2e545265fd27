"""torch_xla's MNIST benchmark: the native step beside DDP, or how both learn.

    $ python examples/xla_mnist.py --fake_data --ddp
    $ python examples/xla_mnist.py --ddp --plot xla_mnist.png

The first prints images per second in torch_xla's table.  The second trains on
scikit-learn's digits, drawn as large as those of MNIST, prints how many it recognizes
after each epoch, and draws the curves.  What both do is in `xla_benchmark.py`.

Source: test/test_train_mp_mnist.py of torch_xla, whose network this is.
"""

from __future__ import annotations

import torch
import xla_benchmark
from torch import nn
from torch.nn import functional

REPORTED = 1 - 14313.78 / 24351.74  # torch_xla's DDP on a TPU v3-8: 41.22 % behind


class Net(nn.Module):
    """Two convolutions and two layers, of 21,900 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 10, kernel_size=5)
        self.first_norm = nn.BatchNorm2d(10)
        self.second = nn.Conv2d(10, 20, kernel_size=5)
        self.second_norm = nn.BatchNorm2d(20)
        self.hidden = nn.Linear(320, 50)
        self.out = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores `(batch, 10)` of images `(batch, 1, 28, 28)`."""
        half = functional.max_pool2d(self.first(images), 2).relu()
        quarter = functional.max_pool2d(self.second(self.first_norm(half)), 2).relu()
        flat = self.second_norm(quarter).flatten(1)
        scores: torch.Tensor = self.out(self.hidden(flat).relu())
        return scores


PROGRAM = xla_benchmark.Program(
    name="MNIST",
    network=Net,
    channels=1,
    weight_decay=0.0,
    compared="90 %",
    reported=REPORTED,
)

if __name__ == "__main__":
    parser = xla_benchmark.arguments(
        "Train torch_xla's MNIST network, natively and by DDP.",
        steps=234,  # 60,000 images over 2 ranks
        log_steps=13,
        image_size=28,
        lr=0.01,
        momentum=0.5,
        plot="xla_mnist.png",
    )
    options = parser.parse_args()
    if options.batch_size is None:  # the digits are few
        options.batch_size = 128 if options.fake_data else 16
    xla_benchmark.run(PROGRAM, options)
