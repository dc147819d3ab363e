"""Logits of a teacher that are saved in advance (`jaxforge prepare --teacher-logits`)."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxforge.commands import prepare
from jaxforge.config.data import DataConfig
from jaxforge.data.sources import open_training_data
from jaxforge.data.teacher_logits import FILE_NAME, TEACHER_IDS, TEACHER_LOGITS
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.tools.prove import xla_flags
from jaxforge.tools.teacher_logits import save
from jaxforge.training import launch
from tests.machine import PATIENCE, wait_until
from tests.training.objectives import prepare_data, progress, stored
from tests.training.objectives import student as online

STEPS = 6

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directory of all runs, with prepared data, a teacher, its logits and a student."""
    directory = tmp_path_factory.mktemp("logits")
    prepare_data(directory)
    save(student(directory, "any"), directory / "saved", per_file=3)
    assert launch.fit(student(directory, "online", max_steps=STEPS)) is Exit.COMPLETED
    return directory


def student(runs, name, **train):
    """Return a config with packed documents."""
    config = online(runs, name, **train)
    data = config.data.model_copy(update={"pack_sequences": True})
    return config.model_copy(update={"data": data})


def offline(config, logits):
    """Return a config with saved logits in place of a teacher."""
    section = config.distillation.model_copy(update={"teacher": None, "logits": str(logits)})
    return config.model_copy(update={"distillation": section})


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [line["train/loss"] for line in metrics(run) if "train/loss" in line]


def test_run_with_saved_logits_equals_the_run_with_a_teacher(runs):
    """Over more than an epoch; a part of the run has the teacher itself."""
    assert len(open_training_data(student(runs, "any"))) < 4 * STEPS
    parts = student(runs, "offline", max_steps=STEPS, exit_interval=2)
    assert launch.fit(offline(parts, runs / "saved")) is Exit.INTERVAL
    assert launch.fit(parts) is Exit.INTERVAL
    config = offline(student(runs, "offline", max_steps=STEPS), runs / "saved")
    assert launch.fit(config) is Exit.COMPLETED
    assert losses(runs / "offline") == losses(runs / "online")
    assert stored(runs / "offline", STEPS) == stored(runs / "online", STEPS)
    assert progress(runs / "offline", STEPS)["frozen"] == progress(runs / "online", STEPS)["frozen"]
    last = [line for line in metrics(runs / "offline") if "eval/loss" in line][-1]
    assert last["step"] == STEPS
    assert "eval/distillation/kl" not in last, "evaluation sets have no saved logits"


def test_fewer_logits_than_saved_are_the_largest(runs):
    config = offline(student(runs, "any"), runs / "saved")
    section = config.distillation.model_copy(update={"top_k": 3})
    fewer = open_training_data(config.model_copy(update={"distillation": section})).batch([4, 17])
    whole = open_training_data(config).batch([4, 17])
    assert fewer[TEACHER_IDS].shape == (2, 48, 3)
    for name in (TEACHER_IDS, TEACHER_LOGITS):
        np.testing.assert_array_equal(fewer[name], whole[name][..., :3])
    assert (np.diff(whole[TEACHER_LOGITS]) <= 0).all()


def test_float16_rounds_logits(runs):
    save(student(runs, "any"), runs / "half", dtype="float16")
    half, whole = (
        open_training_data(offline(student(runs, "any"), runs / name)).batch([0, 19])
        for name in ("half", "saved")
    )
    np.testing.assert_array_equal(half[TEACHER_IDS], whole[TEACHER_IDS])
    rounded = whole[TEACHER_LOGITS].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(half[TEACHER_LOGITS], rounded)
    sizes = [sum(f.stat().st_size for f in (runs / n).glob("*.npy")) for n in ("half", "saved")]
    assert sizes[0] < sizes[1]


@pytest.mark.slow
def test_mixture_reads_the_logits_of_each_dataset(runs):
    for name in ("a", "b"):
        text = "\n".join(f"{name} {i} of {name * (i % 5)}" for i in range(120))
        (runs / f"{name}.txt").write_text(text)
        output = str(runs / name)
        prepared = [str(runs / f"{name}.txt"), "--output", output, "--workers", "1"]
        assert prepare.main(prepared) == 0
    config = student(runs, "mixed")
    mixture = [{"name": name, "path": str(runs / name / "train")} for name in ("a", "b")]
    data = {"dataset_path": "", "datasets": mixture}
    update = {"data": DataConfig.model_validate({**config.data.model_dump(), **data})}
    save(config.model_copy(update=update), runs / "of_both", per_file=7)
    # A mixture of one of the two, under another name, finds its logits.
    data["datasets"] = [{**mixture[1], "name": "other"}]
    update = {"data": DataConfig.model_validate({**config.data.model_dump(), **data})}
    for config_of in (student(runs, "online_b"), offline(student(runs, "b_run"), runs / "of_both")):
        assert launch.fit(config_of.model_copy(update=update)) is Exit.COMPLETED
    assert losses(runs / "b_run") == losses(runs / "online_b")


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("train", {"seq_len": 32}, "was saved with train.seq_len = 48, and this run has 32"),
        ("data", {"pack_sequences": False}, "was saved with data.pack_sequences = True, and"),
        ("model", {"vocab_size": 261}, "was saved with model.vocab_size = 260"),
        ("distillation", {"top_k": 9}, "top_k = 9 exceeds the 8 logits of a token"),
    ],
)
def test_other_sequences_are_refused_at_the_start(runs, section, change, message):
    config = offline(student(runs, "refused"), runs / "saved")
    changed = getattr(config, section).model_copy(update=change)
    with pytest.raises(UserError, match=message):
        launch.fit(config.model_copy(update={section: changed}))
    assert not (runs / "refused" / "checkpoints").exists()


def test_other_data_are_refused(runs):
    output = str(runs / "other_text")
    (runs / "other.txt").write_text("\n".join(f"another text {i}" for i in range(200)))
    assert prepare.main([str(runs / "other.txt"), "--output", output, "--workers", "1"]) == 0
    config = offline(student(runs, "refused"), runs / "saved")
    data = config.data.model_copy(update={"dataset_path": f"{output}/train"})
    with pytest.raises(UserError, match=r"has no logits of .*other_text/train"):
        launch.fit(config.model_copy(update={"data": data}))


@pytest.mark.slow
def test_another_teacher_is_refused_at_a_resume(runs):
    shutil.copytree(runs / "saved", runs / "exchanged")
    manifest = json.loads((runs / "exchanged" / FILE_NAME).read_text())
    name = min(manifest["arrays"])
    manifest["arrays"][name][1] = 0
    (runs / "exchanged" / FILE_NAME).write_text(json.dumps(manifest))
    config = student(runs, "changed", max_steps=2)
    assert launch.fit(offline(config, runs / "saved")) is Exit.COMPLETED
    longer = offline(student(runs, "changed", max_steps=3), runs / "exchanged")
    with pytest.raises(UserError, match=r"distillation.logits = .* is not the model that the run"):
        launch.fit(longer)


def test_damaged_record_is_named(runs):
    shutil.copytree(runs / "saved", runs / "damaged")
    path = runs / "damaged" / "0_00002.npy"
    records = np.load(path)
    records["logits"][1, 5, 0] += 1  # sequence 7
    np.save(path, records)
    data = open_training_data(offline(student(runs, "any"), runs / "damaged"))
    data.batch([6, 8])
    with pytest.raises(UserError, match=r"the logits of sequence 7 of .* are damaged"):
        data.batch([6, 7, 8])
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match=r"0_00002.npy is missing or cut short"):
        open_training_data(offline(student(runs, "any"), runs / "damaged"))


def test_existing_directory_is_replaced_on_request_alone(runs):
    shutil.copytree(runs / "saved", runs / "again")
    with pytest.raises(UserError, match=r"again exists; .* or pass --overwrite"):
        save(student(runs, "any"), runs / "again")
    save(student(runs, "any"), runs / "again", per_file=20, overwrite=True)
    assert {path.name for path in (runs / "again").iterdir()} == {FILE_NAME, "0_00000.npy"}
    with pytest.raises(UserError, match="was not made by this command"):
        save(student(runs, "any"), runs / "text", overwrite=True)


def test_logits_of_random_tokens_are_refused(runs):
    config = student(runs, "any")
    data = config.data.model_copy(update={"dataset_path": "", "dataset_type": "synthetic"})
    with pytest.raises(UserError, match="logits can be saved for token files alone"):
        save(config.model_copy(update={"data": data}), runs / "random")


def test_teacher_and_logits_exclude_each_other(runs):
    config = student(runs, "any")
    section = config.distillation.model_copy(update={"logits": "saved"})
    with pytest.raises(UserError, match=r"distillation.teacher and distillation.logits are both"):
        launch.fit(config.model_copy(update={"distillation": section}))
    with pytest.raises(UserError, match=r"--teacher-logits needs .* distillation.teacher"):
        save(offline(config, runs / "saved"), runs / "new")


def command(config, output, *options):
    """Start the command in a process of its own."""
    file = output.with_suffix(".toml")
    file.write_text(config.to_toml())
    return subprocess.Popen(
        [sys.executable, "-m", "jaxforge.prepare", "--teacher-logits", file, "--output", output,
         *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(1)},
    )  # fmt: skip


@pytest.mark.slow
def test_killed_command_resumes_after_its_last_file(runs):
    np.save(runs / "tokens.npy", np.random.default_rng(0).integers(0, 260, 49 * 301, np.uint16))
    config, files = student(runs, "any"), 151
    data = {"dataset_path": str(runs), "file_pattern": "tokens.npy", "pack_sequences": False}
    config = config.model_copy(update={"data": config.data.model_copy(update=data)})
    process = command(config, runs / "resumed", "--sequences-per-file=2")
    partial = runs / ".resumed.partial"
    wait_until(lambda: (partial / "out" / "0_00020.npy").exists(), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (runs / "resumed").exists()
    (complete,) = json.loads((partial / "journal.json").read_text())["files"]
    assert 20 <= complete < files
    written = [path.stat().st_mtime_ns for path in complete_files(partial / "out", complete)]
    save(config, runs / "resumed", per_file=2)
    save(config, runs / "at_once", per_file=2)
    resumed = complete_files(runs / "resumed", complete)
    assert [path.stat().st_mtime_ns for path in resumed] == written
    assert len(list((runs / "at_once").iterdir())) == files + 1
    for path in (runs / "at_once").iterdir():
        assert (runs / "resumed" / path.name).read_bytes() == path.read_bytes(), path.name


def complete_files(directory, n):
    return [directory / f"0_{i:05d}.npy" for i in range(n)]


@pytest.mark.slow
def test_full_disk_is_one_message(runs):
    limit = 30_000  # bytes of a file, less than a file of records needs
    process = command(student(runs, "any"), runs / "full", "--sequences-per-file=20")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, output
    assert "error: cannot write" in output.splitlines()[-1]
    assert "File too large" in output.splitlines()[-1]
    assert not (runs / "full").exists()
