"""Rounds: all members come, for a barrier, a rendezvous or the end of the group."""
