"""One compiler record: lowering, estimates, searches, plans and the command line share it and say which it was."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest

import meshlib as mtf
from meshlib.command import main
from tests.compilers import FREE_WEIGHTS, IN_PIECES
from tests.effort import some
from tests.validation.rows import BY_NAME

D = mtf.Dimension
BATCH, MODEL, HIDDEN = D("batch", 8192), D("d_model", 1024), D("hidden", 4096)


def outputs() -> dict[str, mtf.Tensor]:
    """Two products whose sum is over a split dim."""
    x = mtf.input("x", [BATCH, MODEL], "bfloat16")
    h = mtf.relu(mtf.einsum([x, mtf.variable("w1", [MODEL, HIDDEN], dtype="bfloat16")], [BATCH, HIDDEN]))
    return {"y": mtf.einsum([h, mtf.variable("w2", [HIDDEN, MODEL], dtype="bfloat16")], [BATCH, MODEL], name="down")}


def program(layout: str = "batch:data;hidden:tensor", **how: object) -> mtf.Program:
    with mtf.Graph():
        return mtf.lower(outputs(), mesh="data:2;tensor:4", layout=layout, **how)


def test_programs_and_estimates_keep_their_compiler():
    assert program().compiler == mtf.estimate(program(), "v3-8").compiler == mtf.XLA_TPU
    made = program(compiler=mtf.NO_OVERLAP)
    assert made.compiler == mtf.estimate(made, "v3-8").compiler == mtf.NO_OVERLAP
    other = mtf.estimate(made, "v3-8", IN_PIECES)
    assert other.compiler == IN_PIECES
    assert other.step_seconds < mtf.estimate(made, "v3-8").step_seconds
    assert other.step_seconds == mtf.estimate(program(compiler=IN_PIECES), "v3-8").step_seconds


def test_small_collectives_are_not_cut_in_pieces():
    """The sum of y has 8 MiB on a device."""
    size = BATCH.size // 2 * MODEL.size * 2
    assert program().collectives[0].payload_bytes == size
    cut, whole = (replace(mtf.XLA_TPU, windowed_einsum_bytes=least) for least in (size, size + 1))
    seconds = [mtf.estimate(program(), "v3-8", c).step_seconds for c in (cut, whole, mtf.XLA_TPU)]
    assert seconds[0] < seconds[1] == seconds[2]


def test_where_weights_move_is_decided_by_the_lowering():
    made = program(compiler=FREE_WEIGHTS)
    assert mtf.estimate(made, "v3-8", mtf.XLA_TPU).compiler == FREE_WEIGHTS
    by_balance = program(balance=mtf.Balance(stationary=False), compiler=mtf.NO_OVERLAP)
    assert by_balance.compiler == replace(mtf.NO_OVERLAP, stationary_weights=False)


def test_every_view_names_it(tmp_path):
    est = mtf.estimate(program(), "v3-8", mtf.NO_OVERLAP)
    assert "compiler: no-overlap" in est.table()
    assert "no-overlap" in est.compare(mtf.estimate(program(), "v3-8"))
    est.save_trace(tmp_path / "trace.json")
    assert "no-overlap" in (tmp_path / "trace.json").read_text()
    assert "compiler: no-overlap" in est.profile().table()
    assert "no-overlap" in str(mtf.scaling(lambda s: program(), ["v3-8"], mtf.NO_OVERLAP))
    serving = mtf.serving(mtf.models.preset("gpt2"), "v5e-1", batches=[8], context=1024, compiler=mtf.NO_OVERLAP)
    assert "no-overlap" in str(serving)
    assert {p.decode.compiler for p in serving.points} == {mtf.NO_OVERLAP}


def test_a_search_lowers_and_prices_with_it(tmp_path):
    def build():
        return outputs(), []

    found = mtf.search(
        build, "v3-8", axes=1, seconds=None, workers=1, compiler=mtf.NO_OVERLAP, resume=tmp_path / "kept"
    )
    with pytest.raises(mtf.GraphError, match="compiler"):  # what was kept is another compiler's
        mtf.search(build, "v3-8", axes=1, seconds=None, workers=1, resume=tmp_path / "kept")
    assert found.estimate().compiler == found.compiler == mtf.NO_OVERLAP
    assert found.as_json()["compiler"] == "no-overlap"
    assert "compiler: no-overlap" in str(found)
    assert "compiler: no-overlap" in str(found.sensitivity(links=[2]))


@pytest.mark.parametrize("command", some(["plan", "estimate", "profile", "compare"], ["profile"]))
def test_the_command_takes_a_name(capsys, command):
    text = []
    for name in ("xla-tpu", "no-overlap"):
        layouts = ["fsdp@fsdp:4", "data@data:4"] if command == "compare" else ["fsdp@fsdp:4"]
        where = [part for layout in layouts for part in ("--layout", layout)]
        main([command, "gpt2", "--slice", "v5e-4", *where, "--compiler", name])
        text.append(capsys.readouterr().out)
        assert name in text[-1]
    assert text[0].replace("xla-tpu", "no-overlap") != text[1]  # and figures differ


def test_published_rows_are_predicted_for_it(capsys, tmp_path, monkeypatch):
    """A gather that a step awaits: with overlap it is hidden in part."""
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([BY_NAME["mt-v5e-16b-1x"]]))
    errors = []
    for name in ("xla-tpu", "no-overlap"):
        main(["validate", "--file", str(file), "--compiler", name])
        text = capsys.readouterr().out
        assert f"compiler: {name}, with what rows say" in text
        errors.append(text.splitlines()[1])
    assert errors[0] != errors[1]


def test_json_has_it(capsys):
    main(["plan", "gpt2", "--slice", "v5e-4", "--layout", "fsdp@fsdp:4", "--json", "--compiler", "gspmd"])
    assert json.loads(capsys.readouterr().out)["compiler"] == "gspmd"


@pytest.mark.parametrize(
    ("field", "bad"),
    [("name", ""), ("overlap", "some"), ("stationary_weights", 1), ("unrolled_loops", "no"), ("slice_jitter", None),
     ("step_overhead_seconds", -1), ("step_overhead_seconds", float("nan")), ("rounding_noise_bytes", -4),
     ("rounding_noise_bytes", 0.5), ("partitioner", "jit"), ("whole_torus_axes", 2), ("bias_lookups", 1),
     ("torus_sums", None),
     ("row_sums", "sorted"), ("sparse_core_collectives", "all_gather"), ("sparse_core_collectives", ("broadcast",))],
)  # fmt: skip
def test_values_that_a_field_cannot_have(field, bad):
    with pytest.raises(mtf.GraphError, match=field):
        replace(mtf.XLA_TPU, **{field: bad})


def test_every_field_is_described():
    for field in fields(mtf.Compiler):
        assert re.search(rf"^ +{field.name}: ", mtf.Compiler.__doc__ or "", re.M)


@pytest.mark.parametrize("call", [
    lambda: program(compiler="xla-tpu"), lambda: mtf.estimate(program(), "v3-8", "xla-tpu"),
    lambda: mtf.search(lambda: (outputs(), []), "v3-8", compiler="xla-tpu"),
    lambda: mtf.serving(mtf.models.preset("gpt2"), "v5e-1", compiler="xla-tpu"),
    lambda: mtf.scaling(lambda s: program(), ["v3-8"], "xla-tpu"),
])  # fmt: skip
def test_a_name_is_no_compiler(call):
    with pytest.raises(mtf.GraphError, match=r"compiler must be an mtf\.Compiler, got str 'xla-tpu'; it is mtf\.COMPI"):
        call()
