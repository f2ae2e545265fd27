"""The machines of links: which side dials, which peers live, which link survives."""
