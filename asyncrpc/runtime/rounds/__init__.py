"""Rounds: one way of "everyone has come", for barriers, rendezvous and the end."""
