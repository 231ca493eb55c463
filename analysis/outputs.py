"""Folders that programs write what they found to."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

__all__ = ["make_folder"]


def make_folder(folder: Path | None, option: str = "--output") -> None:
    """Make a folder, and see that a file can be written there, before the work whose results it is for.

    Raises
    ------
    click.UsageError
        It cannot be written: the folder, why, and the option that names it.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise click.UsageError(
            f"{folder} cannot be written ({error.strerror}): choose another with {option}"
        ) from error
