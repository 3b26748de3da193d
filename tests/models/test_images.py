"""Models of images: published counts, an independent forward, one result under every layout, evaluation, messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from tests.effort import some
from tests.models import images_reference as ref
from tests.oracle import assert_close, run

Array = np.ndarray[Any, Any]

# Parameters and multiply-adds of torchvision's ResNets (weights' pages, "Num params" and "GFLOPS"), and of timm's
# pre-activation resnetv2_50.
PUBLISHED = {
    "resnet-18": (11_689_512, 1.81),
    "resnet-34": (21_797_672, 3.66),
    "resnet-50": (25_557_032, 4.09),
    "resnet-101": (44_549_160, 7.80),
    "resnet-152": (60_192_808, 11.51),
    "resnet-50-v1": (25_557_032, 3.86),  # 3.8 in He et al., table 1
    "resnet-50-v2": (25_549_352, 4.09),
}


@pytest.mark.parametrize("name", some(tuple(PUBLISHED), ("resnet-18", "resnet-50", "resnet-50-v2")))
def test_counts_are_the_published_ones_and_the_graphs(name: str) -> None:
    config = mtf.models.image_preset(name)
    assert (config.parameters, round(config.macs / 1e9, 2)) == PUBLISHED[name]
    with mtf.Graph() as graph:
        mtf.models.image_evaluation(config, 1)
    assert sum(v.shape.size for v in graph.trainable_variables) == config.parameters
    windows = [op for op in graph.operations if op.opdef.name == "convolution"]
    assert len(windows) == sum(c.size > 1 or c.stride > 1 for c in config.convolutions)


def small(
    version: str = "1.5", bottleneck: bool = False, large: bool = False, blocks: Any = (1, 2), **changes: Any
) -> mtf.models.ResNetConfig:
    sizes = {"classes": 5, "height": 17 if large else 8, "width": 19 if large else 8, "features": 4}
    return mtf.models.ResNetConfig(
        "tiny", blocks, bottleneck, version, "imagenet" if large else "small",
        zero_last=False, **{**sizes, "numerics": mtf.Numerics("float64", activation_dtype="float64"), **changes},
    )  # fmt: skip


def drawn_state(graph: mtf.Graph) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    found = {}
    for name, v in graph.variables.items():
        positive = name.endswith(("scale", "moving_variance"))
        x = rng.normal(0, 0.4, v.output.shape.sizes)
        found[name] = np.abs(x) + 0.5 if positive else x
    return found


KINDS = [
    (version, bottleneck, large)
    for version in ("1", "1.5", "2")
    for bottleneck in (False, True)
    for large in (False, True)
]


@pytest.mark.parametrize(("version", "bottleneck", "large"), some(KINDS, [KINDS[6], KINDS[7], KINDS[9]]))
@pytest.mark.parametrize("training", [True, False])
def test_logits_are_those_of_an_independent_network(
    version: str, bottleneck: bool, large: bool, training: bool
) -> None:
    """Odd sizes, both stems, all versions; in training and in use."""
    config = small(version, bottleneck, large)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, config.height, config.width, 3))
    with mtf.Graph() as graph:
        dims = [mtf.Dimension(*d) for d in zip(("batch", "height", "width", "image_channels"), x.shape, strict=True)]
        images = mtf.input("images", dims, "float64")
        logits, updates = mtf.models.resnet(config, images, training)
        program = mtf.lower({"logits": mtf.cast(logits, "float64")}, precision="highest")
    assert bool(updates) is training
    state = drawn_state(graph)
    (found,) = run(program, {"images": x}, "fast", state=state)
    wanted = ref.resnet(state, x, config.blocks, bottleneck, version, large, training)
    assert_close(found, {"logits": wanted}, 1e-10, config)


def test_resnet_18_forward() -> None:
    """All of its layers, with fewer channels, on images of 64."""
    config = mtf.models.image_preset("resnet-18").replace(
        features=4, height=64, width=64, classes=7, numerics=mtf.Numerics("float64", activation_dtype="float64")
    )
    x = np.random.default_rng(2).normal(size=(2, 64, 64, 3))
    with mtf.Graph() as graph:
        dims = [mtf.Dimension(*d) for d in zip(("batch", "height", "width", "image_channels"), x.shape, strict=True)]
        logits, _ = mtf.models.resnet(config, mtf.input("images", dims, "float64"), False)
        program = mtf.lower({"logits": mtf.cast(logits, "float64")}, precision="highest")
    state = drawn_state(graph)
    wanted = ref.resnet(state, x, (2, 2, 2, 2), False, "1.5", True, False)
    assert_close(run(program, {"images": x}, "fast", state=state)[0], {"logits": wanted}, 1e-10, "resnet-18")


# torchvision's (weights' pages), of 224 pixels; multiply-adds with those of attention.
VITS = {
    "vit-b-16": (86_567_656, 17.6),
    "vit-b-32": (88_224_232, 4.4),
    "vit-l-16": (304_326_632, 61.6),
    "vit-l-32": (306_535_400, 15.4),
    "vit-h-14": (632_045_800, 167.3),
}


@pytest.mark.parametrize("name", VITS)
def test_counts_of_vits(name: str) -> None:
    config = mtf.models.image_preset(name)
    assert (config.parameters, pytest.approx(VITS[name][1], abs=0.06)) == (VITS[name][0], config.macs / 1e9)


def images_input(x: Array) -> mtf.Tensor:
    dims = zip(("batch", "height", "width", "image_channels"), x.shape, strict=True)
    return mtf.input("images", [mtf.Dimension(*d) for d in dims], "float64")


@pytest.mark.parametrize("scanned", [True, False])
def test_a_vit_is_an_independent_one(scanned: bool) -> None:
    config = mtf.models.ViTConfig(
        "tiny", 2, 8, 2, 12, 4, 5, 8, 12, scan=scanned, numerics=mtf.Numerics("float64", activation_dtype="float64")
    )
    x = np.random.default_rng(2).normal(size=(3, 8, 12, 3))
    with mtf.Graph() as graph:
        logits, _ = mtf.models.vit(config, images_input(x), True)
        layout = mtf.models.image_layout("channels", config, "model:2")
        program = mtf.lower({"logits": logits}, precision="highest", mesh="model:2", layout=layout)
    assert sum(v.shape.size for v in graph.trainable_variables) == config.parameters
    state = drawn_state(graph)
    assert_close(
        run(program, {"images": x}, state=state)[0], {"logits": ref.vit(state, x, 2, 2, 4, scanned)}, 1e-10, config
    )


@pytest.mark.parametrize("layout", ["", "height:p;width:q", "batch:p;channels:q"])
def test_a_u_net_is_an_independent_one(layout: str) -> None:
    numerics = mtf.Numerics("float64", activation_dtype="float64")
    config = mtf.models.UNetConfig("tiny", 2, 2, 3, 8, 16, numerics=numerics)
    assert config.spatial_split == 2
    x = np.random.default_rng(2).normal(size=(2, 8, 16, 3))
    with mtf.Graph() as graph:
        logits, updates = mtf.models.unet(config, images_input(x), True)
        program = mtf.lower({"logits": logits}, precision="highest", mesh="p:2;q:2", layout=layout)
    assert len(updates) == 2 * (2 * 5 + 2)
    assert sum(v.shape.size for v in graph.trainable_variables) == config.parameters
    state = drawn_state(graph)
    assert_close(run(program, {"images": x}, state=state)[0], {"logits": ref.unet(state, x, 2)}, 1e-10, config)


LAYOUTS = {
    "data": "data:4",
    "zero1": "data:2",
    "spatial": "spatial:2",
    "data+spatial": "data:2;spatial:2;columns:2",
    "channels": "model:2",
    "data+channels": "data:2;model:2",
}


@pytest.mark.parametrize("name", some(tuple(LAYOUTS), ("data+spatial",)))
def test_layouts_change_nothing(name: str) -> None:
    """Two steps of training and an evaluation, against one core: the statistics of batch norm are of all."""
    mesh = LAYOUTS[name]
    config = small(numerics=mtf.Numerics(precision="highest"), blocks=(1, 1))
    layout = mtf.models.image_layout(name, config, mesh)
    rng = np.random.default_rng(5)
    feeds = {"images": rng.normal(size=(8, 8, 8, 3)), "labels": rng.integers(0, 5, 8)}
    results = []
    for where in ({"mesh": mesh, "layout": layout}, {}):
        with mtf.Graph():
            step = mtf.models.image_step(
                config, 8, mtf.optimize.LarsOptimizer(1.0, exclude=mtf.optimize.NORMS_AND_BIASES)
            )
            training = mtf.lower(*step, **where, precision="highest")
        with mtf.Graph():
            evaluation = mtf.lower(mtf.models.image_evaluation(config, 8), **where, precision="highest")
        sim = mtf.simulate(training, seed=2, executor="exact")
        outputs = [sim.step(feeds) for _ in range(2)]
        found = {f"loss {n}": out["loss"] for n, out in enumerate(outputs)}
        found |= sim.run(evaluation, {**feeds, "mask": np.ones(8)})
        results.append(found | {n: sim.state[n] for n in sim.state if n != "step"})
    assert_close(results[0], results[1], 2e-4, name)


def test_evaluation_counts_what_the_mask_leaves() -> None:
    config = small(numerics=mtf.Numerics())
    with mtf.Graph():
        program = mtf.lower(mtf.models.image_evaluation(config, 8), mesh="data:4", layout="batch:data")
    sim = mtf.simulate(program)
    rng = np.random.default_rng(0)
    data = {
        "images": rng.normal(size=(13, 8, 8, 3)).astype(np.float32),
        "labels": rng.integers(0, 5, 13).astype(np.int32),
    }
    results = [sim.step(batch) for batch in mtf.Batches(data, 8, remainder="pad", epochs=1)]
    assert sum(float(r["count"]) for r in results) == 13
    with mtf.Graph():
        dims = [
            mtf.Dimension(*d) for d in zip(("batch", "height", "width", "image_channels"), (13, 8, 8, 3), strict=True)
        ]
        logits, _ = mtf.models.resnet(config, mtf.input("images", dims), False)
        whole = mtf.simulate(mtf.lower({"logits": logits})).step(images=data["images"])["logits"]
    assert sum(float(r["right"]) for r in results) == (whole.argmax(1) == data["labels"]).sum()
    losses = np.log(np.exp(whole).sum(1)) - whole[np.arange(13), data["labels"]]
    assert sum(float(r["loss"]) for r in results) == pytest.approx(losses.sum(), rel=1e-3)


def test_late_stages_are_out_of_reach_of_rules_for_rows() -> None:
    """7 x 7 places can't be shared out between two cores: they are whole, everything before them is split."""
    config = mtf.models.image_preset("resnet-18").replace(features=8, classes=8)
    with mtf.Graph() as graph:
        mtf.models.image_evaluation(config, 2)
    named = {op.name: op.output.shape for op in graph.operations}
    assert named["stage3/block2/conv2"].names == (
        "batch",
        "height",
        "width",
        "channels",
    )
    assert named["stage4/block1/conv1"].names == ("batch", "late_height", "late_width", "channels")


def test_features_that_a_layout_does_not_divide_name_the_argument_that_helps() -> None:
    """14 rows in the third stage of a ResNet: padding is no remedy, another `spatial_split` is."""
    config = mtf.models.image_preset("resnet-50").replace(blocks=(1, 1, 1), features=8)

    def lowered(config: mtf.models.ResNetConfig) -> mtf.Program:
        with mtf.Graph():
            step = mtf.models.image_step(config, 8, mtf.optimize.SgdOptimizer(0.1))
            return mtf.lower(*step, mesh="model:4", layout="height:model")

    with pytest.raises(mtf.LayoutError, match=r"14 % 4 = 2. Give the model spatial_split=4 .*or remove height:model"):
        lowered(config)
    assert lowered(config.replace(spatial_split=4)).collectives


MESSAGES: list[tuple[Callable[[], object], str]] = [
    (lambda: mtf.models.image_preset("resnet-51"), "did you mean 'resnet-50'|did you mean 'resnet-101'"),
    (lambda: mtf.models.ResNetConfig(blocks=()), r"blocks=\(\)"),
    (lambda: mtf.models.ResNetConfig(features=0, classes=-1), "classes=-1, features=0"),
    (lambda: mtf.models.ResNetConfig(version="3"), "version must be '1' or"),
    (lambda: mtf.models.image_layout("spacial", small(), "data:2"), "did you mean 'spatial'"),
    (lambda: mtf.models.image_layout("data+spatial", small(), "data:2"), "needs an axis 'spatial'"),
    (lambda: mtf.models.image_layout("spatial", small(), "spatial:4"), r"spatial_split=4"),
    (lambda: mtf.models.image_layout("channels", small(), "model:8"), "4 % 8 = 4"),
    (lambda: mtf.models.image_step(small(), 0, mtf.optimize.SgdOptimizer(0.1)), "at least 1, got 0"),
    (lambda: mtf.models.image_step(small(), 8, "sgd"), "optimizer must be"),
    (lambda: mtf.models.image_step("resnet-50", 8, mtf.optimize.SgdOptimizer(0.1)), "config of an image model"),
    (lambda: mtf.models.resnet(small(), mtf.zeros([mtf.Dimension("batch", 2)]), True), "no dim 'height'"),
]


@pytest.mark.parametrize(("call", "words"), MESSAGES)
def test_messages(call: Callable[[], object], words: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=words) as raised:
        call()
    assert "test_images.py:" in str(raised.value)
