"""The machines of rounds: who has come, who passes, what fails, when a group has ended.

`series` decides one series of rounds of the same members, `table` all of one worker;
`termination` takes the decisions of a graceful end, whose waves are rounds.
"""
