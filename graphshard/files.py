"""Write files atomically: readers see the old file, the new one or none, never a part of one.

Several ranks and runs may write the same path while others read it: each writer fills its own
scratch folder next to the target, and one rename puts the result in place.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: readers see the old or the new contents.

    Raises:
        OSError: the folder of ``path`` does not exist or cannot be written to, or ``path`` is a
            folder.
    """
    with whole(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def write_output(option: str, path: Path, text: str) -> None:
    """Write the file that a command's ``option`` names, atomically.

    Raises:
        argparse.ArgumentTypeError: the file cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot write {option} {path}: {error.strerror}: choose a file in a writable folder"
        ) from error


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Yield a path for a new file or folder that replaces ``target`` when the block ends.

    If the block raises, ``target`` is unchanged.

    Raises:
        OSError: the folder of ``target`` does not exist or cannot be written to; or, at the end of
            the block, ``target`` is a folder that is not empty, or is a file where the block wrote
            a folder, or the reverse. The output of the block is then lost.
    """
    # ``mkdtemp`` creates the folder exclusively: processes on other hosts get different names, too.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        scratch = Path(folder, target.name)
        yield scratch
        scratch.replace(target)
