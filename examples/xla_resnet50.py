"""torch_xla's ResNet50 benchmark: the native step beside DDP, or how both learn.

    $ python examples/xla_resnet50.py --fake_data --ddp
    $ python examples/xla_resnet50.py --ddp --plot xla_resnet50.png

torch_xla's program takes 128 images of 224 x 224 a step; here it is 8 of 64 x 64 unless
`--batch_size` and `--image_size` say otherwise: so much two cores of a CPU compute in
about a second.  What is sent is the same, 102 MB of gradients a step.  The second
command trains on scikit-learn's digits, drawn larger.  What both do is in
`xla_benchmark.py`.

Source: test/test_train_mp_imagenet.py of torch_xla; the network is that of K. He et
al., "Deep Residual Learning for Image Recognition", CVPR 2016, with the stride in the
3 x 3 convolution as torchvision has it.
"""

from __future__ import annotations

import torch
import xla_benchmark
from torch import nn
from torch.nn import functional

REPORTED = 1 - 395.97 / 418.54  # torch_xla's DDP on a TPU v3-8: 5.39 % behind
DEPTHS = (3, 4, 6, 3)
CLASSES = 1000


class Convolution(nn.Sequential):
    """A convolution and its norm."""

    def __init__(self, of: int, to: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(of, to, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(to),
        )


class Bottleneck(nn.Module):
    """Three convolutions, of which the second is narrow, and a way around them."""

    def __init__(self, of: int, width: int, stride: int) -> None:
        super().__init__()
        to = 4 * width
        self.narrow = Convolution(of, width, 1)
        self.across = Convolution(width, width, 3, stride)
        self.widen = Convolution(width, to, 1)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or of != to:
            self.around = Convolution(of, to, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of 4 x `width` channels."""
        inner = self.across(self.narrow(images).relu()).relu()
        return functional.relu(self.widen(inner) + self.around(images))


class ResNet50(nn.Module):
    """50 layers, of 25,557,032 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Convolution(3, 64, 7, stride=2)
        blocks, of = [], 64
        for stage, depth in enumerate(DEPTHS):
            width = 64 << stage
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(of, width, stride))
                of = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.out = nn.Linear(of, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores `(batch, 1000)` of images `(batch, 3, size, size)`."""
        features = functional.max_pool2d(self.stem(images).relu(), 3, 2, padding=1)
        scores: torch.Tensor = self.out(self.blocks(features).mean((2, 3)))
        return scores


PROGRAM = xla_benchmark.Program(
    name="ResNet50",
    network=ResNet50,
    channels=3,
    weight_decay=1e-4,
    compared="mean",
    reported=REPORTED,
)

if __name__ == "__main__":
    parser = xla_benchmark.arguments(
        "Train ResNet50, natively and by DDP.",
        num_epochs=1,
        steps=40,
        log_steps=2,
        batch_size=8,
        image_size=64,
        lr=0.01,
        momentum=0.9,
        plot="xla_resnet50.png",
    )
    xla_benchmark.run(PROGRAM, parser.parse_args())
