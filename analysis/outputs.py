"""Folders that programs write what they found to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import click

from ddtree.kdtr import check_regular

__all__ = ["CannotWrite", "make_folder"]


class CannotWrite(click.ClickException):
    """What was to be written cannot be."""

    exit_code = 2

    def __init__(self, path: Path, error: OSError, option: str = "--output") -> None:
        super().__init__(f"{path} cannot be written ({error.strerror}): choose another with {option}")


def make_folder(folder: Path | None, option: str = "--output", *, names: Iterable[str] = ()) -> None:
    """Make a folder, and see that files can be written there, before the work whose results they are for.

    Those of ``names`` that are there must be files, which will be replaced.

    Raises
    ------
    CannotWrite
        The folder or file, why, and the option that names it.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CannotWrite(folder, error, option) from error
    for path in (folder / name for name in names):
        try:
            if path.exists():
                check_regular(path)
        except OSError as error:
            raise CannotWrite(path, error, option) from error
