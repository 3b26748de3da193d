"""Special functions without an operation in the library, in terms of those with one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special
from jax import lax

from meshlib.jax.importing.rewrites.table import Function, rewrite


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Horner's rule, highest power first."""
    value = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        value = value * x + c
    return value


def _atan(x: Any) -> Any:
    """Cephes `atanf` (S. L. Moshier): a polynomial near zero, otherwise reduced by pi/4 or pi/2."""
    size = lax.abs(x)
    far, near = size > math.tan(3 * math.pi / 8), size > math.tan(math.pi / 8)
    safe = jnp.where(far, size, 1.0)
    y = jnp.where(far, -1 / safe, jnp.where(near, (size - 1) / (size + 1), size))
    z = y * y
    odd = _polynomial(z, (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)) * z * y + y
    return lax.sign(x) * (jnp.where(far, math.pi / 2, jnp.where(near, math.pi / 4, 0.0)) + odd)


def _atan2(y: Any, x: Any) -> Any:
    upright = x == 0
    angle = _atan(y / jnp.where(upright, 1.0, x))
    turned = jnp.where(x < 0, jnp.where(y < 0, -math.pi, math.pi), 0.0)
    return jnp.where(upright, lax.sign(y) * (math.pi / 2), angle + turned)


def _asin(x: Any) -> Any:
    return _atan2(x, lax.sqrt((1 - x) * (1 + x)))


def _acos(x: Any) -> Any:
    return _atan2(lax.sqrt((1 - x) * (1 + x)), x)


def _asinh(x: Any) -> Any:
    size = lax.abs(x)
    return lax.sign(x) * lax.log1p(size + size * size / (1 + lax.sqrt(size * size + 1)))


def _acosh(x: Any) -> Any:
    return lax.log1p(x - 1 + lax.sqrt((x - 1) * (x + 1)))


def _atanh(x: Any) -> Any:
    return 0.5 * (lax.log1p(x) - lax.log1p(-x))


def _complement(x: Any) -> Any:
    """1 - erf(x), exact for large x too (W. H. Press et al., Numerical Recipes, section 6.2)."""
    size = lax.abs(x)
    t = 1 / (1 + 0.5 * size)
    exponent = _polynomial(t, (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418,
                               0.37409196, 1.00002368, -1.26551223))  # fmt: skip
    tail = t * lax.exp(exponent - size * size)
    return jnp.where(size < 0.5, 1 - lax.erf(x), jnp.where(x < 0, 2 - tail, tail))


_erfc = jax.custom_jvp(_complement)
_erfc.defjvp(lambda xs, dxs: (_erfc(*xs), -2 / math.sqrt(math.pi) * lax.exp(-xs[0] * xs[0]) * dxs[0]))


def _erf_inv(x: Any) -> Any:
    """M. Giles, Approximating the erfinv function (GPU Computing Gems, 2011), in single precision."""
    w = -lax.log1p(-x * x)
    near = w < 5
    a = _polynomial(w - 2.5, (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
                              -0.00125372503, -0.00417768164, 0.246640727, 1.50140941))  # fmt: skip
    b = _polynomial(lax.sqrt(jnp.where(near, 5.0, w)) - 3, (
        -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
        1.00167406, 2.83297682))  # fmt: skip
    return jnp.where(near, a, b) * x


# Lanczos' approximation with g = 7 and nine terms (W. H. Press et al., Numerical Recipes, section 6.1).
_LANCZOS = (
    676.520368121885098567009190444019, -1259.13921672240287047156078755283, 771.3234287776530788486528258894,
    -176.61502916214059906584551354, 12.507343278686904814458936853, -0.13857109526572011689554707,
    9.984369578019570859563e-6, 1.50563273514931155834e-7,
)  # fmt: skip
_BASE = 0.99999999999980993227684700473478


def _lanczos(z: Any) -> tuple[Any, Any]:
    """The series at z >= -0.5, and its derivative."""
    total, slope = jnp.full_like(z, _BASE), jnp.zeros_like(z)
    for n, c in enumerate(_LANCZOS, start=1):
        total, slope = total + c / (z + n), slope - c / ((z + n) * (z + n))
    return total, slope


def _lgamma(x: Any) -> Any:
    """log |gamma(x)|, with reflection below 1/2."""
    low = x < 0.5
    z = jnp.where(low, -x, x - 1)
    t = z + 7.5
    right_half = 0.5 * math.log(2 * math.pi) + (z + 0.5) * lax.log(t) - t + lax.log(_lanczos(z)[0])
    part = lax.abs(x - lax.floor(x))
    turned = math.log(math.pi) - lax.log(jnp.where(low, lax.abs(lax.sin(math.pi * part)), 1.0)) - right_half
    return jnp.where(low, turned, right_half)


def _digamma(x: Any) -> Any:
    low = x < 0.5
    z = jnp.where(low, -x, x - 1)
    t = z + 7.5
    total, slope = _lanczos(z)
    right_half = lax.log(t) - 7 / t + slope / total
    angle = math.pi * jnp.where(low, x - lax.floor(x), 0.25)
    return jnp.where(low, right_half - math.pi * lax.cos(angle) / lax.sin(angle), right_half)


# Chebyshev series of exp(-x) I_n(x) (I_1: over x) for x / 4 - 1, and of sqrt(x) exp(-x) I_n(x) for 16 / x - 1, lowest
# degree first, as in Cephes `i0e.c` and `i1e.c` (S. L. Moshier).
_BESSEL = {
    0: ((0.338397637, -0.304682672, 0.171620902, -0.094901097, 0.0493052842, -0.0237374148, 0.0105464604, -0.00432431,
         0.00163947562, -0.000576375575, 0.000188502885, -5.75419501e-05, 1.64484481e-05, -4.41673836e-06,
         1.11738754e-06, -2.67079385e-07, 6.046995e-08, -1.30002501e-08),
        (0.402245206, 0.00336911648, 6.88975835e-05, 2.89137052e-06, 2.04891859e-07, 2.26666899e-08, 3.39623203e-09)),
    1: ((0.126293593, -0.176416518, 0.102643659, -0.0529459812, 0.024726449, -0.0105640849, 0.00415642294,
         -0.00151357245, 0.000512285956, -0.000161760816, 4.78156511e-05, -1.32731637e-05, 3.47025131e-06,
         -8.56872026e-07, 2.00329475e-07, -4.44505912e-08, 9.38153726e-09),
        (0.389288118, -0.00976109749, -0.000110588939, -3.88256481e-06, -2.51223624e-07, -2.63146885e-08,
         -3.83538039e-09)),
}  # fmt: skip


def _chebyshev(t: Any, coefficients: Sequence[float]) -> Any:
    """Clenshaw's recurrence."""
    last = before = jnp.zeros_like(t)
    for c in reversed(coefficients[1:]):
        last, before = 2 * t * last - before + c, last
    return t * last - before + coefficients[0]


def _bessel(order: int) -> Function:
    near, far = _BESSEL[order]

    def run(x: Any) -> Any:
        size = lax.abs(x)
        large = jnp.maximum(size, 8)
        tail = _chebyshev(16 / large - 1, far) / lax.sqrt(large)
        core = _chebyshev(jnp.minimum(size, 8) / 4 - 1, near)
        return jnp.where(size > 8, lax.sign(x) * tail, x * core) if order else jnp.where(size > 8, tail, core)

    return run


def _polygamma(n: Any, x: Any) -> Any:
    above = lax.sign(n % 2 - 0.5) * lax.exp(lax.lgamma(n + 1)) * jax.scipy.special.zeta(jnp.where(n == 0, 2, n + 1), x)
    return jnp.where(n == 0, lax.digamma(x), above)


_CURVES: dict[str, Function] = {
    "atan": _atan, "atan2": _atan2, "asin": _asin, "acos": _acos, "asinh": _asinh, "acosh": _acosh, "atanh": _atanh,
    "erfc": _erfc, "erf_inv": _erf_inv, "lgamma": _lgamma, "digamma": _digamma,
    "bessel_i0e": _bessel(0), "bessel_i1e": _bessel(1),
    "polygamma": _polygamma, "zeta": jax.scipy.special.zeta,
    "log2": lambda x: lax.log(x) / math.log(2),
}  # fmt: skip


def _widened(function: Function) -> Function:
    """`function` computed in float32 for narrower dtypes."""

    def run(*xs: Any) -> Any:
        narrow = xs[0].dtype
        wide = jnp.promote_types(narrow, jnp.float32)
        return function(*(x.astype(wide) for x in xs)).astype(narrow)

    return run


def _wide_product(dtype: Any) -> Function | None:
    """A product whose operands are cast to its dtype first, which JAX 0.11 can write as one primitive."""
    return None if dtype is None else lambda x, y: x.astype(dtype) * y.astype(dtype)


for _name in _CURVES:
    rewrite(_name, lambda step: _widened(_CURVES[step.kind]))
rewrite("mul", lambda step: _wide_product(step.params.get("out_dtype")))
