"""Data parallelism and pipelines, on workers."""
