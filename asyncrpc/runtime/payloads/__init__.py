"""The bytes of tensors on their way: lanes, shared memory, where they land."""
