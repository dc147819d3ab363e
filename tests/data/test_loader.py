"""batch = f(config, seed, position): on any mesh, from any start, in any order."""

import jax
import numpy as np
import pytest

from jaxforge.config.data import DataConfig
from jaxforge.data import loader, sources
from jaxforge.data.dataset import Dataset
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import make_mesh
from tests.conftest import tiny_config

SEQ = 32


@pytest.fixture
def shards(tmp_path):
    """100 windows in two files; the first token of window i is i."""
    for name, first in (("a", 0), ("b", 60)):
        n = 60 if name == "a" else 40
        windows = np.arange(first, first + n)[:, None] + np.arange(SEQ + 1)
        np.save(tmp_path / f"{name}.npy", (windows % 256).astype(np.uint16).reshape(-1))
    return tmp_path


def config(shards, accum=1, batch=8, **sections):
    data = {"dataset_path": str(shards), "num_workers": 2, **sections.pop("data", {})}
    train = {"batch_size": batch, "grad_accum_steps": accum, **sections.pop("train", {})}
    return tiny_config(data=data, train=train, **sections)


def batches(config, n, first=0, devices=1):
    mesh = make_mesh(config, jax.devices()[:devices])
    dataset = sources.open_training_data(config)
    return [
        jax.tree.map(np.asarray, batch)
        for batch in loader.training_batches(config, mesh, dataset, first, n)
    ]


def windows(batch_list):
    return np.concatenate([b["input_ids"][..., 0].reshape(-1) for b in batch_list])


def test_unshuffled_order_continues_into_next_epoch(shards):
    got = batches(config(shards, data={"shuffle": False}), 14)
    assert windows(got).tolist() == [i % 100 for i in range(14 * 8)]
    assert got[0]["input_ids"].shape == (1, 8, SEQ)
    np.testing.assert_array_equal(got[3]["labels"][0, 2], np.arange(27, 27 + SEQ))


def test_each_epoch_reshuffles_all_windows(shards):
    order = windows(batches(config(shards, batch=10), 20))
    assert sorted(order[:100]) == sorted(order[100:]) == list(range(100))
    assert order[:100].tolist() != order[100:].tolist() != list(range(100))


@pytest.mark.parametrize("order", ["grain", "torch"])
@pytest.mark.parametrize("mesh", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}])
def test_batches_do_not_depend_on_mesh(shards, order, mesh):
    alone = batches(config(shards, data={"order": order}), 15)
    split = batches(
        config(shards, batch=2, data={"order": order}, distributed=mesh),
        15, devices=4 * mesh.get("tp", 1),
    )  # fmt: skip
    for a, b in zip(alone, split, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_batches_do_not_depend_on_accumulation(shards):
    whole = windows(batches(config(shards), 15))
    for accum in (2, 4):
        split = batches(config(shards, accum=accum, batch=8 // accum), 15)
        assert split[0]["input_ids"].shape[:2] == (accum, 8 // accum)
        np.testing.assert_array_equal(windows(split), whole)


@pytest.mark.parametrize("order", ["grain", "torch"])
def test_start_at_any_position_continues_batches(shards, order):
    job = config(shards, data={"order": order})
    whole = batches(job, 30)
    np.testing.assert_array_equal(windows(batches(job, 13, first=17 * 8)), windows(whole[17:]))


def test_order_depends_on_seed(shards):
    by_train_seed = windows(batches(config(shards, train={"seed": 7}), 5))
    by_data_seed = windows(batches(config(shards, train={"seed": 1, "data_seed": 7}), 5))
    np.testing.assert_array_equal(by_train_seed, by_data_seed)
    assert by_train_seed.tolist() != windows(batches(config(shards), 5)).tolist()


def test_batches_do_not_depend_on_reader_threads(shards):
    a, b = (windows(batches(config(shards, data={"num_workers": n}), 9)) for n in (0, 4))
    np.testing.assert_array_equal(a, b)


def test_packed_batches_carry_documents(shards):
    job = config(shards, data={"pack_sequences": True, "eos_token_id": 40, "shuffle": False})
    (batch,) = batches(job, 1, first=16)
    segment_ids = batch["segment_ids"][0, 0]  # window 16: tokens 16 ... 48, EOS in position 24
    assert segment_ids.tolist() == [0] * 25 + [1] * 7
    assert batch["labels"][0, 0, 24] == -100


def test_packing_needs_to_know_what_ends_a_document(shards):
    job = config(shards, data={"pack_sequences": True})
    with pytest.raises(UserError, match=r"data\.eos_token_id, or data\.tokenizer_path"):
        sources.open_training_data(job)


def test_no_source_means_random_tokens():
    job = tiny_config()
    first, again = batches(job, 2), batches(job, 2)
    np.testing.assert_array_equal(windows(first), windows(again))
    assert first[0]["input_ids"].max() < job.model.vocab_size


def test_evaluation_reads_set_once_without_padding(shards):
    job = config(
        shards, batch=32, eval={"enabled": True, "datasets": {"dataset_path": str(shards)}}
    )
    mesh = make_mesh(job, jax.devices()[:1])
    dataset = sources.open_eval_data(job)[""]
    got = [jax.tree.map(np.asarray, b) for b in loader.eval_batches(job, mesh, dataset)]
    assert len(got) == 4
    assert windows(got)[:100].tolist() == list(range(100))
    valid = sum((b["labels"] != -100).sum() for b in got)
    assert valid == 100 * SEQ


def test_several_evaluation_sets_go_by_name(shards, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    np.save(other / "c.npy", np.full(3 * (SEQ + 1), 7, np.uint16))
    paths = {"first": str(shards), "other.set": str(other)}
    tables = [{"name": name, "dataset_path": path} for name, path in paths.items()]
    job = config(shards, eval={"enabled": True, "datasets": tables})
    sets = sources.open_eval_data(job)
    assert {name: len(dataset) for name, dataset in sets.items()} == {"first": 100, "other.set": 3}
    assert sets["other.set"][2]["input_ids"].tolist() == [7] * SEQ
    tables[1]["dataset_path"] = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"eval\.datasets\[1\]\.dataset_path: .*nowhere does not"):
        sources.open_eval_data(config(shards, eval={"datasets": tables}))


def test_next_batch_is_transferred_ahead(shards, monkeypatch):
    monkeypatch.setattr(loader, "ITEM_TOKENS", 1)
    job = config(shards, data={"num_workers": 0})
    mesh = make_mesh(job, jax.devices()[:1])
    dataset = sources.open_training_data(job)
    read = []
    source = dataset.source
    spy = Dataset(_Spy(source, read), dataset.split)
    iterator = loader.training_batches(job, mesh, spy, 0, 5)
    next(iterator)
    assert len(read) == 2 * 8


def test_going_on_reads_nothing_of_what_came_before(shards, monkeypatch):
    """Others skip by reading: a resume that takes as long as the run."""
    monkeypatch.setattr(loader, "ITEM_TOKENS", 1)
    job = config(shards, data={"num_workers": 0, "shuffle": False})
    mesh = make_mesh(job, jax.devices()[:1])
    dataset, read = sources.open_training_data(job), []
    spy = Dataset(_Spy(dataset.source, read), dataset.split)
    next(loader.training_batches(job, mesh, spy, 10**9 + 40, 5))
    assert read == list(range(40, 56))


class _Spy:
    def __init__(self, source, read):
        self._source, self._read = source, read

    def __len__(self):
        return len(self._source)

    def batch(self, indices):
        self._read.extend(indices)
        return self._source.batch(indices)


def test_torch_order_drops_partial_microbatch(shards):
    job = config(shards, batch=24, data={"order": "torch"})
    order = windows(batches(job, 8))
    assert len(set(order[:96])) == 96
    assert sorted(order[:96]) != sorted(order[96:192])


@pytest.mark.parametrize("item_tokens", [1, 3 * 8 * SEQ, 1 << 20])
def test_read_ahead_does_not_change_batches(shards, item_tokens, monkeypatch):
    expected = windows(batches(config(shards, accum=2, batch=4), 10))
    monkeypatch.setattr(loader, "ITEM_TOKENS", item_tokens)
    got = batches(config(shards, accum=2, batch=4), 10)
    assert len(got) == 10
    np.testing.assert_array_equal(windows(got), expected)


def test_unknown_order_is_refused_by_config():
    with pytest.raises(ValueError, match="order"):
        DataConfig(order="random")
