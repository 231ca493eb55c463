"""Timings beside a peer in the same run, each a command: ``python -m ddtree.analysis.benchmarks.build_tree``."""
