"""What the dashboard decides: who may look, what a view shows, in which order."""
