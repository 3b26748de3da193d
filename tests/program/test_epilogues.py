"""Sums over rows in the kernels of products, and what readers make instead of writing it: by hand."""

from __future__ import annotations

import meshlib as mtf
from meshlib.core.opdef import Kind
from meshlib.program.instructions import Compute

BATCH, SIDE, CHANNELS = 128, 16, 128
SIZE = BATCH * SIDE * SIDE * CHANNELS  # of each image tensor


def network(norms=1):
    """Convolutions with batch norm and ReLU, and their gradients."""
    dims = mtf.Shape(f"batch:{BATCH};height:{SIDE};width:{SIDE};channels:{CHANNELS}").dims
    with mtf.Graph():
        x = mtf.input("x", dims, "bfloat16")
        y, updates = x, []
        for n in range(norms + 1):
            with mtf.scope(f"layer{n}"):
                y = mtf.layers.conv(y, mtf.Dimension("channels", CHANNELS), 3, use_bias=False)
                if n < norms:
                    y, more = mtf.layers.batch_norm(y, dims[-1], is_training=True, use_fast_variance=True)
                    updates += more
                y = mtf.relu(y) if n < norms else y
        loss = mtf.reduce_mean(mtf.cast(y, "float32"))
        train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
        return mtf.lower({"loss": loss}, train + updates)


def wide_sums(program):
    """Reductions of a whole image tensor, each with what its kernel has besides."""
    groups = {}
    for i in program.instructions:
        groups.setdefault(i.group, []).append(i)
    found = {}
    for members in groups.values():
        for i in members:
            if isinstance(i, Compute) and i.operation.opdef.kind is Kind.REDUCTION and i.inputs[0].local_size == SIZE:
                found[i.operation.name] = {m.operation.opdef.kind for m in members}
    return found


def test_statistics_are_taken_where_the_convolution_is_made():
    found = wide_sums(network())
    norm = {name: kinds for name, kinds in found.items() if "batch_norm" in name}
    assert len(norm) == 4, "two sums forward, two backward"
    assert all(Kind.CONTRACTION in kinds for kinds in norm.values()), norm


def images_moved(program):
    """Image tensors in bfloat16 that each kernel with a convolution reads and writes; filters are 1/14 of one."""
    est = mtf.estimate(program, "v5e-1")
    return {r.name: r.hbm_bytes / (2 * SIZE) for r in est.rows if r.mxu_flops}


def test_a_value_is_read_once_for_its_statistics():
    """Layer 0 reads x and writes its result; layer 1 reads that, normalises it on the way, and writes."""
    moved = images_moved(network())
    assert 2 <= moved["layer0/conv/sum"] < 2.3
    assert 2 <= moved["layer1/conv/sum"] < 2.3


def test_the_gradient_of_a_norm_is_made_by_who_reads_it():
    """Of layer 0's filter: of dy, what the norm was given, and x. What follows from the first two is never written."""
    moved = images_moved(network())
    assert 3 <= moved["layer0/conv/sum/grad/convolution_1"] < 3.4
    # Of layer 1's image: the norm's operand for ReLU and the sum of dy x; written is the sum's dy. The loss's dy is
    # the same for all of an image's channels, and nobody stores it.
    assert 2 <= moved["layer1/conv/sum/grad/convolution"] < 2.3


def test_two_readers_share_no_copy_where_that_moves_more():
    """z = x + y, both read from memory, has four readers: written once, 2 + 1 + 4 pieces move, made by each 8."""
    dims = mtf.Shape(f"batch:{BATCH};height:{SIDE};width:{SIDE};channels:{CHANNELS}").dims
    with mtf.Graph():
        x, y = (mtf.input(name, dims, "bfloat16") for name in "xy")
        z = mtf.relu(x + y)
        out = mtf.Dimension("channels", CHANNELS)
        found = [mtf.layers.conv(z, out, 1, use_bias=False, name=f"reader{n}") for n in range(4)]
        program = mtf.lower({f"y{n}": t for n, t in enumerate(found)})
    moved = images_moved(program)
    assert all(2 <= n < 2.1 for n in moved.values()), "each reads z, and writes"
    with mtf.Graph():
        x, y = (mtf.input(name, dims, "bfloat16") for name in "xy")
        z = mtf.relu(x + y)
        found = [mtf.layers.conv(z, out, 1, use_bias=False, name=f"reader{n}") for n in range(2)]
        program = mtf.lower({f"y{n}": t for n, t in enumerate(found)})
    moved = images_moved(program)
    assert all(3 <= n < 3.1 for n in moved.values()), "each reads x and y: 4 pieces, not 5"
