"""Optimizers that share out their state, or average parameters, over ranks."""
