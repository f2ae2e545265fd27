"""The end of a backward pass: its gradients are committed, or dropped, everywhere."""

from __future__ import annotations

from asyncrpc.core.autograd.contexts import Contexts
from asyncrpc.core.autograd.messages import AbortPass, CommitPass, PassIds
from asyncrpc.core.autograd.ports import Pool
from asyncrpc.core.autograd.state import ABORTED, Pass
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.trace.ring import plain


class PassEnds:
    """Ends passes here, and on the workers that this one asked."""

    def __init__(
        self,
        me: Incarnation,
        contexts: Contexts,
        directory: Directory,
        pool: Pool,
        recorder: FlightRecorder,
    ) -> None:
        self._me = me
        self._contexts = contexts
        self._directory = directory
        self._pool = pool
        self._recorder = recorder

    def note_begun(self, backward_pass: Pass) -> None:
        """Note that this worker takes part in a pass."""
        backward_pass.began_s = backward_pass.began_s or self._recorder.now_s()

    def finish(self, ids: PassIds, *, commit: bool) -> None:
        """Commit or abort a pass here, and on the workers that this one asked."""
        context_id, pass_id = ids
        state = self._contexts.open.get(context_id)
        backward_pass = (
            None if state is None else state.end_pass(pass_id, commit=commit)
        )
        if state is None or backward_pass is None:
            return
        self._note_end(backward_pass, commit=commit)
        if commit:
            state.commit(backward_pass.flow.staged, defers=self._pool.is_exclusive)
        else:
            backward_pass.abort(ABORTED)
        # It takes the way of the requests, so that workers that only others know learn
        # of it; on each link it comes after the request that made them take part.
        for peer in backward_pass.onward:
            if peer not in (self._me, pass_id.root):
                link = self._directory.link_of(peer)
                if link is not None:
                    link.tell(CommitPass(ids) if commit else AbortPass(ids))

    def _note_end(self, backward_pass: Pass, *, commit: bool) -> None:
        recorder = self._recorder
        recorder.passes.record(
            (
                recorder.now_s(),
                backward_pass.began_s,
                plain(backward_pass.ids.context_id),
                backward_pass.root,
                commit,
                backward_pass.ids.pass_id.number,
                backward_pass.task,
            )
        )
