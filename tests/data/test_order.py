import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grain
import numpy as np
import pytest

from jaxforge.data import order as order_module
from jaxforge.data.order import GrainOrder, TorchOrder, randperm, rank_slice
from jaxforge.errors import UserError

SAMPLERS = json.loads((Path(__file__).parent / "golden_small.json").read_text())["samplers"]


@pytest.mark.parametrize("case", SAMPLERS["randperm"])
def test_randperm_matches_torch(case):
    n, seed = (int(part.split("=")[1]) for part in case.split())
    assert randperm(n, seed).tolist() == SAMPLERS["randperm"][case]


def test_randperm_matches_torch_for_any_seed():
    assert randperm(10, 2**31 + 1).tolist() == [8, 4, 9, 1, 0, 6, 3, 2, 5, 7]
    assert randperm(10, -1).tolist() == [1, 4, 6, 2, 0, 5, 8, 7, 9, 3]


def test_long_randperm_matches_torch():
    # torch 2.13: torch.randperm(1_000_000, generator=torch.Generator().manual_seed(42))
    perm = randperm(1_000_000, 42)
    assert perm[:5].tolist() == [637542, 129489, 295044, 848778, 902602]
    assert (np.sort(perm) == np.arange(len(perm))).all()


def test_randperm_handles_small_and_refuses_large_n():
    assert randperm(0, 1).tolist() == []
    assert randperm(1, 1).tolist() == [0]
    with pytest.raises(UserError, match="too many"):
        randperm(2**32, 1)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rank_slice_matches_kempnerforge(epoch, rank):
    expected = SAMPLERS[f"dist n=23 R=3 seed=42 epoch={epoch} rank={rank}"]
    assert rank_slice(randperm(23, 42 + epoch), rank, 3).tolist() == expected


@pytest.mark.parametrize(("ranks", "per_rank"), [(3, 2), (3, 1), (1, 6), (2, 5)])
def test_global_batches_are_the_union_of_the_ranks(ranks, per_rank):
    """Batch j of `TorchOrder` holds what the ranks of a DataLoader read as their batch j."""
    batch = ranks * per_rank
    order, position = TorchOrder(23, 42, True, batch), 0
    for epoch in range(3):
        slices = [rank_slice(randperm(23, 42 + epoch), rank, ranks) for rank in range(ranks)]
        for j in range(len(slices[0]) // per_rank):
            torch_positions = [part[j * per_rank : (j + 1) * per_rank] for part in slices]
            positions = [order[position + i] for i in range(batch)]
            assert sorted(positions) == sorted(np.concatenate(torch_positions).tolist())
            position += batch


def test_torch_order_without_shuffling_drops_the_remainder():
    order = TorchOrder(7, 0, False, 3)
    assert [order[i] for i in range(9)] == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def test_torch_order_needs_a_batch():
    with pytest.raises(UserError, match=r"5 samples.*6.*train\.batch_size"):
        TorchOrder(5, 0, True, 6)


def test_grain_order_reshuffles_all_samples_each_epoch():
    order = GrainOrder(101, 3, True)
    epochs = [[order[epoch * 101 + i] for i in range(101)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(101)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [GrainOrder(101, 4, True)[i] for i in range(101)] not in epochs
    assert [GrainOrder(3, 0, False)[i] for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert 0 <= GrainOrder(5, -1, True)[10**12] < 5


@pytest.mark.parametrize("seed", [0, 7, -1, 2**40])
@pytest.mark.parametrize("shuffle", [False, True])
def test_grain_order_matches_grain_pipeline(seed, shuffle):
    samples = grain.MapDataset.range(11).seed(seed % 2**32)
    pipeline = (samples.shuffle() if shuffle else samples).repeat()
    order = GrainOrder(11, seed, shuffle)
    assert [order[i] for i in range(40)] == [int(pipeline[i]) for i in range(40)]


def test_grain_order_needs_a_sample():
    with pytest.raises(UserError, match="no sample"):
        GrainOrder(0, 0, True)


@pytest.mark.parametrize(("kind", "batch"), [(GrainOrder, ()), (TorchOrder, (8,))])
def test_orders_are_pure_across_threads_and_pickles(kind, batch):
    order = kind(50, 1, True, *batch)
    positions = np.random.default_rng(0).integers(0, 500, 500).tolist()
    expected = [order[position] for position in positions]
    copy = pickle.loads(pickle.dumps(order))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(copy.__getitem__, positions)) == expected


def test_adjacent_epochs_are_shuffled_once(monkeypatch):
    result = []
    monkeypatch.setattr(
        order_module, "randperm", lambda n, seed: result.append(seed) or randperm(n, seed)
    )
    order = TorchOrder(8, 10, True, 8)
    for position in (6, 8, 7, 9, 5, 10, 16, 15, 17):
        order[position]
    assert result == [10, 11, 12]
