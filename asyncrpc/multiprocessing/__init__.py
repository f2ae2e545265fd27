"""Processes of one host, started and watched: `launch` and what it returns."""

from asyncrpc.errors import ProcessFailedError
from asyncrpc.multiprocessing.launcher import launch
from asyncrpc.multiprocessing.processes import Processes

__all__ = ["ProcessFailedError", "Processes", "launch"]
