"""PJRT's runtime for programs on XLA devices; its public names are `asyncrpc.xla`'s."""
