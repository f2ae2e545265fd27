"""Who is in the group: met, joined, told to each other; barriers, and its end."""
