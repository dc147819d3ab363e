"""Views of lazy tensors, compared with NumPy at random indices."""

import numpy as np
import pytest

from tests.torch_compat.tensors import assert_same, random_array, random_index
from torch_compat.formats.lazy import (
    DTYPES,
    LazyTensor,
    blocks,
    equal,
    from_array,
    intersection,
    relative_to,
    stack,
    zeros,
)

ARRAY = random_array("float32", (7, 6, 5))
MATRIX = random_array("float32", (9, 4))
ORDER = np.array([3, 3, 0, 6, 5])


def of_layers(a):
    return stack([from_array(layer) for layer in a])


VIEWS = {
    "itself": (from_array(ARRAY), ARRAY),
    "part": (from_array(ARRAY).part(4), ARRAY[4]),
    "part of a part": (from_array(ARRAY).part(4).part(1), ARRAY[4, 1]),
    "number": (from_array(MATRIX).part(8).part(2), MATRIX[8, 2]),
    "stack": (of_layers(ARRAY), ARRAY),
    "stack of one": (of_layers(ARRAY[:1]), ARRAY[:1]),
    "stack of numbers": (of_layers(ARRAY[:, 0, 0]), ARRAY[:, 0, 0]),
    "rows": (from_array(ARRAY).rows(ORDER), ARRAY[ORDER]),
    "rows of rows": (from_array(ARRAY).rows(ORDER).rows([4, 0, 0]), ARRAY[ORDER][[4, 0, 0]]),
    "flattened": (from_array(MATRIX).flattened(), MATRIX.reshape(-1)),
    "folded": (from_array(MATRIX.reshape(-1)).folded(4), MATRIX),
    "transposed": (from_array(MATRIX).transposed(), MATRIX.T),
    "shortened": (from_array(ARRAY).resized(4), ARRAY[:4]),
    "lengthened": (
        from_array(MATRIX).resized(12), np.concatenate([MATRIX, np.zeros((3, 4), np.float32)])
    ),
    "cast": (from_array(ARRAY).cast(DTYPES["bfloat16"]), ARRAY.astype(DTYPES["bfloat16"])),
    "cast to itself": (from_array(ARRAY).cast(DTYPES["float32"]), ARRAY),
    "zeros": (zeros((3, 4), DTYPES["bfloat16"]), np.zeros((3, 4), DTYPES["bfloat16"])),
    "all together": (
        stack([from_array(MATRIX).rows([8, 1, 4]).transposed().cast(np.dtype(np.float16))] * 2)
        .part(1).resized(6),
        np.concatenate([MATRIX[[8, 1, 4]].T.astype(np.float16), np.zeros((2, 3), np.float16)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_view_equals_numpy(view):
    lazy, expected = VIEWS[view]
    assert (lazy.shape, lazy.dtype, lazy.nbytes) == (
        expected.shape,
        expected.dtype,
        expected.nbytes,
    )
    assert_same(np.asarray(lazy.all()), np.asarray(expected))
    rng = np.random.default_rng(0)
    for _ in range(60):
        index = random_index(rng, expected.shape)
        assert_same(np.asarray(lazy.read(index)), np.asarray(expected[index]))


def recorded(array):
    """Return a lazy tensor and a list that records the indices of its reads."""
    indices = []

    def read(index):
        indices.append(index)
        return array[index]

    return LazyTensor(array.shape, array.dtype, read), indices


def test_view_reads_only_needed_region():
    tensor, indices = recorded(MATRIX)
    part = tensor.rows(np.arange(9)[::-1]).transposed().part(1)
    assert not indices
    assert_same(part.read((slice(2, 5),)), MATRIX[::-1].T[1, 2:5])
    assert indices == [(slice(4, 7), slice(1, 2))]


def test_stack_reads_only_requested_layers():
    layers = [recorded(layer) for layer in ARRAY]
    index = (slice(2, 4), slice(1, 3), slice(0, 5))
    stack([tensor for tensor, _ in layers]).read(index)
    assert [len(indices) for _, indices in layers] == [0, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("shape", [(), (0,), (5,), (7, 3), (3, 0), (1, 4, 5), (6, 2, 2)])
@pytest.mark.parametrize("limit", [1, 12, 40, 10**6])
def test_blocks_cover_tensor_within_limit(shape, limit):
    seen = np.zeros(shape, int)
    for index in blocks(shape, 4, limit):
        seen[index] += 1
        rows = index[0].stop - index[0].start if index else 1
        assert rows <= 1 or seen[index].size * 4 <= limit
    assert (seen == 1).all()
    assert len(list(blocks(shape, 4, 10**6))) == 1


def test_intersection_equals_common_mask():
    rng = np.random.default_rng(0)
    for _ in range(300):
        a, b = random_index(rng, (5, 6)), random_index(rng, (5, 6))
        in_a, in_b = np.zeros((5, 6), bool), np.zeros((5, 6), bool)
        in_a[a], in_b[b] = True, True
        both = intersection(a, b)
        if both is None:
            assert not (in_a & in_b).any()
            continue
        common = np.zeros((5, 6), bool)
        common[both] = True
        np.testing.assert_array_equal(common, in_a & in_b)
        origin = [s.start for s in a]
        np.testing.assert_array_equal(MATRIX_5_6[a][relative_to(both, origin)], MATRIX_5_6[both])


MATRIX_5_6 = np.arange(30).reshape(5, 6)


def test_equal_compares_bits():
    nan = np.array([1.0, np.nan], np.float32)
    assert equal(from_array(nan), from_array(nan.copy()))
    assert not equal(from_array(nan), from_array(nan.astype(np.float64)))
    assert not equal(from_array(nan), from_array(nan[None]))
    other = MATRIX.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(9))
    assert not equal(from_array(MATRIX), from_array(other))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_cast_rounds_like_torch(name):
    torch = pytest.importorskip("torch")
    values = random_array("float32", (4000,))
    expected = torch.from_numpy(values).to(getattr(torch, name)).float().numpy()
    result = from_array(values).cast(DTYPES[name]).all()
    np.testing.assert_array_equal(result.astype(np.float32), expected)
