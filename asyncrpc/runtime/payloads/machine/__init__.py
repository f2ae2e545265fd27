"""What the machines of payloads decide: which way they take, in what memory."""
