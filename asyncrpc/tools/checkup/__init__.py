"""Checks whether this process and its host are fit for a worker.

`reading` gathers facts; `machine` decides, from these facts only, what is well, what is
worth a note, what is wrong, and what to do.  Nothing is changed.
"""
