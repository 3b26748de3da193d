"""Figures of many programs, before and after a change that must not move them; run by hand:

    PYTHONPATH=<old checkout> python tests/benchmarks/figures.py dump before.json
    PYTHONPATH=<new checkout> python tests/benchmarks/figures.py dump after.json
    python tests/benchmarks/figures.py compare before.json after.json [--ignore memory estimate] [--only llama2]

Programs: those of the README and the examples, the 2-layer model of `tests/models/test_bytes.py` under all of its
layouts, presets under named layouts and policies, and random small ones, two steps of which are simulated too. Only
the public face of meshlib is used, so that one script measures both. `dump --only WORD` writes a part of them.

Each program has figures by name: "collectives" (how many of each kind, axes, dim, payload, sent, count and phase),
"sent", "to_host", "from_host", "work", "memory" (without tiles), "estimate/<slice>/..." and "values" (of outputs and
variables, with a digest of all bits). What a program refuses is a figure too: the class of the error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The bits of a product may depend on the number of threads; NumPy reads this when it is imported.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # PYTHONPATH comes first
import meshlib as mtf
from examples import mnist
from examples.text import transformer

Figures = dict[str, Any]
Job = tuple[str, Callable[[], Figures]]


# ---------------------------------------------------------------- figures of one program


def figures(program: mtf.Program, slices: tuple[str, ...] = ()) -> Figures:
    """What is exact, and the estimate on each of `slices`."""
    moved = Counter(
        f"{c.kind} over {'+'.join(c.axes)} of {c.dim}: {c.payload_bytes} sends {c.sent_bytes} x{c.count} {c.phase}"
        for c in program.collectives
    )
    memory = program.memory
    found: Figures = {
        "collectives": dict(sorted(moved.items())),
        "sent": program.sent_bytes,
        "to_host": program.to_host_bytes,
        "from_host": program.from_host_bytes,
        "work/mxu_flops": program.work.mxu_flops,
        "work/vpu_ops": program.work.vpu_ops,
        "memory/peak": memory.peak_bytes,
        "memory/by_kind": {kind: size for kind, size in memory.by_kind.items() if size},
        "memory/host": memory.host_bytes,
    }
    for name in slices:
        est = mtf.estimate(program, name)
        one = {
            "step_seconds": est.step_seconds,
            "lower_seconds": est.lower_seconds,
            "upper_seconds": est.upper_seconds,
            "exposed_seconds": est.exposed_comm_seconds,
            "mfu": est.mfu,
            "flops": est.flops,
            "useful_flops": est.useful_flops,
            "vpu_ops": est.vpu_ops,
            "hbm_bytes": est.hbm_bytes,
            "memory": est.memory.peak_bytes,
            "host_memory": est.memory.host_bytes,
        }
        found |= {f"estimate/{name}/{figure}": value for figure, value in one.items()}
    return found


def value_figures(program: mtf.Program, executor: str, feeds: dict[str, Any] | None = None) -> Figures:
    """Outputs of two steps and the variables after them: sizes to compare by, and a digest of all bits."""
    rng = np.random.default_rng(0)
    fed = dict(feeds or {})
    for name, value in program.inputs.items():
        if name not in fed:
            fed[name] = rng.uniform(-1, 1, value.tensor.shape.sizes)
    sim = mtf.simulate(program, seed=3, executor=executor, check_nan=False)
    arrays = {}
    for step in range(2):
        arrays |= {f"{name} of step {step}": x for name, x in sim.step(fed).items()}
    arrays |= {f"variable {name}": sim.state[name] for name in program.variables}
    found: Figures = {}
    for name, array in arrays.items():
        x = np.ascontiguousarray(array)
        wide = np.asarray(x, np.float64)
        digest = hashlib.sha1(x.tobytes()).hexdigest()[:12]
        found[f"values/{executor}/{name}"] = [float(np.sum(wide)), float(np.sqrt(np.sum(wide * wide))), digest]
    return found


def refused_or(job: Callable[[], Figures]) -> Figures:
    """The figures, or the error that says why there are none."""
    try:
        return job()
    except mtf.MeshlibError as fault:
        return {"refused": type(fault).__name__}


# ---------------------------------------------------------------- README and examples


def readme_program(layout: str) -> mtf.Program:
    """The first program of the README."""
    batch, pixels = mtf.Dimension("batch", 512), mtf.Dimension("pixels", 784)
    hidden, classes = mtf.Dimension("hidden", 1024), mtf.Dimension("classes", 10)
    with mtf.Graph():
        images = mtf.input("images", [batch, pixels])
        labels = mtf.input("labels", [batch], dtype="int32")
        w1 = mtf.variable("w1", [pixels, hidden])
        w2 = mtf.variable("w2", [hidden, classes])
        h = mtf.relu(mtf.einsum([images, w1], output_shape=[batch, hidden]))
        logits = mtf.einsum([h, w2], output_shape=[batch, classes])
        found = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, classes), classes)
        loss = mtf.reduce_mean(found)
        train = mtf.optimize.SgdOptimizer(lr=0.1).minimize(loss)
    return mtf.lower({"loss": loss}, updates=train, mesh="rows:2;cols:4", layout=layout)


def readme() -> Iterator[Job]:
    """Its layouts."""
    for layout in ("batch:rows;hidden:cols", "batch:rows", "hidden:cols", "batch:rows+cols", "batch:rows;hidden:rows?"):

        def job(layout: str = layout) -> Figures:
            program = readme_program(layout)
            labels = {"labels": np.arange(512) % 10}
            return figures(program, ("v3-8", "v5e-8")) | value_figures(program, "fast", labels)

        yield f"readme {layout}", job


def examples() -> Iterator[Job]:
    """mnist.py and transformer.py under some layouts, the usual layouts of Llama 3.1 405B."""
    for layout in ("batch:rows;hidden:cols", "batch:rows", "hidden:rows+cols", "batch:rows;hidden:cols;pixels:cols?"):
        for executor in ("fast", "exact"):

            def job(layout: str = layout, executor: str = executor) -> Figures:
                flags = ["--layout", layout, "--hidden", "64", "--batch", "16"]
                training, evaluation = mnist.build(mnist.parse(flags))
                labels = {"labels": np.arange(16) % 10}
                evaluated = {f"evaluation/{k}": v for k, v in figures(evaluation).items()}
                return figures(training, ("v3-8",)) | evaluated | value_figures(training, executor, labels)

            yield f"mnist.py {layout} {executor}", job
    for mesh, layout, remat, precision in (
        ("data:2;tensor:4", "2d", "none", "bfloat16"),
        ("data:2;tensor:4", "2d", "full", "float32"),
        ("fsdp:8", "fsdp", "matmuls", "bfloat16"),
    ):

        def job(mesh: str = mesh, layout: str = layout, remat: str = remat, precision: str = precision) -> Figures:
            flags = ["--size", "tiny", "--length", "32", "--batch", "8", "--precision", precision]
            args = transformer.parse([*flags, "--mesh", mesh, "--layout", layout, "--remat", remat])
            training, sampling = transformer.build(args)
            tokens = np.random.default_rng(1).integers(0, 256, (8, 32))
            sampled = {f"sampling/{k}": v for k, v in figures(sampling).items()}
            values = value_figures(training, "fast", {"tokens": tokens, "targets": tokens})
            return figures(training, ("v3-8",)) | sampled | values

        yield f"transformer.py {layout} {remat} {precision}", job
    llama = mtf.models.preset("llama3.1-405b")
    for name, mesh in mtf.models.usual_layouts(llama, 3072, 1536):

        def job(name: str = name, mesh: str = mesh) -> Figures:
            return trained("llama3.1-405b", 1536, 8192, name, mesh, {"remat": "full"}, ("v5p-6144",))

        yield f"llama3.1-405b {name} {mesh}", job


# ---------------------------------------------------------------- models


_steps: dict[tuple[Any, ...], Any] = {}


def trained(
    preset: str, batch: int, length: int, name: str, mesh: str, how: dict[str, Any], slices: tuple[str, ...] = ()
) -> Figures:
    """A training step of a preset under a layout by name; `how` has further arguments of train_step."""
    config = mtf.models.preset(preset)
    key = (preset, batch, length, str(how))
    if key not in _steps:
        with mtf.Graph():
            _steps[key] = mtf.models.train_step(config, batch, length, **how)
    outputs, updates = _steps[key]
    return figures(
        mtf.lower(outputs, updates, mesh=mesh, layout=mtf.models.layout(name, config, mesh)),
        slices,
    )


def two_layers() -> Iterator[Job]:
    """The model of tests/models/test_bytes.py: layouts x meshes x variants."""
    meshes = {
        "data": "data:{k}", "tensor": "tensor:{k}", "2d": "data:{i};tensor:{j}", "fsdp": "fsdp:{k}",
        "fsdp+tensor": "fsdp:{i};tensor:{j}", "zero1": "data:{k}", "zero1+tensor": "data:{i};tensor:{j}",
        "sequence": "tensor:{k}", "context": "context:{k}",
    }  # fmt: skip
    for dtype, scan, remat in (
        ("float32", False, "none"), ("float32", True, "full"), ("bfloat16", True, "none"), ("bfloat16", False, "full"),
    ):  # fmt: skip
        config = mtf.models.TransformerConfig(
            name="two layers", layers=2, d_model=256, heads=8, head_dim=32, d_ff=1024, vocab=512, max_length=64,
            bias=True, numerics=mtf.Numerics(activation_dtype=dtype),
        )  # fmt: skip
        with mtf.Graph():
            outputs, updates = mtf.models.train_step(config, 16, 64, remat=remat, scan=scan)
        for devices, (i, j) in {4: (2, 2), 8: (2, 4), 16: (4, 4)}.items():
            three = [("data+fsdp+tensor", f"data:2;fsdp:{devices // 4};tensor:2")] if devices > 4 else []
            for name, pattern in (*meshes.items(), *three):
                if devices == 16 and name in ("tensor", "sequence"):
                    mesh = "tensor:8;half:2"
                    layout: Any = "heads:tensor;d_ff:tensor+half;vocab:tensor+half"
                    layout += ";length:tensor+half?" if name == "sequence" else ""
                else:
                    mesh = pattern.format(k=devices, i=i, j=j)
                    layout = mtf.models.layout(name, config, mesh)

                def job(step: Any = (outputs, updates), mesh: str = mesh, layout: Any = layout) -> Figures:
                    program = mtf.lower(*step, mesh=mesh, layout=layout)
                    return figures(program, ("v5e-8",) if program.mesh.size == 8 else ())

                yield f"two layers {dtype} {'scan' if scan else 'unrolled'} {remat} {name} {mesh}", job


# preset, batch, length, layout, mesh, further arguments, slices
PRESETS: tuple[tuple[str, int, int, str, str, dict[str, Any], tuple[str, ...]], ...] = (
    ("llama2-7b", 64, 4096, "data+fsdp+tensor", "data:2;fsdp:4;tensor:4", {"remat": "full"}, ("v5e-32", "v4-64")),
    ("llama2-7b", 64, 4096, "fsdp", "fsdp:32", {"remat": "full"}, ("v5e-32",)),
    ("llama2-7b", 64, 4096, "fsdp", "fsdp:32", {"remat": "none"}, ("v5e-32",)),
    ("llama2-7b", 64, 4096, "fsdp", "fsdp:32", {"remat": "matmuls"}, ("v5e-32",)),
    ("llama2-7b", 64, 4096, "fsdp+sequence", "fsdp:8;tensor:4", {"remat": "matmuls"}, ("v5e-32",)),
    ("llama2-7b", 64, 4096, "fsdp+tensor", "fsdp:8;tensor:4",
     {"remat": mtf.Remat(save=["q", "k", "v"], offload=["context"], offload_carries=True)}, ("v5e-32",)),
    ("llama2-7b", 16, 4096, "zero1+tensor", "data:4;tensor:8", {"remat": "full", "optimizer": "sgd"}, ("v5e-32",)),
    ("llama3.1-405b", 64, 8192, "fsdp+sequence", "fsdp:64;tensor:8", {"remat": "full", "optimizer": "adafactor"},
     ("v5p-1024",)),
    ("bert-large", 256, 512, "data", "data:16", {"remat": "none", "predictions": 76}, ("v3-16", "v4-32")),
    ("bert-large", 256, 512, "fsdp+tensor", "fsdp:8;tensor:2", {"remat": "full", "optimizer": "lion"}, ("v3-16",)),
    ("t5-11b", 64, 512, "2d", "data:4;tensor:8", {"remat": "full", "optimizer": "adafactor"}, ("v3-32",)),
    ("t5-small", 64, 256, "zero1", "data:8", {"remat": "none", "scan": False}, ("v3-8",)),
    ("gpt2-xl", 32, 1024, "zero1", "data:16", {"remat": "matmuls", "max_norm": 1.0}, ("v4-32",)),
    ("gpt2", 32, 1024, "context", "context:8", {"remat": "full", "scan": False}, ("v5e-8",)),
    ("gpt3-175b", 64, 2048, "fsdp+sequence", "fsdp:16;tensor:8", {"remat": "full"}, ("v4-256",)),
    ("gemma3-12b", 64, 4096, "fsdp+tensor", "fsdp:8;tensor:4", {"remat": "full"}, ("v5e-32",)),
    ("gemma4-31b", 64, 4096, "fsdp+sequence", "fsdp:8;tensor:4", {"remat": "matmuls"}, ("v5p-64",)),
    ("palm-540b", 512, 2048, "fsdp+tensor", "fsdp:64;tensor:8", {"remat": "full", "optimizer": "adafactor"},
     ("v4-1024",)),
    ("mtf-lm-4.9b", 256, 256, "2d", "data:16;model:32", {"remat": "none"}, ("v2-512",)),
    ("transformer-big", 64, 128, "2d", "data:2;tensor:4", {"remat": "none", "optimizer": "adam"}, ("v3-8",)),
    ("maxtext-16b", 64, 2048, "data+fsdp", "data:2;fsdp:16", {"remat": "matmuls"}, ("v5e-32",)),
    ("mixtral-8x7b", 64, 4096, "fsdp", "fsdp:64", {"remat": "full"}, ("v5p-128",)),
    ("mixtral-8x7b", 64, 4096, "fsdp+expert", "fsdp:8;expert:8", {"remat": "matmuls"}, ("v5p-128",)),
    ("deepseek-v3", 128, 4096, "fsdp+expert", "fsdp:8;expert:16", {"remat": "full"}, ("v5p-256",)),
    ("gpt-oss-20b", 64, 8192, "fsdp+expert", "fsdp:2;expert:32", {"remat": "full"}, ("v5e-64",)),
    ("switch-base-8", 64, 512, "fsdp+expert", "fsdp:8;expert:8", {"remat": "full"}, ("v5e-64",)),
    ("gshard-37b", 128, 1024, "fsdp+expert", "fsdp:4;expert:32", {"remat": "full"}, ("v3-128",)),
)  # fmt: skip


def presets() -> Iterator[Job]:
    """Large models; nothing is allocated."""
    for row in PRESETS:
        policy = row[5]["remat"] if isinstance(row[5]["remat"], str) else "by name"
        label = f"{row[0]} {row[3]} {row[4]} {policy}"
        yield label, lambda row=row: trained(*row)


def reduced() -> Iterator[Job]:
    """Small models of each architecture, simulated."""
    dense = ("transformer-base", "bert-large", "gpt2", "t5-11b", "llama2-7b", "palm-540b", "gemma3-12b")
    for name in (*dense, "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "switch-base-8"):
        for layout, mesh in (("2d", "data:2;tensor:2"), ("fsdp", "fsdp:4")):

            def job(name: str = name, layout: str = layout, mesh: str = mesh) -> Figures:
                config = mtf.models.preset(name).reduced()
                with mtf.Graph():
                    outputs, updates = mtf.models.train_step(config, 4, 8, remat="matmuls")
                program = mtf.lower(outputs, updates, mesh=mesh, layout=mtf.models.layout(layout, config, mesh))
                rng = np.random.default_rng(2)
                feeds = {n: rng.integers(0, 2, v.tensor.shape.sizes) for n, v in program.inputs.items()}
                return figures(program) | value_figures(program, "fast", feeds)

            yield f"reduced {name} {layout}", job


def images() -> Iterator[Job]:
    """Training steps of models of images."""
    for name, layout, mesh, where in (
        ("resnet-50", "data", "data:8", "v3-8"),
        ("resnet-50", "data+spatial", "data:4;spatial:2", "v3-8"),
        ("vit-b-16", "data+channels", "data:4;model:2", "v5e-8"),
    ):

        def job(name: str = name, layout: str = layout, mesh: str = mesh, where: str = where) -> Figures:
            config = mtf.models.image_preset(name)
            with mtf.Graph():
                outputs, updates = mtf.models.image_step(config, 64, mtf.optimize.MomentumOptimizer(0.1))
            rules = mtf.models.image_layout(layout, config, mesh)
            return figures(mtf.lower(outputs, updates, mesh=mesh, layout=rules), (where,))

        yield f"{name} {layout} {mesh}", job


# ---------------------------------------------------------------- random small programs

POOL = {"a": 4, "b": 6, "c": 2, "d": 8, "e": 12}
AXES = ("x", "y", "z")
RANDOM = 200


class Writer:
    """Writes one random program; all choices come from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.count = 0
        self.tensors: list[mtf.Tensor] = []
        self.feeds: dict[str, Any] = {}

    def choose(self, options: Any) -> Any:
        """One of them."""
        options = list(options)
        return options[int(self.rng.integers(len(options)))]

    def dims(self, least: int = 1, most: int = 3) -> list[mtf.Dimension]:
        """Some dims of the pool, in any order."""
        names = self.rng.permutation(list(POOL))[: self.rng.integers(least, most + 1)]
        return [mtf.Dimension(str(n), POOL[str(n)]) for n in names]

    def fresh(self, base: str) -> str:
        """A name."""
        self.count += 1
        return f"{base}{self.count}"

    def source(self, dims: list[mtf.Dimension]) -> mtf.Tensor:
        """An input or a variable."""
        if self.rng.random() < 0.5:
            return mtf.variable(self.fresh("w"), dims, mtf.initializers.random_normal(0.5))
        name = self.fresh("in")
        self.feeds[name] = self.rng.normal(size=[d.size for d in dims])
        return mtf.input(name, dims)

    def indices(self, dims: list[mtf.Dimension], below: int) -> mtf.Tensor:
        """An integer input."""
        name = self.fresh("index")
        self.feeds[name] = self.rng.integers(0, below, [d.size for d in dims])
        return mtf.input(name, dims, dtype="int32")

    def pick(self, good: Callable[[mtf.Tensor], bool] = lambda t: True) -> mtf.Tensor | None:
        """A tensor written so far."""
        found = [t for t in self.tensors if t.dtype.is_float and good(t)]
        return self.choose(found) if found else None


def _unary(w: Writer, x: mtf.Tensor) -> mtf.Tensor:
    return getattr(mtf, w.choose(("tanh", "sin", "sigmoid", "relu", "gelu", "square", "softplus", "negative")))(x * 0.5)


def _binary(w: Writer, x: mtf.Tensor) -> mtf.Tensor:
    y = w.pick(lambda t: mtf.Shape(list(dict.fromkeys((*x.shape, *t.shape)))).size <= 800)
    y = x if y is None else y
    return getattr(mtf, w.choose(("add", "subtract", "multiply", "maximum")))(x, y)


def _einsum(w: Writer, x: mtf.Tensor) -> mtf.Tensor:
    y = w.pick(lambda t: len({*t.shape} & {*x.shape}) > 0)
    if y is None:
        y = w.source(w.dims())
    every = list(dict.fromkeys((*x.shape, *y.shape)))
    return mtf.einsum([x, y], output_shape=[d for d in every if w.rng.random() < 0.6][:3])


def _reduced(w: Writer, x: mtf.Tensor) -> mtf.Tensor:
    kept = [d for d in x.shape if w.rng.random() < 0.5]
    return getattr(mtf, w.choose(("reduce_sum", "reduce_mean", "reduce_max")))(x, output_shape=kept)


def _normalized(w: Writer, x: mtf.Tensor) -> mtf.Tensor | None:
    if not len(x.shape):
        return None
    dim = w.choose(x.shape)
    with mtf.scope(w.fresh("part")):
        return w.choose((lambda: mtf.softmax(x, dim), lambda: mtf.layers.layer_norm(x, dim)))()


def _dense(w: Writer, x: mtf.Tensor) -> mtf.Tensor | None:
    free = [mtf.Dimension(n, s) for n, s in POOL.items() if n not in x.shape]
    if not free or not len(x.shape):
        return None
    return mtf.layers.dense(x, w.choose(free), reduced_dims=[w.choose(x.shape)], name=w.fresh("dense"))


def _along(w: Writer, x: mtf.Tensor) -> mtf.Tensor | None:
    if not len(x.shape):
        return None
    dim = w.choose(x.shape)
    return w.choose(
        (
            lambda: mtf.cumsum(x, dim),
            lambda: mtf.shift(x, 1, dim, wrap=True),
            lambda: mtf.pad(mtf.slice(x, 0, dim.size // 2, dim.name), [0, dim.size - dim.size // 2], dim.name),
            lambda: mtf.reshape(mtf.concat([x, x * 0.5], dim.name), _halves(x, dim)),
            lambda: mtf.top_k(x, dim, mtf.Dimension("best", 2))[0],
        )
    )()


def _halves(x: mtf.Tensor, dim: mtf.Dimension) -> list[mtf.Dimension]:
    made: list[mtf.Dimension] = []
    for d in x.shape:
        made += [mtf.Dimension(f"{d.name}_two", 2), d] if d == dim else [d]
    return made


def _looked_up(w: Writer, x: mtf.Tensor) -> mtf.Tensor | None:
    if not len(x.shape):
        return None
    dim = w.choose(x.shape)
    free = [mtf.Dimension(n, s) for n, s in POOL.items() if n not in x.shape]
    if not free:
        return None
    return mtf.gather(x, w.indices([w.choose(free)], dim.size), dim)


def _dropped(w: Writer, x: mtf.Tensor) -> mtf.Tensor:
    return mtf.dropout(x, 0.75)


def _scanned(w: Writer, x: mtf.Tensor) -> mtf.Tensor | None:
    if not len(x.shape):
        return None
    dim = w.choose(x.shape)
    start = mtf.reduce_mean(x, output_shape=[d for d in x.shape if d != dim])

    def body(carries: Any, slices: Any) -> Any:
        y = mtf.tanh(carries[0]) * 0.5 + slices[0]
        return [y], [mtf.sin(y, name="wave")]

    remat = w.choose(("full", "none", "matmuls", mtf.Remat(save=["wave"])))
    (last,), (stacked,) = mtf.scan(body, [start], [x], dim, remat=remat)
    return w.choose((last, stacked))


def _again(w: Writer, x: mtf.Tensor) -> mtf.Tensor:
    return mtf.recompute_grad(lambda v: mtf.sin(v) * v, [x])


STEPS = (
    _unary, _unary, _binary, _binary, _einsum, _einsum, _einsum, _reduced, _normalized, _dense, _dense, _along, _along,
    _looked_up, _dropped, _scanned, _again,
)  # fmt: skip


def random_program(seed: int) -> Figures:
    """Write one, lay it out at random, and simulate two steps where some layout is legal."""
    w = Writer(seed)
    with mtf.Graph() as graph:
        for _ in range(3):
            w.tensors.append(w.source(w.dims()))
        for _ in range(int(w.rng.integers(4, 12))):
            x = w.pick(lambda t: t.shape.size <= 800)
            try:
                made = w.choose(STEPS)(w, x) if x is not None else None
            except mtf.MeshlibError:
                continue  # what is not a program is not what is measured here
            if made is not None:
                w.tensors.append(made)
        last = w.tensors[-3:]
        squares = [mtf.reduce_mean(mtf.square(t), output_shape=[]) for t in (*last, *graph.trainable_variables)]
        loss = mtf.add_n(squares)
        updates: list[Any] = []
        optimizer = w.choose(("SgdOptimizer", "MomentumOptimizer", "AdamWOptimizer", "AdafactorOptimizer", None))
        if optimizer and graph.trainable_variables:
            kind = getattr(mtf.optimize, optimizer)
            made = kind() if optimizer == "AdafactorOptimizer" else kind(0.1)
            updates = list(made.minimize(loss))
    outputs = {"loss": loss, **{f"y{n}": t for n, t in enumerate(last)}}
    return laid_out(w, outputs, updates, exact=seed % 8 == 0)


def laid_out(w: Writer, outputs: dict[str, mtf.Tensor], updates: list[Any], exact: bool) -> Figures:
    """Figures under the first of four random layouts that is legal; those refused before are noted."""
    found: Figures = {}
    for attempt in range(4):
        sizes = {a: int(w.choose((1, 2, 2, 2, 3, 4))) for a in AXES}
        rules = []
        for axis in AXES:
            dim = w.choose([d for d in POOL if POOL[d] % sizes[axis] == 0])
            rules.append(f"{w.choose(('', '', '', 'variables/', 'activations/'))}{dim}:{axis}?")
        mesh, layout = ";".join(f"{a}:{n}" for a, n in sizes.items()), ";".join(rules)
        try:
            program = mtf.lower(outputs, updates, mesh=mesh, layout=layout, precision=w.choose(("default", "highest")))
        except mtf.MeshlibError as fault:
            found[f"refused {mesh} {layout}"] = type(fault).__name__
            continue
        found["legal"] = attempt
        feeds = {n: x for n, x in w.feeds.items() if n in program.inputs}
        found |= figures(program, ("v3-8",) if program.mesh.size == 8 else ())
        found |= value_figures(program, "fast", feeds)
        if exact and program.mesh.size <= 12:
            found |= value_figures(program, "exact", feeds)
        break
    return found


def random_programs() -> Iterator[Job]:
    """All of them."""
    for seed in range(RANDOM):
        yield f"random {seed}", lambda seed=seed: random_program(seed)


# ---------------------------------------------------------------- the command


def dump(path: str, only: str) -> int:
    """Write the figures of all programs whose name has the word `only`."""
    print(f"figures of {Path(mtf.__file__).parent}")
    begun, found, refused = time.perf_counter(), {}, 0
    for part in (readme, examples, two_layers, presets, images, reduced, random_programs):
        start, names = time.perf_counter(), 0
        for label, job in part():
            if only in label:
                assert label not in found, label
                found[label] = refused_or(job)
                refused += "sent" not in found[label]
                names += 1
        _steps.clear()
        print(f"{part.__name__:<16} {names:4} programs {time.perf_counter() - start:6.1f} s")
    Path(path).write_text(json.dumps(found, indent=1))
    print(f"{len(found)} programs ({refused} refused) in {time.perf_counter() - begun:.0f} s: {path}")
    return 0


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Figures by their whole name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}/{key}" if name else key)
    else:
        yield name, value


def change(before: Any, after: Any) -> str:
    """What became of a figure, and by how much."""
    if isinstance(before, list) and isinstance(after, list):  # sum, norm, digest
        largest = max(abs(b - a) for b, a in zip(before[:2], after[:2], strict=True)) / (abs(before[1]) or 1.0)
        return f"{before[:2]} -> {after[:2]} ({largest:.1e} of the norm{', bits only' if not largest else ''})"
    numbers = all(isinstance(v, int | float) for v in (before, after))
    relative = f" ({(after - before) / before:+.3%})" if numbers and before else ""
    return f"{before} -> {after}{relative}"


def compare(before: str, after: str, ignore: list[str], only: str, most: int) -> int:
    """Print what differs; 1 where anything does."""
    old, new = (json.loads(Path(p).read_text()) for p in (before, after))
    differing, programs, seen = 0, 0, 0
    by_figure: Counter[str] = Counter()
    for label in (x for x in dict.fromkeys((*old, *new)) if only in x):
        if label not in old or label not in new:
            print(f"{label}: only in {before if label in old else after}")
            differing += 1
            continue
        seen += 1
        a, b = dict(flat(old[label])), dict(flat(new[label]))
        figures_of = [f for f in dict.fromkeys((*a, *b)) if not any(word in f for word in ignore)]
        changed = [f for f in figures_of if a.get(f) != b.get(f)]
        if not changed:
            continue
        programs += 1
        differing += len(changed)
        by_figure.update("/".join(f.split("/")[:1]) for f in changed)
        print(label)
        for figure in changed[:most]:
            print(f"    {figure}: {change(a.get(figure, 'none'), b.get(figure, 'none'))}")
        if len(changed) > most:
            print(f"    ... and {len(changed) - most} more figures")
    kinds = "".join(f"; {n} {figure}" for figure, n in by_figure.most_common())
    print(f"{seen} programs compared, {programs} differ in {differing} figures{kinds}")
    return 1 if differing else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump", help="write the figures of the meshlib that is imported")
    dumping.add_argument("path")
    comparing = commands.add_parser("compare", help="print what differs between two files; exit code 1 if anything")
    comparing.add_argument("before")
    comparing.add_argument("after")
    comparing.add_argument("--ignore", nargs="*", default=[], help="words: figures whose name has one are left out")
    comparing.add_argument("--most", type=int, default=12, help="lines a program")
    for one in (dumping, comparing):
        one.add_argument("--only", default="", help="a word: only programs whose name has it")
    args = parser.parse_args()
    if args.command == "dump":
        return dump(args.path, args.only)
    return compare(args.before, args.after, args.ignore, args.only, args.most)


if __name__ == "__main__":
    sys.exit(main())
