"""Datasets of a mixture that end after some epochs or tokens, in counts of actual draws."""

import itertools
import json
from collections import Counter

import jax
import numpy as np
import pytest

from jaxforge.config.job import JobConfig
from jaxforge.data import sources
from jaxforge.data.mixture import GrainMixture
from jaxforge.data.segments import Segment, draws, parts_of
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.training.training_data import DataSets, TrainingData

SIZES = {"web": 500, "code": 30, "math": 7}
SHARES = {"web": 0.5, "code": 0.3, "math": 0.2}
LIMITS = {"code": 60, "math": 20}
BLOCK = 20
SEQ = 7


def mixture(*segments, seed=3):
    return GrainMixture(SIZES, [Segment(*segment) for segment in segments], seed, True, BLOCK)


def drawn(order, positions):
    """Return (dataset, index in the dataset) of each position."""
    starts = np.cumsum([0, *SIZES.values()])
    names = list(SIZES)
    result = []
    for position in positions:
        number = int(np.searchsorted(starts, order[position], "right")) - 1
        result.append((names[number], order[position] - int(starts[number])))
    return result


@pytest.mark.parametrize("seed", range(5))
def test_dataset_is_drawn_up_to_its_limit_and_then_by_the_others(seed):
    free, limited = mixture((0, SHARES), seed=seed), mixture((0, SHARES, LIMITS), seed=seed)
    samples = drawn(limited, range(600))
    counts = Counter(name for name, _ in samples)
    assert (counts["code"], counts["math"]) == (60, 20)
    assert set(Counter(each for each in samples if each[0] == "code").values()) == {2}
    names = [name for name, _ in samples]
    end = max(i for i, name in enumerate(names) if name == "math") + 1
    assert samples[:end] == drawn(free, range(end))
    assert "math" in [name for name, _ in drawn(free, range(end, end + BLOCK))]


def test_weight_of_ended_dataset_goes_to_the_others_in_proportion():
    parts = parts_of([Segment(0, SHARES, LIMITS)], 3, BLOCK)
    # Of 0.5, 0.3 and 0.2; of 0.625 and 0.375, whose largest remainder is web's; of 1.
    assert [part.counts.tolist() for part in parts] == [[10, 6, 4], [13, 7, 0], [20, 0, 0]]


@pytest.mark.parametrize("seed", range(2))
def test_simulated_draws_equal_drawn_samples(seed):
    other = {"web": 0.1, "code": 0.9, "math": 0.0}
    segments = [Segment(0, SHARES, LIMITS), Segment(105, other, LIMITS), Segment(333, SHARES, {})]
    order = GrainMixture(SIZES, segments, seed, True, BLOCK)
    starts = []
    for end in (1, 105, 150, 500):
        spans = draws(segments, end, seed, BLOCK)
        starts = [start for start, _ in spans]
        for (_, counts), (start, stop) in zip(
            spans, itertools.pairwise([*starts, end]), strict=True
        ):
            actual = Counter(name for name, _ in drawn(order, range(start, stop)))
            assert {name: count for name, count in counts.items() if count} == actual
    assert len(starts) > len(segments)


def test_limit_that_is_lowered_later_does_not_change_the_past():
    past, now = Segment(0, SHARES), Segment(150, SHARES, {"code": 10})
    order = mixture(past, now)
    assert drawn(order, range(150)) == drawn(mixture(past), range(150))
    assert "code" not in {name for name, _ in drawn(order, range(150, 300))}


@pytest.fixture
def shards(tmp_path):
    """Datasets of 40 and 10 sequences."""
    for name, count in {"web": 40, "code": 10}.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", np.arange(count * (SEQ + 1), dtype=np.uint16) % 250)
    return tmp_path


def config_of(shards, max_steps, devices=1, rows=4, order="grain", phases=(), **limits):
    tables = [
        {"name": "web", "path": str(shards / "web"), "weight": 3, "max_epochs": limits.get("web")},
        {"name": "code", "path": str(shards / "code"), "max_epochs": limits.get("code"),
         "max_tokens": limits.get("code_tokens")},
    ]  # fmt: skip
    return JobConfig.model_validate(
        {
            "model": {"vocab_size": 256, "max_seq_len": SEQ},
            "train": {"seq_len": SEQ, "batch_size": rows // devices, "max_steps": max_steps},
            "data": {"datasets": tables, "num_workers": 0, "order": order, "phases": phases},
            "distributed": {"dp_shard": devices},
        }
    )


def open_batches(config, devices=1):
    """Return a function progress -> training data at this position."""
    mesh = make_mesh(config, jax.devices()[:devices])
    dataset = sources.open_training_data(config)
    data_sets = DataSets(dataset, {}, {})

    def at(progress):
        return TrainingData.of(Program(config, mesh), data_sets, progress, has_begun=False)

    return at


def numbers(batch):
    return jax.device_get(batch["dataset_idx"]).ravel().tolist()


@pytest.mark.parametrize("devices", [1, 2])
def test_resume_at_every_step_gives_the_same_batches(shards, devices):
    """Code ends within a batch, after 1.3 epochs; the mixture changes at step 8."""
    phases = [{"start_step": 8, "dataset_weights": {"web": 1}}]
    whole = open_batches(config_of(shards, 14, code=1.3, phases=phases))(Progress())
    expected = [jax.device_get(next(whole)) for _ in range(14)]
    config = config_of(shards, 14, devices, code=1.3, phases=phases)
    at, progress = open_batches(config, devices), Progress()
    for step in range(14):
        data = at(progress)
        batch = jax.device_get(next(data))
        jax.tree.map(np.testing.assert_array_equal, batch, expected[step])
        data.note_mixture(progress)
        progress = Progress.from_json(json.loads(json.dumps(progress.to_json())))
        progress.advance(4, 4 * SEQ)
    counts = Counter(itertools.chain.from_iterable(map(numbers, expected)))
    assert counts == {0: 56 - 13, 1: 13}


def test_tokens_limit_a_dataset(shards):
    config = config_of(shards, 20, code_tokens=10 * SEQ + 1)  # rounded up to 11 sequences
    data = open_batches(config)(Progress())
    counts = Counter(itertools.chain.from_iterable(numbers(next(data)) for _ in range(20)))
    assert counts == {0: 69, 1: 11}


def test_run_beyond_all_limits_is_refused_with_numbers(shards):
    """Limits of 60 and 20 sequences are 20 updates of 4 sequences."""
    at = open_batches(config_of(shards, 20, web=1.5, code=2))
    data = at(Progress())
    counts = Counter(itertools.chain.from_iterable(numbers(next(data)) for _ in range(20)))
    assert counts == {0: 60, 1: 20}
    with pytest.raises(UserError) as refused:
        next(open_batches(config_of(shards, 30, web=1.5, code=2))(Progress()))
    assert str(refused.value) == (
        "data.datasets: all datasets of the mixture reach max_epochs or max_tokens after 20 of the "
        "30 updates of this run, at sequence 80 of 120. Limits in sequences: web 60 (1.5 epochs), "
        "code 20 (2 epochs). Raise them, add data, or set train.max_steps to at most 20"
    )


def test_progress_of_a_run_without_limits_is_as_before(shards):
    config = config_of(shards, 5)
    data, progress = open_batches(config)(Progress()), Progress()
    next(data)
    data.note_mixture(progress)
    assert progress.mixtures == [[0, {"web": 0.75, "code": 0.25}]]


def test_torch_order_refuses_limits(shards):
    with pytest.raises(ValueError, match="max_epochs and max_tokens of code do not exist in Kem"):
        config_of(shards, 5, order="torch", code=2)


def test_datasets_that_end_after_an_epoch_are_each_read_once():
    """Most of 40 datasets end at positions of their own."""
    sizes = {str(n): 10 + n for n in range(40)}
    shares = dict.fromkeys(sizes, 1 / 40)
    order = GrainMixture(sizes, [Segment(0, shares, sizes)], 0, True, block=64)
    total = sum(sizes.values())
    assert sorted(order[position] for position in range(total)) == list(range(total))


def test_mixture_of_more_datasets_than_positions_is_refused():
    shares = {str(n): 1 / 30 for n in range(30)}
    with pytest.raises(UserError, match="draws from at most 20 datasets"):
        GrainMixture(dict.fromkeys(shares, 5), [Segment(0, shares)], 0, True, 20)
