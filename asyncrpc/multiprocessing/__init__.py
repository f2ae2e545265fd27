"""Processes of one host: started and watched, and a queue between them."""

from asyncrpc.multiprocessing.launcher import launch
from asyncrpc.multiprocessing.processes import Processes
from asyncrpc.multiprocessing.queue import Queue
from asyncrpc.multiprocessing.spawning import spawn

__all__ = ["Processes", "Queue", "launch", "spawn"]
