"""What the machines of calls decide: whose answer, how much room, what order."""
