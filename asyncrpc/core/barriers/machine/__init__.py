"""The machines of barriers and of the end of a group.

`series` decides one series of rounds of the same members, `table` all series of one
worker; `termination` decides a graceful end, whose waves are rounds.
"""
