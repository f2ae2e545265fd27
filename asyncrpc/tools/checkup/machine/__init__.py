"""The checks: each a function of plain facts."""
