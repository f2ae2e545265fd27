"""Warnings of the scheduler; their public names are in `asyncrpc`."""
