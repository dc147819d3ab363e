"""Bounds on the relative difference of two correct programs, which round differently.

float32   A sum of n products in another order has a relative error of about √n · 2^-24 (a
          random walk of n roundings; Higham and Mary, 2019). Errors of the parts that a value
          has passed through add up in the same way: 2 · 2^-24 · √(width · parts). The bound is
          at least 1e-5, to cover exponentials and quotients.
bfloat16  Products are accumulated in float32 and results are rounded, with a relative error of
          2^-9 as a root mean square. A part rounds about ten times in each program, and
          √20 · 2^-9 is about 2^-7. If two functions of an input are multiplied (gate by up,
          queries by keys), its error counts twice: 2^-6 · √parts.
"""

import math

LEAST = 1e-5
"""Smallest bound, for exponentials and quotients."""
ROUNDING = 2**-24
"""Relative rounding of float32."""


def tolerance(dtype: str, width: int, parts: int) -> float:
    """Return the largest relative difference between two correct programs.

    Args:
        dtype: "float32" or "bfloat16".
        width: number of products in a sum.
        parts: number of attention and feed-forward parts that the value has passed through.
    """
    if dtype == "bfloat16":
        return 2**-6 * math.sqrt(parts)
    return max(LEAST, 2 * ROUNDING * math.sqrt(width * parts))
