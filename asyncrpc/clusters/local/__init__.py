"""Workers of a cluster as processes of this host."""
