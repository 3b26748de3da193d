"""The examples' digits: every source, every fault of a file or folder, and the drawn digits as a task."""

import gzip
import hashlib
import io
import os
import re
import struct
from collections.abc import Callable
from http.client import IncompleteRead
from itertools import pairwise
from pathlib import Path
from typing import IO
from urllib.error import URLError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlib.core.errors import DataError
from meshlib.data.samples import mnist_digits as mnist_data
from meshlib.data.samples.mnist_digits import Digits, Opener, draw, load_digits, read_idx
from tests.effort import deep, draws
from tests.paths import SHARED

REAL = SHARED / "data" / "mnist"
CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, CODES[array.dtype.name], array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def small_files(train: int = 5, test: int = 3) -> dict[str, bytes]:
    """The four files by stem; image i is full of the value i, and label i is i."""
    files = {}
    for stem, count in (("train", train), ("t10k", test)):
        values = np.arange(count, dtype=np.uint8)
        files[f"{stem}-images"] = idx_bytes(np.broadcast_to(values[:, None, None], (count, 28, 28)))
        files[f"{stem}-labels"] = idx_bytes(values)
    return files


def write(folder: Path, files: dict[str, bytes], name: Callable[[str, int], str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in files.items():
        dims = 3 if stem.endswith("images") else 1
        (folder / (name(stem, dims) if name else f"{stem}-idx{dims}-ubyte")).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reads the user's settings or cache, and none reaches the network."""
    for name in ("MESHLIB_MNIST", "MESHLIB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(mnist_data, "_open_url", no_network)
    # Drawing 10,000 digits takes 0.3 s: once, in the tests of `draw`, is enough.
    monkeypatch.setattr(mnist_data, "DRAWN_TRAIN", 80)
    monkeypatch.setattr(mnist_data, "DRAWN_TEST", 20)


def no_network(url: str, timeout: float) -> IO[bytes]:
    raise AssertionError(f"a test opened {url}")


# ---- IDX files ----


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(7,), (2, 3), (4, 2, 3)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_read_idx_returns_what_was_written(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], pack: Callable[[bytes], bytes]
) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    path = tmp_path / "misnamed.gz"  # .gz on plain files too: the bytes count, not the name
    path.write_bytes(pack(idx_bytes(array)))
    found = read_idx(path)
    assert found.dtype == array.dtype
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, array)


GOOD = idx_bytes(np.zeros((2, 28, 28), np.uint8))  # 16 bytes of header, 1568 of pixels
PACKED = gzip.compress(GOOD)
FILE_FAULTS = {
    "empty": (b"", "wrong magic: expected hex 00 00 08|09|0b|0c|0d|0e 01..20, found an empty file"),
    "text": (b"<html>", "wrong magic: expected hex 00 00 08|09|0b|0c|0d|0e 01..20, found 3c 68 74 6d"),
    "three bytes": (GOOD[:3], "found 00 00 08"),
    "unknown type": (b"\0\0\x0a" + GOOD[3:], "found 00 00 0a 03"),
    "no dimensions": (b"\0\0\x08\0" + GOOD[4:], "found 00 00 08 00"),
    "33 dimensions": (b"\0\0\x08\x21" + GOOD[4:], "found 00 00 08 21"),
    "other dimensions": (idx_bytes(np.zeros(9, np.uint8)), "number of dimensions: expected 3, found 1"),
    "half a header": (GOOD[:15], "truncated header: expected 16 bytes, found 15"),
    "one byte short": (
        GOOD[:-1],
        "truncated data: expected 1568 bytes for shape (2, 28, 28), found 1567",
    ),
    "one byte long": (
        GOOD + b"x",
        "trailing bytes: expected 1568 bytes for shape (2, 28, 28), found 1569",
    ),
    "no elements": (
        struct.pack(">4B3I", 0, 0, 8, 3, 0, 2**32 - 1, 2**32 - 1),
        "expected at least 1 element, found 0 in shape (0, 4294967295, 4294967295)",
    ),
    "gzip cut": (PACKED[:-9], f"corrupt gzip: expected a whole stream, found: .*in {len(PACKED) - 9} bytes"),
    "gzip wrong sum": (PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], "corrupt gzip: .*CRC check failed"),
    "gzip garbled": (PACKED[:10] + b"\xff" * 9 + PACKED[19:], "corrupt gzip: .*invalid block type"),
    "gzip of a fault": (gzip.compress(GOOD[:-1]), "truncated data: expected 1568 .*found 1567"),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_read_idx_names_file_expected_and_found(tmp_path: Path, fault: str) -> None:
    content, message = FILE_FAULTS[fault]
    path = tmp_path / "some-images"
    path.write_bytes(content)
    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: .*{pattern}"):
        read_idx(path, dims=3)


def test_read_idx_of_no_file_and_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent can't be read: No such file"):
        read_idx(tmp_path / "absent")
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path))} can't be read: it is a folder"):
        read_idx(tmp_path)


@settings(deadline=None)  # the first example may meet a cold disk
@given(st.sampled_from([GOOD, PACKED]), st.data())
def test_damage_is_a_data_error_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(damaged[: data.draw(st.integers(0, len(content)))])
    try:
        found = read_idx(path)
    except DataError as fault:
        assert str(path) in str(fault)  # noqa: PT017
    else:  # the damage hit the data alone
        assert isinstance(found, np.ndarray)
        assert found.size <= len(gzip.decompress(content) if content == PACKED else content)


# ---- folders ----

NAMINGS: dict[str, Callable[[str, int], str]] = {
    "plain": lambda stem, dims: f"{stem}-idx{dims}-ubyte",
    "gz": lambda stem, dims: f"{stem}-idx{dims}-ubyte.gz",
    "dot": lambda stem, dims: f"{stem}.idx{dims}-ubyte",
    "dot gz": lambda stem, dims: f"{stem}.idx{dims}-ubyte.gz",
}


def check_small(digits: Digits) -> None:
    assert [len(part) for part in (digits.train_images, digits.train_labels)] == [5, 5]
    assert [len(part) for part in (digits.test_images, digits.test_labels)] == [3, 3]
    assert digits.train_images.dtype == np.float32
    assert digits.train_labels.dtype == np.int32
    np.testing.assert_array_equal(digits.train_labels, range(5))
    np.testing.assert_array_equal(digits.test_labels, range(3))
    expected = np.broadcast_to(np.arange(5, dtype=np.float32)[:, None] / np.float32(255), (5, 784))
    np.testing.assert_array_equal(digits.train_images, expected)
    np.testing.assert_array_equal(digits.test_images, expected[:3])


@pytest.mark.parametrize("naming", NAMINGS)
def test_folder_under_every_name(tmp_path: Path, naming: str) -> None:
    files = {stem: gzip.compress(content) if "gz" in naming else content for stem, content in small_files().items()}
    digits = load_digits(write(tmp_path, files, NAMINGS[naming]))
    check_small(digits)
    assert digits.source == f"IDX files in {tmp_path}: 5 train, 3 test"


def test_environment_names_the_folder_and_the_argument_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "mine", small_files())
    monkeypatch.setenv("MESHLIB_MNIST", str(folder))
    check_small(load_digits())
    monkeypatch.setenv("MESHLIB_MNIST", str(tmp_path / "absent"))
    check_small(load_digits(str(folder)))
    with pytest.raises(DataError, match=r"absent: expected a folder of IDX files, found nothing there"):
        load_digits()


def test_test_pair_alone_is_shuffled_and_split(tmp_path: Path) -> None:
    files = {stem: content for stem, content in small_files(test=10).items() if stem.startswith("t10k")}
    write(tmp_path, files)
    digits = load_digits(tmp_path, seed=3)
    assert digits.source == (
        f"t10k IDX files in {tmp_path}, no train files: shuffled with seed 3 and split 80/20: 8 train, 2 test"
    )
    labels = np.concatenate([digits.train_labels, digits.test_labels])
    assert len(digits.test_labels) == 2
    assert sorted(labels) == list(range(10))
    assert list(labels) != list(range(10))
    # Image i is full of the value i, so every image kept its label.
    images = np.concatenate([digits.train_images, digits.test_images])
    np.testing.assert_array_equal(np.rint(255 * images[:, 0]), labels)
    np.testing.assert_array_equal(load_digits(tmp_path, seed=3).train_labels, digits.train_labels)
    assert list(load_digits(tmp_path, seed=4).train_labels) != list(digits.train_labels)


def test_real_test_pair_splits_into_8000_and_2000() -> None:
    if not REAL.is_dir():
        pytest.skip(f"no MNIST files in {REAL}")
    digits = load_digits(REAL)
    assert digits.train_images.shape == (8000, 784)
    assert digits.test_images.shape == (2000, 784)
    assert "split 80/20: 8000 train, 2000 test" in digits.source
    assert (digits.train_images.min(), digits.train_images.max()) == (0, 1)
    # Counts of each digit in the MNIST test set, as its labels file has them.
    counts = np.bincount(np.concatenate([digits.train_labels, digits.test_labels]))
    assert list(counts) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def without(*stems: str) -> dict[str, bytes]:
    return {stem: content for stem, content in small_files().items() if stem not in stems}


BAD_LABEL = idx_bytes(np.array([0, 1, 10, 3, 4], np.uint8))
FOLDER_FAULTS = {
    "empty folder": (
        {},
        r": expected 4 files, 4 missing: looked for train-images-idx3-ubyte, .*; found an empty",
    ),
    "one label file missing": (
        without("train-labels"),
        r": expected 4 files, 1 missing: looked for train-labels-idx1-ubyte, train-labels-idx1-ubyte.gz, "
        r"train-labels.idx1-ubyte, train-labels.idx1-ubyte.gz; found t10k-images-idx3-ubyte, ",
    ),
    "test pair missing": (
        without("t10k-images", "t10k-labels"),
        r": expected 4 files, 2 missing: looked for t10k-images-idx3-ubyte, .*t10k-labels-idx1-ubyte, ",
    ),
    "half a test pair": (
        without("train-images", "train-labels", "t10k-labels"),
        r": expected 2 files, 1 missing: looked for t10k-labels-idx1-ubyte, ",
    ),
    "counts differ": (
        small_files() | {"train-labels": idx_bytes(np.zeros(4, np.uint8))},
        r"train-labels-idx1-ubyte: expected 5 labels, one per image of train-images-idx3-ubyte, found 4$",
    ),
    "label 10": (
        small_files() | {"train-labels": BAD_LABEL},
        r"train-labels-idx1-ubyte: expected labels in 0..9, found 10 at index 2$",
    ),
    "image size": (
        small_files() | {"t10k-images": idx_bytes(np.zeros((3, 28, 27), np.uint8))},
        r"t10k-images-idx3-ubyte: wrong image size: expected 28 x 28, found 28 x 27$",
    ),
    "element type": (
        small_files() | {"t10k-labels": idx_bytes(np.zeros(3, np.int32))},
        r"t10k-labels-idx1-ubyte: wrong element type: expected uint8, found int32$",
    ),
    "labels as images": (
        small_files() | {"train-images": idx_bytes(np.zeros(5, np.uint8))},
        r"train-images-idx3-ubyte: wrong number of dimensions: expected 3, found 1$",
    ),
    "one image to split": (
        {stem: content for stem, content in small_files(test=1).items() if stem.startswith("t10k")},
        r"t10k-images-idx3-ubyte: expected at least 2 images to split 80/20, found 1$",
    ),
}


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_folder_faults(tmp_path: Path, fault: str) -> None:
    files, message = FOLDER_FAULTS[fault]
    write(tmp_path, files)
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path))}.*{message}"):
        load_digits(tmp_path)


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "digits.zip"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"digits.zip: expected a folder of IDX files, found a file$"):
        load_digits(path)


# ---- cache and download ----


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Four small .gz files by URL, with the sizes and sums that the download expects."""
    by_url = {}
    for stem, content in small_files().items():
        packed = gzip.compress(content)
        dims = 3 if stem.endswith("images") else 1
        by_url[f"{mnist_data.MIRROR}{stem}-idx{dims}-ubyte.gz"] = packed
        published = (len(packed), hashlib.sha256(packed).hexdigest())
        monkeypatch.setitem(mnist_data.DOWNLOADS, stem, published)
    return by_url


def opener_of(
    by_url: dict[str, bytes], opened: list[str] | None = None, instead: dict[str, IO[bytes]] | None = None
) -> Opener:
    """Answers from `by_url`, or with the response in `instead`; notes the URLs in `opened`."""

    def open_url(url: str, timeout: float) -> IO[bytes]:
        assert 0 < timeout <= 10
        if opened is not None:
            opened.append(url)
        return (instead or {}).get(url) or io.BytesIO(by_url[url])

    return open_url


def test_download_fills_the_default_cache_once(tmp_path: Path, served: dict[str, bytes]) -> None:
    opened: list[str] = []
    digits = load_digits(opener=opener_of(served, opened))
    check_small(digits)
    cache = tmp_path / "xdg" / "meshlib" / "mnist"
    assert digits.source == f"IDX files in {cache}: 5 train, 3 test"
    assert sorted(path.name for path in cache.iterdir()) == sorted(url.rpartition("/")[2] for url in served)
    assert opened == list(served)
    check_small(load_digits(opener=no_network))  # from the cache
    check_small(load_digits(download=False))


def test_cache_follows_home_without_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / ".cache" / "meshlib" / "mnist", small_files())
    check_small(load_digits())


def test_download_fetches_only_what_the_cache_lacks(tmp_path: Path, served: dict[str, bytes]) -> None:
    write(tmp_path, without("t10k-labels"))
    opened: list[str] = []
    check_small(load_digits(cache=tmp_path, opener=opener_of(served, opened)))
    assert opened == [mnist_data.MIRROR + "t10k-labels-idx1-ubyte.gz"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (URLError("Name or service not known"), "<urlopen error Name or service not known>"),
        (TimeoutError("timed out"), "timed out"),
        (TimeoutError(), "TimeoutError"),
        (ConnectionResetError(104, "reset by peer"), "[Errno 104] reset by peer"),
        (IncompleteRead(b"12345", 7), "IncompleteRead(5 bytes read, 7 more expected)"),
    ],
)
def test_no_network_draws_digits_and_says_why(tmp_path: Path, error: Exception, reason: str) -> None:
    def fail(url: str, timeout: float) -> IO[bytes]:
        raise error

    digits = load_digits(cache=tmp_path / "cache", opener=fail, seed=2)
    assert digits.source == (
        f"digits drawn by the program with seed 2, not MNIST (download failed: {reason}): 80 train, 20 test"
    )
    assert digits.train_images.shape == (80, 784)
    assert digits.test_labels.shape == (20,)
    assert not (tmp_path / "cache").exists()


class Dropped(io.BytesIO):
    """A response whose connection is lost while it is read."""

    def read(self, size: int | None = -1) -> bytes:
        raise TimeoutError("the read timed out")


def test_bad_downloads_leave_no_file(tmp_path: Path, served: dict[str, bytes]) -> None:
    url = mnist_data.MIRROR + "train-labels-idx1-ubyte.gz"  # the second: the first stays, being whole
    good = served[url]
    size, sha256 = mnist_data.DOWNLOADS["train-labels"]
    flipped = bytes([good[0] ^ 1]) + good[1:]
    table: list[tuple[IO[bytes], str]] = [
        (io.BytesIO(good[:-5]), f"{url}: expected {size} bytes, found {size - 5}"),
        (io.BytesIO(b""), f"{url}: expected {size} bytes, found 0"),
        (io.BytesIO(good + b"xyz"), f"{url}: expected {size} bytes, found more than {size}"),
        (
            io.BytesIO(flipped),
            f"{url}: expected SHA-256 {sha256}, found {hashlib.sha256(flipped).hexdigest()}",
        ),
        (Dropped(), "the read timed out"),
    ]
    for response, reason in table:
        digits = load_digits(cache=tmp_path, opener=opener_of(served, instead={url: response}))
        assert f"not MNIST (download failed: {reason}): 80 train" in digits.source
        assert [path.name for path in tmp_path.iterdir()] == ["train-images-idx3-ubyte.gz"]


def test_a_failed_write_leaves_no_file(
    tmp_path: Path, served: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    digits = load_digits(cache=tmp_path / "cache", opener=opener_of(served))
    assert "can't be written: No space left on device" in digits.source
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_network_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not MNIST (download=False)" in load_digits(cache=tmp_path, download=False, opener=no_network).source
    monkeypatch.setenv("MESHLIB_OFFLINE", "1")
    assert "not MNIST (MESHLIB_OFFLINE is set)" in load_digits(cache=tmp_path, opener=no_network).source
    monkeypatch.setenv("MESHLIB_OFFLINE", "0")
    with pytest.raises(AssertionError, match="a test opened https://ossci-datasets"):
        load_digits(cache=tmp_path)


def test_a_faulty_cache_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    write(tmp_path, small_files() | {"train-labels": BAD_LABEL})
    with pytest.raises(DataError, match=r"found 10 at index 2 \(in the cache; delete the file to have it"):
        load_digits(cache=tmp_path)


def test_published_sizes_are_those_of_the_real_files() -> None:
    if not REAL.is_dir():
        pytest.skip(f"no MNIST files in {REAL}")
    for stem, dims in mnist_data.TEST:
        assert (REAL / f"{stem}-idx{dims}-ubyte.gz").stat().st_size == mnist_data.DOWNLOADS[stem][0]


# ---- drawn digits ----


def test_draw_is_repeatable_balanced_and_in_range() -> None:
    images, labels = draw(200, seed=1)
    again, same_labels = draw(200, seed=1)
    np.testing.assert_array_equal(images, again)
    np.testing.assert_array_equal(labels, same_labels)
    assert images.shape == (200, 784)
    assert images.dtype == np.float32
    assert labels.dtype == np.int32
    assert (images.min(), images.max()) == (0, 1)
    assert list(np.bincount(labels)) == [20] * 10
    assert not np.array_equal(draw(200, seed=2)[0], images)
    assert len(np.unique(images, axis=0)) == 200


def test_drawn_digits_have_mnist_like_ink_in_the_middle() -> None:
    images, labels = draw(1000, seed=0)
    # The mean of all MNIST pixels is 0.13; thinner or bolder than by half would not look like it.
    assert 0.09 < images.mean() < 0.18
    ink = images.reshape(-1, 28, 28)
    frame = np.ones((28, 28), bool)
    frame[1:-1, 1:-1] = False
    assert ink[:, frame].sum() < 0.001 * ink.sum()  # nothing is cut off at the edge
    for digit in range(10):  # every digit leaves ink, and no two have the same mean image
        assert ink[labels == digit].sum(axis=(1, 2)).min() > 10
    means = np.array([images[labels == digit].mean(axis=0) for digit in range(10)])
    distances = np.linalg.norm(means[:, None] - means, axis=-1) + 10 * np.eye(10)
    assert distances.min() > 1


def test_drawn_digits_are_a_task_for_a_network_not_for_a_line() -> None:
    """In depth the figures in the docstring of `draw`; by default fewer digits, which both learn less well."""
    count = draws(2500, 10_000)
    images, labels = draw(count, seed=0)
    train, test = slice(count * 4 // 5), slice(count * 4 // 5, None)

    def accuracy(*sizes: int) -> float:
        rng = np.random.default_rng(0)
        weights = [rng.normal(0, (2 / n) ** 0.5, (n, m)).astype(np.float32) for n, m in pairwise(sizes)]
        biases = [np.zeros(m, np.float32) for m in sizes[1:]]

        def forward(x: np.ndarray) -> list[np.ndarray]:
            """The input of every layer, then the scores."""
            values = [x]
            for weight, bias in zip(weights, biases, strict=True):
                values.append(np.maximum(values[-1] @ weight + bias, 0))
            return [*values[:-1], values[-2] @ weights[-1] + biases[-1]]

        for _ in range(10):
            for pick in rng.permutation(count * 4 // 5).reshape(-1, 100):
                x, y = images[train][pick], labels[train][pick]
                *inputs, scores = forward(x)
                chances = np.exp(scores - scores.max(axis=1, keepdims=True))
                chances /= chances.sum(axis=1, keepdims=True)
                grad = (chances - np.eye(10, dtype=np.float32)[y]) / len(y)
                for i in reversed(range(len(weights))):
                    weight_grad, bias_grad = inputs[i].T @ grad, grad.sum(axis=0)
                    if i:
                        grad = (grad @ weights[i].T) * (inputs[i] > 0)
                    weights[i] -= np.float32(0.1) * weight_grad
                    biases[i] -= np.float32(0.1) * bias_grad
        return float((forward(images[test])[-1].argmax(axis=1) == labels[test]).mean())

    network, line = accuracy(784, 256, 10), accuracy(784, 10)
    assert network > line + 0.03
    if deep():
        assert 0.93 < network < 0.97
        assert 0.85 < line < 0.91
