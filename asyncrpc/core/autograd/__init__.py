"""Distributed autograd; its public names are in `asyncrpc.autograd`."""
