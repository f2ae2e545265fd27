"""The group: how members meet, join a running group, and learn of each other."""
