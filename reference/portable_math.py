"""Logarithm and exponential from IEEE additions, multiplications and divisions alone.

A library's log and exp differ by a last bit between NumPy builds, compilers and GPUs, which is enough to choose
another token. These are the classic argument reductions and minimax polynomials of Sun's fdlibm (``e_log.c``,
``e_exp.c``; error below 1 ulp): written down once as a fixed sequence of float64 operations, none of them fused,
they give the same bits everywhere.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["EXP_COEFFICIENTS", "LN2_HIGH", "LN2_LOW", "LOG_COEFFICIENTS", "portable_exp", "portable_log"]

LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
LOG_COEFFICIENTS = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
EXP_COEFFICIENTS = (
    1.66666666666666019037e-01,
    -2.77777777770155933842e-03,
    6.61375632143793436117e-05,
    -1.65339022054652515390e-06,
    4.13813679705723846039e-08,
)


def portable_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive, finite, normal ``x``."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    k = (exponent - small).astype(np.float64)
    f = mantissa - 1.0  # exact: mantissa lies in [0.707, 1.415)
    s = f / (2.0 + f)
    z = s * s
    r = np.zeros_like(z)
    for c in reversed(LOG_COEFFICIENTS):
        r = (r + c) * z
    half = 0.5 * f * f
    return k * LN2_HIGH - ((half - (s * (half + r) + k * LN2_LOW)) - f)


def portable_exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exponential of ``x <= 0``; 0 below −708, where float64 would leave its normal range."""
    x = np.maximum(x, -709.0)
    k = np.rint(x * 1.44269504088896338700)
    high = x - k * LN2_HIGH
    low = k * LN2_LOW
    r = high - low
    z = r * r
    c = np.zeros_like(z)
    for p in reversed(EXP_COEFFICIENTS):
        c = (c + p) * z
    c = r - c
    y = 1.0 - ((low - (r * c) / (2.0 - c)) - high)
    return np.where(x < -708.0, 0.0, np.ldexp(y, k.astype(np.int32)))
