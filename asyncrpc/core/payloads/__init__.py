"""The bytes of tensors on their way: lanes, shared memory, received memory."""
