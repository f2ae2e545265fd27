"""Data parallel training; its public names are in `asyncrpc.ddp`."""
