"""Calls: from a function and its arguments to an answer, on both sides of a link."""
