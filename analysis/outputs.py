"""Folders that programs write what they found to."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

__all__ = ["CannotWrite", "make_folder"]


class CannotWrite(click.ClickException):
    """What was to be written cannot be."""

    exit_code = 2

    def __init__(self, path: Path, error: OSError, option: str = "--output") -> None:
        super().__init__(f"{path} cannot be written ({error.strerror}): choose another with {option}")


def make_folder(folder: Path | None, option: str = "--output") -> None:
    """Make a folder, and see that a file can be written there, before the work whose results it is for.

    Raises
    ------
    CannotWrite
        The folder, why, and the option that names it.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CannotWrite(folder, error, option) from error
