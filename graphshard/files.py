"""Files that are either complete or not there.

Several ranks, or several runs, may write a file of the same name while others read it. Each writer
fills a scratch folder of its own beside the target; one rename then puts the result in its place.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path``; a reader sees the old contents or all of the new ones.

    Raises:
        OSError: the folder of ``path`` does not exist, or cannot be written to.
    """
    with whole(path) as scratch:
        scratch.write_text(text)


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Yield a path to make a file or a folder at, which replaces ``target`` when the block ends.

    If the block raises, ``target`` stays as it was. An existing folder is replaced only if it is
    empty.

    Raises:
        OSError: the folder of ``target`` does not exist, or cannot be written to.
    """
    # ``mkdtemp`` creates the folder exclusively: processes on other hosts get other names as well.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        scratch = Path(folder, target.name)
        yield scratch
        scratch.replace(target)
