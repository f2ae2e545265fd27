"""`asyncrpc manifest`: writes what a scheduler is given, one module for each.

A target is a function that adds its arguments to a parser, and one that writes.
"""
