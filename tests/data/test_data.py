"""The input pipeline: what batches hold, whatever the stages; going on from any place; what goes wrong and where."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import pickle
import threading
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.data.order import Order
from tests.effort import draws

EXAMPLES = 41
SEQUENCES = [np.random.default_rng(n).integers(1, 99, 1 + n * 7 % 19).tolist() for n in range(EXAMPLES)]
BOTH = {"tokens": mtf.data.Field("int32", None), "n": mtf.data.Field("int32")}
TOKENS = {"tokens": BOTH["tokens"]}
Batch = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    made = [mtf.records.encode({"tokens": s, "n": n}) for n, s in enumerate(SEQUENCES)]
    mtf.records.write(folder / "plain@3", made)
    mtf.records.write(folder / "packed@3", made, "gzip")
    return folder


def augmented(example: Batch, rng: np.random.Generator) -> Batch:
    return {**example, "x": rng.random()}


def pipelines(files: Path) -> dict[str, mtf.data.Data]:
    plain, data = files / "plain@3", mtf.data
    numbers = data.records(plain, {"n": BOTH["n"]}, interleave=2)
    whole, tokens = data.records(plain, BOTH).shuffle(3), data.records(plain, TOKENS).shuffle(3)
    zipped = data.records(files / "packed@3", BOTH, interleave=3).shuffle(3, buffer=9)
    arrays = data.arrays({"n": np.arange(EXAMPLES)}).shuffle(3)
    return {
        "maps": numbers.shuffle(3).map(augmented, seed=5).batch(4).repeat(2),
        "joined": numbers.shuffle(3).repeat(2).batch(4, "pad"),
        "padded": whole.batch(4, "pad", pad={"tokens": 20}).repeat(2),
        "packed": tokens.batch(3, "pad", pack={"tokens": 24}).repeat(2),
        "packed, dropped": tokens.batch(3, pack={"tokens": 24}).repeat(2),
        "buckets": whole.batch(4, "pad", buckets={"tokens": [5, 10, 20]}).repeat(2),
        "compressed": zipped.filter(lambda e: e["n"] % 3 > 0).batch(4, "pad", pad={"tokens": 20}).repeat(2),
        "arrays": arrays.batch(4, "pad").repeat(2),
        "arrays, joined": arrays.repeat(2).batch(4),
        "of batches": arrays.batch(4).map(lambda b, rng: {**b, "x": rng.random(4)}, seed=1).repeat(2),
    }


NAMES = (
    "maps", "joined", "padded", "packed", "packed, dropped", "buckets", "compressed", "arrays", "arrays, joined",
    "of batches",
)  # fmt: skip


def assert_same(found: list[Batch], wanted: list[Batch]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_on_with_the_very_next_batch_from_any_place(files: Path, name: str) -> None:
    made = pipelines(files)
    assert tuple(made) == NAMES
    data = made[name]
    whole = list(data)
    assert len(whole) > 8
    for begin in range(0, len(whole) + 1, 1 if draws(0, 1) else 4):
        for variant in (data, data.prefetch(2)):
            feed = iter(variant)
            for _ in islice(feed, begin):
                pass
            state = json.loads(json.dumps(feed.state()))
            feed.close()
            other = iter(data)
            other.restore(state)
            assert_same(list(other), whole[begin:])


@pytest.mark.parametrize("name", ["maps", "packed", "compressed"])
def test_threads_change_nothing(files: Path, name: str) -> None:
    data = pipelines(files)[name]
    assert_same(list(dataclasses.replace(data, workers=3, ahead=2)), list(data))


def odd(example: Batch) -> bool:
    return bool(example["n"] % 2)


def test_processes_change_nothing(files: Path, tmp_path: Path) -> None:
    """What they leave out is counted as well."""
    raw = bytearray((files / "plain-00000-of-00003").read_bytes())
    raw[14] ^= 1
    (tmp_path / "a").write_bytes(raw)
    data = mtf.data.records(tmp_path / "a", BOTH, on_fault="skip").shuffle(3).map(augmented, seed=5).filter(odd)
    data = data.batch(3, "pad", pad={"tokens": 20}).repeat(2)
    whole = list(data)
    assert len(whole) == 6
    with iter(data.parallel(draws(1, 3), "processes").prefetch(2)) as feed:
        assert_same([*islice(feed, 2)], whole[:2])
        state = feed.state()
        assert_same([*feed], whole[2:])
        assert feed.stats.skipped == 1
    other = iter(data)
    other.restore(state)  # the same data, whoever makes them
    assert_same([*other], whole[2:])
    with pytest.raises(mtf.FeedError, match=r"can't be sent to another process.*at the top of a module"):
        x().map(lambda e: e).parallel(1, "processes")
    if draws(0, 1):
        with pytest.raises(mtf.DataError, match=r"map\(broken\) failed at example 0 of arrays: ValueError: no 0"):
            list(x().map(broken).parallel(1, "processes").batch(2))


def test_records_are_decoded_many_at_once_as_one_by_one(tmp_path: Path) -> None:
    """Lengths, layouts and widths of numbers that differ, and records that are laid out as no other."""
    rng = np.random.default_rng(0)
    fields = {
        "label": mtf.data.Field("int64"),
        "small": mtf.data.Field("uint8", (2,)),
        "x": mtf.data.Field("float32", (3,)),
        "half": mtf.data.Field("float16", (), "one"),
        "pixels": mtf.data.Field("int16", (2, 2)),
        "is": mtf.data.Field("bool"),
        "empty": mtf.data.Field("int32", (0,), "x2"),
    }
    made = []
    for n in range(200):
        features: dict[str, Any] = {
            "label": int(rng.integers(-(2**62), 2**62) >> rng.integers(0, 62)),
            "small": rng.integers(0, 256, 2),
            "x": rng.random(3, np.float32),
            "one": float(n),
            "pixels": rng.integers(-9, 9, 4).astype("<i2").tobytes(),
            "is": bool(n % 2),
            "x2": [],
        }
        if n % 7 == 0:
            features["more"] = "x" * (n % 3)
        made.append(mtf.records.encode(features))
    mtf.records.write(tmp_path / "a", made)
    data = mtf.data.records(tmp_path / "a", fields).shuffle(0)
    singly = [{name: field.value(name, mtf.records.decode(r)[field.name or name]) for name, field in fields.items()}
              for r in made]  # fmt: skip
    order = Order(200, 0).places(0, 200)
    for batch_size in (1, 50):
        for variant in (data.batch(batch_size), data.map(lambda e: e).batch(batch_size)):
            found = list(variant)
            for name in fields:
                wanted = np.stack([singly[n][name] for n in order])
                np.testing.assert_array_equal(np.concatenate([b[name] for b in found]), wanted, strict=True)


@pytest.mark.parametrize(
    ("odd_one", "message"),
    [
        ({"a": 300}, "'a' holds 300, which does not fit uint8"),
        ({"a": -1}, "'a' holds -1, which does not fit uint8"),
        ({"a": [1, 2]}, "'a' has 2 elements, expected 1"),
        ({"a": 0.5}, "'a' is 1 numbers of float32, expected integers"),
        ({"b": 1}, "no feature 'a'"),
    ],
)
def test_the_one_record_that_does_not_fit_is_named(tmp_path: Path, odd_one: Any, message: str) -> None:
    made = [mtf.records.encode({"a": n}) for n in range(20)]
    made[13] = mtf.records.encode(odd_one)
    mtf.records.write(tmp_path / "a", made)
    with pytest.raises(mtf.DataError, match=rf"record 13 of .*a: .*{message}"):
        list(mtf.data.records(tmp_path / "a", {"a": mtf.data.Field("uint8")}).batch(10))


@pytest.mark.parametrize("name", ["maps", "joined", "arrays", "arrays, joined"])
def test_some_rows_alone_are_the_same_rows(files: Path, name: str) -> None:
    data = pipelines(files)[name]
    assert data.batching is not None
    rows = np.arange(data.batching.size) % 2 == 0
    whole = list(data)
    read: list[int] = []
    reading, columns = data.source.read, data.source.columns
    object.__setattr__(data.source, "read", lambda numbers: read.extend(numbers) or reading(numbers))
    object.__setattr__(data.source, "columns", lambda numbers: read.extend(numbers) or columns(numbers))
    for variant in (data, dataclasses.replace(data, workers=2, ahead=2)):
        read.clear()
        feed = iter(variant)
        assert feed.only(rows)
        found = list(feed)
        assert len(found) == len(whole)
        for a, b in zip(found, whole, strict=True):
            assert a.keys() == b.keys()
            for field, array in b.items():
                np.testing.assert_array_equal(a[field][rows], array[rows], strict=True)
                assert field == "mask" or not a[field][~rows].any()
        assert len(read) == rows.sum() * len(whole)
    feed = iter(data)
    assert feed.only(rows)
    next(feed)
    other = iter(data)
    other.restore(feed.state())
    assert_same([next(other)], whole[1:2])
    for left in ("padded", "packed", "compressed", "of batches"):
        assert not iter(pipelines(files)[left]).only(np.ones(4, bool))


def test_every_example_once_in_each_epoch(files: Path) -> None:
    made = pipelines(files)
    for name in ("joined", "padded", "buckets", "arrays", "compressed"):
        found = [n for batch in made[name] for n, m in zip(batch["n"].tolist(), batch["mask"], strict=True) if m]
        wanted = [n for n in range(EXAMPLES) if name != "compressed" or n % 3]
        for epoch in (found[: len(wanted)], found[len(wanted) :]):
            assert sorted(epoch) == wanted, name
        assert found[: len(wanted)] != found[len(wanted) :]


@pytest.mark.parametrize(("size", "remainder"), [(4, "drop"), (4, "pad"), (41, "drop"), (1, "pad")])
def test_an_epoch_has_as_many_batches_as_it_says(size: int, remainder: str) -> None:
    made = mtf.data.arrays({"n": np.arange(EXAMPLES)}).batch(size, remainder)
    assert made.per_epoch == len(list(made.repeat(1))) == (41 // size if remainder == "drop" else -(-41 // size))
    with pytest.raises(mtf.FeedError, match="depends on the examples"):
        _ = mtf.data.arrays({"n": np.arange(EXAMPLES)}).filter(lambda e: e["n"] > 3).batch(size, remainder).per_epoch


def test_arrays_give_the_same_as_example_by_example() -> None:
    arrays = mtf.data.arrays({"n": np.arange(EXAMPLES), "x": np.random.default_rng(0).random((EXAMPLES, 3))}).shuffle(1)
    for remainder in ("drop", "pad"):
        for joined in (False, True):
            quick, slow = arrays, arrays.map(lambda e: e)
            pair = [
                (d.repeat(2).batch(6, remainder) if joined else d.batch(6, remainder).repeat(2)) for d in (quick, slow)
            ]
            assert_same(list(pair[0]), list(pair[1]))


def test_the_order_is_that_of_batches() -> None:
    arrays = {"n": np.arange(EXAMPLES)}
    old = list(mtf.Batches(arrays, 4, shuffle_seed=9, epochs=3))
    assert_same(list(mtf.data.arrays(arrays).shuffle(9).batch(4).repeat(3)), old)


def test_a_buffer_shuffles_neighbours_alone() -> None:
    for buffer in (1, 3, 7, 40, 41, 99):
        order = Order(EXAMPLES, 5, buffer)
        whole = order.places(0, 4 * EXAMPLES).reshape(4, EXAMPLES)
        assert all(sorted(epoch) == list(range(EXAMPLES)) for epoch in whole.tolist())
        assert (abs(whole - np.arange(EXAMPLES)) < buffer).all()
        for begin in range(0, 3 * EXAMPLES, 5):
            there = Order(EXAMPLES, 5, buffer).places(begin, begin + 7)
            np.testing.assert_array_equal(there, whole.reshape(-1)[begin : begin + 7])


def test_rows_hold_their_sequences_whole(files: Path) -> None:
    made = pipelines(files)
    for name in ("padded", "packed", "buckets"):
        found = []
        for batch in made[name]:
            ids, positions = batch["segment_ids"], batch["segment_positions"]
            assert not batch["tokens"][ids == 0].any()
            for row in range(len(ids)):
                for segment in range(1, ids[row].max() + 1):
                    here = ids[row] == segment
                    assert positions[row][here].tolist() == list(range(here.sum()))
                    if batch["mask"][row]:
                        found.append(batch["tokens"][row][here].tolist())
        assert sorted(found) == sorted(2 * SEQUENCES), name
    rows = sum(batch["mask"].sum() for batch in made["packed"])
    assert rows < 1.25 * 2 * sum(map(len, SEQUENCES)) / 24  # little of them is padding
    shapes = {batch["tokens"].shape for batch in made["buckets"]}
    assert shapes == {(4, 5), (4, 10), (4, 20)}


def test_sources_and_targets_share_rows_and_are_named_as_models_name_them() -> None:
    pairs = [{"sources": np.arange(1, 3 + n % 3), "tokens": np.arange(1, 6 - n % 4)} for n in range(12)]
    numbered = mtf.data.arrays({"n": np.arange(12)}).map(lambda e: pairs[int(e["n"])])
    (batch,) = numbered.batch(5, "pad", pack={"sources": 10, "tokens": 12})
    assert set(batch) == {
        "sources", "tokens", "segment_ids", "segment_positions", "source_segment_ids", "source_positions", "mask",
    }  # fmt: skip
    assert (batch["segment_ids"].max(axis=1) == batch["source_segment_ids"].max(axis=1)).all()
    assert (batch["sources"] > 0).sum() == sum(len(p["sources"]) for p in pairs)


def test_files_in_turns(files: Path) -> None:
    found = [e["n"] for e in mtf.data.records(files / "plain@3", {"n": BOTH["n"]}, interleave=3)]
    assert found == list(range(EXAMPLES))  # as they were written, one to each file in turn
    pairs = [int(e["n"]) for e in mtf.data.records(files / "plain@3", {"n": BOTH["n"]}, interleave=2)]
    assert pairs[:4] == [0, 1, 3, 4]
    assert sorted(pairs) == list(range(EXAMPLES))


def test_damaged_records_are_left_out_and_counted(files: Path, tmp_path: Path) -> None:
    raw = bytearray((files / "plain-00000-of-00003").read_bytes())
    raw[14] ^= 1
    (tmp_path / "a").write_bytes(raw)
    (tmp_path / "z").write_bytes(gzip.compress(bytes(raw)))
    for name in ("a", "z"):
        with pytest.raises(mtf.DataError, match=rf"{name}: at byte \d+: the \d+ bytes of data have the CRC"):
            list(mtf.data.records(tmp_path / name, BOTH).batch(1, pad={"tokens": 20}))
        feed = iter(mtf.data.records(tmp_path / name, {"n": BOTH["n"]}, on_fault="skip").batch(1).repeat(2))
        assert [b["n"].item() for b in feed] == 2 * list(range(3, EXAMPLES, 3))
        assert feed.stats.skipped == 1


def test_lines_and_folders(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes("a\r\n\nb ä\nlast".encode())
    lines = mtf.data.text(tmp_path / "t")
    assert [e["text"] for e in lines] == ["a", "b ä", "last"]
    (batch,) = lines.batch(3)
    assert batch["text"].tolist() == ["a", "b ä", "last"]
    (tmp_path / "bad").write_bytes(b"ok\n\xff\n")
    with pytest.raises(mtf.DataError, match=r"the line at byte 3 of .*bad is not UTF-8"):
        list(mtf.data.text(tmp_path / "bad"))


def test_what_it_took_is_told() -> None:
    data = mtf.data.arrays({"x": np.zeros((64, 4))}).map(lambda e: e).batch(8).repeat(4).prefetch(1)
    feed = iter(data)
    list(feed)
    stats = feed.stats
    assert (stats.examples, stats.batches, stats.made_examples) == (256, 32, 256)
    assert stats.made_seconds > 0
    assert mtf.HostInput(examples_per_second=stats.examples_per_second).rate > 0


def test_threads_end_with_the_iterator() -> None:
    def running() -> int:
        return sum(t.name.startswith("meshlib.data") for t in threading.enumerate())

    data = mtf.data.arrays({"x": np.arange(64)}).map(lambda e: e, workers=2).batch(8).repeat().prefetch(2)
    before = running()
    feed = iter(data)
    next(feed)
    assert running() > before
    del feed
    assert running() == before
    with iter(data) as feed:
        next(feed)
    assert running() == before
    with pytest.raises(mtf.FeedError, match="closed"):
        next(feed)


def test_memory_is_flat(files: Path) -> None:
    data = mtf.data.records(files / "packed@3", BOTH).shuffle(1, buffer=8).batch(8, pad={"tokens": 20}).repeat()
    feed = iter(data)
    for _ in islice(feed, 20):
        pass
    tracemalloc.start()
    try:
        held = []
        for _ in range(2):
            for _ in islice(feed, draws(40, 20_000)):
                pass
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[1] < held[0] + 200_000


def x() -> mtf.data.Data:
    return mtf.data.arrays({"x": np.arange(6)})


def of_lengths() -> mtf.data.Data:
    return x().map(lambda e: {"t": np.ones(int(e["x"]) + 1)})


def uneven(example: Batch) -> Batch:
    return {"x": np.zeros(int(example["x"]) // 3)}


def broken(example: Batch) -> Batch:
    raise ValueError(f"no {example['x']}")


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda: x().batch(0), "size must be an integer >= 1, got 0"),
        (lambda: x().batch(7), "a batch of 7 is larger than the 6 examples of arrays"),
        (lambda: x().batch(2, "dorp"), "remainder must be 'drop' or 'pad', got 'dorp'; did you mean 'drop'"),
        (lambda: x().batch(2).batch(2), "the data have a batch already"),
        (lambda: x().batch(2).shuffle(1), "applies to examples; write it before batch"),
        (lambda: x().shuffle(1).shuffle(1), "the data have a shuffle already"),
        (lambda: x().shuffle(-1), "seed must be an integer >= 0, got -1"),
        (lambda: x().shuffle(1, buffer=0), "buffer must be an integer >= 1"),
        (lambda: x().shuffle(1).take(2), "write it before shuffle and map"),
        (lambda: x().skip(6), "count must be less than the 6 examples of .*, got 6"),
        (lambda: x().parallel(-1), "workers must be an integer >= 0, got -1"),
        (lambda: x().parallel(1, "process"), "did you mean 'processes'"),
        (lambda: x().map(3), "expected a function of an example, got 3"),
        (lambda: x().batch(2).map(len, workers=2), "workers map examples; write the map before batch"),
        (lambda: x().batch(2, pad={"x": 2}, pack={"x": 2}), "one of pad, pack and buckets, got pad and pack"),
        (lambda: x().batch(2, buckets={"x": [4, 2]}), "as many ascending ones"),
        (lambda: x().batch(2, too_long="cutt"), "did you mean 'cut'"),
        (lambda: list(x().batch(2, pad={"y": 2})), "example 0: no field 'y'; its fields: x"),
        (lambda: list(x().batch(2, pad={"x": 2})), "example 0: 'x' is a single value"),
        (lambda: list(of_lengths().batch(2, pad={"t": 3})), "example 3: 't' has 4 elements, but a row has 3"),
        (lambda: list(x().map(uneven).batch(2)), r"'x' of example 2 is float64 \[0\], of example 3 float64 \[1\]"),
        (lambda: list(x().map(lambda e: {str(e["x"]): 1}).batch(2)), "example 0 has the fields 0, example 1 has 1"),
        (lambda: list(x().map(broken).batch(2)), r"map\(broken\) failed at example 0 of arrays: ValueError: no 0"),
        (lambda: list(x().map(broken, workers=2).batch(2)), "failed at example 0 of arrays: ValueError: no 0"),
        (lambda: list(x().map(lambda e: 3).batch(2)), "must return a dict of fields, returned int at example 0"),
        (lambda: list(x().filter(lambda e: False).batch(2).repeat()), "yields no batch from 6 examples"),
        (lambda: list(x().filter(lambda e: False).repeat().batch(2)), "has no example left"),
        (lambda: list(x().map(lambda e: {"mask": 1}).batch(2, "pad")), "'mask' is a field of the examples"),
        (lambda: iter(x()).restore({"next": 1}), "expected what state"),
        (lambda: iter(x()).restore(iter(x().shuffle(1)).state()), "the state belongs to other data"),
        (lambda: mtf.data.arrays({}), "expected a dict of names to arrays"),
        (lambda: mtf.data.arrays({"a": np.ones(2), "b": np.ones(3)}), "unequal numbers of examples: a 2, b 3"),
        (lambda: mtf.data.arrays({"a": [1]}), "'a' must be a NumPy array, got list"),
        (lambda: mtf.data.records("/nonexistent"), "no file /nonexistent"),
        (lambda: mtf.data.records(3), "expected the path of a file"),
        (lambda: mtf.data.records("a", on_fault="drop"), "on_fault must be 'error' or 'skip'"),
        (lambda: mtf.data.records("a", interleave=0), "interleave must be an integer >= 1"),
        (lambda: mtf.data.records("a", {"x": "int32"}), "fields must map names to mtf.data.Field"),
        (lambda: mtf.data.Field("flaot32"), "dtype must be that of numbers.*did you mean 'float32'"),
        (lambda: mtf.data.Field("text", (-1,)), r"shape must be a tuple of sizes, or None, got \(-1,\)"),
        (lambda: mtf.data.Field("bytes", 3), "shape must be a tuple of sizes, or None, got 3"),
        (lambda: mtf.data.Field("int32", name=3), "name must be that of a feature, got 3"),
        (lambda: mtf.data.Field("image", (3, 4, 3)), r"the shape of an image must be \(side, side, 1 or 3\)"),
        (lambda: mtf.data.folder("/nonexistent", 8), "expected a folder of classes"),
        (lambda: mtf.data.text(["/a", "/b"]), "no file /a; check the path; no file /b"),
    ],
)
def test_one_clear_error(do: Callable[[], object], message: str) -> None:
    with pytest.raises((mtf.FeedError, mtf.DataError), match=message):
        do()


@pytest.mark.parametrize(
    ("feature", "field", "message"),
    [
        ({"a": 300}, mtf.data.Field("uint8"), "'a' holds 300, which does not fit uint8"),
        ({"a": [1, 2]}, mtf.data.Field("int32"), r"'a' has 2 elements, expected 1 of shape \(\)"),
        ({"a": 0.5}, mtf.data.Field("int32"), "'a' is 1 numbers of float32, expected integers"),
        ({"b": 1}, mtf.data.Field("int32"), "no feature 'a'.*; it has b"),
        ({"a": b"xyz"}, mtf.data.Field("int16", None), "expected bytes of an array of int16"),
        ({"a": 1}, mtf.data.Field("text"), "'a' is 1 numbers of int64, expected bytes for text"),
        ({"a": ["x", "y"]}, mtf.data.Field("text"), "'a' is a list of 2 bytes values, expected 1 for text"),
        ({"a": ["x", "y"]}, mtf.data.Field("bytes", (3,)), "'a' is a list of 2 bytes values, expected 3 for bytes"),
        ({"a": b"\xff"}, mtf.data.Field("text"), "'a' is not UTF-8"),
        ({"a": b"xyz"}, mtf.data.Field("image"), "expected a picture"),
    ],
)
def test_a_feature_that_is_another(tmp_path: Path, feature: Any, field: mtf.data.Field, message: str) -> None:
    if field.dtype == "image":
        pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    mtf.records.write(tmp_path / "a", [mtf.records.encode(feature)])
    with pytest.raises(mtf.DataError, match=rf"record 0 of .*a: .*{message}"):
        list(mtf.data.records(tmp_path / "a", {"a": field}))


def test_several_texts_have_a_shape(tmp_path: Path) -> None:
    made = [mtf.records.encode({"t": [f"{n}ä", "", "c", "d"], "any": ["x"] * n}) for n in range(3)]
    mtf.records.write(tmp_path / "a", made)
    fields = {"t": mtf.data.Field("text", (2, 2)), "b": mtf.data.Field("bytes", (4,), "t")}
    (batch,) = mtf.data.records(tmp_path / "a", fields).batch(3)
    assert batch["t"].tolist() == [[[f"{n}ä", ""], ["c", "d"]] for n in range(3)]
    assert batch["b"].tolist() == [[f"{n}ä".encode(), b"", b"c", b"d"] for n in range(3)]
    found = [e["any"].tolist() for e in mtf.data.records(tmp_path / "a", {"any": mtf.data.Field("text", None)})]
    assert found == [[], ["x"], ["x", "x"]]


def test_data_can_be_compared_and_counted() -> None:
    data = x()
    assert data == data
    assert data != x()
    assert len({data, data.batch(2), data.take(2)}) == 3


def test_compressed_files_ask_for_a_buffer(files: Path) -> None:
    with pytest.raises(mtf.FeedError, match=r"packed@3 is compressed.*buffer=10_000"):
        mtf.data.records(files / "packed@3").shuffle(1)


def test_data_of_records_can_be_pickled(files: Path) -> None:
    data = mtf.data.records(files / "plain@3", {"n": BOTH["n"]}).shuffle(seed=1).batch(4)
    told = [batch["n"].tolist() for batch in data]  # its files are open now
    assert [batch["n"].tolist() for batch in pickle.loads(pickle.dumps(data))] == told


def test_a_map_that_writes_into_an_example_leaves_the_arrays_as_they_are() -> None:
    def doubled(example: Batch) -> Batch:
        example["x"] *= 2
        return example

    x = np.ones((4, 2))
    seen = [batch["x"] for batch in mtf.data.arrays({"x": x}).map(doubled).batch(2).repeat(3)]
    np.testing.assert_array_equal(seen, np.full((6, 2, 2), 2.0))
    np.testing.assert_array_equal(x, np.ones((4, 2)))


@pytest.mark.parametrize("shape", [(), (1,), None])
def test_a_negative_number_fits_no_unsigned_dtype(shape: tuple[int, ...] | None) -> None:
    with pytest.raises(mtf.DataError, match="'n' holds -1, which does not fit uint64"):
        mtf.data.Field("uint64", shape).value("n", np.array([-1]))


@pytest.mark.parametrize("other", [np.array([1.5]), np.array([[1]])], ids=["dtype", "shape"])
@pytest.mark.parametrize("how", ["pad", "pack"])
def test_sequences_of_a_batch_are_of_one_kind(other: np.ndarray[Any, Any], how: str) -> None:
    sequences = [np.array([1, 2]), other]
    data = mtf.data.arrays({"n": np.arange(2)}).map(lambda example: {"t": sequences[int(example["n"])]})
    with pytest.raises(mtf.DataError, match=r"'t' of example 0 is int64 \[2\], of example 1 (float64|int64) \[1"):
        list(data.batch(1 + (how == "pad"), **{how: {"t": 4}}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"mask": 5}, "mask must be the name"),
        ({"segments": {"x": "ab"}}, "names of two arrays"),
        ({"segments": {"y": ("a", "b")}}, "names of two arrays"),
        ({"segments": 5}, "names of two arrays"),
    ],
)
def test_names_that_batch_adds_are_checked(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(mtf.FeedError, match=match):
        mtf.data.arrays({"x": np.ones((2, 2))}).batch(2, pad={"x": 3}, **wrong)


def test_segments_replace_no_field() -> None:
    data = mtf.data.arrays({"x": np.ones((2, 2)), "segment_ids": np.arange(2)}).batch(2, pad={"x": 3})
    with pytest.raises(mtf.DataError, match="'segment_ids' is a field of the examples"):
        next(iter(data))


@pytest.mark.parametrize("wrong", [{"next": -3}, {"pending": [5]}, {"pending": "ab"}, {"pending": [[[7]]]}])
def test_a_state_that_none_has_is_an_error(wrong: dict[str, Any]) -> None:
    feed = iter(mtf.data.arrays({"x": np.ones(4)}).batch(2))
    with pytest.raises(mtf.FeedError, match="expected what state"):
        feed.restore({**feed.state(), **wrong})


@pytest.mark.parametrize("shape", [5, (0, 0, 3), ("a", "a", 3), (4, 5, 3), (4, 4, 2)])
def test_a_picture_is_square(shape: Any) -> None:
    with pytest.raises(mtf.FeedError, match="the shape of an image must be"):
        mtf.data.Field("image", shape)


def scaled(by: float) -> Any:
    return lambda example: {**example, "x": example["x"] * by}


def test_a_state_is_of_these_examples_and_their_functions() -> None:
    """What is told in words may be alike: arrays of other content, functions of one name."""

    def feed(first: float = 0.0, by: float = 2.0, **batch: Any) -> mtf.data.Feed:
        x = np.arange(12, dtype=np.float32)
        x[0] = first
        return iter(mtf.data.arrays({"x": x}).shuffle(1).map(scaled(by)).batch(3, **batch))

    state = feed().state()
    assert feed().state() == state == json.loads(json.dumps(state))
    feed().restore(state)
    with pytest.raises(mtf.FeedError, match="their examples differ"):
        feed(first=1.0).restore(state)
    with pytest.raises(mtf.FeedError, match="belongs to other data"):
        feed(mask="valid").restore(state)
    with pytest.warns(UserWarning, match=r"the functions of arrays: 12 examples.* have changed since"):
        feed(by=3.0).restore(state)
    lock = iter(mtf.data.arrays({"x": np.ones(4)}).map(functools.partial(keeping, threading.Lock())))
    assert lock.state()["functions"] is None
    lock.restore(lock.state())


def keeping(lock: Any, example: Any) -> Any:
    return example


@pytest.mark.parametrize("wrong", [{"next": 1.0}, {"next": -1}, {"pending": [[[5]]]}, {"pending": 3}, {"of": 1}])
def test_a_state_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    feed = iter(mtf.data.arrays({"x": np.ones(12)}).batch(3))
    with pytest.raises(mtf.FeedError, match="expected what state"):
        feed.restore({**feed.state(), **wrong})
