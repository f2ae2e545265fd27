"""Devices of a worker: names, maps, and copies between device and host memory."""
