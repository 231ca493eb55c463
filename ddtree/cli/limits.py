"""The most that a command may be asked for, so that a digit too many is told at once and not tried."""

MOST_NODES = 65_536
"""Nodes of a tree besides the root."""

MOST_DEPTH = 1_024
"""Tokens of a path."""

MOST_NEW_TOKENS = 65_536
"""New tokens of a prompt, whose room in the cache is set aside beforehand."""
