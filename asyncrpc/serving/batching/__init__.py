"""Requests that gather in batches, or that enter and leave between steps."""

from asyncrpc.serving.batching.batcher import Batcher
from asyncrpc.serving.batching.continuous import ContinuousBatcher
from asyncrpc.serving.batching.limiter import Limiter
from asyncrpc.serving.batching.sequence_model import SequenceModel
from asyncrpc.serving.batching.statistics import GenerationStats, QueueStats

__all__ = [
    "Batcher",
    "ContinuousBatcher",
    "GenerationStats",
    "Limiter",
    "QueueStats",
    "SequenceModel",
]
