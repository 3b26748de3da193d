"""Checkpoints: the format read by an independent reader, every fault of a file, resuming bit for bit, and kills."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshlib as mtf
from meshlib.core import files
from meshlib.core.dtypes import BY_NAME
from meshlib.storage import checkpoint, safetensors
from tests.effort import draws, some
from tests.paths import ROOT

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 6)
NUMPY = {"F64": "<f8", "F32": "<f4", "I32": "<i4", "BOOL": "?", "BF16": ml_dtypes.bfloat16}
ODD = np.array([[1.5, -0.0, np.inf, 1e-40, 3.3895314e38, -2.0]] * 4, np.float32)  # 1e-40 is subnormal


def variables(mesh: str = "one:1", layout: str = "", seed: int = 0, executor: str = "fast") -> mtf.Simulation:
    """One variable of every dtype, and a scope."""
    with mtf.Graph():
        w, n = mtf.variable("w", [A, B]), mtf.variable("n", [], 7, "int32")
        kept = [
            mtf.variable("wide", [A], np.arange(4.0) + 1e-12, "float64"),
            mtf.variable("narrow", [A, B], ODD.astype(ml_dtypes.bfloat16), "bfloat16"),
            mtf.variable("sliced", [B], 1.00390625, "float32", slice_dtype="bfloat16"),
            mtf.variable("flags", [B], np.arange(6) % 2 == 0, "bool"),
        ]
        with mtf.scope("layer/größe"):
            kept.append(mtf.variable("b", [B], 0.25))
        program = mtf.lower([w, n, *kept], [mtf.assign(w, w * 2), mtf.assign(n, n + 1)], mesh, layout)
    return mtf.simulate(program, seed=seed, executor=executor)


def tensors_of(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str], int]:
    """A second reader of the format, from its description alone: arrays, metadata, first byte of the data."""
    raw = path.read_bytes()
    start = 8 + int(np.frombuffer(raw[:8], "<u8")[0])
    table = json.loads(raw[8:start])
    metadata = table.pop("__metadata__")
    arrays = {}
    for name, item in table.items():
        begin, end = item["data_offsets"]
        assert (start + begin) % np.dtype(NUMPY[item["dtype"]]).itemsize == 0, f"{name} is not aligned"
        arrays[name] = np.frombuffer(raw[start + begin : start + end], NUMPY[item["dtype"]]).reshape(item["shape"])
    return arrays, metadata, start


def bits(sim: mtf.Simulation) -> dict[str, tuple[Any, ...]]:
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in sim.state.arrays.items()}


def written(path: Path, table: object, data: bytes) -> Path:
    """A file with any header and data."""
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


# ---------------------------------------------------------------- the format


def test_every_dtype_has_a_code() -> None:
    assert set(safetensors.CODES) == set(BY_NAME)
    # int4 takes a byte in a file, as its NumPy array does.
    assert {name: safetensors.BITS[safetensors.CODES[name]] // 8 for name in BY_NAME} == {
        name: dtype.public.itemsize for name, dtype in BY_NAME.items()
    }


def test_an_independent_reader_finds_every_tensor(tmp_path: Path) -> None:
    sim, path = variables(seed=-5), tmp_path / "state.safetensors"
    sim.step()
    mtf.save(sim, path)
    arrays, metadata, start = tensors_of(path)
    assert start % 8 == 0
    assert metadata["seed"] == "-5"
    assert set(arrays) == {"wide", "w", "narrow", "sliced", "n", "flags", "layer/größe/b", "step"}
    for name, x in arrays.items():
        stored = sim.state.arrays[name]
        assert x.astype(stored.dtype).tobytes() == stored.tobytes(), name
        assert metadata["crc32/" + name] == f"{zlib.crc32(x.tobytes()):08x}"
    assert arrays["narrow"].dtype == arrays["sliced"].dtype == ml_dtypes.bfloat16
    assert int(arrays["step"]) == 1
    np.testing.assert_array_equal(arrays["narrow"], ODD.astype(ml_dtypes.bfloat16))


def test_the_safetensors_package_reads_ours_and_we_its(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason="the safetensors package is not installed")
    sim, path, theirs = variables(seed=9), tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    sim.step()
    mtf.save(sim, path)
    arrays = numpy.load_file(path)
    assert set(arrays) == set(sim.state)
    for name, x in arrays.items():
        assert x.astype(sim.state.arrays[name].dtype).tobytes() == sim.state.arrays[name].tobytes(), name
    numpy.save_file(arrays, theirs, metadata={"seed": "4"})
    other = variables("r:2;c:2", "a:r;b:c", executor="exact")
    assert mtf.load(theirs, other) == {}
    assert bits(other) == bits(sim)
    assert other.seed == 4


@pytest.mark.parametrize("executor", ["fast", "exact"])
def test_state_loads_under_any_mesh_layout_and_executor(tmp_path: Path, executor: str) -> None:
    sim, path = variables("r:4", "a:r", seed=3), tmp_path / "state"
    sim.step()
    mtf.save(sim, path)
    for mesh, layout in (("one:1", ""), ("r:2;c:3", "a:r;b:c"), ("x:2;y:2", "a:y+x")):
        other = variables(mesh, layout, seed=8, executor=executor)
        assert bits(other) != bits(sim)
        assert mtf.load(path, other) == {}
        assert bits(other) == bits(sim)
        assert (other.seed, other.state.seed) == (3, 3)
        other.step()  # loaded arrays are the simulation's own
        assert int(other.state["n"]) == 9
    assert int(sim.state["n"]) == 8


def test_views_and_large_tensors_are_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sim, other, path = variables(), variables(seed=1), tmp_path / "state"
    sim.state.arrays["w"] = np.asfortranarray(sim.state["w"])
    sim.state.arrays["narrow"] = np.repeat(variables().state.arrays["narrow"], 2, axis=1)[:, ::2]
    monkeypatch.setattr(checkpoint, "CHUNK", 5)
    sizes: list[int] = []
    encoded = checkpoint._encoded

    def measured(*args: Any) -> Any:
        for block in encoded(*args):
            sizes.append(block.nbytes)
            yield block

    monkeypatch.setattr(checkpoint, "_encoded", measured)
    mtf.save(sim, path)
    assert max(sizes) == 32  # the four of float64
    assert len(sizes) == sum(-(-x.size // 5) for x in sim.state.arrays.values())
    mtf.load(path, other)
    for name in sim.state:
        np.testing.assert_array_equal(sim.state[name], other.state[name])


def test_save_takes_little_memory_beyond_the_state(tmp_path: Path) -> None:
    import tracemalloc

    with mtf.Graph():
        wide = [mtf.variable(f"w{i}", [mtf.Dimension("n", 1 << 20)], float(i), "bfloat16") for i in range(4)]
        sim = mtf.simulate(mtf.lower(wide))
    tracemalloc.start()
    try:
        mtf.save(sim, tmp_path / "state")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * 4 * checkpoint.CHUNK  # a few blocks of one tensor of 4 MiB; the state has 16 MiB
    assert (tmp_path / "state").stat().st_size > 8 << 20


def test_bfloat16_that_is_none_is_refused(tmp_path: Path) -> None:
    sim, path = variables(), tmp_path / "state"
    sim.state.arrays["sliced"] = np.float32([1, 1, 1.00390625, 1, 1, 1])
    with pytest.raises(mtf.CheckpointError, match=r"'sliced' is bfloat16, but its element 2 is .*1\.0039"):
        mtf.save(sim, path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- files that do not fit


def other_shapes() -> mtf.Simulation:
    with mtf.Graph():
        kept = [
            mtf.variable("wide", [A], 0.0, "float32"),
            mtf.variable("w", [B, A], 0.0),
            mtf.variable("narow", [A, B], 0.0, "bfloat16"),
            mtf.variable("n", [], 0, "int32"),
        ]
        return mtf.simulate(mtf.lower(kept), seed=1)


def test_everything_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "state"
    mtf.save(variables(), path)
    sim = other_shapes()
    before = bits(sim)
    with pytest.raises(mtf.CheckpointError) as caught:
        mtf.load(path, sim)
    first, *faults = str(caught.value).splitlines()
    assert first.startswith(f"load: {path} does not fit the simulation (strict=False loads what fits and")
    assert first.endswith("): 7 faults")
    assert sorted(line.strip() for line in faults) == sorted(
        [
            "'wide': other dtype: the file has F64 [4], the simulation F32 [4] [a:4]",
            "'w': other shape: the file has F32 [4, 6], the simulation F32 [6, 4] [b:6, a:4]",
            "'narow': not in the file; the simulation has BF16 [4, 6] [a:4, b:6]; did you mean 'narrow'?",
            "'narrow': not in the simulation; the file has BF16 [4, 6]; did you mean 'narow'?",
            "'sliced': not in the simulation; the file has BF16 [6]",
            "'flags': not in the simulation; the file has BOOL [6]",
            "'layer/größe/b': not in the simulation; the file has F32 [6]",
        ]
    )
    assert bits(sim) == before
    assert sim.seed == 1

    skipped = mtf.load(path, sim, strict=False)
    assert set(skipped) == {"wide", "w", "narow", "narrow", "sliced", "flags", "layer/größe/b"}
    assert skipped["w"] == "other shape: the file has F32 [4, 6], the simulation F32 [6, 4] [b:6, a:4]"
    assert int(sim.state["n"]) == 7
    assert sim.seed == 0


def test_only_some_variables(tmp_path: Path) -> None:
    saved, path = variables(seed=2), tmp_path / "state"
    saved.step()
    mtf.save(saved, path)
    sim = variables(seed=1)
    before, after = bits(sim), bits(saved)
    assert mtf.load(path, sim, only=["layer/*", "w"]) == {}
    assert bits(sim) == {**before, "w": after["w"], "layer/größe/b": after["layer/größe/b"]}
    assert (sim.seed, int(sim.state["step"])) == (1, 0)
    with pytest.raises(mtf.CheckpointError, match=r"matches 'flag'; did you mean 'flags'\?"):
        mtf.load(path, sim, only=["w", "flag"])
    with pytest.raises(mtf.CheckpointError, match=r"simulation \(strict=False .*\): 'w': other shape"):
        mtf.load(path, other_shapes(), only="w")
    for wrong in ([], 3, [3]):
        with pytest.raises(mtf.CheckpointError, match="only takes names or patterns"):
            mtf.load(path, sim, only=wrong)


def test_nothing_that_fits_and_no_seed(tmp_path: Path) -> None:
    sim = variables()
    path = written(tmp_path / "x", {"y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    with pytest.raises(mtf.CheckpointError, match=r"nothing in .*x fits: 10 faults"):
        mtf.load(path, sim, strict=False)
    path = written(tmp_path / "x", {"n": {"dtype": "I32", "shape": [], "data_offsets": [0, 4]}}, bytes(4))
    with pytest.raises(mtf.CheckpointError, match="'__metadata__': no 'seed' in it, only nothing"):
        mtf.load(path, sim)
    assert "__metadata__" in mtf.load(path, sim, strict=False)
    assert int(sim.state["n"]) == 0
    table = {"__metadata__": {"seed": "x"}, "n": {"dtype": "I32", "shape": [], "data_offsets": [0, 4]}}
    with pytest.raises(mtf.CheckpointError, match="'seed' in __metadata__ should be an integer, but is 'x'"):
        mtf.load(written(tmp_path / "x", table, bytes(4)), sim, strict=False)


def test_wrong_arguments(tmp_path: Path) -> None:
    sim = variables()
    with pytest.raises(
        mtf.CheckpointError, match=r"save: expected a simulation from mtf.simulate.*mtf.save\(sim, path\)"
    ):
        mtf.save("x", sim)  # type: ignore[arg-type]
    with pytest.raises(
        mtf.CheckpointError, match=r"load: expected a simulation from mtf.simulate.*mtf.load\(path, sim\)"
    ):
        mtf.load(sim, "x")  # type: ignore[arg-type]
    for path in (3, b"x", ""):
        with pytest.raises(mtf.CheckpointError, match="the path must be text or a pathlib"):
            mtf.save(sim, path)  # type: ignore[arg-type]
    with pytest.raises(mtf.CheckpointError, match=r"absent.* can't be read: No such file"):
        mtf.load(tmp_path / "absent", sim)
    with pytest.raises(mtf.CheckpointError, match=r"absent.* can't be written: No such file"):
        mtf.save(sim, tmp_path / "absent" / "x")
    with pytest.raises(mtf.CheckpointError, match="it is a folder"):
        mtf.save(sim, tmp_path)
    with pytest.raises(mtf.CheckpointError, match="can't be read: it is a folder"):
        mtf.load(tmp_path, sim)


# ---------------------------------------------------------------- files at fault

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def item(**changes: object) -> dict[str, object]:
    return {"t": {**F32, **changes}}


FAULTS: dict[str, tuple[object, bytes, str]] = {
    "not JSON": (b"{]", b"", "not valid JSON"),
    "deep JSON": (b'{"a":' * 100_000, b"", "nested deeper than 64 levels"),
    "endless number": (b'{"a":' + b"9" * 9_999 + b"}", b"", "not valid JSON"),
    "NaN": (b'{"a":NaN}', b"", "NaN"),
    "not UTF-8": (b'{"\xff":1}', b"", "not UTF-8: byte 2 of 7 is 0xff"),
    "another format": (b"PK\x03\x04", b"", r"should begin with '\{', but begins with b'PK"),
    "a list": (b"[]", b"", r"should begin with '\{'"),
    "key twice": (b'{"t":' + json.dumps(F32).encode() + b',"t":' + json.dumps(F32).encode() + b"}", bytes(8),
                  "key 't' occurs 2 times"),
    "inner key twice": (b'{"t":{"dtype":"F32","dtype":"F32"}}', b"", "key 'dtype' occurs 2 times"),
    "no tensor": ({"t": 3}, b"", "'t' should have dtype, shape and data_offsets, but is 3"),
    "no shape": ({"t": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), "'t' should have dtype, shape and"),
    "metadata": ({"__metadata__": {"seed": 3}}, b"", "__metadata__ should map text to text"),
    "dtype": (item(dtype="BF61"), bytes(8), "'t' has the unknown dtype 'BF61'; did you mean 'BF16'"),
    "shape": (item(shape=[2.0]), bytes(8), r"'t' has the shape \[2.0\]"),
    "negative size": (item(shape=[-2]), bytes(8), r"shape \[-2\]"),
    "true": (item(shape=[True, 2]), bytes(8), r"shape \[True, 2\]"),
    "offsets": (item(data_offsets=[8, 0]), bytes(8), r"'t' has data_offsets \[8, 0\]"),
    "three offsets": (item(data_offsets=[0, 4, 8]), bytes(8), r"data_offsets \[0, 4, 8\]"),
    "out of range": (item(data_offsets=[0, 80], shape=[20]), bytes(8), "'t' should end at byte 80, but only 8 bytes"),
    "truncated data": (item(), bytes(7), "'t' should end at byte 8, but only 7 bytes follow the header: truncated"),
    "size": (item(shape=[1]), bytes(8), r"'t' F32 \[1\] does not take the 8 bytes of its offsets \[0, 8\], but 4"),
    "huge size": (item(shape=[2**62] * 9), bytes(8), r"does not take the 8 bytes of its offsets \[0, 8\]"),
    "half a byte": (item(dtype="F4", shape=[15]), bytes(8), r"does not take the 8 bytes .*, but 7.5"),
    "overlap": ({"t": F32, "u": {**F32, "data_offsets": [4, 12]}}, bytes(12),
                "'u' begins at byte 4 and overlaps tensor 't', which ends at 8"),
    "gap": (item(data_offsets=[4, 12]), bytes(12), "bytes 0 to 4, before tensor 't', belong to no tensor"),
    "trailing": (item(), bytes(11), "3 trailing bytes: the tensors take 8 bytes, and 11 follow the header"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_file_is_named(tmp_path: Path, fault: str) -> None:
    table, data, message = FAULTS[fault]
    path, sim = written(tmp_path / "bad", table, data), variables()
    before = bits(sim)
    with pytest.raises(mtf.CheckpointError, match=f"load: {path} is not a complete safetensors file: .*{message}"):
        mtf.load(path, sim, strict=False)
    assert bits(sim) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes"),
        (b"1234567", "it has 7 bytes"),
        (b"\x09" + bytes(7) + b"{}      ", "the header should have 9 bytes, but only 8 follow its length: truncated"),
        (b"<html><body>", "a header of 7078601349733312572 bytes, more than the format's 100000000"),
        (bytes(8), r"should begin with '\{', but begins with b''"),
    ],
)
def test_faults_before_the_header(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(mtf.CheckpointError, match=message):
        mtf.load(path, variables())


def test_a_tensor_without_elements_and_foreign_dtypes_are_fine(tmp_path: Path) -> None:
    table = {
        "n": {"dtype": "I32", "shape": [], "data_offsets": [4, 8]},
        "empty": {"dtype": "I64", "shape": [0, 2**60], "data_offsets": [4, 4]},
        "eighths": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]},
    }
    sim = variables()
    skipped = mtf.load(written(tmp_path / "x", table, b"1234\x05\0\0\0"), sim, strict=False)
    assert skipped["eighths"] == "not in the simulation; the file has F8_E4M3 [4]"
    assert int(sim.state["n"]) == 5


def test_a_bool_must_be_one(tmp_path: Path) -> None:
    table = {"flags": {"dtype": "BOOL", "shape": [6], "data_offsets": [0, 6]}}
    with pytest.raises(mtf.CheckpointError, match="element 3 of BOOL tensor 'flags' is 2, not 0 or 1"):
        mtf.load(written(tmp_path / "x", table, b"\0\1\1\2\1\1"), variables(), only="flags")


Good = tuple[bytes, mtf.Simulation, mtf.Simulation]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    """The bytes of a checkpoint, the simulation that it was saved from, and one to load it into."""
    path = tmp_path_factory.mktemp("good") / "state"
    sim = variables(seed=5)
    mtf.save(sim, path)
    return path.read_bytes(), sim, variables(seed=6)


@given(at=st.integers(0, 10**6), flip=st.integers(1, 255), cut=st.one_of(st.none(), st.integers(0, 10**6)))
def test_damage_is_an_error_and_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, good: Good, at: int, flip: int, cut: int | None
) -> None:
    raw, sim = bytearray(good[0]), variables(seed=6)
    if cut is None:
        raw[at % len(raw)] ^= flip
    else:
        del raw[cut % len(raw) :]
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(raw)
    before, seed = bits(sim), sim.seed
    header = 8 + int.from_bytes(good[0][:8], "little")
    if cut is None and 8 <= at % len(raw) < header:  # the names of metadata have no second witness
        with contextlib.suppress(mtf.CheckpointError):
            mtf.load(path, sim)
        assert (bits(sim), sim.seed) in ((before, seed), (bits(good[1]), 5))
        return
    with pytest.raises(mtf.CheckpointError, match=str(path)):
        mtf.load(path, sim)
    assert (bits(sim), sim.seed) == (before, seed)


def test_a_flipped_bit_of_data_is_found(tmp_path: Path, good: Good) -> None:
    raw = bytearray(good[0])
    raw[-1] ^= 1
    path = tmp_path / "state"
    path.write_bytes(raw)
    message = r"damaged: bytes \d+ to \d+, tensor '.*have the CRC-32 [0-9a-f]{8}, but were written with"
    with pytest.raises(mtf.CheckpointError, match=message):
        mtf.load(path, good[2])
    raw = good[0].replace(b'"seed":"5"', b'"seed":"7"')
    path.write_bytes(raw)
    with pytest.raises(mtf.CheckpointError, match=r"damaged: 'seed' in __metadata__, '7', has the CRC-32"):
        mtf.load(path, good[2])


# ---------------------------------------------------------------- resuming


def training(optimizer: str, mesh: str, layout: str) -> mtf.Program:
    batch, inner, hidden = mtf.Dimension("batch", 8), mtf.Dimension("inner", 12), mtf.Dimension("hidden", 16)
    with mtf.Graph():
        x = mtf.input("x", [batch, inner])
        w1, w2 = mtf.variable("w1", [inner, hidden]), mtf.variable("w2", [hidden, mtf.Dimension("outer", 4)])
        h = mtf.dropout(mtf.tanh(mtf.einsum([x, w1], output_shape=[batch, hidden])), True, rate=0.25)
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([h, w2], output_shape=[batch, w2.shape.dim("outer")]) - 1))
        rule = {"Momentum": mtf.optimize.MomentumOptimizer(0.1), "Adam": mtf.optimize.AdamOptimizer(0.01)}[optimizer]
        return mtf.lower({"loss": loss}, rule.minimize(loss), mesh, layout)


TEN = [("Momentum", "fast"), ("Adam", "exact"), ("Momentum", "exact"), ("Adam", "fast")]


@pytest.mark.parametrize(("optimizer", "executor"), some(TEN, TEN[:2]))
def test_ten_steps_are_five_saved_loaded_and_five(tmp_path: Path, optimizer: str, executor: str) -> None:
    data = np.random.default_rng(0).normal(size=(10, 8, 12)).astype(np.float32)
    path = tmp_path / "state"
    first = training(optimizer, "rows:2;cols:2", "batch:rows;hidden:cols")
    places = (("rows:2;cols:2", "batch:rows;hidden:cols"), ("one:1", ""), ("n:4", "inner:n;batch:n?"))

    def run(sim: mtf.Simulation, program: mtf.Program, steps: range) -> list[bytes]:
        return [sim.run(program, x=data[n])["loss"].tobytes() for n in steps]

    straight = mtf.simulate(first, seed=11, executor=executor)
    losses = run(straight, first, range(10))
    assert len(set(losses)) == 10
    for mesh, layout in places:
        second = training(optimizer, mesh, layout)
        # The order of addition is the program's: the reference goes on in the second program, without a file.
        whole = mtf.simulate(first, seed=11, executor=executor)
        expected = run(whole, first, range(5))
        mtf.save(whole, path)
        expected += run(whole, second, range(5, 10))
        resumed = mtf.simulate(second, seed=99, executor=executor)
        assert mtf.load(path, resumed) == {}
        assert run(resumed, second, range(5, 10)) == expected[5:]
        assert bits(resumed) == bits(whole)
        if mesh == places[0][0]:
            assert expected == losses
            assert bits(resumed) == bits(straight)
        mtf.load(path, whole)  # back to step 5, over arrays that the executor still holds
        assert run(whole, second, range(5, 10)) == expected[5:]
        for name in straight.state:  # another layout is the same run up to rounding
            np.testing.assert_allclose(resumed.state[name], straight.state[name], rtol=2e-2, atol=2e-3, err_msg=name)


# ---------------------------------------------------------------- whole or not at all


def test_a_reader_that_maps_the_old_file_keeps_it(tmp_path: Path) -> None:
    sim, path = variables(), tmp_path / "state"
    mtf.save(sim, path)
    old = path.read_bytes()
    mapped = np.memmap(path, np.uint8, mode="r")
    sim.step()
    mtf.save(sim, path)
    assert mapped.tobytes() == old
    assert path.read_bytes() != old


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    sim, link = variables(), tmp_path / "latest"
    (tmp_path / "step_5").write_bytes(b"")
    link.symlink_to("step_5")
    mtf.save(sim, link)
    assert link.is_symlink()
    assert mtf.load(tmp_path / "step_5", sim) == {}


@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    sim, path = variables(), tmp_path / "state"
    mtf.save(sim, path)
    old = path.read_bytes()
    sim.step()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    if place == "write":
        monkeypatch.setattr(checkpoint, "_encoded", full)
    else:
        monkeypatch.setattr(os, place, full)
    with pytest.raises(mtf.CheckpointError, match=f"save: {path} can't be written: No space left on device"):
        mtf.save(sim, path)
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.skipif(sys.platform == "win32", reason="no flock")
def test_stale_files_go_and_those_in_use_and_of_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "state"
    others = [".state.0123abcd.other", ".state.0123abc.saving", ".other.0123abcd.saving", "state.0123abcd.saving"]
    for name in (".state.0123abcd.saving", *others):
        (tmp_path / name).write_bytes(b"x")
    file, in_use = files._temporary(str(tmp_path), "state")
    with file:
        mtf.save(variables(), path)
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["state", Path(in_use).name, *others])
    mtf.save(variables(), path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["state", *others])


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    path, sims = tmp_path / "state", [variables(seed=n) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: mtf.save(sims[n % 4], path), range(80)))
    found = variables(seed=9)
    mtf.load(path, found)
    assert bits(found) == bits(sims[found.seed])
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


KILLS = """
import os, random, select, signal, sys, time
import numpy as np
import meshlib as mtf
from pathlib import Path

path, kills = Path(sys.argv[1]), int(sys.argv[2])
with mtf.Graph():
    made = [mtf.variable(f"v{i}", [mtf.Dimension("n", 1 << 14)], 0.0, d) for i, d in enumerate(["float32", "bfloat16"])]
    made.append(mtf.variable("count", [], 0, "int32"))
    program = mtf.lower(made)


def state(sim, n):  # version n: every number of every variable
    for name in sim.state:
        sim.state[name] = np.full_like(sim.state[name], n % 200)
    sim.seed = n


sim, reader = mtf.simulate(program), mtf.simulate(program)
begun = time.perf_counter()
for _ in range(5):
    state(sim, 0)
    mtf.save(sim, path)
one_save = (time.perf_counter() - begun) / 5
chance, done, midway, total = random.Random(1), 0, 0, 0
for trial in range(kills):
    out, back = os.pipe()
    child = os.fork()
    if child == 0:
        n = done
        while True:
            n += 1
            state(sim, n)
            mtf.save(sim, path)
            os.write(back, n.to_bytes(4, "little"))
    os.close(back)
    time.sleep(chance.uniform(0, 5 * one_save + 0.01))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reported = b""
    while part := os.read(out, 1 << 16):
        reported += part
    os.close(out)
    before = done
    acknowledged = int.from_bytes(reported[-4:], "little") if reported else done
    left = [p for p in path.parent.iterdir() if p != path]
    assert len(left) <= 1, left
    assert mtf.load(path, reader) == {}
    done = reader.seed
    assert acknowledged <= done <= acknowledged + 1, (acknowledged, done)
    for name, x in reader.state.items():
        assert (x.astype(float) == done % 200).all(), (name, done)
    midway += bool(left)
    total += done - before
mtf.save(sim, path)
assert [p.name for p in path.parent.iterdir()] == [path.name]
print(kills, midway, total, one_save)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_writer_killed_at_random_moments_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    count = draws(40, 100)
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "state"), str(count)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kills, midway, saves = map(int, done.stdout.split()[:3])
    assert kills == count
    assert midway >= count // 10  # killed while a temporary file was there
    assert saves >= count // 5


# ---------------------------------------------------------------- paths that are not regular files


def special(folder: Path, kind: str) -> Path:
    """Something that is not a regular file; devices are nodes of this folder alone."""
    path = folder / "special"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(path))
        made.close()
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # the numbers of /dev/null
        except OSError:
            pytest.skip("may not make device nodes")
    else:
        path.mkdir()
    return path


def traced() -> mtf.Estimate:
    with mtf.Graph():
        x = mtf.input("x", [A])
        return mtf.estimate(mtf.lower({"y": mtf.relu(x)}), "v5e-1")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="files of Unix")
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_only_regular_files_are_read_or_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, linked: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has 108 bytes at most
    path, sim = special(Path(), kind), variables()
    before = os.lstat(path)
    if linked:
        path = Path("link")
        path.symlink_to("special")
    for error, use in (
        (mtf.CheckpointError, lambda: mtf.save(sim, path)),
        (mtf.CheckpointError, lambda: mtf.load(path, sim)),
        (mtf.GraphError, lambda: traced().save_trace(path)),
    ):
        with pytest.raises(error, match=f"{path} can't be .*: it is a {kind}"):
            use()
    after = os.lstat("special")
    assert (before.st_mode, before.st_ino, before.st_rdev) == (after.st_mode, after.st_ino, after.st_rdev)
    assert sorted(os.listdir()) == ["link"] * linked + ["special"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a\0b", r"'a\\x00b' can't be the name of a file"),
        ("a\ud800", r"'a\\ud800' can't be the name of a file"),
        ("x" * 256, "File name too long"),
        ("x/" * 2500 + "x", "File name too long"),
        ("ends/", "it is a folder"),
        ("file/below", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="messages of Linux")
def test_paths_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"mine")
    Path("loop").symlink_to("loop")
    sim, estimate = variables(), traced()
    for error, use in (
        (mtf.CheckpointError, lambda: mtf.save(sim, path)),
        (mtf.CheckpointError, lambda: mtf.load(path, sim)),
        (mtf.GraphError, lambda: estimate.save_trace(path)),
    ):
        with pytest.raises(error, match=message) as caught:
            use()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
    assert Path("file").read_bytes() == b"mine"
    assert sorted(os.listdir()) == ["file", "loop"]


def test_every_legal_name_can_be_written(tmp_path: Path) -> None:
    sim = variables(seed=4)
    for name in ("x" * 255, "ü" * 127, "x" * 200, "name with spaces\n", ".hidden"):
        path = tmp_path / name
        (tmp_path / f".{files._stem(name)}.0123abcd.saving").write_bytes(b"left by a writer that was killed")
        mtf.save(sim, path)
        mtf.save(sim, path)
        found = variables()
        assert mtf.load(path, found) == {}
        assert bits(found) == bits(sim)
        assert os.listdir(tmp_path) == [name]
        path.unlink()


def test_links_to_links_and_to_nothing(tmp_path: Path) -> None:
    sim, first, second = variables(), tmp_path / "first", tmp_path / "second"
    first.symlink_to(second)
    second.symlink_to("later")
    mtf.save(sim, first)
    assert first.is_symlink()
    assert second.is_symlink()
    assert (tmp_path / "later").is_file()
    assert mtf.load(first, sim) == {}
    traced().save_trace(first)
    assert first.is_symlink()
    assert (tmp_path / "later").read_bytes().startswith(b"{")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is closed to root")
def test_a_folder_that_may_not_be_written_and_one_that_may_not_be_read(tmp_path: Path) -> None:
    sim = variables()
    tmp_path.chmod(0o500)
    with pytest.raises(mtf.CheckpointError, match="can't be written: Permission denied"):
        mtf.save(sim, tmp_path / "x")
    tmp_path.chmod(0o300)
    mtf.save(sim, tmp_path / "x")
    tmp_path.chmod(0o700)
    assert os.listdir(tmp_path) == ["x"]


def test_a_folder_closed_to_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    sim = variables()
    monkeypatch.setattr(os, "listdir", closed)
    mtf.save(sim, tmp_path / "x")  # what was left by others stays
    monkeypatch.setattr(os, "open", closed)
    with pytest.raises(mtf.CheckpointError, match="x can't be written: Permission denied"):
        mtf.save(sim, tmp_path / "x")
    monkeypatch.undo()
    assert mtf.load(tmp_path / "x", sim) == {}
    assert os.listdir(tmp_path) == ["x"]
