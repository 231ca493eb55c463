"""Kernels, a folder a backend: the same file and function names as :mod:`ddtree.reference`.

Importing this package loads nothing: a backend's library is imported with its first operation.
"""
