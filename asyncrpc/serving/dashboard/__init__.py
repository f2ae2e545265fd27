"""A dashboard of a group: its workers, calls, training and hangs, as a page.

It only looks.  A page asks again and again, by server-sent events; one look is shared
by all who look, and nobody is asked while no browser is there.

    machine/       what is decided: who may look, rows and their order, in slices
    views          what each view asks the group for
    look           one look for all browsers
    streams        server-sent events
    access         sessions and tokens
    application    paths
    files          the page, from memory
    mounting       for a worker, or for an observer
    static/        the page
"""

from asyncrpc.serving.dashboard.mounting import dashboard, observing_dashboard

__all__ = ["dashboard", "observing_dashboard"]
