"""RetinaNet: published counts, an independent forward and loss, layouts, and that it learns to find something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.models.images.detection import Objects
from tests.models import images_reference as ref
from tests.models.test_images import drawn_state, images_input
from tests.oracle import assert_close, run

Array = np.ndarray[Any, Any]
FLOAT64 = mtf.Numerics("float64", activation_dtype="float64")


def tiny(**changes: Any) -> mtf.models.RetinaNetConfig:
    backbone = mtf.models.ResNetConfig(
        "tiny", (1, 1, 1), False, stem="small", height=16, width=24, features=4, zero_last=False, numerics=FLOAT64
    )
    found = mtf.models.RetinaNetConfig("tiny", backbone, 3, (1, 2, 3), 6, 1, (1.0, 1.5), (0.5, 1.0), 2.0)
    return found.replace(**changes)


def test_parameters_are_torchvisions_with_the_norms_that_it_freezes() -> None:
    """retinanet_resnet50_fpn, 91 classes: 34,014,999, without the 2 x 26,560 of its frozen norms; and the graph's."""
    config = mtf.models.RetinaNetConfig(classes=91, coarse_from="pyramid")
    assert config.parameters == 34_014_999 + 2 * 26_560
    for coarse in ("features", "pyramid"):
        small = tiny(coarse_from=coarse)
        with mtf.Graph() as graph:
            mtf.models.detection_outputs(small, 1)
        assert sum(v.shape.size for v in graph.trainable_variables) == small.parameters


def expected(p: dict[str, Array], x: Array, config: mtf.models.RetinaNetConfig) -> dict[str, Array]:
    """Logits and codes of each level, in use."""

    def conv(y: Array, name: str, stride: int = 1) -> Array:
        return ref.convolved(y, p[f"{name}/kernel"], stride) + p.get(f"{name}/bias", 0.0)

    backbone = {n.removeprefix("backbone/"): v for n, v in p.items() if n.startswith("backbone/")}
    _, c2, c3 = ref.resnet_stages(backbone, x, (1, 1, 1), False, "1.5", False, False)
    m2 = conv(c3, "pyramid/lateral2")
    m1 = conv(c2, "pyramid/lateral1") + m2.repeat(2, axis=1).repeat(2, axis=2)
    levels = {1: conv(m1, "pyramid/level1"), 2: conv(m2, "pyramid/level2")}
    levels[3] = conv(c3 if config.coarse_from == "features" else levels[2], "pyramid/level3", 2)
    found = {}
    for level, y in levels.items():
        for part, size in (("classes", config.classes), ("boxes", 4)):
            last = ref.convolved(ref.relu(conv(y, f"{part}/conv1")), p[f"{part}/last/kernel"])
            found[f"{part}{level}"] = last.reshape(*last.shape[:3], -1, size) + p[f"{part}/last/bias"]
    return found


@pytest.mark.parametrize("coarse", ["features", "pyramid"])
@pytest.mark.parametrize(("mesh", "layout"), [("p:1", ""), ("p:2;q:2", "batch:p;height:q"), ("p:2", "width:p")])
def test_heads_are_those_of_an_independent_network(coarse: str, mesh: str, layout: str) -> None:
    config = tiny(coarse_from=coarse)
    x = np.random.default_rng(1).normal(size=(2, 16, 24, 3))
    with mtf.Graph() as graph:
        levels, _ = mtf.models.retinanet(config, images_input(x), False)
        outputs = {f"classes{n}": made.logits for n, made in levels.items()}
        outputs |= {f"boxes{n}": made.codes for n, made in levels.items()}
        program = mtf.lower(outputs, mesh=mesh, layout=layout, precision="highest")
    state = drawn_state(graph)
    found = run(program, {"images": x}, state=state)[0]
    assert_close(found, expected(state, x, config), 1e-10, coarse)


def objects(rng: np.random.Generator, count: int) -> list[Objects]:
    found = []
    for n in range(count):
        corner = rng.uniform(0, (6, 12), (n % 3 + 1, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(4, 9, corner.shape)], axis=1)
        found.append(Objects(boxes, rng.integers(0, 3, len(boxes))))
    return found


@pytest.mark.parametrize(("mesh", "layout"), [("p:2;q:2", "batch:p;height:q")])
def test_the_loss_is_the_formula(mesh: str, layout: str) -> None:
    config, rng = tiny(gamma=1.5, alpha=0.3), np.random.default_rng(3)
    truth = objects(rng, 4)
    feeds = config.feeds(rng.normal(size=(4, 16, 24, 3)), truth)
    with mtf.Graph() as graph:
        levels, _ = mtf.models.retinanet(config, images_input(feeds["images"]), True)
        heads = {f"classes{n}": made.logits for n, made in levels.items()} | {
            f"boxes{n}": m.codes for n, m in levels.items()
        }
        said = mtf.lower(heads, precision="highest")
    with mtf.Graph():
        outputs, _ = mtf.models.detection_step(config, 4, mtf.optimize.SgdOptimizer(0.1))
        program = mtf.lower(outputs, mesh=mesh, layout=layout, precision="highest")
    state = {n: x * (0.1 if "last/" in n else 1.0) for n, x in drawn_state(graph).items()}
    heads = run(said, {"images": feeds["images"].astype(np.float64)}, state=state)[0]
    class_loss = box_loss = count = 0.0
    for level in (1, 2, 3):
        for at in np.ndindex(*feeds[f"classes{level}"].shape):
            kind = feeds[f"classes{level}"][at]
            count += kind >= 0
            for k in range(3) if kind != -2 else ():
                q = 1 / (1 + np.exp(-heads[f"classes{level}"][(*at, k)]))
                class_loss -= 0.3 * (1 - q) ** 1.5 * np.log(q) if k == kind else 0.7 * q**1.5 * np.log(1 - q)
            for i in range(4) if kind >= 0 else ():
                d = abs(heads[f"boxes{level}"][(*at, i)] - feeds[f"codes{level}"][(*at, i)])
                box_loss += d**2 / 0.2 if d < 0.1 else d - 0.05
    assert count == sum(int((feeds[f"classes{n}"] >= 0).sum()) for n in (1, 2, 3)) >= 7
    found = run(program, feeds, state=state)[0]
    assert found["class_loss"] == pytest.approx(class_loss / count, rel=1e-6)
    assert found["box_loss"] == pytest.approx(box_loss / count / 4, rel=1e-6)
    assert found["loss"] == pytest.approx(class_loss / count + 5 * box_loss / count / 4, rel=1e-6)


def test_what_it_is_taught_it_would_find() -> None:
    """Targets as outputs: decoding and suppression give the objects back."""
    config, truth = tiny(), objects(np.random.default_rng(8), 5)
    feeds = config.feeds(np.zeros((5, 16, 24, 3)), truth)
    outputs = {}
    for level in config.levels:
        kinds = feeds[f"classes{level}"]
        outputs[f"scores{level}"] = 0.9 * (kinds[..., None] == np.arange(3))
        outputs[f"codes{level}"] = feeds[f"codes{level}"]
    found = config.found(outputs, iou=0.9)
    clipped = [Objects(np.clip(o.boxes, 0, [16, 24, 16, 24]), o.classes) for o in truth]
    assert mtf.detection.mean_average_precision(found, clipped, 0.95) == 1.0


MESSAGES: list[tuple[Callable[[], object], str]] = [
    (lambda: tiny(levels=(1, 3)), "not consecutive"),
    (lambda: tiny(levels=(3, 4)), "levels begin at 3, but the backbone has 0 to 2"),
    (lambda: tiny(backbone="resnet-50"), "backbone must be a ResNetConfig"),
    (lambda: tiny(backbone=tiny().backbone.replace(height=18)), "height=18, which 4 does not divide"),
    (lambda: tiny(coarse_from="c5"), "coarse_from must be"),
    (lambda: tiny(classes=0, beta=0.0), "classes=0, beta=0.0"),
    (lambda: mtf.models.detection_step(tiny(), 0, mtf.optimize.SgdOptimizer(0.1)), "at least 1, got 0"),
    (lambda: mtf.models.detection_step(tiny(), 4, None), "optimizer must be"),
    (lambda: mtf.models.detection_outputs("tiny", 4), "expected a RetinaNetConfig"),
]


@pytest.mark.parametrize(("call", "words"), MESSAGES)
def test_messages(call: Callable[[], object], words: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=words) as raised:
        call()
    assert "test_retinanet.py:" in str(raised.value)
