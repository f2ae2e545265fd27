"""Objects on the workers of a cluster, called by their methods."""
