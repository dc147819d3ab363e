"""Shared parts of format tests: tensors of every dtype, comparison by bits."""

import numpy as np
import pytest

from torch_compat.formats.dcp_reader import Dcp, open_dcp
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES, LazyTensor


def random_array(name, shape, seed=0):
    """Random values of any dtype: every bit pattern that is a number."""
    dtype = DTYPES[name]
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.kind in "iu":
        raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        return raw.view(dtype).reshape(shape)
    return np.asarray(rng.standard_normal(shape), np.float64).astype(dtype)


def of_torch(tensor):
    """A torch tensor as an array of the same dtype, whatever NumPy thinks of it."""
    torch = pytest.importorskip("torch")
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return raw.numpy().view(dtype).reshape(tensor.shape)


def to_torch(array):
    """An array as a torch tensor of the same dtype."""
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, array.dtype.name)
    raw = torch.from_numpy(np.array(array).reshape(-1).view(np.uint8))
    return raw.view(dtype).reshape(array.shape)


def assert_same(result, expected):
    """Shape, dtype and every bit."""
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert result.tobytes() == expected.tobytes()


def random_index(rng, shape):
    """Some part of a tensor, sometimes an empty one."""
    bounds = [sorted(rng.integers(0, n + 1, 2)) for n in shape]
    return tuple(slice(int(start), int(stop)) for start, stop in bounds)


def assert_reads(lazy: LazyTensor, expected, parts=6):
    """The whole tensor, and parts of it."""
    assert (lazy.shape, lazy.dtype) == (expected.shape, expected.dtype)
    assert_same(lazy.all(), expected)
    rng = np.random.default_rng(0)
    for _ in range(parts):
        index = random_index(rng, expected.shape)
        assert_same(lazy.read(index), expected[index])


def opened(path) -> Dcp:
    return open_dcp(Directory(path))


def read_everything(path):
    """Every tensor and object of a DCP checkpoint."""
    dcp = opened(path)
    tensors = {key: tensor.all() for key, tensor in dcp.tensors.items()}
    return tensors, {key: dcp.objects(key) for key in dcp.objects}
