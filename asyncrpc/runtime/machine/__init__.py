"""Decisions of the runtime: plain state, no I/O, no time, no tasks."""
