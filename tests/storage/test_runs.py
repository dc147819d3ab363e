"""Runs in buckets, with throttling and killed processes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from emulators import ONE_SERVICE
from run_config import CONFIG

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.paths import find
from jaxforge.commands import evaluate, generate, train
from jaxforge.commands import report as report_main
from jaxforge.data.corpus.manifest import Manifest, Shard
from jaxforge.errors import UserError
from jaxforge.runs.reading import read_series
from jaxforge.state.progress import Progress
from jaxforge.storage import COMMITTED, urls
from tests.conftest import tiny_config
from tests.helpers import cli, setup


def losses(run) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "train/loss" in line]
    assert steps == sorted(set(steps)), "a step is logged twice, or out of order"
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def put_shards(directory, rows: int = 40) -> None:
    """Write two shards, one with its length in the header and one in the manifest."""
    tokens = np.random.default_rng(0).integers(0, 256, (2, rows * 17), np.uint16)
    with (directory / "a.npy").open("wb") as file:
        np.save(file, tokens[0])
    (directory / "b.bin").write_bytes(tokens[1].tobytes())
    shards = (Shard("b.bin", tokens.shape[1], 255),)
    size = tokens.shape[1]
    Manifest(1, "uint16", size, 1, 255, 256, 257, "byte", "0" * 64, shards).write(directory)


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return str(path)


DATA = ["--data.tokenizer_path=byte", "--data.file_pattern=*.[nb]*"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the losses of `CONFIG` with local files."""
    directory = tmp_path_factory.mktemp("directory")
    (directory / "run.toml").write_text(CONFIG)
    (directory / "data").mkdir()
    put_shards(directory / "data")
    locations = [f"--checkpoint.dir={directory}/run", f"--data.dataset_path={directory}/data"]
    assert train.main([f"--config={directory}/run.toml", *DATA, *locations]) == 0
    return losses(directory / "run")


# One kind of bucket per test: the other files test both kinds.
@pytest.mark.slow
@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_killed_and_throttled_run_matches_undisturbed_run(
    undisturbed, server, bucket, toml, tmp_path
):
    """Data, checkpoints and metrics are in the bucket."""
    put_shards(urls.path(f"{bucket}/data"))
    settings = [f"--config={toml}", *DATA]
    remote = [f"--checkpoint.dir={bucket}/run", f"--data.dataset_path={bucket}/data"]
    server.throttle(every=12)
    run = urls.path(f"{bucket}/run")
    command = [sys.executable, "-m", "jaxforge.train", *settings, *remote, "--train.max_steps=200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        while not (run / "checkpoints" / "step_4" / COMMITTED).exists():
            assert process.poll() is None, process.communicate()[0].decode()
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    killed_at = find(run)[1]
    half = run / "checkpoints" / "step_999999" / "state" / "manifest.ocdbt"
    half.write_text("what a kill leaves of a save")
    assert find(run)[1] == killed_at
    steps = killed_at + 4
    assert train.main([*settings, *remote, f"--train.max_steps={steps}"]) == 0
    server.throttle(0)
    assert server.refused > 5
    assert sorted(losses(run)) == list(range(1, steps + 1))
    assert {n: loss for n, loss in losses(run).items() if n in undisturbed} == {
        n: loss for n, loss in undisturbed.items() if n <= steps
    }
    assert not half.exists(), "what was torn is removed"
    log = (run / "logs" / "process_0.log").read_text()
    assert f"resuming from step {killed_at} of {bucket}/run" in log
    check_what_reads(bucket, tmp_path, steps)


def check_what_reads(bucket, tmp_path, steps):
    results = tmp_path / "eval.json"
    sets = f"--set=all={bucket}/data/*.npy"
    assert evaluate.main([f"{bucket}/run", sets, "--batch-size=8", f"--json={results}"]) == 0
    assert json.loads(results.read_text())["step"] == steps
    item = f"{bucket}/run/checkpoints/step_{steps}"
    assert generate.main([item, "--prompt=a", "--max-tokens=3"]) == 0
    assert report_main.main([f"{bucket}/run"]) == 0
    assert b"</html>" in urls.path(f"{bucket}/run/report.html").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_run_resumes_after_copy_to_bucket(bucket, toml, tmp_path):
    """The run keeps two checkpoints, is exported, and initializes another run."""
    assert train.main([f"--config={toml}", f"--checkpoint.dir={tmp_path}/run"]) == 0
    for path in filter(Path.is_file, (tmp_path / "run").rglob("*")):
        if path.stat().st_size:
            location = urls.path(f"{bucket}/run") / path.relative_to(tmp_path / "run").as_posix()
            location.write_bytes(path.read_bytes())
    remote = [f"--config={toml}", f"--checkpoint.dir={bucket}/run", "--checkpoint.keep_last_n=2"]
    assert train.main([*remote, "--train.max_steps=17"]) == 0
    assert sorted(losses(urls.path(f"{bucket}/run"))) == list(range(1, 18))
    paths = {path.name for path in urls.path(f"{bucket}/run/checkpoints").iterdir()}
    assert paths == {"step_16", "step_17"}
    assert cli(["convert", f"{bucket}/run", f"{tmp_path}/hf", "--to=hf"]) == 0
    item = f"{bucket}/run/checkpoints/step_17"
    assert cli(["verify", f"{bucket}/run", item]) == 0
    assert cli(["inspect", f"{bucket}/run"]) == 0
    more = [f"--checkpoint.load_path={bucket}/run", "--train.max_steps=19"]
    assert train.main([f"--config={toml}", f"--checkpoint.dir={tmp_path}/on", *more]) == 0
    assert sorted(losses(tmp_path / "on")) == [18, 19]


@ONE_SERVICE
def test_progress_of_saved_step_is_amended_in_bucket(bucket):
    """An evaluation that ends after the save of its step is recorded in the checkpoint."""
    program = setup(tiny_config())
    saved = Checkpoints(urls.path(f"{bucket}/run"), program.config.checkpoint, program.model.axes)
    saved.save(Progress(step=1), program.state())
    evaluated = Progress(step=1, samples=3)
    saved.amend(evaluated)
    assert saved.progress(1).samples == 3
    saved.close()


def test_metrics_in_bucket_are_read(bucket):
    run = urls.path(f"{bucket}/run")
    logged = [json.dumps({"step": n, "time": 5.0, "train/loss": n / 4}) + "\n" for n in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(logged) + '{"step": 4')
    series = read_series(run)[0]["train/loss"]
    assert (series.step.tolist(), series.value.tolist()) == ([1, 2, 3], [0.25, 0.5, 0.75])


def test_truncated_shard_is_named(bucket, toml, tmp_path):
    data = urls.path(f"{bucket}/data")
    put_shards(data)
    whole = (data / "b.bin").read_bytes()
    settings = [
        f"--config={toml}", f"--data.dataset_path={data}", f"--checkpoint.dir={tmp_path}/run"
    ]  # fmt: skip
    for damaged, what in ((whole[:-2], "is cut short"), (whole + b"00", "is too long")):
        (data / "b.bin").write_bytes(damaged)
        with pytest.raises(UserError, match=rf"b\.bin {what}: it has .* manifest\.json says 1360"):
            train.main([*settings, "--data.file_pattern=*.bin"])
    (data / "c.bin").write_bytes(whole)
    with pytest.raises(UserError, match=r"c\.bin.*needs its type and size in a manifest"):
        train.main([*settings, "--data.file_pattern=c.bin"])
