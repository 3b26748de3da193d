"""`.plot(ax=None)` returns matplotlib Axes that show the figures of what is plotted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from hardware import MXU
from tests.report.test_report import estimate_of, pipeline_of

matplotlib = pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402


@cache
def search() -> Any:
    def build() -> Any:
        x, w = mtf.input("x", "batch:512;d:512"), mtf.variable("w", "d:512;f:512")
        return {"y": mtf.reduce_sum(mtf.einsum([x, w], output_shape="batch:512;f:512"))}, []

    return mtf.search(build, "v5e-4", workers=1)


def history() -> Any:
    from meshlib.training.history import History

    rows = History()
    for step in (1, 2, 3):
        rows.add({"step": step, "loss": 1 / step})
    return rows


def scaling() -> Any:
    from meshlib.estimation.views.scaling import Scaling

    return Scaling((estimate_of(4), estimate_of(2)))


def frame() -> Any:
    from hardware.systolic import trace

    return next(iter(trace(MXU(3, 3), np.eye(3), np.eye(3))))


PLOTS: dict[str, Callable[[], Any]] = {
    "timeline": lambda: estimate_of().plot,
    "memory over time": lambda: lambda ax=None: estimate_of().plot(ax, "memory"),
    "roofline": lambda: lambda ax=None: estimate_of().plot(ax, "roofline"),
    "torus": lambda: lambda ax=None: estimate_of().plot(ax, "torus"),
    "stages": lambda: lambda ax=None: pipeline_of("zb-h1").plot(ax, "stages"),
    "device memory": lambda: estimate_of().memory.plot,
    "memory": lambda: estimate_of().program.memory.plot,
    "shards": lambda: next(iter(estimate_of().program.variables.values())).plot,
    "Pareto front": lambda: search().plot,
    "profile": lambda: estimate_of().profile().plot,
    "scaling": lambda: scaling().plot,
    "history": lambda: history().plot,
    "systolic frame": lambda: frame().plot,
}


@pytest.mark.parametrize("name", PLOTS)
def test_plots_return_the_axes_that_they_are_given_or_new_ones(name: str) -> None:
    plot = PLOTS[name]()
    own = pyplot.figure().add_subplot()
    assert plot(own) is own
    assert own.has_data() or own.texts
    fresh = plot()
    axes = fresh if isinstance(fresh, tuple) else (fresh,)
    assert all(isinstance(a, Axes) for a in axes)
    assert own not in axes
    pyplot.close("all")
    with pytest.raises((mtf.MeshlibError, Exception), match=r"ax must be matplotlib Axes.*got int 3"):
        plot(3)


def test_the_stacked_area_reaches_the_peak() -> None:
    est = estimate_of()
    axes = est.plot(None, "memory")
    top = max(c.get_paths()[0].vertices[:, 1].max() for c in axes.collections)
    assert axes.get_ylabel() == "MiB of one device (exact)"
    assert top * 2**20 == pytest.approx(est.memory.peak_bytes)
    assert axes.get_ylim()[1] < 1.2 * top, "the capacity, far above, is a label alone"
    assert any("above this picture" in entry.get_text() for entry in axes.get_legend().get_texts())
    pyplot.close("all")


def test_one_block_is_filled_whatever_the_rank() -> None:
    with mtf.Graph():
        x = mtf.variable("x", "a:4;b:4;c:4;d:4")
        program = mtf.lower({"y": mtf.reduce_sum(x)}, mesh="i:2;j:2;k:2", layout="a:i;b:j;d:k")
    for device in (0, 5):
        axes = program.variables["x"].plot(device=device)
        blocks = [p for p in axes.patches if isinstance(p, Rectangle)]
        assert len(blocks) == 8
        filled = [p for p in blocks if p.get_facecolor()[:3] != (0.95, 0.95, 0.95)]
        assert len(filled) == 1
        pyplot.close("all")


def test_files_are_written_and_other_pictures_refused(tmp_path: Any) -> None:
    est = estimate_of()
    est.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(mtf.GraphError, match="what must be"):
        est.plot(None, "timelines")
    with pytest.raises(mtf.GraphError, match="needs a pipeline"):
        est.plot(None, "stages")
