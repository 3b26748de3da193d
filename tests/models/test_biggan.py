"""BigGAN: the authors' counts, independent players, one step under every layout, noise, samples, messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from tests.effort import some
from tests.models import images_reference as ref
from tests.models.test_images import drawn_state
from tests.oracle import assert_close, run

Adam, Sgd = mtf.optimize.AdamOptimizer, mtf.optimize.SgdOptimizer
FLOAT64 = mtf.Numerics("float64", activation_dtype="float64")


def tiny(**changes: Any) -> mtf.models.BigGANConfig:
    small = {"side": 16, "channels": 1, "classes": 3, "features": 2, "z": 6, "shared": 4, "attention": 8}
    return mtf.models.BigGANConfig("tiny", **{**small, "numerics": FLOAT64, **changes})


def test_parameters_are_those_of_the_authors_and_the_graphs() -> None:
    """Of 128 pixels: 70,433,988 and 87,982,370, as their PyTorch code prints (ajbrock/BigGAN-PyTorch)."""
    config = mtf.models.BigGANConfig()
    assert (config.generator_parameters, config.discriminator_parameters) == (70_433_988, 87_982_370)
    for small in (tiny(), tiny(side=64, features=1, z=10, attention=0, channels=3)):
        with mtf.Graph() as graph:
            mtf.models.gan_step(small, 2, None, Adam(0.1))
        counts = {"generator": 0, "discriminator": 0}
        for v in graph.trainable_variables:
            counts[v.name.partition("/")[0]] += v.shape.size
        assert list(counts.values()) == [small.generator_parameters, small.discriminator_parameters]


@pytest.mark.parametrize("layout", ["", "batch:p;height:q"])
def test_players_are_independent_ones(layout: str) -> None:
    config, rng = tiny(), np.random.default_rng(2)
    batch = mtf.Dimension("batch", 4)
    z, labels = rng.normal(size=(4, 6)), np.array([0, 2, 1, 2])
    x = rng.uniform(-1, 1, (4, 16, 16, 1))
    with mtf.Graph() as graph:
        y = mtf.input("labels", [batch], "int32")
        noise = mtf.input("z", [batch, mtf.Dimension("z", 6)], "float64")
        made, updates = mtf.models.generator(config, noise, y, False)
        sides = [mtf.Dimension(n, 16) for n in ("height", "width")]
        images = mtf.input("images", [batch, *sides, mtf.Dimension("image_channels", 1)], "float64")
        logits, judged = mtf.models.discriminator(config, images, y, False)
        program = mtf.lower({"made": made, "logits": logits}, mesh="p:2;q:2", layout=layout, precision="highest")
    assert not updates
    assert not judged
    state = drawn_state(graph)
    players = ref.Players(state)
    halves = [half for _, _, half in config.discriminated]
    wanted = {"made": players.generated(z, labels, 2, 8), "logits": players.judged(x, labels, halves, 8)}
    (found,) = run(program, {"labels": labels, "z": z, "images": x}, "fast", state=state)
    assert_close(found, wanted, 1e-9, "players")


@pytest.mark.parametrize("name", some(("data", "spatial"), ("spatial",)))
def test_layouts_change_nothing(name: str) -> None:
    """Two steps of both players, noise and classes drawn in the program; then samples by the averages."""
    config = tiny(numerics=mtf.Numerics(precision="highest"), attention=0)
    feeds = {"images": np.random.default_rng(0).uniform(-1, 1, (4, 16, 16, 1)), "labels": np.arange(4) % 3}
    layout = mtf.models.image_layout(name, config, "p:2")
    results = []
    for where in ({"mesh": "p:2", "layout": layout}, {}):
        with mtf.Graph():
            step = mtf.models.gan_step(config, 4, Sgd(0.01), Sgd(0.01), 0.5)
            program = mtf.lower(*step, **where, precision="highest")
        with mtf.Graph():
            samples = mtf.lower(mtf.models.gan_samples(config, 4), **where, precision="highest")
        sim = mtf.simulate(program, seed=3, executor="exact")
        found = [sim.step(feeds) for _ in range(2)][-1]
        averages = mtf.optimize.averaged(sim.state)
        assert all(n.startswith("generator/") for n in averages)
        sim.state.update(averages)
        images = sim.run(samples, z=config.noise(4, 1.0), labels=np.arange(4) % 3)["images"]
        assert np.abs(images).max() <= 1
        results.append(found | {"images": images} | averages)
    assert_close(results[0], results[1], 1e-3, name, floor=0.01)  # a bias before a norm has no gradient but noise


def test_a_step_of_the_discriminator_leaves_the_generator() -> None:
    with mtf.Graph():
        outputs, updates = mtf.models.gan_step(tiny(), 4, None, Adam(0.1))
    assert sorted(outputs) == ["discriminator_loss", "generator_loss", "made", "real"]
    assert all(u.attrs["variable"].startswith("discriminator/") for u in updates)


def test_truncated_noise() -> None:
    noise = tiny().noise(500, 0.5, seed=1)
    assert (noise.shape, noise.dtype) == ((500, 6), np.float32)
    assert 0.45 < np.abs(noise).max() <= 0.5
    assert noise.std() == pytest.approx(0.2837, abs=0.01)  # of a normal law cut off at a half
    np.testing.assert_array_equal(noise, tiny().noise(500, 0.5, seed=1))
    assert np.abs(tiny().noise(500)).max() > 2


MESSAGES: list[tuple[Callable[[], object], str]] = [
    (lambda: tiny(side=20), "side=20, which is none of 16, 32"),
    (lambda: tiny(z=7), "7 % 3 = 1"),
    (lambda: tiny(attention=4), "attention=4, which is not a side of features: 8, 16, or 0"),
    (lambda: tiny(classes=0), "classes=0"),
    (lambda: tiny().noise(3, 0.0), "truncation must be positive"),
    (lambda: mtf.models.gan_step(tiny(), 0, Adam(0.1), Adam(0.1)), "at least 1, got 0"),
    (lambda: mtf.models.gan_step(tiny(), 4, Adam(0.1), None), "both optimizers"),
    (lambda: mtf.models.gan_step("tiny", 4, Adam(0.1), Adam(0.1)), "expected a BigGANConfig"),
    (lambda: mtf.models.gan_samples(tiny(), 0), "at least 1"),
    (lambda: mtf.models.generator(tiny(), mtf.zeros([mtf.Dimension("z", 5)]), mtf.zeros([]), True), "size 5 .*but 6"),
]


@pytest.mark.parametrize(("call", "words"), MESSAGES)
def test_messages(call: Callable[[], object], words: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=words) as raised:
        call()
    assert "test_biggan.py:" in str(raised.value)
