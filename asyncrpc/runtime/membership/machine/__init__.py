"""What the machines of membership decide: who is a member, who tells whom."""
