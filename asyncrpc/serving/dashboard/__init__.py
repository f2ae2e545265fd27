"""A dashboard of a group: its workers, calls, training and hangs, as a page.

It only looks.  A page is updated by server-sent events; all browsers share one look,
and no worker is asked while no browser is connected.

    machine/       decisions: access, rows and their order, in slices
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
