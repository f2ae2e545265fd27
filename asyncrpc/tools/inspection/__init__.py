"""Why a group waits; its public names are in `asyncrpc.inspection`."""
