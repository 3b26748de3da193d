"""Records: bytes stated by hand, published check values, damaged files, and what the command makes of other files."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import meshlib as mtf
from meshlib import records
from meshlib.command import main
from meshlib.records.crc import crc32c, crc32c_each, masked
from meshlib.records.example import Decoder
from tests.effort import draws

# ---------------------------------------------------------------- sums


def by_bits(data: bytes) -> int:
    """CRC-32C a bit at a time, as RFC 3720 defines it."""
    found = 0xFFFFFFFF
    for byte in data:
        found ^= byte
        for _ in range(8):
            found = found >> 1 ^ (0x82F63B78 if found & 1 else 0)
    return found ^ 0xFFFFFFFF


def test_published_check_values() -> None:
    """RFC 3720, appendix B.4, and the check value of the catalogue of CRCs."""
    known = {
        b"123456789": 0xE3069283,
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(range(31, -1, -1)): 0x113FDB5C,
        b"": 0,
    }
    assert {data: crc32c(data) for data in known} == known


def test_sums_of_many_at_once_are_those_bit_by_bit() -> None:
    rng = np.random.default_rng(0)
    lengths = [0, 1, 2, 3, 4, 5, 1023, 1024, 1025, 2048, 2049, 3000, 0]
    messages = [rng.bytes(n) for n in lengths]
    assert crc32c_each(messages).tolist() == [by_bits(m) for m in messages]
    alike = [rng.bytes(100) for _ in range(5)]
    assert crc32c_each(alike).tolist() == [by_bits(m) for m in alike]
    assert crc32c_each([]).tolist() == []


def test_a_long_message() -> None:
    """Beyond 256 rows another table is used."""
    message = np.random.default_rng(1).bytes(300_000)
    table = [by_bits(bytes([n])) ^ 0xFFFFFFFF ^ 0x00FFFFFF for n in range(256)]  # of a byte n ^ 255, without inversions
    state = 0xFFFFFFFF
    for byte in message:
        state = state >> 8 ^ table[(state ^ byte) & 255 ^ 255]
    assert crc32c(message) == state ^ 0xFFFFFFFF


# ---------------------------------------------------------------- examples

# Example{features: {"a": int64 [3, -1 (ten bytes)], "b": bytes "xy", "c": float [1.0]}}, written by hand.
A = b"\x0a\x14\x0a\x01a\x12\x0f\x1a\x0d\x0a\x0b\x03" + b"\xff" * 9 + b"\x01"
B = b"\x0a\x0b\x0a\x01b\x12\x06\x0a\x04\x0a\x02xy"
C = b"\x0a\x0d\x0a\x01c\x12\x08\x12\x06\x0a\x04\x00\x00\x80\x3f"
BY_HAND = b"\x0a" + bytes([len(A + B + C)]) + A + B + C


def test_bytes_of_an_example_by_hand() -> None:
    features = {"c": [1.0], "a": [3, -1], "b": b"xy"}
    assert records.encode(features) == BY_HAND
    found = records.decode(BY_HAND)
    assert found["a"].tolist() == [3, -1]
    assert found["b"] == [b"xy"]
    assert found["c"].tolist() == [1.0]
    assert (found["a"].dtype, found["c"].dtype) == (np.int64, np.float32)


def test_bytes_of_a_record_by_hand(tmp_path: Path) -> None:
    """length, its masked CRC, data, their masked CRC; the sums by the definition, bit by bit."""

    def mask(crc: int) -> int:
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    length = (len(BY_HAND)).to_bytes(8, "little")
    wanted = length + struct.pack("<I", mask(by_bits(length))) + BY_HAND + struct.pack("<I", mask(by_bits(BY_HAND)))
    path = tmp_path / "one"
    assert records.write(path, [BY_HAND]) == [str(path)]
    assert path.read_bytes() == wanted
    assert list(records.read(path)) == [BY_HAND]
    assert masked(0xE3069283) == mask(0xE3069283)


def test_what_other_writers_may_write() -> None:
    """Numbers one by one, split runs, unknown fields of every kind, keys that occur twice, entries turned round."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    singly = field(3, b"\x08\x05" + b"\x08" + b"\xff" * 9 + b"\x01")  # int64 5, -1, not packed
    both = field(3, b"\x08\x05" + field(1, b"\x06\x07"))  # one, then a packed run
    floats = field(2, b"\x0d" + struct.pack("<f", 2.5) + field(1, struct.pack("<f", -1)))
    unknown = b"\x28\x01" + b"\x31" + bytes(8) + b"\x3d" + bytes(4) + field(9, b"?") + b"\x53\x08\x01\x54"
    twice = field(1, field(1, b"k") + field(2, field(3, field(1, b"\x01"))))
    last = field(1, field(2, field(3, field(1, b"\x02"))) + unknown + field(1, b"k"))  # value before key
    entries = [
        field(1, field(1, b"s") + field(2, unknown + singly)),
        field(1, field(1, b"m") + field(2, both)),
        field(1, field(1, b"f") + field(2, floats)),
        twice,
        last,
        field(1, field(2, field(1, field(1, b"v")))),  # no key
        field(1, field(1, b"none")),  # no value
        field(1, field(1, b"kinds") + field(2, singly + field(1, field(1, b"z")))),  # the last kind counts
    ]
    found = records.decode(unknown + b"".join(field(1, unknown + entry) for entry in entries))
    shown = {name: value if isinstance(value, list) else value.tolist() for name, value in found.items()}
    assert shown == {
        "s": [5, -1], "m": [5, 6, 7], "f": [2.5, -1.0], "k": [2], "": [b"v"], "none": [], "kinds": [b"z"],
    }  # fmt: skip


def test_what_is_written_is_read() -> None:
    rng = np.random.default_rng(0)
    decoder = Decoder()
    for _ in range(draws(60, 5000)):
        wanted: dict[str, object] = {}
        for n in range(rng.integers(0, 5)):
            count = int(rng.integers(0, 20))
            wanted[f"f{n}"] = [
                lambda count=count: (rng.integers(-(2**63), 2**63 - 1, count) >> rng.integers(0, 63)).tolist(),
                lambda count=count: rng.standard_normal(count).astype(np.float32).tolist(),
                lambda count=count: [rng.bytes(int(rng.integers(0, 300))) for _ in range(count)],
            ][rng.integers(3)]()
        data = records.encode(wanted)
        for found in (records.decode(data), decoder(data), decoder(data)):
            assert found.keys() == wanted.keys()
            for name, value in found.items():
                assert (value if isinstance(value, list) else value.tolist()) == wanted[name]


def test_a_decoder_minds_the_bytes_around_the_values() -> None:
    decoder = Decoder()
    for features in ({"a": 1, "b": b"xx"}, {"a": 2, "b": b"yy"}, {"a": 2, "c": b"yy"}, {"a": 300, "b": b"x"}):
        data = records.encode(features)
        for _ in range(2):
            found = decoder(data)
            assert found["a"].tolist() == [features["a"]]
            assert [found[name] for name in features if name != "a"] == [[features.get("b", features.get("c"))]]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"a": object()}, "feature 'a' must be bytes, text, numbers"),
        ({"a": [1, b"x"]}, "feature 'a'"),
        ({"a": [1 << 64]}, "feature 'a'"),
        ({"a": np.array([1 << 63], np.uint64)}, "at most 64 bits"),
        ({1: 2}, "names of features must be text"),
        ([1], "expected a dict"),
    ],
)
def test_what_no_example_can_hold(features: object, message: str) -> None:
    with pytest.raises(mtf.DataError, match=message):
        records.encode(features)  # type: ignore[arg-type]


def test_bytes_that_are_no_example() -> None:
    rng = np.random.default_rng(0)
    whole = records.encode({"a": [1, 2, 300], "b": [b"x" * 40, b""], "c": [0.5]})
    refused = 0
    for _ in range(draws(300, 20_000)):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(len(data))] = rng.integers(256)
        part = bytes(data[: rng.integers(1, len(data) + 1)])
        try:
            records.decode(part)
        except mtf.DataError as fault:
            refused += 1
            assert "byte" in str(fault)  # noqa: PT017
    assert refused > 50


# ---------------------------------------------------------------- files


def written(path: Path, compression: str | None = None, count: int = 12) -> list[bytes]:
    rng = np.random.default_rng(3)
    made = [rng.bytes(int(rng.integers(0, 60))) + bytes([n]) for n in range(count)]
    records.write(path, made, compression)
    return made


@pytest.mark.parametrize("compression", [None, "gzip", "zlib"])
def test_files_of_a_set(tmp_path: Path, compression: str | None) -> None:
    made = written(tmp_path / "set@3", compression)
    names = [f"set-{n:05d}-of-00003" for n in range(3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".set@3.json", *names]
    wanted = [made[n] for k in range(3) for n in range(k, 12, 3)]
    for name in ("set@3", "set-*", "."):
        assert list(records.read(tmp_path / name)) == wanted, name
    with pytest.raises(mtf.DataError, match=r"set-00003-of-00004"):
        records.read(tmp_path / "set@4")
    (tmp_path / "set-00001-of-00003").unlink()
    with pytest.raises(mtf.DataError, match=r"of 3 files .* 2 were named, the first missing is 00001"):
        records.read(tmp_path / "set-*")


def test_compressed_files_put_one_behind_the_other_are_one(tmp_path: Path) -> None:
    made = written(tmp_path / "a")
    raw = (tmp_path / "a").read_bytes()
    (tmp_path / "two").write_bytes(gzip.compress(raw[:50]) + gzip.compress(raw[50:]))
    assert list(records.read(tmp_path / "two")) == made
    (tmp_path / "z").write_bytes(zlib.compress(raw))
    assert list(records.read(tmp_path / "z")) == made


def test_faults_name_file_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a"
    made = written(path)
    raw = path.read_bytes()
    third = sum(16 + len(data) for data in made[:2])
    for change, message, kept in (
        (third + 14, rf"a: at byte {third}: the {len(made[2])} bytes of data have the CRC 0x\w+, but were written", 11),
        (third + 2, rf"a: at byte {third}: the length \d+ has the CRC", 2),
        (third + 9, rf"a: at byte {third}: the length {len(made[2])} has the CRC", 2),
    ):
        damaged = bytearray(raw)
        damaged[change] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(mtf.DataError, match=message):
            list(records.read(path))
        faults: list[records.Fault] = []
        found = list(records.read(path, on_fault="skip", faults=faults))
        assert found == [data for n, data in enumerate(made) if n != 2][:kept]
        assert len(faults) == 1
        assert faults[0].offset == third
    path.write_bytes(raw[:-3])
    left = 16 + len(made[-1])
    with pytest.raises(mtf.DataError, match=f"truncated: the record takes {left} bytes, {left - 3} are left"):
        list(records.read(path))


def test_fuzzed_files_crash_nothing_and_no_wrong_record_is_taken(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    damaged, skipped = 0, 0
    for compression in (None, "gzip", "zlib"):
        made = written(tmp_path / "a", compression)
        raw = (tmp_path / "a").read_bytes()
        for _ in range(draws(25, 3334)):
            data = bytearray(raw)
            for _ in range(rng.integers(1, 4)):
                at = int(rng.integers(len(data)))
                kind = rng.integers(4)
                if kind == 0:
                    data[at] ^= 1 << int(rng.integers(8))
                elif kind == 1:
                    del data[at:]
                elif kind == 2:
                    del data[at : at + int(rng.integers(1, 30))]
                else:
                    data[at:at] = rng.bytes(int(rng.integers(1, 30)))
                data = data or bytearray(b"\1")
            path = tmp_path / "b"
            path.write_bytes(data)
            try:
                list(records.read(path))
            except mtf.DataError as fault:
                damaged += 1
                assert str(path) in str(fault)  # noqa: PT017
            faults: list[records.Fault] = []
            found = list(records.read(path, on_fault="skip", faults=faults))
            skipped += bool(faults)
            assert set(found) <= set(made)
            try:
                feed = iter(mtf.data.records(path, on_fault="skip"))
            except mtf.DataError as fault:
                assert "no examples" in str(fault)  # noqa: PT017
            else:
                assert [example["record"] for example in feed] == found
    assert damaged > 60
    assert skipped > 60


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(mtf.DataError, match="a record must be bytes, got int 7"):
        records.write(tmp_path / "a", [b"x", 7])  # type: ignore[list-item]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"
    with pytest.raises(mtf.DataError, match="can't be written: No such file"):
        records.write(tmp_path / "no" / "a", [])
    with pytest.raises(mtf.DataError, match="compression must be"):
        records.write(tmp_path / "b", [], "gz")


# ---------------------------------------------------------------- the command


def test_the_command_writes_records_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "made@2")
    (tmp_path / "lines.txt").write_text("one\n\ntwo ä\n")
    assert main(["records", str(tmp_path / "lines.txt"), target]) == 0
    assert "2 records in" in capsys.readouterr().out
    fields = {"text": mtf.data.Field("text")}
    assert [e["text"] for e in mtf.data.records(target, fields)] == ["one", "two ä"]

    (tmp_path / "table.csv").write_text("x,n,name\n0.5,3,a\n1,4,b\n")
    assert main(["records", str(tmp_path / "table.csv"), target, "--compression", "gzip"]) == 0
    found = [records.decode(r) for r in records.read(target)]
    assert [(e["x"].tolist(), e["n"].tolist(), e["name"]) for e in found] == [([0.5], [3], [b"a"]), ([1], [4], [b"b"])]

    images = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", np.array([7, 8, 9], np.uint8))):
        head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        (tmp_path / name).write_bytes(head + array.tobytes())
    labels = ["--labels", str(tmp_path / "labels-idx1-ubyte")]
    assert main(["records", str(tmp_path / "images-idx3-ubyte"), target, *labels]) == 0
    of_digits = {"image": mtf.data.Field("uint8", (2, 2)), "label": mtf.data.Field("int32")}
    (batch,) = mtf.data.records(target, of_digits, interleave=2).batch(3)
    np.testing.assert_array_equal(batch["image"], images)
    assert batch["label"].tolist() == [7, 8, 9]

    capsys.readouterr()
    assert main(["records", str(tmp_path / "absent"), target]) == 2
    assert "expected a folder or a file" in capsys.readouterr().err


def test_pictures_become_records(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    from PIL import Image

    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for n in range(2):
            Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)).save(tmp_path / kind / f"{n}.png")
    count, _ = records.make(tmp_path, tmp_path / "made")
    assert count == 4
    image = {"image": mtf.data.Field("image", (6, 6, 3)), "label": mtf.data.Field("int32")}
    (batch,) = mtf.data.records(tmp_path / "made", image).batch(4)
    (same,) = mtf.data.folder(tmp_path, 6).batch(4)
    for name in ("image", "label"):
        np.testing.assert_array_equal(batch[name], same[name])
    assert batch["label"].tolist() == [0, 0, 1, 1]
    (tmp_path / "cat" / "bad.png").write_bytes(b"no picture")
    with pytest.raises(mtf.DataError, match=r"bad\.png: .*expected a picture"):
        records.make(tmp_path, tmp_path / "made")


def test_records_are_not_written_over_what_they_are_made_of(tmp_path: Path) -> None:
    text = tmp_path / "lines.txt"
    text.write_bytes(b"one\ntwo\n")
    with pytest.raises(mtf.DataError, match=r"lines\.txt is the file to read"):
        records.make(text, tmp_path / "." / "lines.txt")
    assert text.read_bytes() == b"one\ntwo\n"
    assert [p.name for p in tmp_path.iterdir()] == ["lines.txt"]


def test_what_a_killed_writer_left_is_no_part_of_a_folder(tmp_path: Path) -> None:
    records.write(tmp_path / "set@2", [b"a", b"b"])
    killed = records.Writer(tmp_path / "set@4")
    killed.write(b"half")
    for paths in (tmp_path, tmp_path / "set-*"):
        assert list(records.read(paths)) == [b"a", b"b"]
    killed.__exit__(KeyboardInterrupt, None, None)
    assert len(list(tmp_path.iterdir())) == 3  # with the manifest


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    first, second = records.Writer(tmp_path / "one"), records.Writer(tmp_path / "one")
    with first:
        first.write(b"first")
        with second:
            second.write(b"second, longer")
        assert list(records.read(tmp_path / "one")) == [b"second, longer"]
    assert list(records.read(tmp_path / "one")) == [b"first"]
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda at: records.write(at / "x", None), "expected several records, got NoneType"),
        (lambda at: records.write(at / "x", b"ab"), "expected several records, got bytes"),
        (lambda at: records.write(5, [b"a"]), "expected the path of a file to write, got 5"),
        (lambda at: records.make(5, at / "x"), "source must be a path, got int 5"),
        (lambda at: records.make(at / "text", at / "x", labels=5), "labels must be a path, got int 5"),
        (lambda at: records.make(at / "text", at / "x", progress=5), "progress must be a function"),
        (lambda at: records.make(at / "empty", at / "x"), "empty is a text without a record"),
        (lambda at: records.make(at / "names.csv", at / "x"), r"names\.csv is a table without a record"),
        (lambda at: records.make(at / "t.csv", at / "x", labels=at / "text"), "labels is for IDX; .* is a table"),
        (lambda at: records.make(at / "folder", at / "x", labels=at / "text"), "labels is for IDX; .* is a folder of"),
        (lambda at: records.make(at / "text", at / "x", columns={"a": "text"}), "columns is for a table; .* is a text"),
        (lambda at: records.make(at / "t.csv", at / "x", columns={"b": "text"}), "no column 'b'"),
        (lambda at: records.make(at / "t.csv", at / "x", columns={"a": "int"}), "column 'a' must be integer, float"),
        (
            lambda at: records.make(at / "t.csv", at / "x", columns={"a": "integer"}),
            "line 2: column 'a' is int",
        ),
        (lambda at: records.make(at / "t.csv", at / "x", columns=["a"]), "columns must be kinds by name, got list"),
    ],
)
def test_one_clear_error(call: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, text in (("text", "a\n"), ("empty", "\n \n"), ("names.csv", "a,b\n"), ("t.csv", "a\nx\n")):
        (tmp_path / name).write_text(text)
    with pytest.raises(mtf.DataError, match=message):
        call(tmp_path)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (["1", "-3"], [1, -3]),
        (["2", ".5e1"], [2.0, 5.0]),
        (["7", "nan", "-inf"], [7.0, np.nan, -np.inf]),  # numbers, as in other tables
        (["7", "Bob"], [b"7", b"Bob"]),
        (["1_0", "2"], [b"1_0", b"2"]),
        (["7", "99999999999999999999"], [b"7", b"99999999999999999999"]),
        (["01234", "80331"], [b"01234", b"80331"]),  # of places, not numbers
        (["+4930", "4989"], [b"+4930", b"4989"]),
        (["00.5", "1"], [b"00.5", b"1"]),
        (["-0", "1"], [-0.0, 1.0]),
        (["nan", "Inf"], [b"nan", b"Inf"]),
        (["123456789", "0.5"], [b"123456789", b"0.5"]),  # float32 has 123456792
        (["123456789", "nan"], [b"123456789", b"nan"]),
        (["16777216", "0.5"], [16777216.0, 0.5]),
        (["1e300", "0.5"], [b"1e300", b"0.5"]),
        (["9" * 5000, "1"], [b"9" * 5000, b"1"]),
    ],
)
def test_a_column_of_a_table_is_of_one_kind(tmp_path: Path, values: list[str], wanted: list[object]) -> None:
    table = tmp_path / "table.csv"
    table.write_text("\ufeffname,other\n" + "".join(f"{value},x\n" for value in values), encoding="utf-8")
    records.make(table, tmp_path / "made")
    found = [records.decode(r)["name"] for r in records.read(tmp_path / "made")]
    assert [type(x[0]) for x in found] == [{int: np.int64, float: np.float32}.get(type(x), bytes) for x in wanted]
    np.testing.assert_array_equal([x[0] for x in found], wanted)


def test_a_column_is_what_was_asked_for(tmp_path: Path) -> None:
    table, target = tmp_path / "table.csv", str(tmp_path / "made")
    table.write_text("zip,x,n\n1,007,3\n2,8,4\n")
    assert main(["records", str(table), target, "--column", "zip:text", "--column", "x:float"]) == 0
    found = records.decode(next(records.read(target)))
    assert (found["zip"], found["n"]) == ([b"1"], [3])
    assert found["x"] == np.array([7.0], np.float32)


def test_a_writer_that_has_ended_takes_no_record(tmp_path: Path) -> None:
    with records.Writer(tmp_path / "one") as writer:
        writer.write(b"a")
    with pytest.raises(mtf.DataError, match="takes no more records"):
        writer.write(b"b")
    assert list(records.read(tmp_path / "one")) == [b"a"]
