"""`asyncrpc manifest`: writes files for schedulers, with one module for each target.

A target has a function that adds its arguments to a parser, and one that writes.
"""
