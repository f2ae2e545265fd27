"""Decides for a gang, without Ray: which workers start when; why bundles do not fit."""
