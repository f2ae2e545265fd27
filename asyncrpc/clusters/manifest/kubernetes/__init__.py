"""Manifests of Kubernetes: pure functions from a `Workload` to plain dictionaries.

Each kind of workload has a module.  Their common parts are in `pod` and `network`.
The cluster's secret is mounted as a file; it is never part of a manifest.
"""
