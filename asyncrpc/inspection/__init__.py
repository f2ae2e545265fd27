"""Looks into running workers: tasks, threads, calls, and why they wait."""
