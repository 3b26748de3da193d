"""Byte-pair vocabularies in Hugging Face's tokenizer.json.

Bytes are written as letters: printable ones as themselves, others from code point 256 on. Files like those of GPT-2 and
Llama 3 are read; unsupported features are refused by name.

Source: huggingface/tokenizers, tokenizers/src/{models/bpe,pre_tokenizers/byte_level,added_vocabulary}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from meshlib.data.vocabulary.merges import GPT2, Pair, escaped

if TYPE_CHECKING:
    from meshlib.data.vocabulary.bytepairs import BytePairs

Fail = Callable[[str], NoReturn]
FORMS = ("NFC", "NFD", "NFKC", "NFKD")
STRIPS = {"before": "lstrip", "after": "rstrip"}  # whether a token absorbs adjacent blanks
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that are letters or marks in Latin-1
LETTERS = {byte: chr(byte) for byte in _SEEN} | {
    b: chr(256 + n) for n, b in enumerate(sorted({*range(256)} - {*_SEEN}))
}
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def letters(piece: bytes) -> str:
    """Bytes as letters."""
    return "".join(LETTERS[b] for b in piece)


def record_of(v: BytePairs) -> dict[str, Any]:
    """The content of a vocabulary's file."""
    names = {n: name for name, n in {**v.specials, **v.added}.items()}
    vocab = {letters(piece): n for n, piece in enumerate(v.pieces) if n not in names}
    byte_level = {"type": "ByteLevel", "add_prefix_space": v.prefix_space, "trim_offsets": True}
    before: dict[str, Any] = {**byte_level, "use_regex": True}
    if v.patterns != (GPT2,):
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in v.patterns
        ]
        before = {"type": "Sequence", "pretokenizers": [*splits, {**byte_level, "use_regex": False}]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                **{"id": n, "content": name, "special": name in v.specials, "normalized": False, "single_word": False},
                **{strip: side in v.blanks.get(name, ()) for side, strip in STRIPS.items()},
            }
            for n, name in sorted(names.items())
        ],
        "normalizer": None if v.normal_form is None else {"type": v.normal_form},
        "pre_tokenizer": before,
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": v.whole_words,
            "vocab": {**{name: n for n, name in names.items()}, **vocab},
            "merges": [[letters(v.pieces[a]), letters(v.pieces[b])] for a, b in v.merges],
        },
    }


def arguments_in(record: object, fail: Fail) -> dict[str, Any]:
    """The arguments of `BytePairs` in a file's record. `fail` is called with the first fault."""
    model = record.get("model") if isinstance(record, dict) else None
    if not isinstance(model, dict) or not isinstance(record, dict):
        fail("it has no model")
    if model.get("type", "BPE") != "BPE":
        fail(f"its model is {model.get('type')!r:.40}, not BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            fail(f"its model has {name} {model[name]!r:.40}")
    patterns, prefix_space = _word_patterns(record.get("pre_tokenizer"), fail)
    specials, added, blanks = _added_tokens(record.get("added_tokens") or [], fail)
    names = {**specials, **added}
    pieces = _pieces(model.get("vocab"), names, fail)
    for text, n in added.items():
        pieces[n] = text.encode("utf-8", "surrogatepass")
    numbers = {piece: n for n, piece in enumerate(pieces) if n not in set(names.values())}
    lost = [b for b in range(256) if bytes([b]) not in numbers]
    if lost:
        fail(f"{len(lost)} of the 256 bytes have no token, the first is 0x{lost[0]:02x}")
    return {
        "pieces": pieces,
        "merges": _merges(model.get("merges"), numbers, fail),
        "specials": specials,
        "patterns": patterns,
        "whole_words": bool(model.get("ignore_merges", False)),
        "prefix_space": prefix_space,
        "added": added,
        "normal_form": _normal_form(record.get("normalizer"), fail),
        "blanks": blanks,
    }


def _normal_form(normalizer: object, fail: Fail) -> str | None:
    """The Unicode normal form applied before splitting."""
    steps: Any = [normalizer] if normalizer else []
    if isinstance(normalizer, dict) and normalizer.get("type") == "Sequence":
        steps = normalizer.get("normalizers")
    if not isinstance(steps, list) or not all(isinstance(s, dict) and s.get("type") in FORMS for s in steps):
        fail(f"it has a normalizer, {normalizer!r:.80}; supported: {', '.join(FORMS)}")
    if len(steps) > 1:
        fail(f"it has {len(steps)} normalizers, where one is supported")
    return str(steps[0]["type"]) if steps else None


def _word_patterns(pre_tokenizer: object, fail: Fail) -> tuple[tuple[str, ...], bool]:
    """The patterns of words, and whether a blank is added before a text."""
    if not isinstance(pre_tokenizer, dict):
        fail("it has no pre_tokenizer, which has to be ByteLevel")
    steps = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        fail(f"its pre_tokenizer is {pre_tokenizer!r:.80}")
    *splits, last = steps
    if last.get("type") != "ByteLevel":
        fail(f"its pre_tokenizer ends with {last.get('type')!r:.40}, not ByteLevel")
    patterns = [_pattern(step, fail) for step in splits] + [GPT2] * bool(last.get("use_regex", True))
    if not patterns:
        fail("its pre_tokenizer does not cut words")
    prefix_space = bool(last.get("add_prefix_space", False))
    if prefix_space and splits:
        fail("its pre_tokenizer puts a blank before each word")
    return tuple(patterns), prefix_space


def _pattern(step: Mapping[str, Any], fail: Fail) -> str:
    """The pattern of a step that isolates matches."""
    if step.get("type") == "Digits":
        return r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    wanted = {"type": "Split", "behavior": "Isolated", "invert": False}
    given = step.get("pattern")
    text = given.get("Regex") or given.get("String") if isinstance(given, dict) else None
    if any(step.get(name, value) != value for name, value in wanted.items()) or not isinstance(text, str):
        fail(f"its pre_tokenizer has {step!r:.120}, not a Split by a pattern, Isolated")
    return text if given.get("Regex") else escaped(text)  # type: ignore[union-attr]


def _added_tokens(entries: object, fail: Fail) -> tuple[dict[str, int], dict[str, int], dict[str, tuple[str, ...]]]:
    """Special tokens, tokens that match their text, and those that absorb adjacent blanks."""
    if not isinstance(entries, list):
        fail(f"added_tokens are {entries!r:.80}, not a list")
    specials: dict[str, int] = {}
    added: dict[str, int] = {}
    blanks: dict[str, tuple[str, ...]] = {}
    for one in entries:
        if not isinstance(one, dict) or not isinstance(one.get("content"), str) or type(one.get("id")) is not int:
            fail(f"the added token {one!r:.80} has no content and id")
        name = one["content"]
        if not name:
            fail(f"the added token {one!r:.80} is empty")
        if one.get("single_word"):
            fail(f"the added token {name!r:.40} is a single_word")
        (specials if one.get("special", True) else added)[name] = one["id"]
        sides = tuple(side for side, strip in STRIPS.items() if one.get(strip))
        if sides:
            blanks[name] = sides
    return specials, added, blanks


def _pieces(vocab: object, names: Mapping[str, int], fail: Fail) -> list[bytes]:
    if not isinstance(vocab, dict) or not all(type(n) is int for n in vocab.values()):
        fail("its vocab does not map text to numbers")
    numbers = {**vocab, **names}
    size = len(set(numbers.values()))
    if sorted(set(numbers.values())) != list(range(size)) or len(numbers) != size:
        fail(f"its {len(numbers)} tokens do not have the numbers 0 to {len(numbers) - 1}, each once")
    pieces = [b""] * size
    for text, n in vocab.items():
        if text in names:
            continue
        if not text or any(letter not in BYTES for letter in text):
            fail(f"its token {text!r:.40} is not in the letters of bytes; SentencePiece vocabularies are not supported")
        pieces[n] = bytes(BYTES[letter] for letter in text)
    return pieces


def _merges(entries: object, numbers: Mapping[bytes, int], fail: Fail) -> list[Pair]:
    if not isinstance(entries, list):
        fail("it has no merges")
    merges = []
    for one in entries:
        parts = one.split(" ") if isinstance(one, str) else one
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
            fail(f"the merge {one!r:.80} is not a pair")
        try:
            a, b = (bytes(BYTES[letter] for letter in part) for part in parts)
            merges.append((numbers[a], numbers[b]))
            numbers[a + b]
        except KeyError:
            fail(f"the merge {one!r:.80} has parts, or a result, that are not tokens")
    return merges
