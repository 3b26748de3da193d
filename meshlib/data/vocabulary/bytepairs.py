"""A byte-pair vocabulary: lossless conversion of any text to tokens and back.

A text is split into words by a pattern (`meshlib.data.vocabulary.merges`), and the bytes of each word are merged
(`meshlib.data.vocabulary.merges`). Each byte is a token, so that every text can be tokenised.

Its file is a tokenizer.json (`meshlib.data.vocabulary.tokenizer_file`), as for GPT-2, Llama 3 and others.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NoReturn

import numpy as np

from layouts.parsing import is_iterable
from meshlib.core.arguments import at, choice, flag, items, whole
from meshlib.core.documents import read_json
from meshlib.core.errors import CheckpointError, GraphError
from meshlib.core.files import replace_file
from meshlib.data.vocabulary.merges import GPT2, WHITE, Pair, compiled, learnt, merged, words
from meshlib.data.vocabulary.tokenizer_file import BYTES, FORMS, STRIPS, arguments_in, record_of

WHAT = "BytePairs"
PAD, END = "<pad>", "<end>"
ENDS = (END, "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")  # usual names
CACHED_WORDS = 1 << 16


class BytePairs:
    """A lossless byte-pair tokenizer: `decode(encode(text)) == text` for every text.

    Create one with `BytePairs.learn`, or read one with `BytePairs.load`. It is a tokenizer for `mtf.generate`. A loaded
    one may prescribe a Unicode normal form, or a blank before each text: then decoding returns that form.

    Attributes:
      pieces: the bytes of each token; empty for special tokens.
      specials: ids of special tokens, which have no text, by name.
      patterns: regular expressions of words, which merges do not cross; each splits the parts of the previous one.
      added: ids of tokens that match their text anywhere, whatever the context.
      normal_form: Unicode normal form of texts; None: unchanged.
    Example:
      >>> import meshlib as mtf
      >>> found = mtf.BytePairs.learn(["the cat, the hat", "the bat"], size=264)
      >>> found.encode("the rat"), found.decode(found.encode("the rat ☃"))
      ([260, 34, 116, 258], 'the rat ☃')
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        merges: Sequence[Pair],
        specials: Mapping[str, int],
        patterns: str | Sequence[str] = GPT2,
        whole_words: bool = False,
        prefix_space: bool = False,
        added: Mapping[str, int] | None = None,
        normal_form: str | None = None,
        blanks: Mapping[str, Sequence[str]] | None = None,
        end_name: str | None = None,
    ) -> None:
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(items(patterns, WHAT, "patterns"))
        _check(
            pieces, merges, {**specials, **(added or {})} if isinstance(specials, Mapping) else specials, self.patterns
        )
        self.pieces, self.specials, self.added = tuple(pieces), dict(specials), dict(added or {})
        self.normal_form = None if normal_form is None else choice(normal_form, WHAT, "normal_form", FORMS)
        self.blanks = _sides_of_blanks(blanks or {})
        self.end_name = next((name for name in ENDS if name in self.specials), None) if end_name is None else end_name
        if self.end_name is not None and self.end_name not in self.specials:
            self._special(self.end_name)
        self.whole_words, self.prefix_space = (
            flag(whole_words, WHAT, "whole_words"),
            flag(prefix_space, WHAT, "prefix_space"),
        )
        self.merges = tuple(merges)
        special = {*self.specials.values(), *self.added.values()}
        self._numbers = {piece: n for n, piece in enumerate(self.pieces) if n not in special}
        self._bytes = [self._numbers[bytes([b])] for b in range(256)]
        self._ranks: dict[Pair, Pair] = {}
        for rank, (a, b) in enumerate(self.merges):
            self._ranks.setdefault((a, b), (rank, self._numbers[self.pieces[a] + self.pieces[b]]))
        self._word = lru_cache(CACHED_WORDS)(self._tokens)
        for pattern in self.patterns:
            compiled(pattern)

    @classmethod
    def learn(
        cls,
        texts: str | Iterable[str],
        size: int,
        specials: Sequence[str] = (PAD, END),
        progress: Callable[[int, int], object] | None = None,
    ) -> BytePairs:
        """A vocabulary of the most frequent pairs in texts. The same texts give the same vocabulary.

        Args:
          texts: one text, or several.
          size: number of tokens, including special ones and all bytes; fewer if no pair occurs twice.
          specials: special tokens without text; they have the first ids, so that <pad> is 0.
          progress: called with (merges so far, total merges).
        Raises: GraphError for invalid arguments.
        """
        what = f"{WHAT}.learn"
        if progress is not None and not callable(progress):
            raise GraphError(f"{at(what)}: progress must be a function, got {progress!r:.80}")
        given: list[Any] = [texts] if isinstance(texts, str) or not is_iterable(texts) else list(texts)
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
            piece = pieces[first + a] + pieces[first + b]
            pieces.append(piece)
            known.add(piece)
            merges.append((first + a, first + b))
        return cls(pieces, merges, {name: n for n, name in enumerate(names)})

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.pieces)

    @property
    def end(self) -> int:
        """The id of the end-of-text token: <end>, or another usual name. Raises: GraphError if there is none."""
        return self._special(self.end_name or END)

    @property
    def pad(self) -> int:
        """The id of <pad>. Raises: GraphError if there is none."""
        return self._special(PAD)

    def encode(self, text: str, specials: bool = False) -> list[int]:
        """The tokens of a text.

        Args:
          text: any str.
          specials: whether names of special tokens in the text are encoded as these instead of as text.
        Raises: GraphError if `text` is not a str.
        """
        if not isinstance(text, str):
            raise GraphError(f"{at(WHAT)}: text must be text, got {type(text).__name__} {text!r:.80}")
        tokens: list[int] = []
        at_ = 0
        names = {**self.added, **(self.specials if specials else {})}
        for match in self._named(specials).finditer(text) if names else ():
            tokens += self._of_text(text[at_ : match.start()])
            tokens.append(names[match[match.lastindex or 0]])
            at_ = match.end()
        return tokens + self._of_text(text[at_:])

    def _of_text(self, text: str) -> list[int]:
        """The tokens of a text, or of part of one, without added ones."""
        if self.normal_form is not None:
            text = unicodedata.normalize(self.normal_form, text)  # type: ignore[arg-type]
        if self.prefix_space and text and not text.startswith(" "):
            text = f" {text}"
        parts = [text]
        for pattern in self.patterns:
            parts = [word for part in parts for word in words(part, pattern)]
        return [token for word in parts for token in self._word(word)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; special ones have none. Invalid UTF-8 becomes a replacement character.

        Raises: GraphError for invalid ids.
        """
        if not is_iterable(tokens):
            raise GraphError(
                f"{at(WHAT)}: tokens must be a list of numbers, got {type(tokens).__name__} {tokens!r:.80}"
            )
        raw = b"".join(self.pieces[self._checked(token)] for token in tokens)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "replace")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BytePairs) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((self.pieces, self.merges))

    def __len__(self) -> int:
        return self.size

    def __reduce__(self) -> tuple[Any, ...]:  # without the cache of tokenised words
        parts = self.pieces, self.merges, self.specials, self.patterns, self.whole_words, self.prefix_space
        return type(self), (*parts, self.added, self.normal_form, self.blanks, self.end_name)

    def __repr__(self) -> str:
        return f"<BytePairs of {self.size} tokens, {len(self.merges)} pairs>"

    # ------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json atomically.

        Raises: CheckpointError if the file can't be written.
        """
        replace_file(path, lambda file: file.write(self.as_json()), f"{WHAT}.save", CheckpointError)

    def as_json(self) -> bytes:
        """The content of its tokenizer.json."""
        return json.dumps(record_of(self), ensure_ascii=False, indent=1).encode()

    @classmethod
    def load(cls, path: str | os.PathLike[str], end: str | None = None) -> BytePairs:
        """Read a tokenizer.json of byte-level byte pairs.

        Other features are refused: other models (Unigram, WordPiece), byte fallback (SentencePiece, as in Llama 2),
        normalisers other than Unicode normal forms, pre-tokenizers other than patterns. Templates, such as a token at
        the beginning, are not applied by `encode`.

        Args:
          path: the file, or its folder.
          end: the name of the end-of-text token; by default the first of the usual names.
        Raises: CheckpointError for an invalid file or an unsupported feature; GraphError for an unknown end token.
        """
        what = f"{WHAT}.load"
        if isinstance(path, str | os.PathLike) and os.path.isdir(path):
            path = os.path.join(path, "tokenizer.json")
        record, target = read_json(path, what, CheckpointError, "a tokenizer of byte-level byte pairs")

        def fail(fault: str) -> NoReturn:
            raise CheckpointError(f"{what}: {target} is not a byte-level byte-pair tokenizer: {fault}")

        read = arguments_in(record, fail)
        try:
            return cls(**read, end_name=end)
        except GraphError as fault:
            if end is not None and end not in read["specials"]:
                raise
            fail(str(fault))

    def _tokens(self, word: str) -> tuple[int, ...]:
        raw = _bytes(word)
        if self.whole_words and raw in self._numbers:
            return (self._numbers[raw],)
        return tuple(merged((self._bytes[b] for b in raw), self._ranks))

    def _checked(self, token: object) -> int:
        if isinstance(token, int | np.integer) and not isinstance(token, bool) and 0 <= token < len(self.pieces):
            return int(token)
        raise GraphError(f"{at(WHAT)}: tokens must be numbers from 0 to {len(self.pieces) - 1}, got {token!r:.40}")

    def _special(self, name: str) -> int:
        if name not in self.specials:
            specials = ", ".join(self.specials) or "none"
            raise GraphError(f"{at(WHAT)}: the vocabulary has no {name}; its special tokens: {specials}")
        return self.specials[name]

    @cache  # noqa: B019 (two patterns at most, which live as long as the vocabulary)
    def _named(self, specials: bool) -> re.Pattern[str]:
        """Regular expression of token names in a text, longest first, with the blanks that some absorb."""
        names = [*self.added, *(self.specials if specials else ())]
        alternatives = []
        for name in sorted(names, key=len, reverse=True):
            before, after = (f"[{WHITE}]*" if side in self.blanks.get(name, ()) else "" for side in STRIPS)
            alternatives.append(f"{before}({re.escape(name)}){after}")
        return re.compile("|".join(alternatives))


def _check(pieces: object, merges: object, specials: object, patterns: tuple[object, ...]) -> None:
    """Raise GraphError for arguments that do not describe a vocabulary."""
    all_pieces = items(pieces, WHAT, "pieces")
    if not all(isinstance(piece, bytes) for piece in all_pieces):
        raise GraphError(f"{at(WHAT)}: pieces must be bytes, got {pieces!r:.80}")
    special_numbers = _checked_specials(specials, len(all_pieces))
    reserved = set(special_numbers.values())
    ordinary = {piece for n, piece in enumerate(all_pieces) if n not in reserved}
    for name in special_numbers:  # a tokenizer.json lists it among the pieces, which are written as letters
        if all(letter in BYTES for letter in name) and bytes(BYTES[letter] for letter in name) in ordinary:
            raise GraphError(f"{at(WHAT)}: the special token {name!r:.40} is spelled like one of the pieces")
    lost = [b for b in range(256) if bytes([b]) not in ordinary]
    if lost:
        raise GraphError(f"{at(WHAT)}: {len(lost)} of the 256 bytes are not pieces, the first is 0x{lost[0]:02x}")
    _check_merges(merges, all_pieces, ordinary)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise GraphError(f"{at(WHAT)}: patterns must be text, got {patterns!r:.80}")


def _checked_specials(specials: object, count: int) -> dict[str, int]:
    """The ids of the special tokens by name: distinct, and below `count`, the number of pieces."""
    if not isinstance(specials, Mapping) or not all(isinstance(name, str) and name for name in specials):
        raise GraphError(f"{at(WHAT)}: specials must be numbers by name, got {specials!r:.80}")
    numbers = {name: whole(n, WHAT, "each special token") for name, n in specials.items()}
    if len(set(numbers.values())) < len(numbers) or not all(0 <= n < count for n in numbers.values()):
        raise GraphError(f"{at(WHAT)}: specials must be different numbers from 0 to {count - 1}, got {specials!r:.80}")
    return numbers


def _check_merges(merges: object, pieces: Sequence[bytes], ordinary: set[bytes]) -> None:
    """Raise GraphError for a merge that is not a pair of pieces, or whose result is not an ordinary piece."""
    for pair in items(merges, WHAT, "merges"):
        parts = items(pair, WHAT, "each merge")
        if len(parts) != 2 or not all(0 <= whole(n, WHAT, "each merge") < len(pieces) for n in parts):
            raise GraphError(
                f"{at(WHAT)}: merges must be pairs of numbers from 0 to {len(pieces) - 1}, got {pair!r:.80}"
            )
        if pieces[parts[0]] + pieces[parts[1]] not in ordinary:
            raise GraphError(f"{at(WHAT)}: the merge {pair!r:.80} yields no piece of the vocabulary")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _sides_of_blanks(blanks: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The sides on which special tokens absorb blanks."""
    sides_of = {name: tuple(sides) for name, sides in blanks.items()}
    if any(side not in STRIPS for sides in sides_of.values() for side in sides):
        raise GraphError(f"{at(WHAT)}: blanks must be on the {' or '.join(STRIPS)} of a token, got {blanks!r:.80}")
    return sides_of
