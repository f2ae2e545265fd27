"""Decisions of a gang, without Ray: who starts when, and which bundles do not fit."""
