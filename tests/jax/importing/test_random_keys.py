"""Draws with keys of random derivations: equal where JAX's are, or refused."""

import random

import numpy as np
import pytest

import meshlib as mtf
from meshlib.jax.importing.code import NotImported
from tests.effort import draws
from tests.jax.importing.checks import compared

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

SPLITS = 4


def drawing(rng):
    """A function of a key and a number: it draws in up to two nested loops, which determine the key or not."""
    loops = [(rng.choice(["split", "some rows", "fold"]), rng.choice([2, 3]), rng.random() < 0.7) for _ in range(2)]
    last, n = rng.choice(["row", "fold", "split of fold", "given"]), rng.randrange(3)
    loops = loops[: rng.randrange(3)]

    def draw(key, given, depth=0):
        if depth == len(loops):
            if last == "row":
                return jax.random.normal(jax.random.split(key, SPLITS)[n], (3,))
            key = jax.random.fold_in(key, given + n if last == "given" else n)
            return jax.random.normal(jax.random.split(key)[0] if last == "split of fold" else key, (3,))
        kind, trips, decides = loops[depth]
        if kind == "fold":
            return lax.map(
                lambda n: draw(jax.random.fold_in(key, 2 * n) if decides else key, given, depth + 1), jnp.arange(3)
            )
        keys = jax.random.split(key, trips) if kind == "split" else jax.random.split(key, SPLITS)[1:trips]
        return lax.map(lambda k: draw(k if decides else key, given, depth + 1), keys)

    return draw


def pattern(draws):
    """For each row of numbers the first equal one."""
    rows = [tuple(row) for draw in draws for row in np.round(np.reshape(draw, (-1, 3)), 5).tolist()]
    return [rows.index(row) for row in rows]


@pytest.mark.parametrize("seed", range(draws(6, 16)))
def test_numbers_are_equal_where_those_of_jax_are(seed):
    rng = random.Random(seed)
    key = jax.random.PRNGKey(7) if seed % 3 == 0 else jax.random.key(7)
    draws = [drawing(rng) for _ in range(rng.choice([1, 2, 2]))]

    def function(w, key, given):
        return [w + draw(key, given) for draw in draws]

    given = np.float32(0), key, np.int32(rng.randrange(3))
    in_jax = jax.jit(function)
    expected = pattern(in_jax(*given))
    try:
        graph = mtf.from_jax(function, *given)
    except NotImported:
        others = (pattern(in_jax(*given[:2], np.int32(n))) for n in range(-2, 5))
        assert any(numbers != [*range(len(numbers))] for numbers in others)
        return
    program = mtf.lower(graph.outputs)
    assert pattern(mtf.simulate(program).step(**graph.feeds(*given)).values()) == expected
    assert pattern(mtf.on_jax(program).step(**graph.feeds(*given)).values()) == expected


@pytest.mark.parametrize(("step", "expected"), [(5, [0, 0, 2, 3, 3, 5, 0]), (3, [0, 0, 2, 3, 0, 0, 0])])
def test_keys_that_are_numbered_by_an_argument(step, expected):
    """As dropout is, whose keys are `fold_in(key, step)`, beside keys of other numbers."""

    def draws(w, key, step):
        def numbers(n):
            return w + jax.random.normal(jax.random.fold_in(key, n), (3,))

        def trip(count, _):
            return count + 1, numbers(count)

        apart = jax.checkpoint(numbers)  # in a body of its own
        later = lax.scan(trip, step + 1, None, length=2)[1]
        return apart(step), apart(step), later, numbers(2 * step - 3), numbers(3), apart(step)

    given = np.float32(0), jax.random.key(7), np.uint32(step)
    graph = mtf.from_jax(draws, *given)
    drawn = mtf.simulate(mtf.lower(graph.outputs)).step(**graph.feeds(*given)).values()
    assert pattern(drawn) == pattern(draws(*given)) == expected


@pytest.mark.parametrize("step", [1, 7])
def test_equal_loops_draw_equal_numbers_beside_a_key_that_is_numbered_by_an_argument(step):
    def draws(w, key, step):
        def numbers(n):
            return w + jax.random.normal(jax.random.fold_in(key, n), (3,))

        return *[lax.map(numbers, jnp.arange(3)) for _ in range(2)], numbers(step)

    given = np.float32(0), jax.random.key(7), np.uint32(step)
    graph = mtf.from_jax(draws, *given)
    drawn = mtf.simulate(mtf.lower(graph.outputs)).step(**graph.feeds(*given)).values()
    assert pattern(drawn) == pattern(draws(*given)) == [0, 1, 2, 0, 1, 2, 1 if step == 1 else 6]


def of_two_kinds(w, key, step):
    """Bits and normal numbers, which JAX computes from bits, whose keys are equal if `step` is 3."""
    return w + jax.random.normal(jax.random.fold_in(key, step), (3,)), jax.random.bits(jax.random.fold_in(key, 3), (3,))


def of_a_changing_key(w, key, step):
    def trip(key, n):
        both = [jax.random.normal(jax.random.fold_in(key, number), (3,)) for number in (step, 3)]
        return jax.random.fold_in(key, n), w + jnp.stack(both)

    return lax.scan(trip, key, jnp.stack([step, step * 2, step + 1]))[1]


@pytest.mark.parametrize("draws", [of_two_kinds, of_a_changing_key])
def test_draws_whose_keys_are_not_told_apart_by_numbers_are_refused(draws):
    with pytest.raises(NotImported, match="or for another distribution"):
        mtf.from_jax(draws, np.float32(0), jax.random.key(7), np.uint32(5))


def in_a_trip(inside, outside):
    """Draws in a loop, and one whose key equals that of one trip."""
    return lambda w, key: (w + inside(key), jax.random.normal(outside(key), (3,)))


def over(keys):
    return lambda key: lax.map(lambda k: jax.random.normal(k, (3,)), keys(key))


def raw_keys(key):
    return jax.random.split(jax.random.key_data(key), 4)


REFUSED = {
    "row": in_a_trip(over(lambda k: jax.random.split(k, 4)), lambda k: jax.random.split(k, 4)[2]),
    "overlapping rows": lambda w, key: (
        w + over(lambda k: jax.random.split(k, 6)[:3])(key),
        over(lambda k: jax.random.split(k, 6)[2:])(key),
    ),
    "raw row": in_a_trip(
        over(lambda k: jax.random.split(jax.random.key_data(k), 4)),
        lambda k: jax.random.split(jax.random.key_data(k), 4)[1],
    ),
}


def carried(split=2):
    def step(key, _):
        key, of_trip, *_ = jax.random.split(key, split)
        return key, jax.random.normal(of_trip, (3,))

    return lambda key: lax.scan(step, key, None, length=3)[1]


def by_hand(key):
    return jax.random.split(jax.random.split(key)[0])[1]


def numbers(key):
    return jax.random.normal(key, (3,))


REFUSED |= {
    "carried, then split by hand": in_a_trip(carried(), by_hand),
    "split by hand, then carried": lambda w, key: (numbers(by_hand(key)), w + carried()(key)),
    "carried by two loops": lambda w, key: (w + carried()(key), carried(3)(key)),
    "raw, carried": in_a_trip(lambda k: carried()(jax.random.key_data(k)), lambda k: by_hand(jax.random.key_data(k))),
}
DISTINCT = {
    "split before": lambda w, key: (w + numbers(by_hand(key)), carried()(jax.random.split(by_hand(key))[0])),
    "folded": in_a_trip(carried(), lambda key: jax.random.fold_in(key, 7)),
    "another distribution": lambda w, key: (w + carried()(key), jax.random.uniform(by_hand(key), (3,))),
    "another child": in_a_trip(carried(), lambda key: by_hand(jax.random.split(key, 4)[3])),
}


@pytest.mark.parametrize("function", DISTINCT.values(), ids=DISTINCT)
def test_a_carried_key_and_others_that_no_trip_derives_are_distinct(function):
    w, key = np.float32(0), jax.random.key(0)
    graph = mtf.from_jax(function, w, key)
    rows = mtf.simulate(mtf.lower(graph.outputs)).step(**graph.feeds(w, key)).values()
    assert pattern(rows) == pattern(function(w, key)) == [*range(4)]


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_a_key_of_one_trip_used_outside_its_loop_is_refused(function):
    with pytest.raises(NotImported, match="a key that a loop has drawn with, of another length, in one of its trips"):
        mtf.from_jax(function, np.float32(0), jax.random.key(0))


def test_keys_of_a_loop_and_others_of_the_same_split_are_distinct():
    def function(w, key):
        keys = jax.random.split(key, 4)
        return w + over(lambda _: keys[1:])(key), jax.random.normal(keys[0], (3,))

    graph = mtf.from_jax(function, np.float32(0), jax.random.key(0))
    assert pattern(mtf.simulate(mtf.lower(graph.outputs)).step().values()) == [0, 1, 2, 3]


@pytest.mark.parametrize("loop", ["slices", "carry"])
def test_nested_loops_over_the_same_keys_draw_by_their_own_trips(loop):
    def over_keys(draw, key):
        if loop == "slices":
            return lax.map(draw, jax.random.split(key, 3))

        def trip(key, _):
            key, own = jax.random.split(key)
            return key, draw(own)

        return lax.scan(trip, key, None, length=3)[1]

    def function(w, key):
        return over_keys(
            lambda a: over_keys(lambda b: w + jnp.stack([jax.random.normal(k, (3,)) for k in (a, b)]), key), key
        )

    key = jax.random.key(7)
    graph = mtf.from_jax(function, np.float32(0), key)
    numbers = mtf.simulate(mtf.lower(graph.outputs)).step().values()
    assert pattern(numbers) == pattern([function(np.float32(0), key)])


def test_unused_draws_are_ignored() -> None:
    """As in MaxText's scanned layers, which draw initial values from one key before their parameters replace them."""

    def loss(w, x, key):
        def layer(h, now):
            own, k = now
            return jnp.tanh(h @ own), jax.random.normal(k, own.shape)

        keys = jax.random.split(key, 3)
        jax.random.normal(keys[0], w.shape[1:])
        return (lax.scan(layer, x, (w, keys))[0] ** 2).sum()

    w, x = (np.random.default_rng(1).normal(size=size).astype(np.float32) for size in ((3, 4, 4), (5, 4)))
    compared(loss, w, x, jax.random.key(0))
