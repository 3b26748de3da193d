"""The poetry example: its verses, the models that it is set beside, a few steps, and its folder loaded elsewhere."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import meshlib as mtf
from examples.text import poetry
from meshlib.core.errors import DataError
from meshlib.data.samples import verse_pairs as verse_data
from tests.effort import deep

TINY = ["--vocab", "264", "--batch", "8", "--steps", "4", "--every", "2", "--beams", "2", "--precision", "float32"]
POEM = "the cat sat on the mat\nand looked at the rat\nthe rat that had sat\non the hat of the cat\n\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "poems.txt"
    file.write_text("# of nobody\n\n" + POEM * 10)
    return file


def test_the_verses_that_come_along() -> None:
    verses = verse_data.load_verses(None)
    assert len(verses.train) > 400
    assert len(verses.held_out) > 40
    assert not {*verses.train} & {*verses.held_out}
    assert ("Shall I compare thee to a summer's day?", "Thou art more lovely and more temperate:") in verses.train
    lengths = {len(poem.splitlines()) for poem in verse_data.OWN.read_text().split("\n\n") if "#" not in poem}
    assert 14 in lengths  # sonnets
    assert all(line == line.strip() and line.isascii() for pair in verses.train for line in pair)


def test_counted_models_are_distributions_and_no_worse_than_uniform() -> None:
    rng = np.random.default_rng(0)
    lines = [[int(t) for t in rng.integers(0, 9, rng.integers(1, 8)) ** 2 % 11] for _ in range(60)]
    for discount in (0.3, 0.9):
        made = verse_data.NgramCounts(lines, 13, discount)
        assert sum(made.unigram(t) for t in range(13)) == pytest.approx(1)
        for before in (verse_data.START, 0, 4, 12):  # 12 is never seen
            assert sum(made.bigram(before, t) for t in range(13)) == pytest.approx(1)
    assert all(p < 13 for p in verse_data.counted(lines, 13).perplexities(lines))


def test_a_bigram_by_hand() -> None:
    """Two lines, "0 1" and "0 2": after 0 come 1 and 2, once each; each token follows one kind of token."""
    made = verse_data.NgramCounts([[0, 1], [0, 2]], 4, 0.5)
    lower = (1 - 0.5) / 3 + 0.5 * 3 / 3 / 4  # of three pairs of kinds
    assert made.bigram(0, 1) == pytest.approx((1 - 0.5) / 2 + 0.5 * 2 / 2 * lower)
    assert made.bigram(0, 3) == pytest.approx(0.5 * 2 / 2 * (0.5 * 3 / 3 / 4))
    assert made.unigram(0) == pytest.approx((2 - 0.5) / 4 + 0.5 * 3 / 4 / 4)
    one, two = made.perplexities([[0, 1]])
    assert one == pytest.approx(math.exp(-(math.log(made.unigram(0)) + math.log(made.unigram(1))) / 2))
    chances = [made.bigram(a, b) for a, b in pairwise([verse_data.START, 0, 1])]
    assert two == pytest.approx(math.prod(chances) ** -0.5)


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert poetry.main([*TINY, *flags]) == 0
    return capsys.readouterr().out


def figures(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"perplexity(?: of held-out lines)? +([\d.]+)", out)]


def test_the_same_on_eight_cores_and_on_one_and_loaded_elsewhere(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eight = run(capsys, "--text", str(text), "--export", str(tmp_path / "model"), "--line", "the cat sat on the mat")
    one = run(
        capsys, "--text", str(text), "--mesh", "device:1", "--layout", "", "--slice", "v5e-1", "--line", "the cat"
    )
    assert len(figures(eight)) == 4
    assert figures(eight) == pytest.approx(figures(one), rel=1e-4)
    for shown in ("unigram", "bigram", "by beam search with 2 beams", "the MXU works", "a whole run on v3-8"):
        assert shown in eight
    model = mtf.load_model(tmp_path / "model")
    completed = re.search(r"  the cat sat on the mat\n +(.*)\n", eight)
    assert completed is not None
    length = int(re.search(r"of (\d+) tokens", eight)[1])  # type: ignore[index]
    assert model.predict("the cat sat on the mat", max_tokens=length, beams=2).strip() == completed[1].strip()


def test_it_goes_on_where_it_stopped(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not deep():
        pytest.skip("three runs: with --hypothesis-profile=deep; tests/training has the loop's own")
    monkeypatch.setattr(poetry, "complete", lambda *args: None)
    flags = ["--text", str(text), "--mesh", "device:1", "--layout", "", "--slice", "v5e-1", "--line", "the cat"]
    whole = figures(run(capsys, *flags))
    run(capsys, *flags, "--folder", str(tmp_path / "run"))
    for newer in (tmp_path / "run").glob("step_*4.safetensors"):
        newer.unlink()
    assert figures(run(capsys, *flags, "--folder", str(tmp_path / "run")))[-2:] == whole[-2:]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text", "nowhere.txt"], r"--text: .*nowhere.txt can't be read: No such file"),
        (["--layout", "bach:rows"], "batch"),
        (["--vocab", "3"], "--vocab must be at least 258, got 3"),
        (["--dropout", "1"], "--dropout must be in 0 to 1"),
    ],
)
def test_wrong_flags_end_with_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = poetry.main(flags)
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    assert re.search(message, capsys.readouterr().err)


def test_texts_without_enough_lines(tmp_path: Path) -> None:
    short, plain = tmp_path / "short.txt", tmp_path / "plain.txt"
    short.write_text("one\ntwo\n")
    with pytest.raises(DataError, match="holds 0 pairs of lines, fewer than 20"):
        verse_data.load_verses(str(short))
    plain.write_text("\n".join(f"line {n}" for n in range(60)))
    assert len(verse_data.load_verses(str(plain)).held_out) in (4, 5, 6)
