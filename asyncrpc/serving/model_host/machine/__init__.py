"""What decides; without I/O, time or chance."""
