"""The owner's side of a distributed optimizer (placeholder until the real one lands)."""
from asyncrpc.errors import MalformedError


class OptimizerService:
    name = "optim"
    def __init__(self, worker, autograd): self.worker=worker
    async def on_request(self, link, method, value): raise MalformedError(method)
    def on_notice(self, link, method, value): raise MalformedError(method)
    def on_peer_lost(self, peer, reason): pass
    async def close(self): pass
