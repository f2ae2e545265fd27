"""The records of runs and models on disk, and how commands find them."""
