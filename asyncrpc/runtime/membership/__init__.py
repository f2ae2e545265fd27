"""The group: how members meet, join and learn of each other."""
