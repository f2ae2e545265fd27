"""Workers inside aiohttp applications; `asyncrpc.serving` has its public names."""
