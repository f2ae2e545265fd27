"""Processes of one host; their public names are in `asyncrpc.multiprocessing`."""
