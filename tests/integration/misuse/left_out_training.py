"""What of training is public by its name, and is not for users to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_MADE_BY: Final = {
    "autograd.Context": "`autograd.context`",
    "ddp.GradBucket": "the reducer, which gives it to hooks",
    "ddp.Join": "`DistributedDataParallel.join`",
    "nn.PipelineReport": "`Pipeline.forward_backward`",
    "nn.PipelineResult": "`Pipeline.forward_backward`",
    "nn.ActionSpan": "`Pipeline.forward_backward`",
    "nn.StageReport": "`Pipeline.forward_backward`",
    "optim.StepResult": "`DistributedOptimizer.step`",
}
_OF_HOOKS: Final = (
    "PowerSGDState.begin",
    "PowerSGDState.count",
    "PowerSGDState.error_for",
    "PowerSGDState.q_for",
    "PowerSGDState.qs_for",
    "PowerSGDState.warn_of_zeros",
    *(
        f"{state}.{method}"
        for state in ("HookState", "PostLocalSGDState", "PowerSGDState")
        for method in ("bind", "numbers_of", "parameter")
    ),
)
_ABSTRACT: Final = (
    "ModelAverager",
    "ModelAverager.average_parameters",
    "ModelAverager.close",
)

LEFT_OUT_TRAINING: Final[Mapping[str, str]] = {
    **{name: f"made by {maker}" for name, maker in _MADE_BY.items()},
    **{f"ddp.{name}": "of the module and its hook" for name in _OF_HOOKS},
    **{f"ddp.{name}": "abstract: used by its subclasses" for name in _ABSTRACT},
}
