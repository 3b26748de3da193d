"""Convolutions in NumPy by hand, forward and both gradients: im2col, whole or image by image, and shifted products.

Every array is allocated once and written by `out=`. All work on x [n, h, w, c], filters [kh, kw, c, o], padding "SAME".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Shapes:
    """One convolution; `depthwise`: a filter for each channel, [kh, kw, c]."""

    name: str
    batch: int
    size: int
    channels: int
    window: int
    out: int
    stride: int = 1
    depthwise: bool = False

    @property
    def made(self) -> int:
        """Rows and columns of the result."""
        return -(-self.size // self.stride)

    @property
    def before(self) -> int:
        """Padding before the first row."""
        return max(0, (self.made - 1) * self.stride + self.window - self.size) // 2

    @property
    def padded(self) -> int:
        """Rows of the padded image."""
        return (self.made - 1) * self.stride + self.window


class _ByHand:
    """What all ways share: the padded image, and the results."""

    def __init__(self, s: Shapes) -> None:
        self.s = s
        f = np.float32
        self.image = np.zeros((s.batch, s.padded, s.padded, s.channels), f)
        self.y = np.empty((s.batch, s.made, s.made, s.out), f)
        self.dimage = np.empty_like(self.image)
        self.dx = np.empty((s.batch, s.size, s.size, s.channels), f)

    def pad(self, x: Array) -> None:
        """Copy the image into its place; strides may leave some of its last rows out."""
        s = self.s
        n = min(s.size, s.padded - s.before)
        self.image[:, s.before : s.before + n, s.before : s.before + n] = x[:, :n, :n]

    def unpad(self) -> Array:
        """The cotangent of the image without padding."""
        s = self.s
        n = min(s.size, s.padded - s.before)
        if n < s.size:
            self.dx[...] = 0
        self.dx[:, :n, :n] = self.dimage[:, s.before : s.before + n, s.before : s.before + n]
        return self.dx

    def tap(self, image: Array, a: int, b: int) -> Array:
        """What the windows have at one tap: [n, made, made, c]."""
        s, reach = self.s, (self.s.made - 1) * self.s.stride + 1
        return image[:, a : a + reach : s.stride, b : b + reach : s.stride]


class Im2col(_ByHand):
    """Windows copied into a matrix, `images` images at a time (0: all), which the filters' gradient uses again."""

    def __init__(self, s: Shapes, images: int) -> None:
        super().__init__(s)
        self.images = images or s.batch
        self.depth = s.window**2 * s.channels
        rows = self.images * s.made**2
        self.windows, self.dwindows = (np.empty((rows, self.depth), np.float32) for _ in range(2))
        self.dw, self.part = (np.empty((self.depth, s.out), np.float32) for _ in range(2))

    def gather(self, begin: int) -> Array:
        """The windows of some images."""
        s = self.s
        part = self.image[begin : begin + self.images]
        n, h, w, c = part.strides
        view = np.lib.stride_tricks.as_strided(
            part,
            (self.images, s.made, s.made, s.window, s.window, s.channels),
            (n, h * s.stride, w * s.stride, h, w, c),
        )
        np.copyto(self.windows.reshape(view.shape), view)
        return self.windows

    def __call__(self, x: Array, w: Array, dy: Array) -> tuple[Array, Array, Array]:
        s, flat = self.s, w.reshape(-1, self.s.out)
        self.pad(x)
        self.dimage[...] = 0
        for begin in range(0, s.batch, self.images):
            some = np.s_[begin : begin + self.images]
            windows, given = self.gather(begin), dy[some].reshape(-1, s.out)
            np.matmul(windows, flat, out=self.y[some].reshape(-1, s.out))
            np.matmul(windows.T, given, out=self.part if begin else self.dw)
            if begin:
                self.dw += self.part
            np.matmul(given, flat.T, out=self.dwindows)
            spread = self.dwindows.reshape(self.images, s.made, s.made, s.window, s.window, s.channels)
            for a, b in np.ndindex(s.window, s.window):
                self.tap(self.dimage[some], a, b)[...] += spread[:, :, :, a, b]
        return self.y, self.unpad(), self.dw.reshape(w.shape)


class Turned(Im2col):
    """As `Im2col`, but the gradient of the image is im2col of dy with turned filters; stride 1 only."""

    def __init__(self, s: Shapes, images: int) -> None:
        super().__init__(s, images)
        self.other = _ByHand(s)
        self.back = Shapes(s.name, s.batch, s.size, s.out, s.window, s.channels)
        self.gathered = Im2col(self.back, self.images)

    def __call__(self, x: Array, w: Array, dy: Array) -> tuple[Array, Array, Array]:
        s, flat = self.s, w.reshape(-1, self.s.out)
        turned = np.ascontiguousarray(w[::-1, ::-1].swapaxes(2, 3)).reshape(-1, s.channels)
        self.pad(x)
        self.gathered.image[:, s.window - 1 - s.before :][:, : s.made, s.window - 1 - s.before :][:, :, : s.made] = dy
        for begin in range(0, s.batch, self.images):
            some = np.s_[begin : begin + self.images]
            windows, given = self.gather(begin), dy[some].reshape(-1, s.out)
            np.matmul(windows, flat, out=self.y[some].reshape(-1, s.out))
            np.matmul(windows.T, given, out=self.part if begin else self.dw)
            if begin:
                self.dw += self.part
            np.matmul(self.gathered.gather(begin), turned, out=self.dx[some].reshape(-1, s.channels))
        return self.y, self.dx, self.dw.reshape(w.shape)


class Shifted(_ByHand):
    """A product for each tap, of the image moved by it."""

    def __init__(self, s: Shapes) -> None:
        super().__init__(s)
        self.term, self.moved = np.empty_like(self.y), np.empty((s.batch, s.made, s.made, s.channels), np.float32)
        self.dterm = np.empty_like(self.moved)

    def __call__(self, x: Array, w: Array, dy: Array) -> tuple[Array, Array, Array]:
        s = self.s
        self.pad(x)
        self.dimage[...] = 0
        dw = np.empty_like(w)
        flat, given = self.moved.reshape(-1, s.channels), dy.reshape(-1, s.out)
        for n, (a, b) in enumerate(np.ndindex(s.window, s.window)):
            np.copyto(self.moved, self.tap(self.image, a, b))
            np.matmul(flat, w[a, b], out=(self.term if n else self.y).reshape(-1, s.out))
            if n:
                self.y += self.term
            np.matmul(flat.T, given, out=dw[a, b])
            np.matmul(given, w[a, b].T, out=self.dterm.reshape(-1, s.channels))
            self.tap(self.dimage, a, b)[...] += self.dterm
        return self.y, self.unpad(), dw


class Taps(_ByHand):
    """Depthwise: taps times the image moved by them."""

    def __init__(self, s: Shapes) -> None:
        super().__init__(s)
        self.term = np.empty_like(self.y)

    def __call__(self, x: Array, w: Array, dy: Array) -> tuple[Array, Array, Array]:
        s = self.s
        self.pad(x)
        self.dimage[...] = 0
        dw = np.empty_like(w)
        for n, (a, b) in enumerate(np.ndindex(s.window, s.window)):
            moved = self.tap(self.image, a, b)
            np.multiply(moved, w[a, b], out=self.term if n else self.y)
            if n:
                self.y += self.term
            np.multiply(moved, dy, out=self.term)
            np.add.reduce(self.term.reshape(-1, s.channels), axis=0, out=dw[a, b])
            np.multiply(dy, w[a, b], out=self.term)
            self.tap(self.dimage, a, b)[...] += self.term
        return self.y, self.unpad(), dw


def ways(s: Shapes) -> dict[str, _ByHand]:
    """All ways that fit a convolution."""
    if s.depthwise:
        return {"taps": Taps(s)}
    found: dict[str, _ByHand] = {"im2col": Im2col(s, 0), "im2col by image": Im2col(s, 1), "shifted": Shifted(s)}
    if s.stride == 1:
        found |= {"im2col twice": Turned(s, 0), "im2col twice by image": Turned(s, 1)}
    return found
