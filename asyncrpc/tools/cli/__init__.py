"""The command line: `asyncrpc` or `python -m asyncrpc`."""
