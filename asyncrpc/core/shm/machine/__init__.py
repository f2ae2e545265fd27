"""What decides about shared memory, without any: sizes, offsets and who holds what."""
