"""Decides where calls to replicas go; without I/O, clock or randomness."""
