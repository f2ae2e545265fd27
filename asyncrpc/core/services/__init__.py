"""What a service of a worker is: its messages, its routes, and what it may use."""
