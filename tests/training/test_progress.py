"""Counters of a run: derived values and JSON round trips."""

import json

from jaxforge.state.progress import Progress, Validation


def through_json(progress):
    return Progress.from_json(json.loads(json.dumps(progress.to_json())))


def test_epoch_counts_complete_passes():
    epochs = [Progress(samples=n, sequences_per_epoch=10).epoch for n in (0, 9, 10, 19, 20)]
    assert epochs == [0, 0, 1, 1, 2]
    assert Progress(samples=99).epoch is None


def test_updates_count_applied_steps():
    progress = Progress(skipped=1)
    for _ in range(3):
        progress.advance(samples=8, tokens=256)
    assert (progress.step, progress.updates, progress.samples, progress.tokens) == (3, 2, 24, 768)


def test_evaluation_set_is_complete_after_its_last_batch():
    """linnaeus counts a partly evaluated set as both completed and pending."""
    progress = Progress()
    validation = progress.begin_validation(["a", "b"])
    validation.sums["a"] = {"batches": 3}
    assert (validation.pending, validation.completed) == (["a", "b"], [])
    validation.pending.pop(0)
    assert (validation.pending, validation.completed) == (["b"], ["a"])


def test_pending_sets_are_scheduled_once():
    progress = Progress()
    assert progress.stage == "training"
    begun = progress.begin_validation(["a", "b"])
    begun.pending.pop(0)
    assert progress.begin_validation(["a", "b"]) is begun
    assert progress.stage == "validation"


def test_json_round_trip_preserves_progress_and_adds_derived_values():
    progress = Progress(
        step=7, samples=60, tokens=1900, valid_tokens=1800, skipped=2, consecutive_bad=1,
        sequences_per_epoch=25, validation=Validation(["b"], {"a": {"nats": 1.5, "batches": 3}}),
        best_metric=2.5, best_step=4, mixtures=[[0, {"web": 1.0}]],
        rollbacks=[{"from": 9, "to": 4, "samples": 40}], early_stop={"best": 2.5}, run_id="ours",
    )  # fmt: skip
    assert through_json(progress) == progress
    reported = progress.to_json()
    assert (reported["updates"], reported["epoch"], reported["stage"]) == (5, 2, "validation")


def test_written_progress_is_a_copy():
    """linnaeus returns the mutable list itself."""
    progress = Progress(validation=Validation(["a", "b"]))
    written = progress.to_json()
    progress.validation.pending.pop(0)
    progress.rollbacks.append({"from": 2, "to": 1, "samples": 8})
    assert written["validation"]["pending"] == ["a", "b"]
    assert written["rollbacks"] == []
