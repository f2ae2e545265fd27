"""Modules on other workers; their public names are in `asyncrpc.nn`."""
