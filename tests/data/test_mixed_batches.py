"""Batches of a mixture: the same on any mesh and hosts, from anywhere, however far ahead read."""

import types

import jax
import numpy as np
import pytest

from jaxforge.data import loader, sources
from jaxforge.data.corpus.manifest import FILE_NAME
from jaxforge.data.corpus.tokenizer_files import tokenizer_of
from jaxforge.data.mixture import GrainMixture, TorchMixture
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import make_mesh
from jaxforge.training.training_data import Phases
from tests.conftest import tiny_config
from tests.data.manifest_writer import ShardWriter

SEQ, ROWS, START = 32, 8, 5
SIZES = {"low": 40, "high": 70}


@pytest.fixture
def directories(tmp_path):
    """Two directories; the first token of window i is i in the one, and 100 + i in the other."""
    for name, first in (("low", 0), ("high", 100)):
        (tmp_path / name).mkdir()
        windows = np.arange(SIZES[name])[:, None] + np.zeros(SEQ + 1, int) + first
        np.save(tmp_path / name / "a.npy", windows.astype(np.uint16).reshape(-1))
    return [{"path": str(tmp_path / name), "name": name} for name in SIZES]


def config(directories, accum=1, batch=ROWS, distributed=None, **data):
    phases = [{"start_step": START, "dataset_weights": {"low": 0.0}}]
    return tiny_config(
        data={"datasets": directories, "num_workers": 0, "phases": phases, **data},
        train={"batch_size": batch, "grad_accum_steps": accum},
        distributed={"dp_shard": 1, **(distributed or {})},
    )


def batches(job, n, step=0, history=(), devices=1):
    """Return the batches of the updates from `step` on, with a resumed run's `history`."""
    mesh = make_mesh(job, jax.devices()[:devices])
    dataset, first = sources.open_training_data(job), step * ROWS
    segments = Phases.of(job.data).segments(history, step, first, lambda later: later * ROWS)
    return [
        jax.tree.map(np.asarray, batch)
        for batch in loader.training_batches(job, mesh, dataset, first, n, segments)
    ]


def windows(batch_list):
    return np.concatenate([b["input_ids"][..., 0].reshape(-1) for b in batch_list])


def assert_same(result, expected):
    for a, b in zip(result, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_every_sequence_says_of_which_dataset_it_is(directories):
    for batch in batches(config(directories), 12):
        assert batch["dataset_idx"].shape == (1, ROWS)
        assert batch["dataset_idx"].dtype == np.int32
        np.testing.assert_array_equal(batch["dataset_idx"], batch["input_ids"][..., 0] >= 100)


def test_single_source_has_no_dataset_idx(directories):
    job = tiny_config(data={"dataset_path": directories[0]["path"]})
    assert batches(job, 1)[0].keys() == {"input_ids", "labels"}


@pytest.mark.parametrize("order", ["grain", "torch"])
def test_phase_weights_do_not_depend_on_read_ahead(directories, order):
    job = config(directories, order=order, num_workers=8, prefetch_factor=8)
    shares = [batch["dataset_idx"].mean() for batch in batches(job, 12)]
    assert all(share < 1 for share in shares[:START])
    assert shares[START:] == [1.0] * 7
    assert_same(batches(job, 12), batches(config(directories, order=order), 12))


@pytest.mark.parametrize("order", ["grain", "torch"])
def test_resume_at_any_step_continues_batches(directories, order):
    job = config(directories, order=order)
    whole, history = batches(job, 12), []
    for step in range(10):
        history = Phases.of(job.data).recorded(history, step, step * ROWS)
        assert_same(batches(job, 12 - step, step, history), whole[step:])


@pytest.mark.parametrize("order", ["grain", "torch"])
@pytest.mark.parametrize("mesh", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}])
def test_batches_do_not_depend_on_mesh(directories, order, mesh):
    job = config(directories, batch=2, distributed=mesh, order=order, torch_ranks=1)
    split = batches(job, 8, devices=4 * mesh.get("tp", 1))
    assert_same(batches(config(directories, order=order), 8), split)


@pytest.mark.parametrize("order", ["grain", "torch"])
def test_hosts_read_their_rows_of_the_same_batches(directories, order):
    """Some rows belong to other processes, as in `_Layout`."""
    job = config(directories, accum=2, batch=4, order=order)
    dataset = sources.open_training_data(job)
    segments = Phases.of(job.data).segments([], 0, 0, lambda step: step * ROWS)
    of_mixture = (
        TorchMixture(dataset.sizes, segments, 0, 4, 1)
        if order == "torch"
        else GrainMixture(dataset.sizes, segments, 0, job.data.shuffle)
    )

    def read(rows):
        layout = types.SimpleNamespace(accum=2, rows=4, local_rows=rows, tokens=ROWS * SEQ, size=8)
        updates = loader.UpdateBatches(dataset, of_mixture, layout, 0, 9)
        return [update for i in range(len(updates)) for update in updates[i]]

    for whole, *parts in zip(read([0, 1, 2, 3]), read([0, 1]), read([2, 3]), strict=True):
        for name, array in whole.items():
            joined = np.concatenate([part[name] for part in parts], axis=1)
            np.testing.assert_array_equal(array, joined)


def test_batches_do_not_depend_on_accumulation(directories):
    split = batches(config(directories, accum=4, batch=2), 8)
    assert split[0]["dataset_idx"].shape == (4, 2)
    np.testing.assert_array_equal(windows(split), windows(batches(config(directories), 8)))


def test_torch_order_depends_on_torch_ranks_only(directories):
    alone = config(directories, order="torch", torch_ranks=4)
    four = config(directories, order="torch", batch=2, distributed={"dp_shard": 4})
    assert_same(batches(alone, 8), batches(four, 8, devices=4))
    assert (
        windows(batches(alone, 8)).tolist()
        != windows(batches(config(directories, order="torch"), 8)).tolist()
    )


def test_packing_knows_the_document_ends_of_each_dataset(directories):
    job = config(directories, pack_sequences=True, eos_token_id=3, shuffle=False)
    rows = np.concatenate([b["segment_ids"][0] for b in batches(job, 5)])
    assert (rows[:, -1] > 0).sum() == 1  # window 3 of "low" is nothing but ends


@pytest.mark.parametrize(("spoil", "message"), [
    ({"path": "nowhere"}, r"data\.datasets\[1\]\.path: .*nowhere does not exist"),
    ({}, r"no file matches data\.file_pattern = '\*\.bin'"),
])  # fmt: skip
def test_source_errors_name_their_key(directories, spoil, message):
    directories[1] |= spoil
    more = {} if spoil else {"file_pattern": "*.bin"}
    with pytest.raises(UserError, match=message):
        sources.open_training_data(config(directories, **more))


def test_tokenizer_next_to_source_is_used(directories, tmp_path):
    assert tokenizer_of(config(directories).data) is None
    directories[1]["path"] = str(tmp_path / "other" / "train")
    (tmp_path / "other" / "tokenizer").mkdir(parents=True)
    assert tokenizer_of(config(directories).data) == tmp_path / "other" / "tokenizer"


def test_sources_of_different_tokenizers_do_not_mix(tmp_path):
    directories = []
    for name, fingerprint in (("x", "1"), ("y", "2")):
        with ShardWriter(tmp_path / name, vocab_size=256, dtype="uint16") as writer:
            writer.add(np.zeros(200, np.uint16))
            writer.finish(eos_id=0, tokenizer=f"{name}.json", tokenizer_sha256=fingerprint)
        assert (tmp_path / name / FILE_NAME).exists()
        directories.append({"path": str(tmp_path / name), "name": name})
    with pytest.raises(UserError, match=r"x and y were tokenized differently \(x.json, y.json\)"):
        sources.open_training_data(tiny_config(data={"datasets": directories}))


def test_sources_with_and_without_bos_do_not_mix(tmp_path):
    directories = []
    for name, bos_ids in (("x", (1,)), ("y", ())):
        with ShardWriter(tmp_path / name, vocab_size=256, dtype="uint16") as writer:
            writer.add(np.zeros(200, np.uint16))
            writer.finish(eos_id=0, bos_ids=bos_ids, tokenizer="t", tokenizer_sha256="1")
        directories.append({"path": str(tmp_path / name), "name": name})
    with pytest.raises(UserError, match=r"documents of x begin with BOS, those of y do not"):
        sources.open_training_data(tiny_config(data={"datasets": directories}))
