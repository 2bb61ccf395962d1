"""Files that people hand in: read whole, but never without end."""

from __future__ import annotations

from pathlib import Path

MOST_BYTES = 64 << 20
"""A long sweep or a run of `kda gate regret` has under 1 MB."""


def file_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: it is no regular file, larger than `MOST_BYTES`, or not UTF-8; the message names it.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file")
    with path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES >> 20} MiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
