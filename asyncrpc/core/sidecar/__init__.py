"""The sidecar: a small process that tells peers whether its worker still runs.

A worker whose interpreter is held by one long call of C code answers nothing, like one
that was stopped or has died.  Its host can tell them apart: by what the kernel says of
its process, and by the time when its event loop last ran, its *pulse*.  Peers on the
same host look for themselves; peers on other hosts ask at the worker's port, where the
sidecar answers if the worker does not.

The process imports only the modules here, so they use only a few modules of the
standard library, not even `typing`: it takes 10 MiB and starts in 20 ms.
"""
