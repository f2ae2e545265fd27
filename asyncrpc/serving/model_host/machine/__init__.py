"""Decides when model processes start and end; without I/O, clock or randomness."""
