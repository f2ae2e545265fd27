"""What the training rows measure: the same modules and functions on both sides.

(a) a model of two layers on one worker, (b) a chain of layers over three, (c) trainers
of one parameter server, (d) many crossings in one pass, (e) a large graph on one
worker.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

FEATURES: Final = 256
BATCH: Final = 64
HIDDEN: Final = 64
SERVER_FEATURES: Final = 64  # small: what is measured is how trainers get in each
SERVER_BATCH: Final = 16  # other's way
TRAINERS: Final = 8
CROSSINGS: Final = 200
NODES: Final = 2000
LEARNING_RATE: Final = 0.01


class TwoLayers(nn.Module):
    """(a): two layers and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, HIDDEN)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(BATCH, FEATURES)` to `(BATCH, HIDDEN)`."""
        result: torch.Tensor = self.layers(rows)
        return result


class Square(nn.Module):
    """(b) and (c): one layer, as wide at its end as at its beginning."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.layer = nn.Linear(features, features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows to rows."""
        result: torch.Tensor = self.layer(rows).relu()
        return result


class Point(nn.Module):
    """(d): next to nothing, so that the crossing is what is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale


class Long(nn.Module):
    """(e): a graph of many small nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map 8 numbers to 8, by way of `NODES` nodes."""
        for _ in range(NODES // 2):
            rows = rows * self.scale + 0.001
        return rows
