"""Weights that are exchanged while a model serves: versions, canaries, the way back."""

from asyncrpc.serving.weights.publisher import Publication, Publisher, catch_up
from asyncrpc.serving.weights.served_model import ServedModel, ServedVersion

__all__ = ["Publication", "Publisher", "ServedModel", "ServedVersion", "catch_up"]
