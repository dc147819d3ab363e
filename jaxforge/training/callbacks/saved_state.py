"""States of callbacks as JSON, stored in `Progress.callbacks` and restored bit-exactly.

JSON values          as they are; floats have all digits, so no bit is lost
array                {"__array__": base64 of its bytes, "dtype": name, "shape": [...]}
scalar of NumPy      the same with "shape": null
bytes                {"__bytes__": base64}
tuple                {"__tuple__": [...]}
"""

import base64
from typing import Any

import jax
import numpy as np

from jaxforge.errors import UserError

_ARRAY, _BYTES, _TUPLE = "__array__", "__bytes__", "__tuple__"


def encode(value: Any, name: str) -> Any:  # noqa: ANN401 (any JSON)
    """Return the JSON of a state.

    Args:
        value: JSON values, tuples, bytes, and arrays of NumPy or JAX, in dicts with text keys.
        name: name of the value in error messages.

    Raises:
        UserError: the state contains a value of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key in (_ARRAY, _BYTES, _TUPLE):
                raise UserError(f"{name} has the key {key!r}. Use other text as the key")
        return {key: encode(part, f"{name}[{key!r}]") for key, part in value.items()}
    if type(value) in (list, tuple):
        parts = [encode(part, f"{name}[{i}]") for i, part in enumerate(value)]
        return parts if type(value) is list else {_TUPLE: parts}
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        if array.dtype.kind not in "biufcV" or np.dtype(array.dtype.name) != array.dtype:
            raise UserError(f"{name} is an array of {array.dtype}. Use an array of numbers")
        content = base64.b64encode(array.tobytes()).decode()
        shape = None if isinstance(value, np.generic) else list(array.shape)
        return {_ARRAY: content, "dtype": array.dtype.name, "shape": shape}
    raise UserError(
        f"{name} is of type {type(value).__name__}, which a checkpoint cannot store. Use numbers, "
        "text, bytes, arrays, lists, tuples and dicts"
    )


def decode(value: Any) -> Any:  # noqa: ANN401 (any JSON)
    """Return the state whose JSON is `value`. Arrays are writable NumPy arrays."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _BYTES in value:
        return base64.b64decode(value[_BYTES])
    if _TUPLE in value:
        return tuple(decode(part) for part in value[_TUPLE])
    if _ARRAY in value:
        array = np.frombuffer(base64.b64decode(value[_ARRAY]), np.dtype(value["dtype"]))
        shape = value["shape"]
        return array[0] if shape is None else array.reshape(shape).copy()
    return {key: decode(part) for key, part in value.items()}
