"""Models written in one place and loaded in another: another mesh, one core, JAX; raw input in, answers out."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.records.images import read_image
from meshlib.sharing.pictures import pixels_of
from meshlib.sharing.programs import variables_of

D = mtf.Dimension
WORDS = mtf.BytePairs.learn("to be, or not to be: that is the question\n" * 2, 280)
MANY = "".join(map(str, range(99))) * 2
EXACT = mtf.Numerics(precision="highest")
TINY = mtf.models.preset("gpt2").reduced(1).replace(vocab=280, max_length=32, numerics=EXACT)
PAIRS = mtf.models.preset("t5-small").reduced(1).replace(vocab=280, numerics=EXACT)
SMALL = mtf.models.ResNetConfig(
    "small", (1,), False, stem="small", classes=3, height=8, width=12, channels=3, features=8, numerics=EXACT
)


@cache
def trained(config: Any, scan: bool = True) -> mtf.Simulation:
    """After a step, so that there are slots, too."""
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, 4, 8, scan=scan)
        program = mtf.lower(outputs, updates, mesh="data:2", layout="batch:data")
    sim = mtf.simulate(program, seed=3)
    rng = np.random.default_rng(0)
    sim.step({n: rng.integers(0, 280, v.tensor.shape.sizes, np.int32) for n, v in program.inputs.items()})
    return sim


@pytest.mark.parametrize("config", [TINY, PAIRS], ids=["decoder", "encoder-decoder"])
def test_text_in_text_out_wherever_it_is_loaded(config: Any, tmp_path: Path) -> None:
    sim = trained(config)
    mtf.export(sim, tmp_path / "model", config, tokenizer=WORDS)
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    wanted = mtf.generate(config, ["to be", "that"], sim, max_tokens=5, tokenizer=WORDS, stop=[WORDS.end])
    one = mtf.load_model(tmp_path / "model")
    assert one.config == config
    with mtf.Graph() as graph:
        mtf.models.transformer(config, 1, 1)
    assert one.state.keys() == graph.variables.keys()  # no slots of the optimizer, no step
    assert one.predict(["to be", "that"], max_tokens=5) == list(wanted.texts)
    assert one.predict("to be", max_tokens=5) == wanted.texts[0]
    if config is PAIRS:
        return
    other = mtf.load_model(tmp_path / "model", mesh="tensor:2", layout="heads:tensor", batch=2)
    assert other.predict(["to be", "that", "to be"], max_tokens=5) == [*wanted.texts, wanted.texts[0]]
    searched = mtf.generate(config, ["to be"], sim, max_tokens=5, tokenizer=WORDS, stop=[WORDS.end], beams=2)
    assert one.predict("to be", max_tokens=5, beams=2) == searched.text


def test_a_completion_ends_with_the_models_positions(tmp_path: Path) -> None:
    mtf.export(trained(TINY), tmp_path, TINY, tokenizer=WORDS)
    model = mtf.load_model(tmp_path)
    text = "x" * 20
    wanted = mtf.generate(TINY, text, model.state, 12, tokenizer=WORDS, stop=[WORDS.end]).text
    assert model.predict(text) == model.predict(text, max_tokens=12) == wanted


@pytest.mark.parametrize("options", [{"temperature": 2.0}, {"beams": 3}])
def test_of_a_padded_vocabulary_no_token_is_chosen_that_has_no_text(options: dict[str, Any]) -> None:
    few = mtf.BytePairs.learn("", 258)
    sim = trained(TINY)
    state = {name: sim.state[name] for name in variables_of(TINY)}
    state["embedding"] = np.concatenate([state["embedding"][:258], 9 * state["embedding"][258:]])
    made = mtf.generate(TINY, ["to be"] * 4, state, 5, tokenizer=few, mesh="x:2", layout="vocab:x", **options)
    assert max(t for tokens in made.tokens for t in tokens) < 258
    unknown = mtf.generate(TINY, ["to be"] * 4, state, 5, tokenizer=WORDS, **options)
    assert max(t for tokens in unknown.tokens for t in tokens) >= 258


def test_from_checkpoints_arrays_and_layers_one_by_one(tmp_path: Path) -> None:
    sim = trained(TINY, scan=False)
    mtf.save(sim, tmp_path / "whole.safetensors")
    arrays = {name: sim.state[name] for name in sim.state}
    mtf.export(sim, tmp_path / "a", TINY, tokenizer=WORDS)
    mtf.export(arrays, tmp_path / "b", TINY, tokenizer=WORDS)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    stacked = mtf.load_model(tmp_path / "a").state["layers/attention/q/kernel"]
    assert np.array_equal(stacked[-1], sim.state["layer_0/attention/q/kernel"])
    scanned = trained(TINY)
    mtf.save(scanned, tmp_path / "scanned.safetensors")
    mtf.export(tmp_path / "scanned.safetensors", tmp_path / "c", TINY)
    again = mtf.load_model(tmp_path / "c").state
    assert all(np.array_equal(again[name], scanned.state[name]) for name in again)


def test_jax_predicts_the_same(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="the extra 'jax' is not installed")
    mtf.export(trained(TINY), tmp_path, TINY, tokenizer=WORDS)
    here, there = (mtf.load_model(tmp_path, run=run) for run in (None, mtf.on_jax))
    assert here.predict("to be", max_tokens=4) == there.predict("to be", max_tokens=4)


@pytest.mark.parametrize(("size", "kind"), [((21, 33), "png"), ((33, 20), "jpg"), ((200, 137), "jpg")])
def test_a_served_model_sees_what_it_was_trained_on(tmp_path: Path, size: tuple[int, int], kind: str) -> None:
    """Odd margins, and JPEGs that are decoded at a part of their size."""
    image_file = pytest.importorskip("PIL.Image", reason="the extra 'images' is not installed")
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    image_file.fromarray(pixels).save(tmp_path / f"picture.{kind}")
    served = pixels_of(tmp_path / f"picture.{kind}", (16, 16, 3), "predict")
    np.testing.assert_array_equal(served, read_image(tmp_path / f"picture.{kind}", (16, 16)))


def test_pictures_in_classes_out(tmp_path: Path) -> None:
    with mtf.Graph():
        outputs, updates = mtf.models.image_step(SMALL, 4, mtf.optimize.MomentumOptimizer(0.1))
        sim = mtf.simulate(mtf.lower(outputs, updates, mesh="data:2", layout="batch:data"))
    rng = np.random.default_rng(0)
    sim.step(images=rng.normal(size=(4, 8, 12, 3)).astype("f4"), labels=np.array([0, 1, 2, 0], np.int32))
    facts = mtf.ImageInput((0.5, 0.4, 0.3), (0.2, 0.2, 0.1), ("cat", "dog", "fish"))
    mtf.export(sim, tmp_path / "model", SMALL, images=facts)
    pixels = rng.integers(0, 256, (8, 12, 3), np.uint8)
    with mtf.Graph():
        image = mtf.input("images", [D("batch", 1), D("height", 8), D("width", 12), D("image_channels", 3)])
        logits, _ = mtf.models.resnet(SMALL, image, is_training=False)
        program = mtf.lower({"logits": logits})
    fed = ((pixels / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.2, 0.1]).astype("f4")
    row = sim.run(program, images=fed[None])["logits"][0].astype(float)
    wanted = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    model = mtf.load_model(tmp_path / "model", batch=2, mesh="data:2", layout="batch:data")
    found = model.predict(pixels)
    assert list(found) == [("cat", "dog", "fish")[n] for n in np.argsort(-wanted)]
    assert [found[n] for n in ("cat", "dog", "fish")] == pytest.approx(wanted, rel=1e-4)
    several = model.predict([pixels, pixels / np.float32(255), pixels])
    assert [pytest.approx(found, rel=1e-5)] * 3 == several
    image_file = pytest.importorskip("PIL.Image", reason="the extra 'images' is not installed")
    image_file.fromarray(pixels).save(tmp_path / "picture.png")
    assert model.predict(str(tmp_path / "picture.png")) == pytest.approx(found, rel=1e-6)
    tall = np.zeros((40, 12, 3), np.uint8)
    tall[16:24] = pixels  # of which the middle is taken
    image_file.fromarray(tall).save(tmp_path / "tall.png")
    assert model.predict(tmp_path / "tall.png") == pytest.approx(found, rel=1e-6)
    assert model.predict((tmp_path / "picture.png").read_bytes()) == pytest.approx(found, rel=1e-6)
    (tmp_path / "none.png").write_bytes(b"no picture")
    image_file.fromarray(np.zeros((8, 12), np.uint16)).save(tmp_path / "deep.png")
    for wrong, text in (
        (tmp_path / "none.png", r"none\.png: expected a picture, found: cannot identify"),
        (tmp_path / "nothing.png", "expected a picture, found: .*No such file"),
        (tmp_path / "deep.png", "found: mode I;16, which has more than 8 bits"),
        (pixels.astype(np.float32), "the picture holds .* float32 must be 0 to 1"),
        (pixels.astype(int) - 256, "the picture holds -256 to .* int64 must be 0 to 255"),
        (pixels[1:], r"expected a picture of shape \[8, 12, 3\], .* got uint8 \[7, 12, 3\]"),
        (3, "expected the path of a picture, its bytes or an array, got int"),
        ([], "got none"),
    ):
        with pytest.raises(mtf.FeedError, match=text):
            model.predict(wrong)


def own(hidden: int = 4) -> dict[str, mtf.Tensor]:
    x = mtf.input("x", [D("batch", 2), D("d", 3)])
    w = mtf.variable("w", [D("d", 3), D("hidden", hidden)])
    return {"y": mtf.einsum([x, w], precision="highest")}


def test_a_program_of_ones_own(tmp_path: Path) -> None:
    with mtf.Graph():
        sim = mtf.simulate(mtf.lower(own(6), mesh="a:2", layout="hidden:a"), seed=5)
    mtf.export(sim, tmp_path, {"hidden": 6}, build=own)
    model = mtf.load_model(tmp_path, build=own, mesh="a:3", layout="hidden:a")
    x = np.ones((2, 3), np.float32)
    assert model.predict({"x": x})["y"] == pytest.approx(x @ sim.state["w"], rel=1e-6)
    with pytest.raises(mtf.GraphError, match=r"needs build=, a function of hidden that returns outputs by name"):
        mtf.load_model(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        mtf.models.preset("deepseek-v3").reduced(),
        mtf.models.preset("gemma3-4b").reduced(),
        mtf.models.image_preset("vit-b-16").replace(remat=mtf.Remat(save=["q"])),
        mtf.models.image_preset("resnet-50"),
    ],
)
def test_configs_come_back(config: Any) -> None:
    from meshlib.sharing.config_json import as_json, from_json

    back = from_json(json.loads(json.dumps(as_json(config))), "test")
    assert as_json(back) == as_json(config)
    assert type(back) is type(config)
    if isinstance(config, mtf.models.TransformerConfig):
        assert back == config


def test_faults_are_named(tmp_path: Path) -> None:
    sim = trained(TINY)
    mtf.export(sim, tmp_path / "good", TINY, tokenizer=WORDS)
    for call, kind, text in (
        (lambda: mtf.export(sim, tmp_path, PAIRS), mtf.GraphError, r"'encoder/relative_position_bias' .* is missing"),
        (lambda: mtf.export(3, tmp_path, TINY), mtf.GraphError, "trained must be a simulation, .* got int 3"),
        (lambda: mtf.export(sim, tmp_path, "gpt2"), mtf.GraphError, "config must be a TransformerConfig"),
        (lambda: mtf.export(sim, tmp_path, TINY, build=own), mtf.GraphError, "build is for a config of your own"),
        (lambda: mtf.export(sim, tmp_path, TINY, images=mtf.ImageInput()), mtf.GraphError, "images is for models of"),
        (lambda: mtf.export(sim, tmp_path, TINY, tokenizer=len), mtf.GraphError, "which can't be written"),
        (lambda: mtf.export({}, tmp_path, {"a": own}, build=own), mtf.GraphError, "can't be written as JSON"),
        (lambda: mtf.load_model(tmp_path), mtf.CheckpointError, "No such file"),
        (lambda: mtf.load_model(3), mtf.CheckpointError, "folder must be text"),
        (
            lambda: mtf.export(sim, tmp_path, TINY, tokenizer=mtf.BytePairs.learn(MANY, 281)),
            mtf.GraphError,
            "the tokenizer has 281 tokens, the model 280",
        ),
        (
            lambda: mtf.load_model(tmp_path / "good", mesh="x:3", layout="heads:x"),
            mtf.LayoutError,
            "'heads' does not divide over axis 'x'",
        ),
        (
            lambda: mtf.load_model(tmp_path / "good", mesh="x:2", layout="haeds:x"),
            mtf.LayoutError,
            "haeds.*did you mean 'heads'",
        ),
        (
            lambda: mtf.load_model(tmp_path / "good").predict("a", temprature=1),
            mtf.GraphError,
            "there is no option 'temprature'; did you mean 'temperature'",
        ),
        (
            lambda: mtf.load_model(tmp_path / "good").predict("a", tokenizer=WORDS),
            mtf.GraphError,
            "there is no option 'tokenizer'",
        ),
        (lambda: mtf.generate(TINY, "a", sim, max_token=1), mtf.GraphError, "did you mean 'max_tokens'"),
        (lambda: mtf.load_model(tmp_path / "good", batch=0), mtf.GraphError, "batch must be at least 1"),
        (lambda: mtf.load_model(tmp_path / "good").predict(3), mtf.GraphError, "expected a text or a list of texts"),
        (lambda: mtf.load_model(tmp_path / "good").predict(["a", ""]), mtf.GraphError, "text 1 is empty"),
        (
            lambda: mtf.load_model(tmp_path / "good").predict("x" * 30, max_tokens=3),
            mtf.GraphError,
            "a text of 30 tokens and 3 more, but .* has 32 positions",
        ),
        (lambda: mtf.load_model(tmp_path / "good").predict("x" * 32), mtf.GraphError, "32 tokens and 1 more"),
        (lambda: mtf.load_model(tmp_path / "good", run=5), mtf.GraphError, "run must map a program to a run"),
        (
            lambda: mtf.export({}, tmp_path, SMALL, images=mtf.ImageInput((0.5, 0.5))),
            mtf.GraphError,
            "images has 2 numbers of mean, the model 3 channels",
        ),
        (
            lambda: mtf.export({}, tmp_path, SMALL, images=mtf.ImageInput(classes=("a", "b"))),
            mtf.GraphError,
            "images names 2 classes, the model has 3",
        ),
        (lambda: mtf.ImageInput(deviation=(0,)), mtf.GraphError, "positive number for each channel"),
    ):
        with pytest.raises(kind, match=text):
            call()
    mtf.export(sim, tmp_path / "bare", TINY)
    with pytest.raises(mtf.GraphError, match="exported without a tokenizer"):
        mtf.load_model(tmp_path / "bare").predict("to be")
    good = json.loads((tmp_path / "good/config.json").read_text())
    files = good["files"]
    for change, text in (
        ({"format": "x"}, "has format 'x', version 2"),
        ({"model": {"type": "TransformerConfg"}}, "no config 'TransformerConfg'; did you mean 'TransformerConfig'"),
        ({"model": {**good["model"], "layerz": 1}}, "TransformerConfig has no field 'layerz'; did you mean 'layers'"),
        ({"files": {}}, "'files' should say which files hold the variables"),
        ({"files": {**files, "variables": {"name": "../x"}}}, "names no file of it"),
        (
            {"files": {**files, "variables": {**files["variables"], "bytes": 5}}},
            r"its manifest says 5 bytes, it has \d+",
        ),
        ({"files": {**files, "variables": {**files["variables"], "crc32": "0"}}}, "its manifest says the CRC-32 0, it"),
        ({"model": {"type": "Numerics", "bad": 1}}, "Numerics has no field 'bad'"),
    ):
        (tmp_path / "good/config.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(mtf.CheckpointError, match=text):
            mtf.load_model(tmp_path / "good")
    (tmp_path / "good/config.json").write_text("{}")
    with pytest.raises(mtf.CheckpointError, match=r"is not a config that export wrote: it has no 'format'"):
        mtf.load_model(tmp_path / "good")
