"""Whether this process and its host are fit for a worker: facts, read, and judged.

`reading` gathers facts; `machine` decides from these facts alone what is well, what is
worth a note, what is wrong, and what to do.  Nothing is changed.
"""
