"""What decides which weights a replica serves; no I/O, no time and no tensor in it."""
