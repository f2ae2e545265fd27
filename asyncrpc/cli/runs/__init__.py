"""What `asyncrpc run` writes down of a run, and how the other verbs find it."""
