"""Brings new weights to the model that a worker serves; a service of the worker.

Threads copy the tensors into new storage, apart from the tensors that are served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import torch

from asyncrpc.core.arguments import wrong
from asyncrpc.errors import RejectedError, UsageError
from asyncrpc.extend import PeerLink, ServiceHost, WorkerId, answers, ask
from asyncrpc.serving.weights.machine.versions import TransferId
from asyncrpc.serving.weights.messages import (
    SERVICE,
    AbandonTransfer,
    AskVersions,
    BeginTransfer,
    CommitTransfer,
    PutTensors,
    RollBack,
    SendWeights,
    SetCanary,
    VersionReport,
)
from asyncrpc.serving.weights.served_model import ServedModel
from asyncrpc.serving.weights.transfer import new_serial, stage_weights

logger = logging.getLogger("asyncrpc")


class WeightsService:
    """Takes new weights for one model."""

    name = SERVICE

    def __init__(self, host: ServiceHost, model: ServedModel[Any]) -> None:
        self._host = host
        self.model = model
        self._weights = model.weights
        self._copying = asyncio.Lock()  # parts are copied one after the other
        self.routes = (
            answers(AskVersions, self._on_ask),
            answers(BeginTransfer, self._on_begin),
            answers(PutTensors, self._on_put),
            answers(CommitTransfer, self._on_commit),
            answers(AbandonTransfer, self._on_abandon),
            answers(SetCanary, self._on_canary),
            answers(RollBack, self._on_roll_back),
            answers(SendWeights, self._on_send),
        )

    async def _on_ask(self, _: PeerLink, __: AskVersions) -> VersionReport:
        return self._weights.report

    async def _on_begin(self, link: PeerLink, message: BeginTransfer) -> None:
        transfer, weights = (
            TransferId(link.peer.incarnation, message.serial),
            self._weights,
        )
        weights.begin(transfer, message.version, message.tensors)
        try:
            room = await self._host.run_in_thread(weights.room_for)
        except BaseException:
            self._give_up(transfer)
            raise
        weights.set_room(transfer, room)

    async def _on_put(self, link: PeerLink, message: PutTensors) -> None:
        transfer, weights = (
            TransferId(link.peer.incarnation, message.serial),
            self._weights,
        )
        async with self._copying:
            self._check_part(transfer, message)
            room = weights.room
            targets = [room[name] for name in message.names]
            try:
                await self._host.run_in_thread(
                    lambda: _copy_all(targets, message.tensors)
                )
                if not weights.history.take(transfer, message.names):
                    return
                prepared = await self._host.run_in_thread(weights.with_room)
            except RejectedError:  # it was given up meanwhile
                raise
            except BaseException:
                self._give_up(transfer)
                raise
            if weights.history.transfer == transfer:
                weights.set_next(prepared)

    def _check_part(self, transfer: TransferId, message: PutTensors) -> None:
        """Refuse a part that does not belong to the transfer under way."""
        history, room = self._weights.history, self._weights.room
        if history.transfer != transfer or not room:
            raise RejectedError("this transfer is no longer under way")
        if len(message.names) != len(message.tensors):
            raise UsageError("each tensor needs one name")
        for name, tensor in zip(message.names, message.tensors, strict=True):
            if name not in history.missing:
                raise UsageError(f"tensor {name!r} was not expected")
            if tensor.shape != room[name].shape:
                raise UsageError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)}, but was"
                    f" announced with shape {tuple(room[name].shape)}"
                )

    async def _on_commit(
        self, link: PeerLink, message: CommitTransfer
    ) -> VersionReport:
        check_canary(message.canary)
        transfer = TransferId(link.peer.incarnation, message.serial)
        self._weights.commit(transfer, message.canary)
        logger.info("worker %r serves version %d", self._host.name, self.model.version)
        return self._weights.report

    async def _on_abandon(self, link: PeerLink, message: AbandonTransfer) -> None:
        self._give_up(TransferId(link.peer.incarnation, message.serial))

    async def _on_canary(self, _: PeerLink, message: SetCanary) -> VersionReport:
        check_canary(message.share)
        self._weights.set_canary(message.version, message.share)
        return self._weights.report

    async def _on_roll_back(self, _: PeerLink, message: RollBack) -> VersionReport:
        self._weights.roll_back(message.version)
        return self._weights.report

    async def _on_send(self, link: PeerLink, message: SendWeights) -> int | None:
        weights, version = self._weights, self.model.version
        if message.known == version:
            return None
        # All of one version: its tensors are never written to, even if another comes.
        serial = new_serial(self._host.random_bytes)
        await stage_weights(link, serial, weights.state(), version)
        await ask(link, CommitTransfer(serial, 0.0))
        return version

    def _give_up(self, transfer: TransferId) -> None:
        if self._weights.history.abandon(transfer):
            self._weights.drop()

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Give up the weights of a publisher that is gone."""
        if self._weights.history.on_lost(peer.incarnation):
            logger.warning(
                "worker %r: new weights of %r are given up: %s",
                self._host.name,
                peer.name,
                reason,
            )
            self._weights.drop()

    async def close(self) -> None:
        """Do nothing: the service holds no resources."""


def _copy_all(targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)


def check_canary(share: float) -> None:
    """Raise UsageError unless a canary share is a number from 0 to 1."""
    if not 0 <= share <= 1:
        raise wrong("canary", "a number from 0 to 1", share)


def serve_weights(host: ServiceHost, model: ServedModel[Any]) -> None:
    """Let publishers bring weights to a model."""
    service = host.find_service(WeightsService)
    if service is not None and service.model is not model:
        raise UsageError(f"worker {host.name!r} serves another model")
    host.add_service(WeightsService(host, model))
