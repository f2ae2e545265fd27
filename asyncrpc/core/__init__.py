"""The core: calls between workers, references, autograd, optimizers, modules.

`asyncrpc.core.worker.Worker` is the bare one; `asyncrpc.Worker` adds references and
autograd.
"""
