"""Text for the language model: what is read, how it is cut, and every fault of a path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshlib.core.errors import DataError
from meshlib.data.samples import plain_text as text_data


def test_default_is_the_standard_library() -> None:
    text = text_data.load_text()
    assert len(text.train) > 1_000_000
    assert b"def " in text.train.tobytes()
    assert "standard library" in text.source
    assert 2.5 < text.unigram_entropy < 4.0  # English and code: 3 to 3.5 nats a byte


def test_folder_in_order_without_binaries_and_held_out_is_the_end(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"b" * 60)
    (tmp_path / "a.txt").write_bytes(b"a" * 40)
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    text = text_data.load_text(tmp_path)
    assert text.train.tobytes() == b"a" * 40 + b"b" * 55
    assert text.held_out.tobytes() == b"b" * 5
    assert "2 files, 100 bytes" in text.source


def test_entropy_of_known_counts(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_bytes(b"ab" * 100)
    assert text_data.load_text(file).unigram_entropy == pytest.approx(np.log(2))


def test_windows_overlap_by_the_byte_to_predict() -> None:
    cut = text_data.windows(np.arange(11, dtype=np.uint8), 3)
    assert cut.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert cut.dtype == np.int32


def test_faults_of_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        text_data.load_text(tmp_path / "nothing")
    with pytest.raises(DataError, match="holds no text"):
        text_data.load_text(tmp_path)
    with pytest.raises(DataError, match="has 3 bytes, one example of --length 3 takes 4"):
        text_data.windows(np.zeros(3, np.uint8), 3)
