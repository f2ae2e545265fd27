"""What both doors of an application decide: answers to errors, deadlines, events."""
