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
from meshlib.data.vocabulary.merges import GPT2, compiled, learnt, merged, words
from tests.effort import draws

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
    from meshlib.data.vocabulary.tokenizer_file import LETTERS

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
    ends = [added("<|end|>", len(vocab), special=True)]
    made = {"version": "1.0", "added_tokens": ends, "normalizer": None, "pre_tokenizer": cut, "model": model}
    return {**made, **changes}


def steps(*splits: dict[str, Any], prefix: bool = False) -> dict[str, Any]:
    """A pre_tokenizer of several steps."""
    level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, level]}


def split(**pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def added(name: str, number: int, **more: bool) -> dict[str, Any]:
    flags = ("special", "single_word", "lstrip", "rstrip", "normalized")
    return {"id": number, "content": name, **dict.fromkeys(flags, False), **more}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a normal form": {"normalizer": {"type": "NFC"}},
    "forms in a sequence": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKD"}]}},
    "a blank before": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
    "several patterns": {
        "pre_tokenizer": steps(split(Regex=r"\p{N}{1,3}"), split(Regex="[一-龥]+"), split(Regex=LLAMA3))
    },
    "digits": {"pre_tokenizer": steps({"type": "Digits", "individual_digits": True}, split(Regex=GPT2))},
    "runs of digits": {"pre_tokenizer": steps({"type": "Digits", "individual_digits": False}, split(Regex=GPT2))},
    "a text that cuts": {"pre_tokenizer": steps(split(String="e."), split(Regex=LLAMA3))},
    "added tokens": {
        "added_tokens": [
            added("<|end|>", 262, special=True),
            added("sea sea", 263),
            added("sea", 264),
            added("<mask>", 265, special=True, lstrip=True),
            added("<right>", 266, special=True, rstrip=True),
        ]
    },
}


def some_texts(count: int) -> list[str]:
    rng = random.Random(0)
    parts = [
        *TEXT[:80],
        "\r\n",
        "\u3000",
        "\x1c",
        "²",
        "'LL",
        "e\u0301",
        "ﬁ",
        "漢字",
        "the",
        " <mask> ",
        " <right>  ",
        "123",
    ]
    return ["".join(rng.choice(parts) for _ in range(30)) for _ in range(count)]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_original_agrees_on_its_own_files(name: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="compares with Hugging Face's tokenizers, which are not here")
    record = {**foreign(), **VARIANTS[name], "decoder": steps()["pretokenizers"][-1], "post_processor": None}
    (tmp_path / "theirs.json").write_text(json.dumps({"truncation": None, "padding": None, **record}))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "theirs.json"))
    ours = mtf.BytePairs.load(tmp_path / "theirs.json")
    ours.save(tmp_path / "ours.json")
    assert mtf.BytePairs.load(tmp_path / "ours.json") == ours
    again = tokenizers.Tokenizer.from_file(str(tmp_path / "ours.json"))
    for text in ["", " ", "sea sea sea", *some_texts(draws(100, 5000))]:
        wanted = theirs.encode(text).ids
        assert ours.encode(text, specials=True) == wanted, text
        assert again.encode(text).ids == wanted, text
        assert ours.decode(wanted) == theirs.decode(wanted), text


def test_added_tokens_are_their_text(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(foreign(**VARIANTS["added tokens"])))
    vocabulary = mtf.BytePairs.load(tmp_path, end="<|end|>")
    v = vocabulary._numbers
    assert vocabulary.end == 262
    assert vocabulary.encode("i<sea seasea>") == [v[b"i"], v[b"<"], 263, 264, v[b">"]]
    assert vocabulary.decode([v[b"i"], 263, 262, 264]) == "isea seasea"
    for text in some_texts(20):
        assert vocabulary.decode(vocabulary.encode(text)) == text
    with pytest.raises(mtf.GraphError, match="no <stop>; its special tokens"):
        mtf.BytePairs.load(file, end="<stop>")


def test_each_pattern_cuts_further(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    for name, text, wanted in (
        ("digits", "34 the", [b"3", b"4", b" the"]),
        ("runs of digits", "34 the", [b"34", b" the"]),
        ("a text that cuts", "the. the", [b"th", b"e", b".", b" the"]),
    ):
        file.write_text(json.dumps(foreign(**VARIANTS[name])))
        vocabulary = mtf.BytePairs.load(file)
        assert [vocabulary.pieces[n] for n in vocabulary.encode(text)] == wanted


def test_normal_forms_and_blanks_come_back_as_they_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(foreign(normalizer={"type": "NFC"})))
    assert mtf.BytePairs.load(file).decode(mtf.BytePairs.load(file).encode("e\u0301")) == "\u00e9"


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
    names = [{"id": 262, "content": "<|endoftext|>", "special": True}]
    file.write_text(json.dumps(foreign(added_tokens=names)))
    assert mtf.BytePairs.load(file).end == 262


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
        ({"normalizer": {"type": "Lowercase"}}, "has a normalizer, {'type': 'Lowercase'}; supported: NFC"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFD"}]}}, "has 2 normalizers"),
        ({"added_tokens": [{"id": 262, "content": "x", "single_word": True}]}, "the added token 'x' is a single_word"),
        ({"pre_tokenizer": steps({"type": "Metaspace"})}, "has {'type': 'Metaspace'}, not a Split by a pattern"),
        ({"pre_tokenizer": steps({"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Removed"})}, "'Removed'"),
        ({"pre_tokenizer": steps({"type": "Digits"}, prefix=True)}, "a blank before each word"),
        ({"pre_tokenizer": steps({"type": "Split", "pattern": {"Regex": "[[a]]"}})}, "nested character classes"),
        ({"pre_tokenizer": None}, "no pre_tokenizer, which has to be ByteLevel"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "ends with 'Whitespace'"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}}, "its pre_tokenizer is"),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, "does not cut words"),
        ({"added_tokens": [{"id": "1"}]}, "has no content and id"),
        ({"added_tokens": [{"id": 900, "content": "x"}]}, "do not have the numbers 0 to"),
        ({"model": {"vocab": {"a": 0}, "merges": []}}, "do not have the numbers"),
        ({"model": {"vocab": {"\u2581the": 0}, "merges": []}, "added_tokens": []}, "SentencePiece vocabularies"),
        ({"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []}, "255 of the 256 bytes have no token"),
        ({"model": {**foreign()["model"], "merges": ["a b c"]}}, "merge 'a b c' is not a pair"),
        ({"model": {**foreign()["model"], "merges": ["z z"]}}, "are not tokens"),
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
        (lambda: mtf.BytePairs.load(tmp_path / "a.json"), mtf.CheckpointError, "is not valid JSON"),
        (lambda: mtf.BytePairs.load(tmp_path / "b.json"), mtf.CheckpointError, "No such file"),
        (lambda: mtf.BytePairs.learn("a", 100), mtf.GraphError, "size must be at least 258, .* got 100"),
        (lambda: mtf.BytePairs.learn(["a", 3], 300), mtf.GraphError, "texts must be text, got int 3"),
        (lambda: mtf.BytePairs.learn("a", 300, ["x", "x"]), mtf.GraphError, "different names"),
        (lambda: WORDS.encode(3), mtf.GraphError, "text must be text, got int 3"),
        (lambda: WORDS.decode([10**6]), mtf.GraphError, r"numbers from 0 to \d+, got 1000000"),
        (lambda: WORDS.decode([True]), mtf.GraphError, "got True"),
        (lambda: WORDS.decode(5), mtf.GraphError, "tokens must be a list of numbers, got int 5"),
        (lambda: mtf.BytePairs.learn("a a", 300, progress=5), mtf.GraphError, "progress must be a function"),
        (lambda: mtf.BytePairs.learn("aaa aaa", 300, ["a"]), mtf.GraphError, "'a' is spelled like one of the pieces"),
        (lambda: mtf.texts_in_rows(["a"], WORDS, 8, start_token="x"), mtf.GraphError, "start_token must be an integer"),
        (lambda: mtf.texts_in_rows(["a"], WORDS, 8, start_token=1 << 40), mtf.GraphError, "must be a token"),
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
