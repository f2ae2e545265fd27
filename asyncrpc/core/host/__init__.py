"""This host: its identity, its directories, what it runs short of."""
