"""Caches: a part is written in place, and moves nothing else; where somebody reads what was there, it is copied."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core.graph import Operation, Tensor
from tests.oracle import run

D = mtf.Dimension
LAYERS, B, S, H, K, M = D("layers", 3), D("batch", 4), D("cache", 256), D("heads", 8), D("key", 32), D("model", 32)
TOKEN = B.size * H.size * K.size * 2  # bytes of keys or values of one token of each sequence, in bfloat16
CACHE = TOKEN * S.size
AT = B.size * 4


def cache(name: str = "cache", dims: Sequence[mtf.Dimension] = (B, H, S, K)) -> Tensor:
    return mtf.variable(name, dims, 0.0, "bfloat16", trainable=False)


def token(name: str = "token") -> Tensor:
    return mtf.input(name, [B, H, K], "bfloat16")


def at(name: str = "at") -> Tensor:
    return mtf.input(name, [B], "int32")


def moved_bytes(program: mtf.Program) -> int:
    """Bytes that all kernels of a step read and write in HBM, without padding."""
    return sum(r.hbm_bytes * r.count for r in mtf.estimate(program, "v5e-1").rows)


def lowered(outputs: dict[str, Tensor] | None, updates: Sequence[Operation], **where: str) -> mtf.Program:
    return mtf.lower(outputs, updates, **where)


# ---------------------------------------------------------------- what is moved, and what it takes


def test_a_token_goes_into_a_cache_in_place() -> None:
    with mtf.Graph():
        c = cache()
        program = lowered(None, [mtf.assign(c, mtf.update_slice(c, token(), S, at()))])
    assert moved_bytes(program) == 2 * TOKEN + AT  # read, and written where it belongs
    assert program.memory.peak_bytes == CACHE + TOKEN + AT


def test_two_writes_share_the_place() -> None:
    with mtf.Graph():
        c = cache()
        twice = mtf.update_slice(mtf.update_slice(c, token(), S, at()), token("other"), S, at("there"))
        program = lowered(None, [mtf.assign(c, twice)])
    assert moved_bytes(program) == 2 * (2 * TOKEN + AT)
    assert program.memory.peak_bytes == CACHE + 2 * (TOKEN + AT)


def test_a_split_cache_takes_a_token_where_it_lies() -> None:
    with mtf.Graph():
        c = cache()
        program = lowered(
            None, [mtf.assign(c, mtf.update_slice(c, token(), S, at()))], mesh="a:2;b:2", layout="cache:a;heads:b"
        )
    assert not program.collectives
    assert program.memory.peak_bytes == CACHE // 4 + TOKEN // 2 + AT


OLD: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda c: c,
    "under another name": lambda c: mtf.rename_dimension(c, "cache", "before"),
}


@pytest.mark.parametrize("reader", OLD)
def test_a_cache_that_is_fetched_as_it_was_is_copied(reader: str) -> None:
    with mtf.Graph():
        c = cache()
        program = lowered({"old": OLD[reader](c)}, [mtf.assign(c, mtf.update_slice(c, token(), S, at()))])
    assert program.memory.peak_bytes == 2 * CACHE + TOKEN + AT
    assert moved_bytes(program) == 2 * CACHE + TOKEN + AT


def test_layers_write_where_their_slices_lie() -> None:
    """Stacked caches are slices of a loop, and stacked again: each trip writes into its own."""
    with mtf.Graph():
        c, new, where = cache(dims=(LAYERS, B, H, S, K)), token(), at()

        def layer(carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            written = mtf.update_slice(slices[0], mtf.tanh(carries[0]), S, where)
            return [mtf.reduce_max(written, reduced_dim=S)], [written]

        (last,), (written,) = mtf.scan(layer, [new], [c], LAYERS)
        program = lowered({"last": last}, [mtf.assign(c, written)])
    # A trip reads its carry, writes it as the token, reads the cache, and writes the next carry.
    assert moved_bytes(program) <= LAYERS.size * (CACHE + 5 * TOKEN + AT)
    assert program.memory.peak_bytes <= LAYERS.size * CACHE + 4 * TOKEN + AT


def test_layers_whose_old_slices_are_fetched_are_copied() -> None:
    with mtf.Graph():
        c, new, where = cache(dims=(LAYERS, B, H, S, K)), token(), at()
        (last,), (written,) = mtf.scan(
            lambda carries, slices: (carries, [mtf.update_slice(slices[0], carries[0], S, where)]), [new], [c], LAYERS
        )
        program = lowered({"last": last, "old": mtf.identity(c)}, [mtf.assign(c, written)])
    assert program.memory.peak_bytes >= 2 * LAYERS.size * CACHE
    assert moved_bytes(program) >= 2 * LAYERS.size * CACHE


def test_a_carried_cache_is_written_in_place() -> None:
    """As a loop over tokens does: the cache goes from trip to trip."""
    with mtf.Graph():
        c, new = cache(), token()

        def step(where: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
            return where + 1, mtf.update_slice(held, new, S, where)

        _, held = mtf.while_loop(5, step, [at(), c])
        program = lowered(None, [mtf.assign(c, held)])
    assert moved_bytes(program) <= 5 * (2 * TOKEN + 4 * AT)
    assert program.memory.peak_bytes <= CACHE + TOKEN + 4 * AT


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_attention_reads_a_narrow_cache_as_it_is_stored(dtype: str) -> None:
    """Keys and values of a byte an element, each token's with a scale of its own, are widened in the kernel."""
    with mtf.Graph():
        caches = [mtf.variable(n, [B, H, S, K], 0, dtype, trainable=False) for n in ("k", "v")]
        scales = [mtf.variable(f"{n}_scale", [B, H, S], 0.0, "float32", trainable=False) for n in ("k", "v")]
        new, where = [mtf.input(n, [B, H, K], dtype) for n in "kv"], at()
        by = [mtf.input(f"{n}_by", [B, H]) for n in "kv"]
        q = mtf.input("q", [B, H, D("length", 1), K], "bfloat16")
        held = [mtf.update_slice(c, part, S, where) for c, part in zip(caches, new, strict=True)]
        scaled = [mtf.update_slice(c, part, S, where) for c, part in zip(scales, by, strict=True)]
        wide = [mtf.cast(c, "bfloat16") * mtf.cast(s, "bfloat16") for c, s in zip(held, scaled, strict=True)]
        y = mtf.attention(q, *wide, "length", S, K)
        updates = [mtf.assign(c, x) for c, x in zip([*caches, *scales], [*held, *scaled], strict=True)]
        program = lowered({"y": y}, updates)
    tokens = B.size * H.size
    stored = 2 * tokens * S.size * (K.size + 4)
    passing = 2 * TOKEN + 4 * tokens * (K.size + 4) + 4 * AT  # query and result, tokens read and written
    assert moved_bytes(program) == stored + passing
    assert program.memory.peak_bytes <= stored + passing + AT


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("executor", ["fast", "exact"])
@pytest.mark.parametrize("layout", ["", "cache:a;heads:b", "batch:a;cache:b"])
def test_what_is_there_stays_there(layout: str, executor: str) -> None:
    """Writes in place in a loop of layers, old slices read after, for several steps."""
    rng = np.random.default_rng(0)
    small = [LAYERS, B, D("heads", 2), D("cache", 8), D("key", 4)]
    with mtf.Graph():
        c = mtf.variable("cache", small, 0.0, trainable=False)
        new, where = mtf.input("token", [LAYERS, B, small[2], small[4]]), at()

        def layer(carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            held, part = slices
            written = mtf.update_slice(held, part, "cache", where)
            before = mtf.reduce_sum(held, reduced_dim=held.shape.dim("cache"))  # of what was there, too
            return [carries[0] + mtf.reduce_sum(written) * mtf.reduce_mean(before)], [written]

        (total,), (written,) = mtf.scan(layer, [mtf.constant(0.0)], [c, new], LAYERS)
        program = lowered({"total": total}, [mtf.assign(c, written)], mesh="a:2;b:2", layout=layout)
    sim, held = mtf.simulate(program, executor=executor), np.zeros([d.size for d in small])
    for _ in range(3):
        tokens, places = rng.normal(size=[3, 4, 2, 4]), rng.integers(0, 8, 4)
        result = sim.step(token=tokens, at=places)
        before = held.copy()
        for b, place in enumerate(places):
            held[:, b, :, place] = tokens[:, b]
        means = [before[n].sum(axis=2).mean() for n in range(3)]
        np.testing.assert_allclose(result["total"], sum(held[n].sum() * means[n] for n in range(3)), rtol=2e-5)
        np.testing.assert_allclose(sim.state["cache"], held, rtol=1e-6)


def test_rows_read_from_where_each_says() -> None:
    with mtf.Graph():
        x, where = mtf.input("x", [B, S]), at()
        program = mtf.lower({"y": mtf.dynamic_slice(x, where, 4, S)}, mesh="a:2", layout="cache:a")
    x, places = np.arange(4 * 256.0).reshape(4, 256), np.array([0, 250, 7, 252])
    (out,) = run(program, {"x": x, "at": places})
    np.testing.assert_array_equal(out["y"], [row[n : n + 4] for row, n in zip(x, places, strict=True)])


@pytest.mark.parametrize("layout", ["", "cache:a"])
@pytest.mark.parametrize("start", [-1, 6])
def test_a_part_past_the_end_is_an_error_everywhere(layout: str, start: int) -> None:
    """Positions 6 to 8 of 8: in both executors and on JAX, unless the caller asks to drop what is outside."""
    n = D("cache", 8)
    with mtf.Graph():
        x, part, where = mtf.zeros([B, n]), mtf.input("part", [B, D("run", 3)]), at()
        programs = [
            mtf.lower({"y": mtf.update_slice(x, part, n, where, out_of_range=kind)}, mesh="a:1", layout=layout)
            for kind in ("error", "drop")
        ]
    fed = {"part": np.ones((4, 3)), "at": np.array([0, 5, start, 1])}
    runs = [partial(mtf.simulate, executor="fast"), partial(mtf.simulate, executor="exact")]
    if importlib.util.find_spec("jax") is not None:
        runs.append(mtf.on_jax)
    for made in runs:
        with pytest.raises(mtf.FeedError, match=rf"positions {start} to {start + 2} .*cache:8, which has .* 0 to 7"):
            made(programs[0]).step(fed)
        assert made(programs[1]).step(fed)["y"].sum() == 11


def test_bad_starts() -> None:
    with mtf.Graph():
        c, new = cache(), token()
        with pytest.raises(mtf.ShapeError, match=r"int32 of dims of .* but 'cache'.*batch2"):
            mtf.update_slice(c, new, S, mtf.input("i", [D("batch2", 4)], "int32"))
        with pytest.raises(mtf.ShapeError, match="cast it with"):
            mtf.update_slice(c, new, S, mtf.input("f", [B]))
        with pytest.raises(mtf.ShapeError, match=r"must have the dims of .*, but for 'cache' or one in its place"):
            mtf.update_slice(c, mtf.input("p", [B, H], "bfloat16"), S, 0)
        with pytest.raises(mtf.ShapeError, match="bfloat16 and float32; cast the part"):
            mtf.update_slice(c, mtf.input("wide", [B, H, K]), S, 0)
