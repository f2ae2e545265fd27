"""The package in which torch.distributed.nn keeps its remote module."""
