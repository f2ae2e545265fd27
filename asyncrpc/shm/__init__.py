"""Memory that processes of one host and user share: slabs, and what lies where in them.

A *slab* is a piece of memory without a name (memfd) that its creator divides into
blocks.  `machine` decides which block is whose; `slab` makes and maps the memory.  How
peers come to a slab, and what they are told of it, is the runtime's business.
"""
