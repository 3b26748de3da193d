"""The examples of images run, learn something, and say what is wrong with their flags."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from examples.images import classify, detect, gan
from meshlib.data.samples import frame, grid, write_png
from meshlib.data.samples import image_folders as image_data

SMALL = ["--side", "16", "--features", "2", "--blocks", "1", "1", "--epochs", "1", "--examples", "128"]


def unpacked(path: Path) -> np.ndarray:
    """The pixels of a PNG file without filters."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_pictures(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    picture = rng.random((7, 5, 3))
    frame(picture, np.array([-3.0, 1.0, 4.0, 9.0]), np.ones(3))
    write_png(tmp_path / "a.png", picture)
    np.testing.assert_array_equal(unpacked(tmp_path / "a.png"), np.rint(255 * picture))
    assert (picture[3, 1:] == 1).all()
    assert (picture[:4, 1] == 1).all()
    assert grid(rng.random((6, 4, 4, 1)), 2, 3).shape == (2 * 14, 3 * 14, 3)


def test_images_train_save_and_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "model.safetensors")
    flags = [*SMALL, "--mesh", "data:8", "--layout", "batch:data"]
    assert classify.main([*flags, "--save", model]) == 0
    out = capsys.readouterr().out
    assert "shapes drawn by the program" in out
    assert "test accuracy" in out
    assert "all_reduce" in out
    pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    write_png(tmp_path / "a.png", np.random.default_rng(0).random((20, 24, 3)))
    assert classify.main([*flags, "--load", model, "--predict", str(tmp_path / "a.png")]) == 0
    shares = [float(row.split("%")[0]) for row in capsys.readouterr().out.splitlines()[1:]]
    assert len(shares) == 5
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100.1


def test_detection_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--steps", "2", "--scenes", "16", "--unseen", "16", "--features", "2", "--batch", "8", "--side", "32"]
    assert detect.main([*flags, "--picture", str(tmp_path / "found.png")]) == 0
    out = capsys.readouterr().out
    assert "mAP" in out
    assert unpacked(tmp_path / "found.png").shape == (4 * 98, 4 * 98, 3)


def test_a_gan_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_data, "DRAWN_TRAIN", 80)
    flags = ["--steps", "2", "--features", "2", "--batch", "8", "--every", "1", "--picture", str(tmp_path / "made.png")]
    assert gan.main(flags) == 0
    assert "discriminator loss" in capsys.readouterr().out
    assert unpacked(tmp_path / "made.png").shape == (11 * 66, 10 * 66, 3)


@pytest.mark.parametrize(
    ("run", "flags", "message"),
    [
        (classify.main, ["--data", "/nonexistent"], "classify.py: /nonexistent: expected a folder"),
        (classify.main, ["--examples", "64", "--side", "8", "--layout", "bacth:rows"], "did you mean 'batch'"),
        (detect.main, ["--layout", "spacial"], "did you mean 'spatial'"),
    ],
)
def test_wrong_flags_give_one_message(
    run: Callable[[list[str]], int], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(flags) == 2
    err = capsys.readouterr().err
    assert re.search(message, err)
    assert "Traceback" not in err


@pytest.mark.parametrize("batches", ["0", "64,x", ""])
def test_batches_are_counts(batches: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        classify.main(["--batches", batches])
    assert "expected numbers of at least 1, such as 8,16" in capsys.readouterr().err
