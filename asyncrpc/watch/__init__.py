"""The watch: a small process beside a worker that says whether the worker still runs.

A worker whose interpreter is held by one long call of C code answers nothing, as one
that was stopped, or has died.  What tells them apart is on its host: what the kernel
says of its process, and when its event loop last ran, its *pulse*.  Peers on the same
host look for themselves; those on others ask at the worker's port, where the watch
answers if the worker does not.

The modules here are all that the process imports, so they know nothing but a few
modules of the standard library, not even `typing`: it takes 10 MiB and starts in 20 ms.
"""
