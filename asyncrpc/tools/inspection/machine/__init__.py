"""Who waits for whom in a group, and who is at fault.  Sans-IO."""
