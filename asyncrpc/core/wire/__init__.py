"""Bytes to messages and back: sans-IO, and without torch."""
