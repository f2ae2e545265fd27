"""The machines of membership: who is a member, and which member tells which."""
