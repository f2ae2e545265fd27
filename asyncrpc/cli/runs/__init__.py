"""What `asyncrpc run` writes down of a run, and how verbs find it, or a model."""
