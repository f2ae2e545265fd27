"""Decides for ASGI which messages pass, and when a handler is cancelled."""
