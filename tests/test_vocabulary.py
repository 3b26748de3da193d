"""Byte pairs: exact both ways, as other programs make them; texts in rows of static lengths."""

from __future__ import annotations

import json
import pickle
import random
import sys
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshlib as mtf
from meshlib.vocabulary.merging import learnt, merged
from meshlib.vocabulary.words import GPT2, compiled, words

TEXT = (
    "In the beginning the sea was the sea; it's the sea's own. 12 seas, 345 sands\n\n  and the sand—ü ☃ the end\n" * 3
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
WORDS = mtf.BytePairs.learn(TEXT, 320)


def slow_learnt(counts: dict[bytes, int], merges: int) -> list[tuple[int, int]]:
    """Everything counted anew for each pair."""
    found = {tuple(word): n for word, n in counts.items()}
    made: list[tuple[int, int]] = []
    while len(made) < merges:
        pairs: Counter[tuple[int, int]] = Counter()
        for word, n in found.items():
            for pair in pairwise(word):
                pairs[pair] += n
        best = min(pairs, key=lambda p: (-pairs[p], p), default=None)
        if best is None or pairs[best] < 2:
            return made
        made.append(best)
        joined: Counter[tuple[int, ...]] = Counter()
        for word, n in found.items():
            joined[tuple(slow_joined(list(word), best, 255 + len(made)))] += n
        found = dict(joined)
    return made


def slow_joined(word: list[int], pair: tuple[int, int], new: int) -> list[int]:
    n = 0
    while n < len(word) - 1:
        if (word[n], word[n + 1]) == pair:
            word[n : n + 2] = [new]
        n += 1
    return word


@pytest.mark.parametrize("category", ["L", "N", "Lu", "P"])
def test_classes_hold_what_unicode_says(category: str) -> None:
    pattern = compiled(rf"\p{{{category}}}")
    for n in range(0, sys.maxunicode + 1, 53):
        letter = chr(n)
        assert bool(pattern.fullmatch(letter)) == unicodedata.category(letter).startswith(category), hex(n)


def test_pairs_are_those_of_counting_anew() -> None:
    rng = random.Random(3)
    for _ in range(40):
        made = ["".join(rng.choice("aab c") for _ in range(rng.randrange(1, 12))) for _ in range(30)]
        counts = {word.encode(): rng.randrange(1, 5) for word in made}
        pairs = learnt(counts, 25)
        assert pairs == slow_learnt(counts, 25)
        ranks = {pair: (n, 256 + n) for n, pair in reversed([*enumerate(pairs)])}
        for word in counts:
            wanted = list(word)
            for n, pair in enumerate(pairs):
                wanted = slow_joined(wanted, pair, 256 + n)
            assert merged(word, ranks) == wanted


@given(st.text(st.characters(), max_size=40))
def test_any_text_comes_back(text: str) -> None:
    assert WORDS.decode(WORDS.encode(text)) == text
    assert "".join(words(text, GPT2)) == text
    assert "".join(words(text, LLAMA3)) == text
    assert WORDS.decode(WORDS.encode(text, specials=True)).count("<") <= text.count("<")


def test_it_is_deterministic_and_its_file_says_all(tmp_path: Path) -> None:
    again = mtf.BytePairs.learn(iter([TEXT]), 320)
    assert again == WORDS
    assert WORDS.size == len(WORDS.pieces) <= 320
    WORDS.save(tmp_path / "a.json")
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    read = mtf.BytePairs.load(tmp_path / "a.json")
    assert read == WORDS
    assert (read.pad, read.end, read.encode(TEXT)) == (0, 1, WORDS.encode(TEXT))
    assert len(WORDS.encode(TEXT)) < 0.6 * len(TEXT.encode())
    assert WORDS.encode("a<end>b") != [*WORDS.encode("a"), 1, *WORDS.encode("b")]
    assert WORDS.encode("a<end>b", specials=True) == [*WORDS.encode("a"), 1, *WORDS.encode("b")]


def foreign(pattern: str | None = None, **changes: Any) -> dict[str, Any]:
    """A tokenizer.json in its published form, bytes and a few pairs, its numbers in an order of their own."""
    from meshlib.vocabulary.bytepairs import LETTERS

    letters = [LETTERS[b] for b in range(255, -1, -1)]
    pairs = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("3", "4"), ("34", "5")]
    vocab = {text: n for n, text in enumerate([*letters, *(a + b for a, b in pairs), "hello"])}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern is None}
    cut = level if pattern is None else {"type": "Sequence", "pretokenizers": [split, level]}
    model = {
        "type": "BPE",
        "vocab": vocab,
        "merges": [" ".join(p) for p in pairs],
        "ignore_merges": pattern is not None,
    }
    added = [{"id": len(vocab), "content": "<|end|>", "special": True}]
    made = {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": cut, "model": model}
    return {**made, **changes}


def test_it_can_be_sent_elsewhere() -> None:
    WORDS.encode(TEXT)
    sent = pickle.loads(pickle.dumps(WORDS))
    assert sent == WORDS
    assert (len(sent), sent.encode(TEXT)) == (len(WORDS.pieces), WORDS.encode(TEXT))


def test_files_of_others(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(foreign()))
    gpt2 = mtf.BytePairs.load(file)
    v = gpt2._numbers
    assert gpt2.encode("in the 3456") == [v[b"i"], v[b"n"], v[b" the"], v[b" "], v[b"345"], v[b"6"]]
    assert gpt2.encode("hello")[0] == v[b"h"]
    file.write_text(json.dumps(foreign(LLAMA3)))
    llama = mtf.BytePairs.load(file)
    assert llama.encode("hello") == [v[b"hello"]]  # whole words first
    assert llama.encode("3456") == [v[b"345"], v[b"6"]]
    assert llama.encode("1234\n\nIT'S") == [v[bytes([b])] for b in b"1234\n\nIT'S"]
    assert llama.specials == {"<|end|>": 262}
    with pytest.raises(mtf.GraphError, match=r"no <end>; its special tokens: <\|end\|>"):
        _ = llama.end


def test_the_original_agrees(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="compares with Hugging Face's tokenizers, which are not here")
    WORDS.save(tmp_path / "ours.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "ours.json"))
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice([*TEXT[:80], "\r\n", "\u3000", "\x1c", "²", "'LL"]) for _ in range(30))
        assert theirs.encode(text).ids == WORDS.encode(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "it has no model"),
        ({"model": {"type": "Unigram"}}, "its model is 'Unigram', not BPE"),
        ({"model": {"type": "BPE", "byte_fallback": True}}, "has byte_fallback True"),
        ({"normalizer": {"type": "NFC"}}, "has a normalizer"),
        ({"pre_tokenizer": None}, "no pre_tokenizer, which has to be ByteLevel"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "ends with 'Whitespace'"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}}, "its pre_tokenizer is"),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "cuts words 0 times"),
        ({"added_tokens": [{"id": "1"}]}, "has no content and id"),
        ({"added_tokens": [{"id": 900, "content": "x"}]}, "do not have the numbers 0 to"),
        ({"model": {"vocab": {"a": 0}, "merges": []}}, "do not have the numbers"),
        ({"model": {"vocab": {"\u2581the": 0}, "merges": []}, "added_tokens": []}, "SentencePiece's"),
        ({"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []}, "255 of the 256 bytes have no token"),
        ({"model": {**foreign()["model"], "merges": ["a b c"]}}, "merge 'a b c' is no pair"),
        ({"model": {**foreign()["model"], "merges": ["z z"]}}, "no tokens"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(foreign(**changes)))
    with pytest.raises(mtf.CheckpointError, match=message):
        mtf.BytePairs.load(file)


def test_faults_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    for call, kind, text in (
        (lambda: mtf.BytePairs.load(tmp_path / "a.json"), mtf.CheckpointError, "is no JSON"),
        (lambda: mtf.BytePairs.load(tmp_path / "b.json"), mtf.CheckpointError, "No such file"),
        (lambda: mtf.BytePairs.learn("a", 100), mtf.GraphError, "size must be at least 258, .* got 100"),
        (lambda: mtf.BytePairs.learn(["a", 3], 300), mtf.GraphError, "texts must be text, got int 3"),
        (lambda: mtf.BytePairs.learn("a", 300, ["x", "x"]), mtf.GraphError, "different names"),
        (lambda: WORDS.encode(3), mtf.GraphError, "text must be text, got int 3"),
        (lambda: WORDS.decode([10**6]), mtf.GraphError, r"numbers from 0 to \d+, got 1000000"),
        (lambda: WORDS.decode([True]), mtf.GraphError, "got True"),
    ):
        with pytest.raises(kind, match=text):
            call()


# ---------------------------------------------------------------- texts in rows


def test_packed_rows_hold_each_pair_once() -> None:
    pairs = [(TEXT[n : n + n % 17], TEXT[2 * n : 2 * n + n % 13]) for n in range(60)]
    made = mtf.text_to_text(pairs, WORDS, 16, 20)
    alone = mtf.text_to_text(pairs, WORDS, 16, 20, packed=False)
    assert (made.texts, alone.texts, alone.rows) == (60, 60, 60)
    assert made.rows < 40
    assert made.filled > alone.filled

    def texts(found: mtf.TextExamples) -> list[tuple[str, ...]]:
        x = found.arrays
        out = []
        for r in range(found.rows):
            for n in range(1, x["segment_ids"][r].max() + 1):
                side = x["sources"][r][x["source_segment_ids"][r] == n], x["targets"][r][x["segment_ids"][r] == n]
                tokens = x["tokens"][r][x["segment_ids"][r] == n]
                assert tokens.tolist() == [0, *side[1][:-1]]
                for of, name in ((side[0], "source_positions"), (side[1], "segment_positions")):
                    ids = x["source_segment_ids" if name[1] == "o" else "segment_ids"][r]
                    assert x[name][r][ids == n].tolist() == list(range(len(of)))
                assert side[1][-1] == WORDS.end
                out.append((WORDS.decode(side[0]), WORDS.decode(side[1])))
        return sorted(out)

    assert texts(made) == texts(alone) == sorted(pairs)
    assert all(x.dtype == np.int32 for x in made.arrays.values())


def test_a_models_loss_does_not_depend_on_packing() -> None:
    config = mtf.models.preset("t5-small").reduced().replace(vocab=320, numerics=mtf.Numerics(), dropout=0.0)
    pairs = [("the sea", "and the sand"), ("the", "sands 12"), ("own", "the end")]
    losses = []
    for packed in (False, True):
        made = mtf.text_to_text(pairs, WORDS, 16, 24, packed)
        with mtf.Graph():
            model = mtf.models.transformer(config, made.rows, 24, encoder_length=16, packed=True)
            program = mtf.lower({"loss": model.loss}, precision="highest")
        losses.append(float(mtf.simulate(program, seed=1).step(made.arrays)["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] > 3


def test_texts_that_are_too_long() -> None:
    texts = ["the sea", "sand " * 30]
    cut, left = (mtf.texts_in_rows(texts, WORDS, 12, too_long=way) for way in ("cut", "skip"))
    assert (cut.texts, cut.cut, cut.skipped, left.texts, left.cut, left.skipped) == (2, 1, 0, 1, 0, 1)
    assert (cut.arrays["targets"] == WORDS.end).sum() == 1  # of the text that was not cut
    assert cut.arrays["targets"][1].tolist() == WORDS.encode(texts[1])[:12]
    for call, text in (
        (lambda: mtf.texts_in_rows(texts, WORDS, 12, too_long="refuse"), r"text 1 is too long: \d+ tokens .* for 12"),
        (lambda: mtf.texts_in_rows(["sand " * 30], WORDS, 12, too_long="skip"), "no texts; 1 were too long"),
        (lambda: mtf.texts_in_rows([], WORDS, 12), "there are no texts"),
        (lambda: mtf.texts_in_rows("text", WORDS, 12), "texts must be several, got str"),
        (lambda: mtf.texts_in_rows(["a"], WORDS, 0), "lengths must be at least 1"),
        (lambda: mtf.texts_in_rows(["a"], None, 4), "vocabulary must have encode and end"),
        (lambda: mtf.text_to_text(["ab"], WORDS, 4, 4), r"pair 0 must be \(source, target\), got 'ab'"),
        (lambda: mtf.text_to_text([("a", 3)], WORDS, 4, 4), "text 0 must be text, got int 3"),
        (lambda: mtf.text_to_text([("a", "b")], WORDS, 4, 4, too_long="drop"), "too_long must be 'cut' or"),
    ):
        with pytest.raises(mtf.GraphError, match=text):
            call()
