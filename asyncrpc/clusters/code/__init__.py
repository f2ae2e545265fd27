"""The program's own modules on hosts that do not see its files."""
