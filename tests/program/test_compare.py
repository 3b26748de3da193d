"""mtf.compare on networks whose bytes and work are derived by hand."""

from __future__ import annotations

import pytest

import meshlib as mtf
from meshlib.program.records import Program

D = mtf.Dimension
F32 = 4
B, P, H, C = 64, 16, 32, 8  # batch, pixels, hidden, classes


def network(batch: int = B) -> tuple[mtf.Tensor, list]:
    """The README's network, small: pixels to hidden to classes, SGD."""
    b, p, h, c = D("batch", batch), D("pixels", P), D("hidden", H), D("classes", C)
    images, labels = mtf.input("images", [b, p]), mtf.input("labels", [b], "int32")
    w1, w2 = mtf.variable("w1", [p, h]), mtf.variable("w2", [h, c])
    logits = mtf.einsum([mtf.relu(mtf.einsum([images, w1], [b, h])), w2], [b, c])
    loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, c), c))
    return loss, mtf.optimize.SgdOptimizer(0.1).minimize(loss)


def program(mesh: str, layout: str, batch: int = B) -> Program:
    with mtf.Graph():
        loss, train = network(batch)
        return mtf.lower({"loss": loss}, train, mesh, layout)


@pytest.fixture(scope="module")
def data() -> Program:
    return program("data:4", "batch:data")


@pytest.fixture(scope="module")
def two() -> Program:
    return program("data:2;model:2", "batch:data;hidden:model")


@pytest.fixture(scope="module")
def sharded() -> Program:
    return program("data:4", "batch:data;hidden:data?", batch=256)


def test_a_program_does_not_differ_from_itself(data: Program) -> None:
    found = mtf.compare(data, data)
    assert (found.only_a, found.only_b, found.changed) == ((), (), ())
    assert len(found.unchanged) == len(data.collectives) == 3
    assert all(t.same for t in found.tensors)
    assert found.sent_bytes[0] == found.sent_bytes[1]
    assert "have the same axes" in str(found)
    assert "only in" not in str(found)


def test_collectives_of_data_parallel_against_two_dimensional(data: Program, two: Program) -> None:
    """The logits' sum over the model axis is new; gradients and loss are in both with other bytes."""
    found = mtf.compare(data, two)
    assert found.only_a == ()
    (logits,) = found.only_b
    assert (logits.kind, logits.axes, logits.payload_bytes) == ("all_reduce", ("model",), B // 2 * C * F32)
    sizes = sorted((p.a.payload_bytes, p.b.payload_bytes) for p in found.changed)
    # the loss on 2 cores instead of 4, w2 and w1 by halves of hidden
    assert sizes == [(F32, F32), (H * C * F32, H * C * F32 // 2), (P * H * F32, P * H * F32 // 2)]
    assert found.unchanged == ()
    assert found.sent_by_phase == {
        "forward": (6.0, 4.0 + 1024.0),  # 2 x 3/4 x 4; 2 x 1/2 x 4, and 2 x 1/2 x 1024
        "backward": (3072.0 + 1536.0, 1024.0 + 512.0),
        "update": (0.0, 0.0),
    }
    assert found.sent_bytes == (data.sent_bytes, two.sent_bytes)


def test_collectives_of_data_parallel_against_fully_sharded(sharded: Program) -> None:
    found = mtf.compare(program("data:4", "batch:data", batch=256), sharded)
    assert sorted(c.kind for c in found.only_a) == ["all_reduce"] * 2
    assert sorted(c.kind for c in found.only_b) == ["all_gather"] * 3 + ["reduce_scatter"] * 2
    assert [p.a.payload_bytes for p in found.unchanged] == [F32]
    assert found.changed == ()


def test_where_tensors_lie(data: Program, two: Program) -> None:
    lies = {t.tensor: t for t in mtf.compare(data, two).tensors}
    assert (lies["w1"].a, lies["w1"].b, lies["w1"].group) == ("whole", "hidden@model", "variables")
    assert (lies["images"].a, lies["images"].b, lies["images"].group) == ("batch@data", "batch@data", "inputs")
    assert lies["relu"].b == "batch@data hidden@model"
    assert lies["einsum_1"].b == "batch@data {sum over model} -> batch@data"
    gradient = next(t for t in lies.values() if t.group == "gradients" and "pixels" in t.type)
    assert gradient.label == "of w1"
    assert gradient.a == "{sum over data} -> whole"
    assert gradient.b == "hidden@model {sum over data} -> hidden@model"
    assert lies["w1"].source.startswith("test_compare.py:")


def test_slots_have_a_group_of_their_own() -> None:
    with mtf.Graph():
        w = mtf.variable("w", [D("d", 8)])
        loss = mtf.reduce_sum(mtf.square(w * mtf.input("x", [D("batch", 4), D("d", 8)])))
        train = mtf.optimize.MomentumOptimizer(0.1, 0.9).minimize(loss)
        a = mtf.lower({}, train, "p:2", "batch:p")
        b = mtf.lower({}, train, "p:2", "batch:p;slots/d:p")
    (slot,) = (t for t in mtf.compare(a, b).tensors if t.group == "slots")
    assert (slot.a, slot.b) == ("whole", "d@p")


def test_memory_and_peak_are_those_of_the_programs(data: Program, two: Program) -> None:
    found = mtf.compare(data, two)
    assert found.peak_bytes == (data.memory.peak_bytes, two.memory.peak_bytes)
    assert found.memory_by_kind["variables"] == ((P * H + H * C) * F32, (P * H + H * C) * F32 // 2)


def test_duplicated_work(data: Program) -> None:
    """Matmuls: forward 2 B H (P + C), backward 2 B H (P + 2 C) flops; a fourth by batch, all of it when replicated."""
    whole = 2 * B * H * (2 * P + 3 * C)
    alone = program("data:4", "")
    a, b = mtf.compare(data, alone).work
    assert (a.mxu_flops, b.mxu_flops) == (whole // 4, whole)
    assert (a.mxu_duplicated, b.mxu_duplicated) == (1.0, 4.0)
    assert b.vpu_duplicated == 4.0
    assert 1.0 < a.vpu_duplicated < 4.0  # every core updates all variables
    assert b.vpu_ops > a.vpu_ops


def test_loops_count_by_trips() -> None:
    def lowered(trips: int, layout: str) -> Program:
        with mtf.Graph():
            d, out = D("d", 4), D("out", 4)
            x, w = mtf.input("x", [D("batch", 4), d]), mtf.variable("w", [d, out])
            (y,) = mtf.while_loop(
                trips, lambda v: mtf.rename_dimension(mtf.tanh(mtf.einsum([v, w], [x.shape[0], out])), "out", "d"), [x]
            )
            return mtf.lower({"y": y}, mesh="p:2", layout=layout)

    found = mtf.compare(lowered(2, "d:p"), lowered(3, "d:p"))
    assert found.work[0].mxu_flops * 3 == found.work[1].mxu_flops * 2 > 0
    assert found.sent_bytes[0] * 3 == found.sent_bytes[1] * 2 > 0
    assert found.changed  # the same bytes, another number of times
    assert " 3 times" in str(found)


def test_two_graphs_compare_by_names(data: Program) -> None:
    with mtf.Graph():
        images = mtf.input("images", [D("batch", B), D("pixels", P)])
        other = mtf.lower({"y": mtf.tanh(images, name="new")}, mesh="data:4", layout="pixels:data")
    found = mtf.compare(data, other)
    lies = {t.tensor: t for t in found.tensors}
    assert (lies["images"].a, lies["images"].b) == ("batch@data", "pixels@data")
    assert (lies["new"].a, lies["new"].b) == ("", "pixels@data")
    assert lies["relu"].b == ""
    assert len(found.only_a) == 3
    assert "not there" in str(found)


def test_the_text_says_what_why_and_how_much(data: Program, two: Program) -> None:
    text = str(mtf.compare(data, two))
    first, second, summary, _, head, *_ = text.splitlines()
    assert first == "a  mesh data:4 (4 cores), layout batch:data"
    assert second == "b  mesh data:2;model:2 (4 cores), layout batch:data;hidden:model"
    # 4614 and 2564 bytes
    assert summary.startswith("a core of b sends 2.504 KiB, not 4.506 KiB (0.556x), peaks at ")
    assert head.split() == ["a", "core,", "in", "a", "step", "a", "b", "b", "/", "a"]
    assert "only in b: 1\n  forward all_reduce of einsum_1 over model: payload 1 KiB, sends 1 KiB" in text
    assert "because einsum 'einsum_1' sums over 'hidden', split over model" in text
    assert "(gradient of w1)" in text
    assert "in both, with other bytes: 3" in text
    assert max(map(len, text.splitlines())) < 160


def test_reasons_that_differ_in_the_axes_alone_are_given_once(data: Program, two: Program) -> None:
    renamed = program("rows:4", "batch:rows")
    text = str(mtf.compare(data, renamed))
    assert "only in" not in text
    assert "in both, alike: 3" in text
    both = str(mtf.compare(renamed, two))
    assert "split over rows (in b over data)" in both
    assert "a because" not in both


def test_wrong_arguments(data: Program) -> None:
    with pytest.raises(mtf.GraphError, match=r"program_b: expected a program from mtf.lower, got str 'x'"):
        mtf.compare(data, "x")


# ---------------------------------------------------------------- a change of plan


def gathered(batch: int) -> Program:
    """A product with a fully-sharded weight: the weight comes to a large batch, a small batch to the weight."""
    with mtf.Graph():
        x, w = mtf.input("x", [D("batch", batch), D("d", 64)]), mtf.variable("w", [D("d", 64), D("out", 64)])
        y = mtf.einsum([mtf.sin(x), w], output_shape=[D("batch", batch), D("out", 64)], name="product")
        return mtf.lower({"y": y}, mesh="p:4", layout="batch:p;out:p?")


def test_a_change_of_plan_is_a_note_that_names_the_operation() -> None:
    small, large, larger = gathered(8), gathered(1024), gathered(2048)
    assert mtf.compare(large, larger).notes == ()
    found = mtf.compare(small, large)
    (product,) = (x for x in found.replanned if x.operation == "einsum")
    assert (product.name, product.phase, product.a, product.b) == ("product", "forward", "out@p", "batch@p")
    assert any(
        "split by batch@p in b, split by out@p in a: einsum 'product' (test_compare.py:" in n for n in found.notes
    )
    assert f"note: {found.notes[0]}" in str(found)


def test_two_layouts_have_no_change_of_plan(data: Program, two: Program) -> None:
    found = mtf.compare(data, two)
    assert found.replanned
    assert found.notes == ()
