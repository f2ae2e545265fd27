"""Pipelines of modules on workers; their public names are in `asyncrpc.nn`."""
