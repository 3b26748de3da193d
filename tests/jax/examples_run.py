"""The examples, small: the same on simulated cores and on devices."""

from __future__ import annotations

from pathlib import Path

from examples import mnist
from examples.text import transformer


def _mnist(folder: Path, *flags: str) -> int:
    return mnist.main(["--epochs", "1", "--hidden", "32", "--batch", "1024", "--precision", "float32", *flags])


def _transformer(folder: Path, *flags: str) -> int:
    text = folder / "text.txt"
    sizes = ["--size", "tiny", "--length", "16", "--batch", "8", "--steps", "2", "--every", "1", "--sample", "0"]
    return transformer.main(["--text", str(text), *sizes, "--precision", "float32", "--remat", "full", *flags])


EXAMPLES = {"mnist": _mnist, "transformer": _transformer}
