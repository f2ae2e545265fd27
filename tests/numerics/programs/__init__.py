"""Random training programs, on workers and in one process: `python -m` runs many."""
