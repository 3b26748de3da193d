"""Byte-level tokens of a file, a folder, or the sources of Python's standard library.

The default is the standard library's source code: a few megabytes of real text without a download. A file or folder
given by the user must be readable and long enough: any fault is a `DataError`.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshlib.core.errors import DataError
from meshlib.core.text import counted

Tokens = NDArray[np.uint8]
Windows = NDArray[np.int32]

VOCAB = 256  # a token is a byte
LIMIT_BYTES = 8 * 2**20  # enough for any run here
HELD_OUT = 0.05  # the end of the text, held out


@dataclass(frozen=True)
class Text:
    """Bytes of a text, uint8 [n]: training and held-out part; `source` is one line to print."""

    train: Tokens
    held_out: Tokens
    source: str

    @property
    def unigram_entropy(self) -> float:
        """Entropy in nats per byte of the best model of byte frequencies without context.

        A model that has learned anything from context has a lower loss.
        """
        counts = np.bincount(self.train, minlength=VOCAB)
        share = counts[counts > 0] / len(self.train)
        return float(-(share * np.log(share)).sum())


def load_text(path: str | Path | None = None) -> Text:
    """The text at `path`: a file, or all files of a folder by name; by default Python's standard library.

    Returns: `Text`, cut at LIMIT_BYTES.
    Raises: DataError for a path that does not exist, cannot be read, or has no text.
    """
    if path is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files, what = sorted(folder.glob("*.py")), "sources of the standard library"
    else:
        folder = Path(path).expanduser()
        if not folder.exists():
            raise DataError(f"--text {path}: there is no such file or folder")
        files, what = [folder] if folder.is_file() else sorted(folder.rglob("*")), str(path)
    count, data = 0, bytearray()
    for text in _texts(files, named=files == [folder]):
        count += 1
        data += text
        if len(data) >= LIMIT_BYTES:
            break
    if not data:
        raise DataError(f"{folder}: holds no text: 0 files without zero bytes")
    tokens = np.frombuffer(bytes(data[:LIMIT_BYTES]), np.uint8)
    split = len(tokens) - int(HELD_OUT * len(tokens))
    return Text(tokens[:split], tokens[split:], f"{what}: {counted(count, 'file')}, {len(tokens):,} bytes")


def _texts(files: list[Path], named: bool) -> Iterator[bytes]:
    """The contents of text files; files with a zero byte, and unreadable ones in a folder, are skipped."""
    for file in files:
        if not file.is_file():
            continue
        try:
            with file.open("rb") as opened:
                text = opened.read(LIMIT_BYTES)
        except OSError as fault:
            if named:
                raise DataError(f"--text {file}: cannot be read: {fault.strerror}") from None
            continue
        if text and b"\0" not in text[:8192]:
            yield text


def windows(tokens: Tokens, length: int) -> Windows:
    """The text cut into examples: int32 [n, length + 1]; the last byte of one is the first of the next.

    Raises: DataError for a text shorter than one example.
    """
    count = (len(tokens) - 1) // length
    if count < 1:
        raise DataError(f"the text has {len(tokens)} bytes, one example of --length {length} takes {length + 1}")
    starts = length * np.arange(count)
    cut: Windows = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return cut
