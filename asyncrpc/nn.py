"""Modules that live on other workers, and pipelines of them.

Source: torch.distributed.nn, torch.distributed.pipelining.
"""

from asyncrpc.core.nn.remote_module import RemoteModule
from asyncrpc.parallel.pipeline.pipeline import Pipeline, PipelineResult
from asyncrpc.parallel.pipeline.pipeline_report import PipelineReport, StageReport
from asyncrpc.parallel.pipeline.schedules import ActionKind, ActionSpan, StageAction

__all__ = [
    "ActionKind",
    "ActionSpan",
    "Pipeline",
    "PipelineReport",
    "PipelineResult",
    "RemoteModule",
    "StageAction",
    "StageReport",
]
