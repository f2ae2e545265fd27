"""Collectives of a group; their public names are in `asyncrpc.collectives`."""
