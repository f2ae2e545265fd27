"""Workers on a Ray cluster; their public names are in `asyncrpc.ray`."""
