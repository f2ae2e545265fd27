"""Links to other workers: dialed, kept alive, resumed, given up.

A link is to one incarnation of a worker and outlives its connections.
"""
