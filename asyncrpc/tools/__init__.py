"""Looking at workers: inspection, metrics, the command line."""
