"""Decides what a preempted worker does when, without I/O: see `preempting`."""
