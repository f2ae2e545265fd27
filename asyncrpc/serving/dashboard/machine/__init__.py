"""Decides on access, on what a view shows, and in which order."""
