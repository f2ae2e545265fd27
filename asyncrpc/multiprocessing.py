"""Processes of one host: started and watched, and a queue between them."""

from asyncrpc.core.multiprocessing.launcher import launch
from asyncrpc.core.multiprocessing.processes import Processes
from asyncrpc.core.multiprocessing.queue import Queue
from asyncrpc.core.multiprocessing.spawning import spawn

__all__ = ["Processes", "Queue", "launch", "spawn"]
