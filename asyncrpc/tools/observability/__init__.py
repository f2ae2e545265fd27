"""Metrics and traces; their public names are in `asyncrpc.observability`."""
