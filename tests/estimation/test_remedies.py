"""What would help where memory does not fit, carried out: each remedy saves about what was said."""

from __future__ import annotations

import dataclasses
import re

import pytest

import meshlib as mtf
from hardware import CHIPS, Slice
from meshlib import models
from meshlib.estimation import Remedy
from meshlib.estimation.memory.remedies import microbatches
from tests.effort import some

D = mtf.Dimension


def network(
    mesh: str,
    layout: str,
    how: str = "kept",
    tokens: int = 8192,
    layers: int = 6,
    on_host: bool = False,
    **scan: object,
) -> mtf.Program:
    """Residual layers of two products under Adam, written out ("kept"), each recomputed ("again"), or scanned.

    "parts" and "scan parts" are two microbatches, of layers written out or scanned.
    """
    b, d, f, loop = D("batch", tokens), D("d", 512), D("f", 2048), D("layers", layers)

    def layer(x: mtf.Tensor, up: mtf.Tensor, down: mtf.Tensor) -> mtf.Tensor:
        rows = x.shape.dim("batch")
        return x + mtf.einsum([mtf.sin(mtf.einsum([x, up], [rows, f])), down], [rows, d])

    def model(features: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
        x = features["x"]
        if how.startswith("scan"):
            weights = [mtf.variable("up", [loop, d, f]), mtf.variable("down", [loop, f, d])]
            (x,), _ = mtf.scan(lambda c, s: ([layer(c[0], *s)], []), [x], weights, loop, **scan)  # type: ignore[arg-type]
        else:
            for n in range(layers):
                weights = [mtf.variable(f"up{n}", [d, f]), mtf.variable(f"down{n}", [f, d])]
                x = mtf.recompute_grad(layer, [x, *weights]) if how == "again" else layer(x, *weights)
        return {"loss": mtf.reduce_mean(mtf.square(x))}

    with mtf.Graph() as graph:
        optimizer, features = mtf.optimize.AdamOptimizer(1e-3, slots_on_host=on_host), {"x": mtf.input("x", [b, d])}
        if how.endswith("parts"):
            grads, outputs = mtf.serialize_training_step(features, model, b, num_splits=int(how.split()[-2]))
            train = optimizer.apply_grads(grads, graph.trainable_variables)
        else:
            outputs = model(features)
            train = optimizer.minimize(outputs["loss"])
        return mtf.lower(outputs, train, mesh=mesh, layout=layout)


def carried_out(r: Remedy, mesh: str, layout: str, how: str, tokens: int) -> mtf.Program:
    """The program with what a remedy says."""
    what = r.what
    if found := re.search(r"layout rule '([^']+)'", what):
        return network(mesh, ";".join(filter(None, (layout, found[1]))), how, tokens)
    if found := re.search(r"a new mesh axis 'new' of 2 with rule '([^']+)'", what):
        return network(f"{mesh};new:2", ";".join(filter(None, (layout, found[1]))), how, tokens)
    if found := re.search(r"mesh axis '(\w+)' (\d+) -> (\d+)", what):
        assert f"{found[1]}:{found[2]}" in mesh
        return network(mesh.replace(f"{found[1]}:{found[2]}", f"{found[1]}:{found[3]}"), layout, how, tokens)
    if found := re.search(r"half the batch, 'batch' (\d+) -> (\d+)", what):
        assert (int(found[1]), int(found[2])) == (tokens, tokens // 2)
        return network(mesh, layout, how, tokens // 2)
    if found := re.search(r"(\d+) microbatches of 'batch' .*num_splits=(\d+)", what):
        assert found[1] == found[2]
        return network(mesh, layout, f"scan {found[1]} parts" if how == "scan" else f"{found[1]} parts", tokens)
    if "slots_on_host=True" in what:
        return network(mesh, layout, how, tokens, on_host=True)
    if "recompute_grad" in what:
        return network(mesh, layout, "again", tokens)
    if "remat='full'" in what:
        return network(mesh, layout, "scan", tokens)
    assert "remat=mtf.Remat(offload_carries=True)" in what, what
    return network(mesh, layout, "scan", tokens, remat=mtf.Remat(offload_carries=True))


def slice_of(program: mtf.Program) -> Slice:
    """As many chips in a line as the mesh has places."""
    chip = dataclasses.replace(CHIPS["v5e"], pod_shape=(16,), max_slice_chips=16, wrap_axis=16)
    return Slice(f"v5e-{program.mesh.size}", chip)


CASES = [
    ("data:4", "batch:data", "kept", 8192),
    ("data:4", "batch:data", "kept", 65536),
    ("data:4", "batch:data;d:data?", "kept", 65536),
    ("data:4", "batch:data", "scan", 8192),
    ("data:4", "batch:data", "scan", 65536),
    ("data:4;model:2", "batch:data;f:model", "kept", 65536),
    ("data:4;model:2", "batch:data;f:model", "scan", 65536),
    ("chip:1", "", "kept", 8192),
]


@pytest.mark.parametrize("case", some(CASES, [CASES[2], CASES[3]]), ids=lambda case: " ".join(map(str, case)))
def test_remedies_save_about_what_they_say(case):
    program = network(*case)
    memory = mtf.estimate(program, slice_of(program)).memory
    assert memory.remedies
    gains = [r.gain_bytes for r in memory.remedies]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 0.01 * memory.peak_bytes
    for r in memory.remedies:
        done = carried_out(r, *case)
        saved = memory.peak_bytes - mtf.estimate(done, slice_of(done)).memory.peak_bytes
        assert abs(saved - r.gain_bytes) <= 0.15 * memory.peak_bytes, (str(r), saved)


def test_what_a_loop_keeps_besides_is_named():
    program = network("data:4", "batch:data", "scan", 65536, remat="none")
    memory = mtf.estimate(program, "v5e-4").memory
    (r,) = (r for r in memory.remedies if "remat='full'" in r.what)
    done = mtf.estimate(network("data:4", "batch:data", "scan", 65536), "v5e-4").memory
    assert abs(memory.peak_bytes - done.peak_bytes - r.gain_bytes) <= 0.15 * memory.peak_bytes
    assert r.gain_bytes > 0.3 * memory.peak_bytes


def test_memory_on_the_host_does_not_count():
    kept, offloaded = (
        mtf.estimate(network("data:4", "batch:data", "scan", 65536, **how), "v5e-4").memory
        for how in ({}, {"remat": mtf.Remat(offload_carries=True)})
    )
    carried = 6 * 65536 // 4 * 512 * 4
    assert kept.host_bytes == 0
    assert offloaded.host_bytes == carried
    assert kept.peak_bytes - offloaded.peak_bytes == pytest.approx(carried, rel=0.25)
    assert "on the host" in str(offloaded)
    assert "on the host" not in str(kept)


def test_all_kinds_of_remedies_are_offered_where_they_help():
    def whats(*case: object) -> str:
        program = network(*case)
        return " ".join(r.what for r in mtf.estimate(program, slice_of(program)).memory.remedies)

    wide = whats("data:4", "batch:data", "kept", 65536)
    for word in ("recompute_grad", "'data' 4 -> 8", "layout rule '", "ZeRO-1"):
        assert word in wide
    # Splitting the dim of a loop would gather all of it.
    assert "layers:" not in whats("data:4", "batch:data", "scan", 8192)
    assert "new mesh axis" in whats("chip:1", "", "kept", 8192)
    small = mtf.lower({"y": mtf.relu(_x())}, mesh="chip:1")
    assert mtf.estimate(small, "v5e-1").memory.fits


def _x() -> mtf.Tensor:
    with mtf.Graph():
        return mtf.input("x", [D("b", 8), D("d", 128)])


def test_remedies_are_combined_where_none_suffices():
    whole = mtf.estimate(network("data:4", "batch:data", "kept", 2**16), "v5e-4").memory
    least = min(whole.peak_bytes - r.gain_bytes for r in dataclasses.replace(whole, capacity_bytes=1).remedies)
    memory = dataclasses.replace(whole, capacity_bytes=round(0.8 * least))
    together, *alone = memory.remedies
    assert together.what.startswith("together: ")
    assert memory.peak_bytes - together.gain_bytes <= memory.capacity_bytes
    assert all(memory.peak_bytes - r.gain_bytes > memory.capacity_bytes for r in alone)
    parts = together.what.removeprefix("together: ").split("; and ")
    assert 2 <= len(parts) <= 3
    assert set(parts) <= {r.what for r in alone}
    assert together.what in memory.message


def test_there_are_as_many_microbatches_as_it_takes_to_fit():
    case = ("data:4", "batch:data", "scan", 2**18)
    whole = mtf.estimate(network(*case), "v5e-4").memory
    counts = []
    for share in (0.8, 0.5, 0.4):
        memory = dataclasses.replace(whole, capacity_bytes=round(share * whole.peak_bytes))
        (remedy,) = (r for r in memory.remedies if len(r.parts) == 1 and microbatches(r.what))
        done = mtf.estimate(carried_out(remedy, *case), "v5e-4").memory
        assert done.peak_bytes <= memory.capacity_bytes
        counts.append(microbatches(remedy.what))
    assert counts == sorted(counts)
    assert counts[0] == 2 < counts[-1]


def test_more_microbatches_than_save_anything_are_not_proposed():
    """Where no number suffices: at 65,536, a row each, the state is what is left, and at 8 nearly so."""
    whole = mtf.estimate(network("data:4", "batch:data", "scan", 2**18), "v5e-4").memory
    memory = dataclasses.replace(whole, capacity_bytes=round(0.2 * whole.peak_bytes))
    (proposed,) = (microbatches(r.what) for r in memory.remedies if len(r.parts) == 1 and microbatches(r.what))
    assert proposed == 8


def test_no_remedy_is_a_layout_that_the_library_refuses():
    """Of two tensors with a dim of one name, one cannot be split: a rule for it would be a fault."""

    def whats(other: int) -> str:
        with mtf.Graph():
            x = mtf.input("x", [D("batch", 8), D("d", 4096)])
            w, v = mtf.variable("w", [D("d", 4096), D("f", 4096)]), mtf.variable("v", [D("f", other)])
            y = mtf.einsum([x, w], [D("batch", 8), D("f", 4096)])
            program = mtf.lower({"y": y, "v": v * 2.0}, mesh="data:4", layout="batch:data")
        return " ".join(r.what for r in mtf.estimate(program, "v5e-4").memory.remedies)

    assert "'f:data?'" in whats(4096)
    assert "f:data" not in whats(3)
    assert "'d:data?'" in whats(3)  # the next best


def test_variables_that_are_only_read_may_be_narrow():
    def program(**kept: str) -> mtf.Program:
        with mtf.Graph():
            x = mtf.input("x", [D("batch", 16), D("d", 4096)])
            w = mtf.variable("w", [D("d", 4096), D("f", 4096)], **kept)
            return mtf.lower({"y": mtf.einsum([x, w], [D("batch", 16), D("f", 4096)])}, mesh="m:4", layout="batch:m")

    memory = mtf.estimate(program(), "v5e-4").memory
    (r,) = (r for r in memory.remedies if "slice_dtype='bfloat16'" in r.what)
    done = mtf.estimate(program(slice_dtype="bfloat16", activation_dtype="float32"), "v5e-4").memory
    assert memory.peak_bytes - done.peak_bytes == r.gain_bytes == 4096 * 4096 * 2
    # An optimizer keeps a float32 copy of what is stored narrow.
    assert "bfloat16" not in " ".join(
        r.what for r in mtf.estimate(network("data:4", "batch:data"), "v5e-4").memory.remedies
    )


def test_a_loss_in_parts():
    parts, rows, d, vocab = D("parts", 8), D("rows", 4096), D("d", 128), D("vocab", 32768)

    def program(whole: bool) -> mtf.Program:
        with mtf.Graph():
            x, labels = mtf.input("x", [parts, rows, d]), mtf.input("labels", [parts, rows], "int32")
            w = mtf.variable("w", [d, vocab])

            def loss_of(x: mtf.Tensor, labels: mtf.Tensor) -> mtf.Tensor:
                logits = mtf.einsum([x, w], [*labels.shape, vocab])
                return mtf.reduce_sum(mtf.layers.softmax_cross_entropy_with_logits(logits, labels, vocab))

            if whole:
                loss = loss_of(x, labels)
            else:
                trip = lambda c, s: ([c[0] + loss_of(*s)], [])  # noqa: E731
                (loss,), _ = mtf.scan(trip, [mtf.constant(0.0)], [x, labels], parts, remat="full")
            return mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss), mesh="chip:1")

    memory = mtf.estimate(program(whole=True), "v5e-1").memory
    (r,) = (r for r in memory.remedies if "the loss over 'vocab' in 8 parts" in r.what)
    saved = memory.peak_bytes - mtf.estimate(program(whole=False), "v5e-1").memory.peak_bytes
    assert saved == pytest.approx(r.gain_bytes, rel=0.05)
    assert r.gain_bytes > 0.7 * memory.peak_bytes


def test_what_is_gathered_then_counts():
    """A rule that splits a weight has it gathered for its product, or what it is multiplied by if that is less; what is
    gathered now is wanted whole, and no rule splits it."""

    def memory(layout: str, tokens: int) -> mtf.estimation.DeviceMemory:
        b, d, vocab = D("batch", tokens), D("d", 512), D("vocab", 8192)
        with mtf.Graph():
            x, w = mtf.input("x", [b, d]), mtf.variable("w", [d, vocab])
            loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], [b, vocab])))
            train = mtf.optimize.AdamOptimizer(1e-3).minimize(loss)
            return mtf.estimate(mtf.lower({"loss": loss}, train, mesh="m:4", layout=layout), "v5e-4").memory

    for tokens, gathered in ((8192, 512 * 8192 * 4), (64, 64 * 512 * 4)):
        whole = memory("batch:m", tokens)
        (rule,) = (r for r in whole.remedies if "rule 'd:m?'" in r.what or "rule 'vocab:m?'" in r.what)
        assert rule.gain_bytes == 3 * 512 * 8192 * 4 * 3 // 4 - gathered
    split = memory("batch:m;d:m?", 8192)
    assert not [r for r in split.remedies if "rule 'vocab:m?'" in r.what]


@pytest.mark.parametrize("sums", [False, True], ids=["attention", "reads all layers"])
def test_what_is_computed_again_leaves_what_goes_from_part_to_part(sums: bool) -> None:
    """Layers with a softmax written out; layers that each read the results of all before, which therefore stay."""
    b, n, m, d, f = D("batch", 8), D("length", 512), D("memory_length", 512), D("d", 256), D("f", 512)

    def attention(w: mtf.Tensor, x: mtf.Tensor) -> mtf.Tensor:
        keys = mtf.rename_dimension(x, "length", "memory_length")
        weights = mtf.softmax(mtf.einsum([x, keys], [b, n, m]), m)
        return x + mtf.einsum([mtf.einsum([weights, keys], [b, n, d]), w, w], [b, n, d])

    def joined(w: mtf.Tensor, *earlier: mtf.Tensor) -> mtf.Tensor:
        return mtf.einsum([mtf.gelu(mtf.einsum([mtf.add_n(earlier), w], [b, n, f])), w], [b, n, d])

    def peak(again: bool) -> mtf.estimation.DeviceMemory:
        with mtf.Graph():
            seen = [mtf.input("x", [b, n, d])]
            for layer in range(6):
                w = mtf.variable(f"w{layer}", [d, f])
                function, read = (joined, seen) if sums else (attention, seen[-1:])
                seen.append(mtf.recompute_grad(function, [w, *read]) if again else function(w, *read))
            loss = mtf.reduce_mean(mtf.square(seen[-1]))
            program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss), mesh="chip:1")
        return mtf.estimate(program, "v5e-1").memory

    memory = peak(again=False)
    (r,) = (r for r in memory.remedies if "recompute_grad" in r.what)
    saved = memory.peak_bytes - peak(again=True).peak_bytes
    assert 0.5 * saved <= r.gain_bytes <= 1.1 * saved
    assert r.gain_bytes > 0.2 * memory.peak_bytes


def test_remedies_together_make_room_for_the_compiled_step() -> None:
    config = models.preset("llama3-8b")
    with mtf.Graph():
        outputs, updates = models.train_step(config, 16, 32768)
        program = mtf.lower(outputs, updates, "fsdp:16", models.layout("fsdp", config, "fsdp:16"))
    memory = mtf.estimate(program, "v5e-16").memory
    over = memory.needed_bytes - memory.capacity_bytes
    carries = next(r.gain_bytes for r in memory.remedies if len(r.parts) == 1 and "loop carries" in r.what)
    assert memory.peak_bytes - memory.capacity_bytes < carries < over  # enough for the peak, too little for the step
    assert memory.remedies[0].gain_bytes >= over
