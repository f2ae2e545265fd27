"""Events of a worker; their public names are in `asyncrpc.trace`."""
