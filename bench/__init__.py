"""Measurements side by side with the peers' tools: `make bench`, or `python -m bench`; docs/benchmarks.md explains."""
