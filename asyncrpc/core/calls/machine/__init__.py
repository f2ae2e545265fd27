"""The machines of calls: matching of answers, credit, and order of streams."""
