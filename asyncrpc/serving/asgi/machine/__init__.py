"""What the ASGI door decides: what goes on, and when a handler is cancelled."""
