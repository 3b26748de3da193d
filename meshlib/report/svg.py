"""Static SVG pictures: scales, axes, shapes. Colours are classes, so that a style sheet decides about dark pages.

    picture = Picture(420, 300)
    across = Scale((0, step_seconds), (picture.left, picture.right))
    picture.axis_below(across, seconds_text, "time")
    picture.rect(across(begin), 20, across(end) - across(begin), 12, "mxu", title="einsum", href="#op-3")
    str(picture)

Lengths are pixels of a picture shown at its own size; numbers have one digit behind the point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from meshlib.report.markup import attributes_text, tag, text

LETTER = 7.0  # average width of a letter of labels, pixels (DejaVu Sans)


@dataclass(frozen=True)
class Scale:
    """Maps values between `domain` onto pixels between `pixels`, linearly or by their logarithm.

    >>> Scale((0, 10), (100, 200))(5), Scale((1, 100), (0, 10), log=True)(10)
    (150.0, 5.0)
    """

    domain: tuple[float, float]
    pixels: tuple[float, float]
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.domain
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low * 1e-9))
        share = (value - low) / (high - low) if high > low else 0.0
        return self.pixels[0] + share * (self.pixels[1] - self.pixels[0])

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values inside the domain: multiples of 1, 2 or 5, or powers of ten.

        >>> Scale((0, 10), (0, 1)).ticks(5), Scale((1, 1000), (0, 1), log=True).ticks()
        ([0, 2, 4, 6, 8, 10], [1.0, 10.0, 100.0, 1000.0])
        """
        low, high = self.domain
        if self.log:
            powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
            if len(powers) > 2:
                return [10.0**p for p in powers][:: max(1, len(powers) // count)]
            candidates = (m * 10.0**p for p in range(math.floor(math.log10(low)), powers.stop + 1) for m in (1, 2, 5))
            return [v for v in candidates if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        if high <= low:
            return [low]
        step = _round_step((high - low) / count)
        return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def binary_ticks(scale: Scale) -> list[float]:
    """About five ticks at powers of two, for bytes.

    >>> [t / 2**30 for t in binary_ticks(Scale((0, 16 * 2**30), (0, 1)))]
    [0.0, 4.0, 8.0, 12.0, 16.0]
    """
    high = scale.domain[1]
    if high <= 0:
        return [0.0]
    step = 2.0 ** math.ceil(math.log2(high / 5))
    return [n * step for n in range(math.floor(high / step + 1e-9) + 1)]


def _round_step(least: float) -> float:
    """The next number of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    step = next(m for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9)) * power
    return int(step) if step >= 1 else step


@dataclass
class Picture:
    """Shapes on a canvas of `width` x `height` pixels; margins leave room for axes.

    `wide`: a picture over the whole page, which scrolls where the page is narrower.
    """

    width: float
    height: float
    margins: tuple[float, float, float, float] = (10, 12, 34, 64)  # top, right, bottom, left
    label: str = ""
    wide: bool = False
    parts: list[str] = field(default_factory=list)

    @property
    def top(self) -> float:
        """Upper edge of the plot."""
        return self.margins[0]

    @property
    def right(self) -> float:
        """Right edge of the plot."""
        return self.width - self.margins[1]

    @property
    def bottom(self) -> float:
        """Lower edge of the plot."""
        return self.height - self.margins[2]

    @property
    def left(self) -> float:
        """Left edge of the plot."""
        return self.margins[3]

    # ------------------------------------------------------------ shapes

    def add(
        self,
        shape: str,
        class_: str,
        title: str = "",
        href: str = "",
        op: str = "",
        content: str = "",
        **attributes: object,
    ) -> None:
        """Add a shape with a tooltip and a link; `op` ties it to other shapes of the same operation."""
        numbers = {k: number(v) if isinstance(v, float) else v for k, v in attributes.items()}
        inner = content + (tag("title", text(title)) if title else "")
        element = f"<{shape}{attributes_text({**numbers, 'class_': class_ or None, 'data_op': op or None})}"
        element += f">{inner}</{shape}>" if inner else "/>"
        self.parts.append(f'<a href="{text(href)}">{element}</a>' if href else element)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        class_: str,
        title: str = "",
        href: str = "",
        op: str = "",
    ) -> None:
        """A rectangle."""
        self.add("rect", class_, title, href, op, x=float(x), y=float(y), width=float(width), height=float(height))

    def line(self, x1: float, y1: float, x2: float, y2: float, class_: str, title: str = "") -> None:
        """A straight line."""
        self.add("line", class_, title, x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2))

    def circle(
        self, x: float, y: float, radius: float, class_: str, title: str = "", href: str = "", op: str = ""
    ) -> None:
        """A disc."""
        self.add("circle", class_, title, href, op, cx=float(x), cy=float(y), r=float(radius))

    def path(self, points: Iterable[tuple[float, float]], class_: str, closed: bool = False, title: str = "") -> None:
        """A line through points, or the area inside it."""
        steps = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self.add("path", class_, title, d=f"M{steps}{'Z' if closed else ''}")

    def text(self, x: float, y: float, content: object, class_: str = "", anchor: str = "start") -> None:
        """Text that begins, ends or is centred at x; y is its base line."""
        self.add("text", class_, content=text(content), x=float(x), y=float(y), text_anchor=anchor)

    # ------------------------------------------------------------ axes

    def axis_below(
        self, scale: Scale, shown: Callable[[float], str], title: str = "", ticks: Sequence[float] | None = None
    ) -> None:
        """Grid lines and tick labels of a horizontal scale."""
        last = -math.inf
        for tick in scale.ticks() if ticks is None else ticks:
            x, label = scale(tick), shown(tick)
            self.line(x, self.top, x, self.bottom, "grid")
            half = LETTER * len(label) / 2
            middle = min(max(x, half), self.width - half)
            if middle - half > last:
                self.text(middle, self.bottom + 14, label, anchor="middle")
                last = middle + half + 4
        self.text((self.left + self.right) / 2, self.height - 4, title, "axis", "middle")

    def axis_left(self, scale: Scale, shown: Callable[[float], str], ticks: Sequence[float] | None = None) -> None:
        """Grid lines and tick labels of a vertical scale."""
        for tick in scale.ticks() if ticks is None else ticks:
            y = scale(tick)
            self.line(self.left, y, self.right, y, "grid")
            self.text(self.left - 6, y + 4, shown(tick), anchor="end")

    def __str__(self) -> str:
        size = f'viewBox="0 0 {number(self.width)} {number(self.height)}" width="{number(self.width)}"'
        label = f' role="img" aria-label="{text(self.label)}"' if self.label else ""
        drawn = f"<svg {size}{label}>{''.join(self.parts)}</svg>"
        return tag("div", drawn, class_="scroll wide" if self.wide else "picture")


def number(value: float) -> str:
    """A coordinate with one digit behind the point.

    >>> number(3.0), number(2.345)
    ('3', '2.3')
    """
    return f"{value:.1f}".removesuffix(".0")


def shortened(name: str, pixels: float) -> str:
    """The longest end of a scoped name that fits, from a slash on; "" where nothing fits.

    >>> shortened("layers/scan/feed_forward/wi", 120), shortened("layers/wi", 40), shortened("embedding", 40)
    ('…/feed_forward/wi', '…/wi', '')
    """
    letters = int(pixels / LETTER)
    ends = (f"…{name[at:]}" for at, letter in enumerate(name) if letter == "/")
    return next((end for end in (name, *ends) if len(end) <= letters), "")
