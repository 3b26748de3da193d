"""Predictions beside published measurements: each row built, lowered and estimated.

A program is built from the fields of a row; nothing depends on its name. Supported are micro-benchmarks (`micro`),
inference (`inference`), training runs of Transformers (`runs`, `training`) and of residual networks (`images`,
`image_training`); every other row is listed with the reason.

    python -m meshlib validate                                  the packaged set
    python -m meshlib validate --file published_results.json    rows of that format
    python -m meshlib validate --refit                          with the constants fitted to those rows

Rows are predicted three times: with the calibrated constants, with constants fitted to the Transformer runs of all
other chips, and by a naive rule with and without the chip: for training the median utilisation of other runs (`naive`),
for inference and micro-benchmarks the roofline of nominal rates. Residual networks and inference use the same constants
without having been fitted; micro-benchmarks depend on no fitted constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hardware.checks import HardwareError
from meshlib.core.compiler import XLA_TPU, Compiler, require_compiler
from meshlib.core.documents import read_json
from meshlib.core.errors import GraphError, MeshlibError
from meshlib.core.forks import check_workers, mapped, usual_workers
from meshlib.core.garbage import uncollected
from meshlib.estimation import CALIBRATED, Physics
from meshlib.validation import inference, micro
from meshlib.validation.calibrate import Case, fit, left_out
from meshlib.validation.image_training import PreparedImages, prepare_images
from meshlib.validation.images import ImageRun, image_run_of, is_of_images
from meshlib.validation.naive import at_median, naive_seconds, naive_without_chip_seconds
from meshlib.validation.policies import NotExpressed
from meshlib.validation.priced import Priced
from meshlib.validation.rankings import RankedPair, ranked_pairs
from meshlib.validation.runs import ROWS, Run, run_of
from meshlib.validation.training import Prepared, prepare

# Errors that figures of rows can cause: one unreadable row must not hide the others.
_UNREADABLE = (MeshlibError, HardwareError, ArithmeticError, AttributeError, TypeError, ValueError, LookupError)


MOST_WORKERS = 8  # by default
Mapped = Callable[..., list[Any]]  # `mapped` with a number of workers


@dataclass(frozen=True)
class Checked:
    """One published measurement with its prediction, or the reason why it cannot be expressed.

    Attributes:
      name, family, chip: as the row gives them.
      why_not: why there is no prediction; apart: why there is one that does not count.
      run, images: the training run of a Transformer, or of a residual network; None for other rows.
      priced: the program of a micro-benchmark or of inference; None for other rows.
      phase: "prefill" or "decode" of inference.
      left_out_seconds: with constants fitted to other chips; naive_seconds, naive_left_out_seconds: by the naive rule.
    """

    name: str
    family: str
    chip: str
    predicted_seconds: float | None
    measured_seconds: float | None
    why_not: str = ""
    apart: str = ""
    run: Run | None = None
    images: ImageRun | None = None
    priced: Priced | None = None
    left_out_seconds: float | None = None
    naive_seconds: float | None = None
    naive_left_out_seconds: float | None = None
    phase: str = ""

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        return self.error_of("predicted_seconds")

    def error_of(self, what: str) -> float | None:
        """The relative error of another prediction, given by its attribute's name."""
        seconds = getattr(self, what)
        if seconds is None or self.measured_seconds is None:
            return None
        return float(seconds / self.measured_seconds - 1)


@dataclass(frozen=True)
class Validation:
    """All rows of a file, expressed or not, with the constants and the compiler of the predictions."""

    rows: tuple[Checked, ...]
    physics: Physics = CALIBRATED
    compiler: Compiler = XLA_TPU

    @property
    def scored(self) -> tuple[Checked, ...]:
        """Rows that have a prediction and count."""
        return tuple(r for r in self.rows if r.error is not None and not r.apart)

    @property
    def training(self) -> tuple[Checked, ...]:
        """Training runs of Transformers among `scored`."""
        return tuple(r for r in self.scored if r.run is not None)

    @property
    def images(self) -> tuple[Checked, ...]:
        """Training runs of ResNets among `scored`."""
        return tuple(r for r in self.scored if r.images is not None)

    @property
    def benchmarks(self) -> tuple[Checked, ...]:
        """Micro-benchmarks among `scored`."""
        return tuple(r for r in self.scored if r.run is None and r.images is None and not r.phase)

    @property
    def inference(self) -> tuple[Checked, ...]:
        """Prefills and decoding steps among `scored`."""
        return tuple(r for r in self.scored if r.phase)

    def errors(self, family: str | None = None) -> list[float]:
        """Absolute relative errors of the scored rows, of one family or of all."""
        return absolute(self.scored, family=family)

    @property
    def pairs(self) -> tuple[RankedPair, ...]:
        """Pairs of scored training runs of one model on one chip that have a measured order."""
        return ranked_pairs(self.scored)

    def __str__(self) -> str:
        from meshlib.validation.report import report

        return report(self)


def absolute(rows: Iterable[Checked], what: str = "predicted_seconds", family: str | None = None) -> list[float]:
    """Absolute relative errors of a prediction, given by its attribute's name."""
    errors = [r.error_of(what) for r in rows if family in (None, r.family)]
    return [abs(error) for error in errors if error is not None]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed.

    >>> percentile([3, 1, 2, 10], 0.5), percentile([1, 2], 0.9)
    (2, 2)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@uncollected  # shared objects live until all rows are done; collecting garbage would scan sixty programs repeatedly
def validate(
    path: str | Path | None = None,
    refit: bool = False,
    compiler: Compiler = XLA_TPU,
    progress: Callable[[int, int], object] | None = None,
    workers: int | None = None,
) -> Validation:
    """Predict every row of a file of published results, or of the set in the package.

    Args:
      path: JSON: {"rows": [...]} or a list; each row has `id`, `family`, `chip`, `model`, `measured`, `slice`.
      refit: fit the constants to the training runs among the rows first.
      compiler: the compiler for which programs are lowered and scheduled, with what a row says of its software.
      progress: called with (rows done, all rows) after one or several.
      workers: number of forked processes, as of `mtf.search`; 1: none. Results are independent of them.
    Raises: GraphError for a file that cannot be read or has no rows, or a bad number of workers.
    """
    rows = ROWS if path is None else _load(path)
    require_compiler(compiler, "validate")
    if workers is not None:
        check_workers(workers, "validate")
    forked = partial(mapped, "validate", workers or usual_workers(MOST_WORKERS))
    checked = [check_row(row, compiler) for row in rows]
    prepared, of_images = _prepare(checked, compiler, forked, progress or (lambda done, total: None))
    return _with_runs(checked, prepared, of_images, refit, compiler, forked)


def _load(path: str | Path) -> list[dict[str, Any]]:
    document, _ = read_json(path, "validate", GraphError, "a file of published rows, {'rows': [...]}", a_list=True)
    rows = document.get("rows") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        raise GraphError(f"validate: {path} holds no rows; expected {{'rows': [...]}} with an object for each")
    return rows


def check_row(row: Mapping[str, Any], compiler: Compiler = XLA_TPU) -> Checked:
    """Predict a row that is not a training run; prepare training runs, timed by `validate`; give reasons for others."""
    family, kind, phase = str(row.get("family", "?")), micro.kind_of(row), inference.phase_of(row)
    title = " ".join(dict.fromkeys(word for word in (family, kind or phase) if word))
    checked = Checked(str(row.get("id", "?")), title, str(row.get("chip", "?")), None, None, phase=phase)
    try:
        if kind or phase:
            priced = (micro if kind else inference).priced(row, compiler)
            return replace(
                checked,
                priced=priced,
                predicted_seconds=priced.predicted_seconds,
                measured_seconds=priced.measured_seconds,
                naive_seconds=priced.roofline_seconds,
                naive_left_out_seconds=priced.roofline_seconds,
            )
        if is_of_images(row):
            image_run = image_run_of(row)
            checked = replace(checked, family=image_run.family, images=image_run)
            return replace(checked, measured_seconds=image_run.measured_seconds, apart=image_run.apart)
        run = run_of(row)
        return replace(checked, family=run.family, run=run, measured_seconds=run.measured_seconds, apart=run.apart)
    except NotExpressed as fault:
        return replace(checked, why_not=str(fault))
    except _UNREADABLE as fault:
        return replace(checked, why_not=f"its figures make no program: {fault}".splitlines()[0])


def _prepare(
    rows: list[Checked], compiler: Compiler, forked: Mapped, told: Callable[[int, int], object]
) -> tuple[dict[int, Prepared], dict[int, PreparedImages]]:
    """The programs of training runs, of text and of images, by row; a row without one is replaced by its reason."""
    alike: dict[object, list[int]] = {}  # rows of images share programs, and take longest
    for n, row in enumerate(rows):
        if row.images is not None:
            alike.setdefault((row.images.config, row.images.dims[1], row.images.optimizer), []).append(n)
    groups = [*alike.values(), *([n] for n, row in enumerate(rows) if row.run is not None)]
    waiting = {group: len(numbers) for group, numbers in enumerate(groups)}

    def done(group: int) -> None:
        del waiting[group]
        told(len(rows) - sum(waiting.values()), len(rows))

    answers = forked(lambda numbers: [_prepared(rows[n], compiler) for n in numbers], groups, done)
    prepared: dict[int, Prepared] = {}
    of_images: dict[int, PreparedImages] = {}
    for n, answer in sorted(pair for pairs in map(zip, groups, answers) for pair in pairs):
        if isinstance(answer, Prepared):
            prepared[n] = answer
        elif isinstance(answer, PreparedImages):
            of_images[n] = answer
        else:
            rows[n] = replace(rows[n], run=None, images=None, measured_seconds=None, apart="", why_not=answer)
    return prepared, of_images


def _prepared(row: Checked, compiler: Compiler) -> Prepared | PreparedImages | str:
    """The programs of a training run, or why there are none."""
    try:
        if row.images is not None:
            return prepare_images(row.images, compiler)
        assert row.run is not None
        return prepare(row.run, compiler)
    except _UNREADABLE as fault:
        return f"its program is refused: {fault}".splitlines()[0]


def _with_runs(
    rows: list[Checked], prepared: Mapping[int, Prepared], of_images: Mapping[int, PreparedImages], refit: bool,
    compiler: Compiler, forked: Mapped,
) -> Validation:  # fmt: skip
    """Fill in the predictions of training runs."""
    counted = {n: p for n, p in prepared.items() if not p.run.apart}
    cases = [Case(p.run.name, p.run.chip, p.run.measured_seconds, p.seconds) for p in counted.values()]
    physics = fit(cases) if refit and cases else CALIBRATED
    without = left_out(cases, physics, forked) if len({c.group for c in cases}) > 1 else {}
    runs = [p.run for p in counted.values()]
    inferred = {n: row.priced for n, row in enumerate(rows) if row.priced is not None and row.phase}
    programs: dict[int, Prepared | PreparedImages | Priced] = {**prepared, **of_images, **inferred}
    # Without scored runs on a chip, it had no influence on the constants.
    at = {n: (physics, without.get(rows[n].chip, physics)) for n in programs}
    seconds = forked(lambda n: [programs[n].seconds(constants) for constants in at[n]], [*programs])
    for n, (whole, left) in zip(programs, seconds, strict=True):
        rows[n] = replace(rows[n], predicted_seconds=whole, left_out_seconds=left)
    for n, p in prepared.items():
        fitted = n in counted
        rows[n] = replace(
            rows[n],
            left_out_seconds=rows[n].left_out_seconds if fitted and p.run.chip in without else None,
            naive_seconds=naive_seconds(p.run, runs) if fitted else None,
            naive_left_out_seconds=naive_without_chip_seconds(p.run, runs) if fitted else None,
        )
    for n, own in of_images.items():
        rows[n] = _with_naive(rows[n], own, of_images.values())
    return Validation(tuple(rows), physics, compiler)


def _with_naive(row: Checked, own: PreparedImages, runs: Iterable[PreparedImages]) -> Checked:
    """A ResNet run with its predictions by the naive rule."""
    counted = [p for p in runs if not p.run.apart]
    like = [p.utilisation for p in counted if p.run.chip == own.run.chip]
    unlike = [p.utilisation for p in counted if p.run.chip != own.run.chip]
    at_peak = own.utilisation * own.run.measured_seconds
    return replace(row, naive_seconds=at_median(at_peak, like), naive_left_out_seconds=at_median(at_peak, unlike))
