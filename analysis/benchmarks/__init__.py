"""Timings beside peers in the same run: ``ddtree bench``, and for reading files and batches of trees a command each."""
