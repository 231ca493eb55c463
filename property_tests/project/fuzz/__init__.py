"""Fuzzing of all that parses bytes: KDTR files, checkpoints, imports, cases, and the command line.

``make fuzz`` runs it to a number of bytes, with atheris (guided by coverage) where that is installed; ``test_fuzz.py``
runs a slice of the same targets in ``make test``. What it last found is in ``RESULTS.md``.
"""
