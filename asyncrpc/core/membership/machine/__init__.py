"""The machines of membership: who is a member, and how news of it spreads."""
