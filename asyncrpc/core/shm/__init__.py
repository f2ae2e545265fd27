"""Memory that processes of one host and user share: slabs, and what lies where in them.

A *slab* is anonymous memory (memfd) that its creator divides into blocks.  `machine`
decides who holds which block; `slab` makes and maps the memory.  The runtime tells
peers about slabs and passes them on.
"""
