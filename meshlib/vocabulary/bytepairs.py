"""A vocabulary of byte pairs: any text as numbers, and back to the last byte.

A text is cut into words by a pattern (`meshlib.vocabulary.words`), each word's bytes are joined by what was learnt
(`meshlib.vocabulary.merging`). Each byte is a token of its own, so that there is no text without tokens.

Files are those of Hugging Face's tokenizers (tokenizer.json) for byte-level byte pairs, which other programs read, and
of which this reads those of GPT-2, Llama 3 and the like. In them a byte stands as a letter: itself where it can be
seen, else one from 256 on.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import numpy as np

from meshlib.checks import at, flag, items, whole
from meshlib.errors import CheckpointError, GraphError
from meshlib.files import open_file, replace_file
from meshlib.vocabulary.merging import Pair, learnt, merged
from meshlib.vocabulary.words import GPT2, compiled, words

WHAT = "BytePairs"
PAD, END = "<pad>", "<end>"
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that are letters or marks in Latin-1
LETTERS = {byte: chr(byte) for byte in _SEEN} | {
    b: chr(256 + n) for n, b in enumerate(sorted({*range(256)} - {*_SEEN}))
}
BYTES = {letter: byte for byte, letter in LETTERS.items()}
CACHED_WORDS = 1 << 16


class BytePairs:
    """Texts as tokens and back, exactly: `decode(encode(text)) == text` for every text.

    Make one with `BytePairs.learn`, or read one with `BytePairs.load`. It is a tokenizer for `mtf.generate`.

    Attributes:
      pieces: the bytes of each token; of a special one none.
      specials: the numbers of tokens that stand for no text, by name.
      pattern: of the words across which nothing is joined.
    Example:
      >>> found = BytePairs.learn(["the cat, the hat", "the bat"], size=264)
      >>> found.encode("the rat"), found.decode(found.encode("the rat ☃"))
      ([260, 34, 116, 258], 'the rat ☃')
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        merges: Sequence[Pair],
        specials: Mapping[str, int],
        pattern: str = GPT2,
        whole_words: bool = False,
        prefix_space: bool = False,
    ) -> None:
        _check(pieces, merges, specials, pattern)
        self.pieces, self.specials, self.pattern = tuple(pieces), dict(specials), pattern
        self.whole_words, self.prefix_space = (
            flag(whole_words, WHAT, "whole_words"),
            flag(prefix_space, WHAT, "prefix_space"),
        )
        self.merges = tuple(merges)
        special = set(self.specials.values())
        self._numbers = {piece: n for n, piece in enumerate(self.pieces) if n not in special}
        self._bytes = [self._numbers[bytes([b])] for b in range(256)]
        self._ranks: dict[Pair, Pair] = {}
        for rank, (a, b) in enumerate(self.merges):
            self._ranks.setdefault((a, b), (rank, self._numbers[self.pieces[a] + self.pieces[b]]))
        self._word = lru_cache(CACHED_WORDS)(self._tokens)
        compiled(pattern)

    @classmethod
    def learn(
        cls,
        texts: str | Iterable[str],
        size: int,
        specials: Sequence[str] = (PAD, END),
        progress: Callable[[int, int], object] | None = None,
    ) -> BytePairs:
        """A vocabulary of the pairs that are most frequent in texts. The same texts give the same vocabulary.

        Args:
          texts: one text, or several.
          size: how many tokens, special ones and all bytes included; fewer where no pair occurs twice.
          specials: tokens that stand for no text; they are the first numbers, so that <pad> is 0.
          progress: called with (pairs so far, pairs in all).
        Raises: GraphError for bad arguments.
        """
        what = f"{WHAT}.learn"
        given = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
        if not all(isinstance(text, str) for text in given):
            strange = next(text for text in given if not isinstance(text, str))
            raise GraphError(f"{at(what)}: texts must be text, got {type(strange).__name__} {strange!r:.80}")
        names = items(specials, what, "specials")
        if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            raise GraphError(f"{at(what)}: specials must be different names, got {names!r:.80}")
        room = whole(size, what, "size") - len(names) - 256
        if room < 0:
            raise GraphError(
                f"{at(what)}: size must be at least {256 + len(names)}, for the bytes and {len(names)} special tokens, "
                f"got {size}"
            )
        counts: Counter[bytes] = Counter()
        for text in given:
            counts.update(_bytes(word) for word in words(text, GPT2))
        first = len(names)
        pieces = [b""] * first + [bytes([b]) for b in range(256)]
        merges: list[Pair] = []
        known = set(pieces)
        for a, b in learnt(counts, room, progress):
            made = pieces[first + a] + pieces[first + b]
            pieces.append(made)
            known.add(made)
            merges.append((first + a, first + b))
        return cls(pieces, merges, {name: n for n, name in enumerate(names)})

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.pieces)

    @property
    def end(self) -> int:
        """The number of <end>. Raises: GraphError where there is none."""
        return self._special(END)

    @property
    def pad(self) -> int:
        """The number of <pad>. Raises: GraphError where there is none."""
        return self._special(PAD)

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """The tokens of a text.

        Args:
          text: any.
          specials: whether names of special tokens in the text stand for them; else they are text as any other.
        Raises: GraphError for what is no text.
        """
        if not isinstance(text, str):
            raise GraphError(f"{at(WHAT)}: text must be text, got {type(text).__name__} {text!r:.80}")
        if self.prefix_space and text and not text.startswith(" "):
            text = f" {text}"
        if not specials or not self.specials:
            return [token for word in words(text, self.pattern) for token in self._word(word)]
        made: list[int] = []
        at_ = 0
        for found in self._named.finditer(text):
            made += self.encode(text[at_ : found.start()])
            made.append(self.specials[found[0]])
            at_ = found.end()
        return made + self.encode(text[at_:])

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; special ones have none. Bytes that are no UTF-8 show as a replacement character.

        Raises: GraphError for numbers that are no tokens.
        """
        raw = b"".join(self.pieces[self._checked(token)] for token in tokens)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BytePairs) and self._record() == other._record()

    def __hash__(self) -> int:
        return hash((self.pieces, self.merges))

    def __len__(self) -> int:
        return self.size

    def __reduce__(self) -> tuple[Any, ...]:  # what words come to is no part of it
        parts = self.pieces, self.merges, self.specials, self.pattern, self.whole_words, self.prefix_space
        return type(self), parts

    def __repr__(self) -> str:
        return f"<BytePairs of {self.size} tokens, {len(self.merges)} pairs>"

    # ------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a tokenizer.json, whole or not at all.

        Raises: CheckpointError where the file can't be written.
        """
        text = json.dumps(self._record(), ensure_ascii=False, indent=1)
        replace_file(path, lambda file: file.write(text.encode()), f"{WHAT}.save", CheckpointError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BytePairs:
        """Read a tokenizer.json of byte-level byte pairs.

        What a file asks for beyond that is refused: other models (Unigram, WordPiece), bytes as a fall-back
        (SentencePiece's, as of Llama 2), normalisers, words that are cut otherwise than by patterns. What a template
        puts around a text, such as a token for its beginning, is not put there by `encode`.
        Raises: CheckpointError where the file is none, or asks for what is not here.
        """
        what = f"{WHAT}.load"
        with open_file(path, what, CheckpointError) as (file, target):
            raw = file.read()
        try:
            record = json.loads(raw.decode())
        except (ValueError, RecursionError) as fault:
            raise CheckpointError(f"{what}: {target} is no JSON: {fault!s:.80}") from None

        def fail(fault: str) -> NoReturn:
            raise CheckpointError(f"{what}: {target} is no tokenizer of byte-level byte pairs: {fault}")

        return cls(**_read(record, fail))

    # ------------------------------------------------------------ inside

    def _tokens(self, word: str) -> tuple[int, ...]:
        raw = _bytes(word)
        if self.whole_words and raw in self._numbers:
            return (self._numbers[raw],)
        return tuple(merged((self._bytes[b] for b in raw), self._ranks))

    def _checked(self, token: object) -> int:
        if isinstance(token, int | np.integer) and not isinstance(token, bool) and 0 <= token < len(self.pieces):
            return int(token)
        raise GraphError(f"{at(WHAT)}: tokens are numbers from 0 to {len(self.pieces) - 1}, got {token!r:.40}")

    def _special(self, name: str) -> int:
        if name not in self.specials:
            there = ", ".join(self.specials) or "none"
            raise GraphError(f"{at(WHAT)}: the vocabulary has no {name}; its special tokens: {there}")
        return self.specials[name]

    @cached_property
    def _named(self) -> Any:
        import re

        return re.compile("|".join(re.escape(name) for name in sorted(self.specials, key=len, reverse=True)))

    def _record(self) -> dict[str, Any]:
        names = {n: name for name, n in self.specials.items()}
        vocab = {_letters(piece): n for n, piece in enumerate(self.pieces) if n not in names}
        byte_level = {"type": "ByteLevel", "add_prefix_space": self.prefix_space, "trim_offsets": True}
        split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
        before: dict[str, Any] = {**byte_level, "use_regex": True}
        if self.pattern != GPT2:
            before = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    **{"id": n, "content": name, "special": True, "normalized": False},
                    **{"single_word": False, "lstrip": False, "rstrip": False},
                }
                for name, n in self.specials.items()
            ],
            "normalizer": None,
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
                "ignore_merges": self.whole_words,
                "vocab": {**{name: n for n, name in names.items()}, **vocab},
                "merges": [[_letters(self.pieces[a]), _letters(self.pieces[b])] for a, b in self.merges],
            },
        }


def _check(pieces: object, merges: object, specials: object, pattern: object) -> None:
    """Raise GraphError for arguments that make no vocabulary."""
    given = items(pieces, WHAT, "pieces")
    if not all(isinstance(piece, bytes) for piece in given):
        raise GraphError(f"{at(WHAT)}: pieces must be bytes, got {pieces!r:.80}")
    if not isinstance(specials, Mapping) or not all(isinstance(name, str) and name for name in specials):
        raise GraphError(f"{at(WHAT)}: specials must be numbers by name, got {specials!r:.80}")
    numbers = [whole(n, WHAT, "each special token") for n in specials.values()]
    if len(set(numbers)) < len(numbers) or not all(0 <= n < len(given) for n in numbers):
        raise GraphError(
            f"{at(WHAT)}: specials must be different numbers from 0 to {len(given) - 1}, got {specials!r:.80}"
        )
    known = {piece for n, piece in enumerate(given) if n not in set(numbers)}
    lost = [b for b in range(256) if bytes([b]) not in known]
    if lost:
        raise GraphError(f"{at(WHAT)}: {len(lost)} of the 256 bytes are no pieces, the first is 0x{lost[0]:02x}")
    for pair in items(merges, WHAT, "merges"):
        parts = items(pair, WHAT, "each merge")
        if len(parts) != 2 or not all(0 <= whole(n, WHAT, "each merge") < len(given) for n in parts):
            raise GraphError(
                f"{at(WHAT)}: merges must be pairs of numbers from 0 to {len(given) - 1}, got {pair!r:.80}"
            )
        if given[parts[0]] + given[parts[1]] not in known:
            raise GraphError(f"{at(WHAT)}: the merge {pair!r:.80} makes no piece")
    if not isinstance(pattern, str):
        raise GraphError(f"{at(WHAT)}: pattern must be text, got {type(pattern).__name__} {pattern!r:.80}")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _letters(piece: bytes) -> str:
    return "".join(LETTERS[b] for b in piece)


def _read(record: object, fail: Callable[[str], NoReturn]) -> dict[str, Any]:
    """The arguments of `BytePairs` in a file's record."""
    model = record.get("model") if isinstance(record, dict) else None
    if not isinstance(model, dict) or not isinstance(record, dict):
        fail("it has no model")
    if model.get("type", "BPE") != "BPE":
        fail(f"its model is {model.get('type')!r:.40}, not BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            fail(f"its model has {name} {model[name]!r:.40}")
    if record.get("normalizer"):
        fail(f"it has a normalizer, {record['normalizer']!r:.80}")
    pattern, prefix_space = _cut(record.get("pre_tokenizer"), fail)
    specials = _specials(record.get("added_tokens", []), fail)
    pieces = _pieces(model.get("vocab"), specials, fail)
    numbers = {piece: n for n, piece in enumerate(pieces) if n not in set(specials.values())}
    lost = [b for b in range(256) if bytes([b]) not in numbers]
    if lost:
        fail(f"{len(lost)} of the 256 bytes have no token, the first is 0x{lost[0]:02x}")
    return {
        "pieces": pieces,
        "merges": _merges(model.get("merges"), numbers, fail),
        "specials": specials,
        "pattern": pattern,
        "whole_words": bool(model.get("ignore_merges", False)),
        "prefix_space": prefix_space,
    }


def _cut(found: object, fail: Callable[[str], NoReturn]) -> tuple[str, bool]:
    """The pattern of words, and whether a blank is put before a text."""
    if not isinstance(found, dict):
        fail("it has no pre_tokenizer, which has to be ByteLevel")
    steps = found.get("pretokenizers") if found.get("type") == "Sequence" else [found]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        fail(f"its pre_tokenizer is {found!r:.80}")
    *splits, last = steps
    if last.get("type") != "ByteLevel":
        fail(f"its pre_tokenizer ends with {last.get('type')!r:.40}, not ByteLevel")
    own = last.get("use_regex", True)
    if len(splits) + bool(own) != 1:
        fail(f"its pre_tokenizer cuts words {len(splits) + bool(own)} times; one pattern is known here")
    pattern: object = GPT2
    for step in splits:
        wanted = {"type": "Split", "behavior": "Isolated", "invert": False}
        strange = [name for name, value in wanted.items() if step.get(name, value) != value]
        pattern = step.get("pattern", {}).get("Regex") if isinstance(step.get("pattern"), dict) else None
        if strange or step.get("type") != "Split" or not isinstance(pattern, str):
            fail(f"its pre_tokenizer has {step!r:.120}, not a Split by one Regex, Isolated")
    return str(pattern), bool(last.get("add_prefix_space", False))


def _specials(found: object, fail: Callable[[str], NoReturn]) -> dict[str, int]:
    if not isinstance(found, list):
        fail(f"added_tokens are {found!r:.80}, not a list")
    made: dict[str, int] = {}
    for one in found:
        if not isinstance(one, dict) or not isinstance(one.get("content"), str) or type(one.get("id")) is not int:
            fail(f"the added token {one!r:.80} has no content and id")
        if not one["content"]:
            fail(f"the added token {one!r:.80} is empty")
        made[one["content"]] = one["id"]
    return made


def _pieces(vocab: object, specials: Mapping[str, int], fail: Callable[[str], NoReturn]) -> list[bytes]:
    if not isinstance(vocab, dict) or not all(type(n) is int for n in vocab.values()):
        fail("its vocab does not map text to numbers")
    numbers = {**vocab, **specials}
    size = len(set(numbers.values()))
    if sorted(set(numbers.values())) != list(range(size)) or len(numbers) != size:
        fail(f"its {len(numbers)} tokens do not have the numbers 0 to {len(numbers) - 1}, each once")
    pieces = [b""] * size
    for text, n in vocab.items():
        if text in specials:
            continue
        strange = [letter for letter in text if letter not in BYTES]
        if strange or not text:
            fail(
                f"its token {text!r:.40} is not written in letters of bytes; SentencePiece's vocabularies are not known"
            )
        pieces[n] = bytes(BYTES[letter] for letter in text)
    return pieces


def _merges(found: object, numbers: Mapping[bytes, int], fail: Callable[[str], NoReturn]) -> list[Pair]:
    if not isinstance(found, list):
        fail("it has no merges")
    made = []
    for one in found:
        parts = one.split(" ") if isinstance(one, str) else one
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
            fail(f"the merge {one!r:.80} is no pair")
        try:
            a, b = (bytes(BYTES[letter] for letter in part) for part in parts)
            made.append((numbers[a], numbers[b]))
            numbers[a + b]
        except KeyError:
            fail(f"the merge {one!r:.80} has parts, or a result, that are no tokens")
    return made
