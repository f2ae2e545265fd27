"""The machines of payloads: which way a payload takes, and in which memory."""
