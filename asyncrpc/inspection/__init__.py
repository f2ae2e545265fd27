"""Looks into running workers: tasks, threads, calls, and why they wait."""

from asyncrpc.inspection.asking import why

__all__ = ["why"]
