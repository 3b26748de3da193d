"""Plans of 44 models beside what the TPU compiler makes of them: bytes by collective, differences by name, peaks.

    python tests/benchmarks/compiled_cases.py [NAME ...] [--keep FOLDER] [--differences]

Needs libtpu (`pip install libtpu`), no device; one compilation at a time, 10 to 200 CPU seconds each. With `--keep`,
what the compiler answers is written into a folder, and read from there the next time, whatever has changed in the plan.
NAME is a part of a case's name; all cases run unless one is given.

`step` is what the plan says a compiled step takes (`memory.needed_bytes`), `buffers` the part that is exact, `compiled`
what the compiler says, the program's code included.
`unnamed` is what differs in bytes sent and is in no difference; `no line` counts differences without a source line.
"""

from __future__ import annotations

import argparse
import gzip
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import meshlib as mtf
from hardware.slices import Slice
from meshlib.core.errors import MissingError
from meshlib.core.text import bytes_text, grid
from meshlib.jax.compiling import result_of
from meshlib.jax.compiling.messages import Answer, CompileTask, Failed
from meshlib.jax.compiling.process import answers
from meshlib.jax.compiling.topologies import require_tpu_compiler, topology_of

Build = Callable[[], mtf.Program]


def model(config: Any, make: Callable[[Any], Any], mesh: str, layout: str, named: Any = mtf.models.layout) -> Build:
    """The step that `make` builds of a configuration, under a layout that `named` knows."""

    def build() -> mtf.Program:
        with mtf.Graph():
            step = make(config)
        return mtf.lower(*step, mesh, named(layout, config, mesh))

    return build


def train(preset: str, mesh: str, layout: str, batch: int, length: int, **options: Any) -> Build:
    """A training step with AdamW and full rematerialisation."""
    return model(mtf.models.preset(preset), lambda c: mtf.models.train_step(c, batch, length, **options), mesh, layout)


def images(preset: str, mesh: str, batch: int) -> Build:
    """A data-parallel training step of a model of images."""
    optimizer = mtf.optimize.MomentumOptimizer(0.1, 0.9)
    config = mtf.models.image_preset(preset)
    return model(config, lambda c: mtf.models.image_step(c, batch, optimizer), mesh, "data", mtf.models.image_layout)


def decode(preset: str, mesh: str, layout: str, batch: int, length: int) -> Build:
    """A token for each sequence, with caches of `length` positions."""
    return model(mtf.models.preset(preset), lambda c: mtf.models.decode_step(c, batch, length), mesh, layout)


def prefill(preset: str, mesh: str, layout: str, batch: int, length: int, encoder_length: int | None = None) -> Build:
    """Prompts of `length` tokens into caches."""
    sizes = (batch, length, length, encoder_length)
    return model(mtf.models.preset(preset), lambda c: mtf.models.prefill(c, *sizes), mesh, layout)


def network(mesh: str, layout: str, batch: int) -> Build:
    """A training step of a network of 8,192, 32,768 and 8,192 features."""

    def build() -> mtf.Program:
        b, x, h, y = (mtf.Dimension(*d) for d in (("batch", batch), ("x", 8192), ("h", 32768), ("y", 8192)))
        with mtf.Graph():
            given, wanted = mtf.input("given", [b, x]), mtf.input("wanted", [b, y])
            first, second = mtf.variable("first", [x, h]), mtf.variable("second", [h, y])
            hidden = mtf.relu(mtf.einsum([given, first], [b, h]))
            loss = mtf.reduce_mean(mtf.square(mtf.einsum([hidden, second], [b, y]) - wanted))
            updates = mtf.optimize.AdamWOptimizer(1e-3).minimize(loss)
        return mtf.lower({"loss": loss}, updates, mesh, layout)

    return build


STAGES = mtf.models.Pipeline(stages=4, microbatches=8)
CASES: dict[str, tuple[Build, str]] = {
    "network fsdp": (network("fsdp:16", "batch:fsdp;x:fsdp?;y:fsdp?", 32768), "v4-32"),
    "network fsdp+tensor": (network("data:4;model:4", "batch:data;x:data?;y:data?;h:model", 8192), "v5e-16"),
    "network tensor": (network("model:8", "h:model", 2048), "v6e-8"),
    "network two slices": (network("data:2;fsdp:8", "batch:data+fsdp;x:fsdp?;y:fsdp?", 16384), "2*v5e-8"),
    "gpt2-xl fsdp": (train("gpt2-xl", "fsdp:4", "fsdp", 16, 1024), "v5e-4"),
    "llama2-7b fsdp": (train("llama2-7b", "fsdp:16", "fsdp", 16, 2048), "v5e-16"),
    "llama2-7b fsdp+tensor": (train("llama2-7b", "fsdp:4;tensor:4", "fsdp+tensor", 16, 2048), "v5e-16"),
    "llama2-7b fsdp+sequence": (train("llama2-7b", "fsdp:4;tensor:4", "fsdp+sequence", 16, 2048), "v5e-16"),
    "llama3-8b fsdp": (train("llama3-8b", "fsdp:8", "fsdp", 8, 4096), "v5p-2x2x2"),
    "palm-8b fsdp+sequence": (train("palm-8b", "fsdp:4;tensor:4", "fsdp+sequence", 16, 2048), "v6e-16"),
    "mixtral fsdp+expert": (train("mixtral-8x7b", "fsdp:4;expert:8", "fsdp+expert", 64, 2048), "v5p-2x4x4"),
    "vit-l data": (images("vit-l-16", "data:8", 256), "v5e-8"),
    "resnet-18 data": (images("resnet-18", "data:8", 1024), "v5e-8"),
    "t5-base prompts": (prefill("t5-base", "data:4;tensor:2", "data+tensor", 64, 512, 512), "v4-16"),
    "gpt2-xl prompts": (prefill("gpt2-xl", "data:8", "data", 32, 1024), "v5e-8"),
    "llama3-8b prompts": (prefill("llama3-8b", "data:2;tensor:4", "data+tensor", 16, 2048), "v5p-2x2x2"),
    "llama3-8b decode": (decode("llama3-8b", "data:2;tensor:4", "data+tensor", 64, 4096), "v5e-8"),
    "llama2-13b decode": (decode("llama2-13b", "tensor:8", "tensor", 16, 4096), "v6e-8"),
    "mixtral decode": (decode("mixtral-8x7b", "expert:8", "expert", 64, 4096), "v5p-2x2x2"),
    "qwen3-30b-a3b decode": (decode("qwen3-30b-a3b", "expert:16", "expert", 128, 4096), "v6e-16"),
    "gemma3-4b decode": (decode("gemma3-4b", "tensor:4", "tensor", 32, 4096), "v5e-4"),
    "deepseek-v2-lite decode": (decode("deepseek-v2-lite", "expert:8", "expert", 64, 4096), "v6e-8"),
    "llama3.1-8b prompts": (prefill("llama3.1-8b", "tensor:8", "tensor", 4, 8192), "v5e-8"),
    "qwen3-30b-a3b prompts": (prefill("qwen3-30b-a3b", "expert:16", "expert", 32, 2048), "v6e-16"),
    "bert-large fsdp": (train("bert-large", "fsdp:4", "fsdp", 32, 512), "v5e-4"),
    "resnet-50 data": (images("resnet-50", "data:8", 512), "v4-16"),
    "gpt2-large two slices": (train("gpt2-large", "data:2;fsdp:8", "data+fsdp", 32, 1024), "2*v5e-8"),
    # Drawn after the plan's rules were written, and measured before any was changed for them:
    "unseen llama3-70b fsdp+context": (
        train("llama3-70b", "fsdp:128;context:2", "fsdp+context", 128, 8192),
        "v5e-256",
    ),
    "unseen mtf-lm-1.28b fsdp": (train("mtf-lm-1.28b", "fsdp:8", "fsdp", 256, 256), "v5e-8"),
    "unseen gpt2-medium data+fsdp": (train("gpt2-medium", "data:2;fsdp:2", "data+fsdp", 16, 1024), "v6e-4"),
    "unseen t5-large fsdp": (train("t5-large", "fsdp:8", "fsdp", 32, 512), "v5p-2x2x2"),
    "unseen vit-b data": (images("vit-b-16", "data:4", 256), "v6e-4"),
    "unseen llama2-7b prompts": (prefill("llama2-7b", "data:2;tensor:4", "data+tensor", 16, 4096), "v5e-8"),
    "unseen llama2-7b decode": (decode("llama2-7b", "tensor:4", "tensor", 16, 4096), "v4-8"),
    "unseen gemma3-12b decode": (decode("gemma3-12b", "data:2;tensor:4", "data+tensor", 32, 8192), "v6e-8"),
    "unseen gpt-oss-20b decode": (decode("gpt-oss-20b", "expert:8", "expert", 64, 1024), "v6e-8"),
    # Drawn later, as the others:
    "unseen llama2-13b pipeline+fsdp": (
        train("llama2-13b", "pipe:4;fsdp:4", "pipeline+fsdp", 32, 2048, pipeline=STAGES),
        "v5p-2x2x4",
    ),
    "unseen maxtext-16b fsdp": (train("maxtext-16b", "fsdp:32", "fsdp", 32, 2048), "v4-64"),
    "unseen llama2-13b prompts": (prefill("llama2-13b", "tensor:8", "tensor", 8, 4096), "v6e-8"),
    "unseen t5-large prompts": (prefill("t5-large", "data:2;tensor:4", "data+tensor", 32, 512, 512), "v5e-8"),
    "unseen llama3-70b decode": (decode("llama3-70b", "data:2;tensor:8", "data+tensor", 64, 8192), "v5p-2x2x4"),
    "unseen palm-8b decode": (decode("palm-8b", "data:2;tensor:4", "data+tensor", 64, 2048), "v5e-8"),
    "unseen llama4-scout decode": (decode("llama4-scout", "expert:16", "expert", 64, 8192), "v5p-2x2x4"),
    "unseen gpt2-medium decode": (decode("gpt2-medium", "data:4", "data", 128, 1024), "v6e-4"),
}


def answer(name: str, program: mtf.Program, slice_: Slice, folder: Path | None) -> Answer | Failed:
    """What the compiler says of a program: from the folder if it is there, else of the compiler."""
    file = folder and folder / f"{name.replace(' ', '_')}.answer"
    if file is not None and file.exists():
        stored: Answer | Failed = pickle.loads(gzip.decompress(file.read_bytes()))
        return stored
    topology = topology_of(slice_)
    task = CompileTask((program,), (topology.name, topology.options), slice_.slices, {})
    compiled = next(iter(answers(task, lambda text: None, None)))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(pickle.dumps(compiled)))
    return compiled


def rows(name: str, folder: Path | None, differences: bool) -> Iterator[tuple[str, ...]]:
    """The row of a case, those of its collectives, and its differences on standard output."""
    build, on = CASES[name]
    program, slice_ = build(), Slice(on)
    compiled = result_of(program, slice_, "tpu", answer(name, program, slice_, folder))
    planned = compiled.planned
    sent, named = float(program.sent_bytes), sum(d.more_bytes for d in compiled.differences)
    unnamed = abs(compiled.sent_bytes - sent - named) / max(sent, 1.0)
    whole = compiled.memory.with_code_bytes if compiled.memory else compiled.peak_bytes
    peaks = (planned.peak_bytes, planned.needed_bytes, whole)
    ratio = f"{compiled.sent_bytes / sent:.4f}" if sent else ""
    without_line = sum(not d.source for d in compiled.differences)
    memory = *map(bytes_text, peaks), f"{peaks[2] / peaks[1]:.4f}"
    sends = bytes_text(sent), bytes_text(compiled.sent_bytes), ratio
    yield name, on, *memory, *sends, str(len(compiled.differences)), f"{unnamed:.1e}", str(without_line)
    for row in compiled.sent_by_kind():
        ratio = f"{row.compiled_bytes / row.planned_bytes:.4f}" if row.planned_bytes else ""
        sizes = bytes_text(row.planned_bytes), bytes_text(row.compiled_bytes)
        yield f"  {row.kind} over {row.over}", *[""] * 5, *sizes, ratio, *[""] * 3
    if differences:
        print(name, *compiled.differences, sep="\n  ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--differences", action="store_true")
    given = parser.parse_args()
    try:
        require_tpu_compiler()
    except MissingError as fault:
        sys.exit(str(fault))
    chosen = [name for name in CASES if not given.names or any(part in name for part in given.names)]
    memory, sent = ("buffers", "step*", "compiled", "ratio"), ("sent", "compiled", "ratio")
    table: list[tuple[str, ...]] = [("case", "slice", *memory, *sent, "differences", "unnamed", "no line")]
    for n, name in enumerate(chosen):
        print(f"{n + 1} of {len(chosen)}: {name}", file=sys.stderr, flush=True)
        table += rows(name, given.keep, given.differences)
    print(*grid(table, right=tuple(range(2, 12))), "* modelled", sep="\n")


if __name__ == "__main__":
    main()
