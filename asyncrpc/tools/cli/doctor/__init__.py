"""`asyncrpc doctor`: checks whether a worker can start here, and advises."""
