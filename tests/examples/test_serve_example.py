"""The serving example: it trains or loads, completes, says how fast, and answers wrong flags in one line."""

from __future__ import annotations

import re

import pytest

from examples.text import serve

TINY = ["--size", "tiny", "--mesh", "data:2;tensor:4", "--steps", "2", "--batch", "8", "--length", "8", "--tokens", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a model that is trained once."""
    folder = tmp_path_factory.mktemp("serve")
    text = folder / "text.txt"
    text.write_bytes(b"to be or not to be, that is the question: " * 200)
    return [*TINY, "--text", str(text), "--checkpoint", str(folder / "model.safetensors")]


def test_it_trains_completes_and_says_how_fast(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main([*model, "--prompt", "to be", "--prompt", "question", "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert "trained for 2 steps on mesh data:2;tensor:4" in first
    assert len(re.findall(r"^    (to be|question)\|", first, flags=re.M)) == 2
    assert re.search(r"tokens/s here.*\non v3-8 \(modelled\): [\d,]+ tokens/s, a token every [\d,]+ us", first)
    # The same completions of the parameters that it kept, one by one, on another mesh.
    other = ["--mesh", "data:8", "--layout", "batch:data", "--prompt", "question", "--temperature", "0"]
    assert serve.main([*model, *other, "--precision", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "model.safetensors" in out
    assert re.search(r"question\|.*", out)[0] == re.search(r"question\|.*", first)[0]


def test_beams_and_narrow_types(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "to be", "--beams", "2", "--stop", r"\n", "--kernels", "int8", "--cache", "int8"]
    assert serve.main([*model, *flags]) == 0
    assert "over the length penalty" in capsys.readouterr().out


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--plan", "gpt2", "--slice", "v5e-1", "--context", "1024"]) == 0
    out = capsys.readouterr().out
    assert "gpt2 on v5e-1: weights in bfloat16, 1024 positions of cache" in out
    assert "on the frontier of latency and throughput" in out


BAD = {
    "no layout": ([*TINY, "--layout", "tensr"], "no layout 'tensr'"),
    "a preset": (["--plan", "llama"], "llama"),
    "a top_p": ([*TINY, "--top-p", "2"], r"top_p must be in \(0, 1\], got 2"),
    "a stop": (["--stop", "\\x"], r"--stop '\\\\x' is not text with escapes: truncated"),
    "a prompt": (["--prompt", "a", "--prompt", ""], "--prompt 2 is empty"),
}


def test_wrong_flags_show_before_anything_is_trained(
    model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve.mtf, "train", lambda *args, **options: pytest.fail("it trains"))
    for flags in (["--top-p", "2"], ["--slice", "v99"], ["--layout", "batch:dat"]):
        assert serve.main([*model[:-2], *flags]) == 2  # without the checkpoint
        assert capsys.readouterr().err.startswith("serve.py: ")


def test_stops_of_other_alphabets() -> None:
    """Escapes are read, letters beyond ASCII stay what they are."""
    args = serve.parse(["--stop", r"\n", "--stop", "é", "--stop", "€\\t", "--stop", "end"])
    assert serve.stops(args) == [10, "é", "€\t", "end"]


def test_a_plan_of_an_encoder_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--plan", "t5-small", "--slice", "v5e-1", "--context", "64"]) == 0
    assert "t5-small on v5e-1: weights in bfloat16, 64 positions of cache" in capsys.readouterr().out


@pytest.mark.parametrize("about", BAD)
def test_wrong_flags(about: str, model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags, message = BAD[about]
    assert serve.main([*model, *flags]) == 2
    assert re.search(rf"^serve.py: .*{message}", capsys.readouterr().err)
