"""Optimizers of remote parameters; their public names are in `asyncrpc.optim`."""
