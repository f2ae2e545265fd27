"""Decides which requests run next, and which do not run at all."""
