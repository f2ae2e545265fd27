"""The event loop of a worker, its threads and its clock."""
