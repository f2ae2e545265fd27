"""`asyncrpc doctor`: whether a worker can start and run here, and what to do."""
