"""What decides where calls to replicas go; no I/O, no time and no randomness in it."""
