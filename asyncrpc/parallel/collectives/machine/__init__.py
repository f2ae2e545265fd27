"""What a collective does, decided without a loop, a clock or a tensor."""
