"""Post-local SGD: gradients are averaged over all ranks at first, later over some.

Then the parameters must be averaged over all ranks from time to time, as
`PostLocalSGDOptimizer` does.

Source: torch/distributed/algorithms/ddp_comm_hooks/post_localSGD_hook.py; Lin et al.,
"Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any, Final

import torch

from asyncrpc.core.arguments import check_count, check_flag
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.argument_checks import (
    check_bucket,
    check_group,
    check_hook,
    check_state,
)
from asyncrpc.parallel.ddp.bucket import GradBucket
from asyncrpc.parallel.ddp.hooks.plain import average
from asyncrpc.parallel.ddp.hooks.states import HookState

logger = logging.getLogger("asyncrpc")

_SAVED: Final = ("start_localSGD_iter", "post_local_gradient_allreduce", "iter")


class PostLocalSGDState(HookState):
    """When to stop averaging over all ranks, and over which ranks to average then.

    It is saved by pickle or by `state_dict`; the groups are left out.

    Attributes:
        process_group: all ranks, as given; None: those of the module.
        subgroup: the ranks to average over later; None: the ranks of this host, for
            which a group is made when it is needed.
        start_localSGD_iter: steps whose gradients are averaged over all ranks.
        post_local_gradient_allreduce: whether gradients are averaged over `subgroup`
            later; if not, each rank goes on with its own.
        iter: steps that have been averaged over all ranks.

    Source: torch's `PostLocalSGDState`.
    """

    def __init__(
        self,
        process_group: Group | None,
        subgroup: Group | None,
        start_localSGD_iter: int,  # noqa: N803  torch's name
        *,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        """Make a state, with the same options at all ranks.

        Args:
            process_group: all ranks; None: those of the module it is registered with.
            subgroup: the ranks to average over later, including this one; None: the
                ranks of this host.
            start_localSGD_iter: steps whose gradients are averaged over all ranks.
            post_local_gradient_allreduce: average over `subgroup` later.

        Raises:
            UsageError: `start_localSGD_iter` is negative, or an argument has the wrong
                type.
        """
        super().__init__(process_group)
        if subgroup is not None:
            check_group(subgroup, "subgroup")
        check_count("start_localSGD_iter", start_localSGD_iter)
        check_flag("post_local_gradient_allreduce", post_local_gradient_allreduce)
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        self._had_subgroup = False
        self._host_group: Group | None = None

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step, if the bucket is the last one.

        Raises:
            UsageError: `bucket` is not a GradBucket.
        """
        check_bucket(bucket)
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("local SGD begins after %d steps", self.iter)

    async def local_group(self) -> Group:
        """Return the ranks to average over after the first steps.

        Raises:
            CollectiveError: the ranks could not tell each other their hosts.
            UsageError: the state has no group yet; or the state was loaded, and its
                subgroup has not been set again.

        Cancellation:
            The call fails on all ranks.
        """
        if self.subgroup is not None:
            return self.subgroup
        if self._had_subgroup:
            raise UsageError(
                "this PostLocalSGDState had a subgroup, which is not saved with it: "
                "set `subgroup` again"
            )
        if self._host_group is None:
            host = hashlib.blake2b(HOST_ID.encode()).digest()
            hosts = await self.group.all_gather(torch.tensor(list(host), device="cpu"))
            mine = hosts[self.group.rank]
            here = [rank for rank, other in enumerate(hosts) if other.equal(mine)]
            self._host_group = self.group.subgroup(here, name="local SGD")
        return self._host_group

    # --- saving ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the groups: plain values."""
        had = self._had_subgroup or self.subgroup is not None
        return {**{name: getattr(self, name) for name in _SAVED}, "had_subgroup": had}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; groups and module stay.

        Raises:
            UsageError: the state has other fields.
        """
        check_state(state, (*_SAVED, "had_subgroup"), "state")
        for name in _SAVED:
            setattr(self, name, state[name])
        self._had_subgroup = state["had_subgroup"]

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("a PostLocalSGDState is saved without its groups")
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None, None, 0)  # type: ignore[misc]  # as if new, but for those
        self.load_state_dict(state)
        logger.warning(
            "a PostLocalSGDState was loaded without its groups: set `subgroup` again "
            "if it had one, and `process_group` if it is not the module's"
        )


async def post_localSGD_hook(  # noqa: N802  torch's name
    state: PostLocalSGDState, bucket: GradBucket
) -> torch.Tensor:
    """Reduce a bucket to its mean over all ranks at first, and over some later.

    Args:
        state: when to change, and to which ranks.
        bucket: the bucket to reduce, in place.

    Returns:
        The bucket's buffer.

    Raises:
        CollectiveError: a rank failed or was lost; all ranks that take part fail.
        UsageError: the state has no group, or an argument has the wrong type.

    Cancellation:
        The call fails on all ranks that take part; the buffer's content is undefined.

    Source: torch's `post_localSGD_hook`.
    """
    check_hook(state, PostLocalSGDState, bucket)
    buffer = bucket.buffer()
    if state.iter < state.start_localSGD_iter:
        await average(state.group, buffer)
        state.maybe_increase_iter(bucket)
    elif state.post_local_gradient_allreduce:
        await average(await state.local_group(), buffer)
    return buffer
