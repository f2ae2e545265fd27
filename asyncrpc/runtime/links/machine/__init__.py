"""What the machines of links decide: who dials, who is alive, what survives."""
