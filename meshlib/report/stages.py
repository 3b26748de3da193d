"""The stages of pipelines over time: forwards, backwards, gradients of weights, and idle gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshlib.core.graph import FORWARD
from meshlib.core.loop_record import Active, StageTask, TimedTask
from meshlib.core.text import seconds_text
from meshlib.estimation import Estimate
from meshlib.estimation.time.scheduling import Event, StepSchedule
from meshlib.program.instructions import Loop
from meshlib.program.records import Program
from meshlib.report.markup import legend, paragraph, section, text
from meshlib.report.svg import LETTER, Picture, Scale, number

TASK_CLASSES = {"forward": "k-0", "backward": "k-3", "weights": "k-4"}
ROW, GAP = 18.0, 4.0
MOST_TASKS = 6000  # of one picture: of larger pipelines, stages at equal distances are drawn


@dataclass(frozen=True)
class PipelineTasks:
    """The tasks of a pipeline's stages in one step, in seconds from its first task."""

    summary: str
    stages: tuple[tuple[TimedTask, ...], ...]

    @property
    def seconds(self) -> float:
        """Seconds from the first task to the end of the last."""
        return max(row[-1].end for row in self.stages)

    def idle_share(self, stage: int) -> float:
        """Share of the time in which a stage has no task."""
        return 1 - sum(task.end - task.start for task in self.stages[stage]) / self.seconds


def pipelines_of(est: Estimate) -> list[PipelineTasks]:
    """The pipelines of a program, those in loops for one trip."""
    return [*_pipelines(est.schedule, est.program)]


def _pipelines(schedule: StepSchedule, program: Program) -> Iterator[PipelineTasks]:
    rounds: dict[tuple[str, int], list[tuple[Event, Active, Loop]]] = {}  # (dim, stages) -> loops over trips
    for event in schedule.events:
        loop = program.instructions[event.first] if event.loop is not None else None
        if not isinstance(loop, Loop) or event.loop is None:
            continue
        active, timing = loop.record.active, loop.record.timing
        if event.stages and timing is not None:
            yield PipelineTasks(timing.summary, tuple(map(tuple, event.stages)))
        elif active is not None and active.share < 1:
            rounds.setdefault((active.dim, active.size), []).append((event, active, loop))
        else:
            yield from _pipelines(event.loop, loop.body)
    for loops in rounds.values():
        begin = min(event.start for event, _, _ in loops)
        rows: dict[int, list[TimedTask]] = {}
        for event, active, loop in loops:
            for stage, task in _trips(event, active, loop, begin):
                rows.setdefault(stage, []).append(task)
        note = next((active.note for _, active, _ in loops if active.note), "")
        yield PipelineTasks(note, tuple(tuple(rows[stage]) for stage in sorted(rows)))


def _trips(event: Event, active: Active, loop: Loop, begin: float) -> Iterator[tuple[int, TimedTask]]:
    """(stage, task) of all trips of a loop whose stages are partly idle; tasks are numbered as their forwards."""
    seconds = event.seconds / len(active.indices)
    kind = "forward" if event.region == FORWARD else "backward"
    done: Counter[int] = Counter()
    numbered: list[list[tuple[int, int]]] = []  # per index, (stage, number of its task)
    for busy in active.indices:
        numbered.append([(stage, done[stage]) for stage in busy])
        done.update(busy)
    for trip, index in enumerate(loop.record.trip_order):
        start = event.start - begin + trip * seconds
        for stage, microbatch in numbered[index]:
            yield stage, TimedTask(StageTask(kind, microbatch), start, start + seconds)


def stages(est: Estimate) -> str:
    """The section with pictures of all pipelines of a step; "" without any."""
    parts: list[str] = []
    for pipeline in pipelines_of(est):
        idle = sum(map(pipeline.idle_share, range(len(pipeline.stages)))) / len(pipeline.stages)
        about = f"{pipeline.summary}; a stage is idle for {idle:.1%} of {seconds_text(pipeline.seconds)}, modelled."
        kinds = [kind for kind in TASK_CLASSES if any(t.task.kind == kind for row in pipeline.stages for t in row)]
        keys = legend((TASK_CLASSES[kind], kind) for kind in kinds)
        parts += [paragraph(text(about)), keys, _picture(pipeline)]
    return section("stages", "Stages of the pipeline", *parts) if parts else ""


def _picture(pipeline: PipelineTasks) -> str:
    count = max(2, MOST_TASKS // max(map(len, pipeline.stages)))
    shown = shown_stages(len(pipeline.stages), count)
    picture = Picture(1000, 44 + len(shown) * (ROW + GAP), (6, 76, 32, 84), "stages of a pipeline over time", wide=True)
    across = Scale((0.0, pipeline.seconds), (picture.left, picture.right))
    picture.axis_below(across, lambda t: seconds_text(t) if t else "0", "time ≈", across.ticks(8))
    for n, stage in enumerate(shown):
        y, row = picture.top + n * (ROW + GAP), pipeline.stages[stage]
        picture.text(picture.left - 8, y + ROW / 2 + 4, f"stage {stage}", anchor="end")
        picture.rect(picture.left, y, picture.right - picture.left, ROW, "lane", f"stage {stage}: idle where empty")
        picture.text(picture.right + 6, y + ROW / 2 + 4, f"idle {pipeline.idle_share(stage):.0%}")
        for kind, class_ in TASK_CLASSES.items():
            own = [task for task in row if task.task.kind == kind]
            if own:
                busy = sum(task.end - task.start for task in own)
                title = f"stage {stage}: {len(own)} {kind} tasks, {seconds_text(busy)}"
                picture.add("path", class_, title, d="".join(_boxes(own, across, y)))
        _numbers(picture, row, across, y)
    return str(picture)


def _boxes(tasks: Iterable[TimedTask], across: Scale, y: float) -> Iterator[str]:
    """One rectangle for each task, as parts of a path."""
    for task in tasks:
        x, width = across(task.start), across(task.end) - across(task.start)
        width -= 1.0 if width > 3 else 0.0  # a gap between neighbours
        yield f"M{number(x)} {number(y + 1)}h{number(max(width, 0.3))}v{number(ROW - 2)}h-{number(max(width, 0.3))}z"


def _numbers(picture: Picture, row: Sequence[TimedTask], across: Scale, y: float) -> None:
    """Numbers of microbatches on the tasks of a stage, if they have room."""
    widest = LETTER * len(str(max(task.task.microbatch for task in row))) + 4
    if all(across(task.end) - across(task.start) > widest for task in row):
        for task in row:
            middle = across((task.start + task.end) / 2)
            picture.text(middle, y + ROW / 2 + 4, task.task.microbatch, "on", "middle")


def shown_stages(count: int, most: int) -> list[int]:
    """At most `most` of `count` stages at equal distances, the first and the last among them.

    >>> shown_stages(4, 8), shown_stages(9, 3)
    ([0, 1, 2, 3], [0, 4, 8])
    """
    if count <= most:
        return [*range(count)]
    return [round(n * (count - 1) / (most - 1)) for n in range(most)]
