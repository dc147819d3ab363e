"""`jaxforge init --depth` and `--flops`: formulas, files, costs."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from jaxforge.commands import init, prepare, train
from jaxforge.config import check, load_config
from jaxforge.data.corpus.manifest import Manifest, Shard
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model, parameter_count
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.numbers import human
from jaxforge.tools.plan.topology import Topology
from jaxforge.tools.starting.dial import (
    Wish,
    dial_depth,
    dial_flops,
    optimal_batch,
    optimal_rate,
    sequences,
    shape,
)
from jaxforge.tools.starting.dial_config import dialled_run, table_of_cost
from jaxforge.tools.starting.dial_target import Target, update_seconds
from jaxforge.tools.starting.machine import Machine
from jaxforge.tools.starting.sizes import PreparedData

WISH = Wish(vocab_size=32768, seq_len=2048)
PAGE = (Path(__file__).parents[3] / "docs" / "dial.md").read_text()
NODE = Topology.parse("h100:1x8")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The command sets this variable of its process."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def cells(table, column):
    return dict(zip(table.columns[0].cells, table.columns[column].cells, strict=True))


def test_batch_and_rate_follow_published_models():
    """DeepSeek LLM 7B: C = (72 x 30 x 4096² + 12 x 30 x 4096 x 4096) x 2e12."""
    compute = 8.4557e22
    assert optimal_batch(compute) == pytest.approx(9.2226e6, rel=1e-3)  # by hand
    assert optimal_rate(compute) == pytest.approx(4.2447e-4, rel=1e-3)
    assert optimal_batch(compute) == pytest.approx(2304 * 4096, rel=0.05)  # its table 2
    assert optimal_rate(compute) == pytest.approx(4.2e-4, rel=0.02)


def test_compute_of_batch_formula_is_that_of_its_paper():
    model = {"dim": 4096, "n_layers": 30, "n_heads": 32, "ffn_hidden_dim": 4 * 4096 * 2 // 3}
    settings = [f"--model.{key}={value}" for key, value in model.items()]
    dial = dial_depth(30, Wish(102400, 4096, settings=settings))._replace(tokens=2e12)
    assert dial.compute_of_law == pytest.approx(8.4557e22, rel=1e-3)


def test_sizes_of_a_depth_are_those_computed_by_hand():
    dial = dial_depth(4, WISH)
    assert shape(4) == {"dim": 256, "n_layers": 4, "n_heads": 2, "ffn_hidden_dim": 640}
    layers = 4 * (4 * 256**2 + 3 * 256 * 640)
    head = 32768 * 256
    assert dial.parameters == layers + 2 * head == 19_791_872
    assert dial.tokens == 20 * 19_791_872
    assert dial.flops_per_token == 6 * (layers + head) + 12 * 4 * 256 * 2048 == 93_585_408
    assert dial.compute_of_law == dial.tokens * (93_585_408 - 6 * head)
    assert shape(20) == {"dim": 1280, "n_layers": 20, "n_heads": 10, "ffn_hidden_dim": 3456}


def test_sizes_grow_with_depth():
    dials = [dial_depth(depth, WISH) for depth in range(1, 41)]
    for small, large in itertools.pairwise(dials):
        assert small.parameters < large.parameters
        assert small.tokens < large.tokens
        assert small.flops < large.flops
        assert small.batch_tokens < large.batch_tokens
        assert small.config.model.dim <= large.config.model.dim
    batches = [sequences(dial.batch_tokens, 2048, 8) for dial in dials]
    assert batches == sorted(batches)


@pytest.mark.parametrize("ratio", [5, 20, 100])
@pytest.mark.parametrize("flops", [3e16, 1e18, 1e20, 7e22])
def test_budget_is_spent_at_the_nearest_depth(flops, ratio):
    wish = WISH._replace(ratio=ratio)
    dial = dial_flops(flops, wish)
    assert dial.flops == pytest.approx(flops)

    def distance(depth):
        return abs(math.log(dial_depth(depth, wish).flops / flops))

    near = [depth for depth in (dial.depth - 1, dial.depth, dial.depth + 1) if depth]
    assert min(near, key=distance) == dial.depth


@pytest.mark.parametrize("flops", [1.0, 1e40])
def test_budget_outside_all_depths_is_refused(flops):
    with pytest.raises(UserError, match="depths from 1 to 256 take"):
        dial_flops(flops, WISH)


def test_batch_is_the_nearest_power_of_two_for_each_device():
    assert sequences(2048 * 11, 2048, 1) == 8
    assert sequences(2048 * 12, 2048, 1) == 16
    assert sequences(2048 * 100, 2048, 6) == 6 * 16
    assert sequences(2048 * 3, 2048, 64) == 64


@pytest.mark.parametrize("depth", [1, 7, 20, 40])
@pytest.mark.parametrize("machine", ["h100:1x1", "h100:2x6", "v5e:8x8", "cpu:1"])
def test_written_config_is_valid_and_fits(tmp_path, depth, machine, capsys):
    path, n = tmp_path / "x.toml", Topology.parse(machine).n_devices
    command = ["--depth", str(depth), "--topology", machine, "--output", str(path)]
    if (depth, machine) in {(40, "h100:1x1"), (40, "cpu:1")}:
        with pytest.raises(UserError, match="the model does not fit") as refused:
            init.main(command)
        assert refused.value.exit_code == 2
        assert not path.exists()
        return
    assert init.main(command) == 0
    config = load_config(path)
    check(config, n)
    model = build_model(config, "cpu")
    expected = dial_depth(depth, Wish.of(None, is_on_cpu=machine == "cpu:1")).parameters
    norms = (2 * depth + 1) * config.model.dim
    assert parameter_count(model.abstract) - norms == expected
    assert (config.train.mixed_precision == "fp32") == (machine == "cpu:1")
    assert f"{path}" in capsys.readouterr().out


def test_dry_run_accepts_written_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert init.main(["--flops", "1e19", "--topology", "h100:1x8"]) == 0
    (path,) = tmp_path.glob("d*.toml")
    assert train.main(["--config", str(path), "--dry-run", "--devices", "h100:1x8"]) == 0
    said = capsys.readouterr().out
    used, usable = re.search(r"h100: ([\d.]+) GB of ([\d.]+) GB;", said).groups()
    assert float(used) <= 0.9 * float(usable)
    printed = re.search(r"memory of a device +([\d.]+) GB", said)[1]
    assert printed == used


@pytest.mark.slow
def test_dialled_run_trains_and_costs_the_printed_flops(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("all work and no play\n" * 2000)
    monkeypatch.chdir(tmp_path)
    assert prepare.main(["text.txt", "--output", "mine", "--machine", "cpu"]) == 0
    capsys.readouterr()
    command = ["--depth", "1", "--topology", "cpu:8", "--data", "mine", "--train.seq_len=64"]
    assert init.main([*command, "--output", "x.toml"]) == 0
    printed = re.search(r"^ FLOPs +(\S+)", capsys.readouterr().out, re.M)[1]
    config = load_config("x.toml")
    batch, steps = config.train.global_batch_size, config.train.max_steps
    cost = StepCost.of(config, batch)
    assert float(printed) == pytest.approx(steps * cost.tokens * cost.flops, rel=0.005)
    settings = ["--train.max_steps=3", "--checkpoint.interval=100"]
    assert train.main(["--config", "x.toml", *settings]) == 0
    lines = (tmp_path / "runs" / "d1" / "metrics.jsonl").read_text().splitlines()
    *_, last = [row for row in map(json.loads, lines) if "train/tflops_per_device" in row]
    executed = last["train/tflops_per_device"] * 8e12 * last["train/step_time_sec"]
    assert executed == pytest.approx(cost.tokens * cost.causal_flops, rel=1e-3)
    assert last["train/loss"] < 5.6


def test_settings_of_the_user_replace_choices_and_what_follows(tmp_path):
    path = tmp_path / "x.toml"
    settings = ["--train.seq_len=4096", "--train.global_batch_size=64", "--optimizer.lr=1e-3",
                "--scheduler.name=cosine", "--train.activation_checkpointing=full",
                "--metrics.log_interval=7", "--model.vocab_size=1024"]  # fmt: skip
    command = ["--depth", "4", "--topology", "h100:1x1", *settings, "--output", str(path)]
    assert init.main(command) == 0
    config = load_config(path)
    assert config.train.seq_len == config.model.max_seq_len == 4096
    assert config.train.activation_checkpointing == "full"
    assert (config.train.global_batch_size, config.metrics.log_interval) == (64, 7)
    assert (config.optimizer.lr, config.scheduler.name) == (1e-3, "cosine")
    wish = Wish(1024, 4096, settings=["--model.vocab_size=1024"])
    tokens = dial_depth(4, wish).tokens
    assert config.train.max_steps == round(tokens / (64 * 4096))
    assert re.search(r"^lr = 0.001 .*# given$", path.read_text(), re.M)


def test_length_of_the_user_is_that_of_the_cost(tmp_path, capsys):
    command = ["--depth", "2", "--topology", "h100:1x1", "--train.max_steps", "1B tok"]
    assert init.main([*command, "--output", str(tmp_path / "x.toml")]) == 0
    assert re.search(r"^ tokens +1B ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--preset NAME, --depth N or --flops C is required"),
        (["--depth", "0"], "must be an integer of at least 1"),
        (["--depth", "257"], "--depth 257: must be at most 256"),
        (["--flops", "nan"], "must be a number above 0"),
        (["--depth", "2", "--flops", "1e18"], "not allowed with"),
        (["--flops", "1e18", "--train.max_steps=5"], "both set the length"),
        (["--depth", "2", "--topology", "h100"], "expected one of the forms"),
        (["--depth", "2", "--model.num_experts=8"], "are for dense models"),
        (["--depth", "2", "--model.widht=8"], "unknown key model.widht"),
        (["--depth", "2", "--train.global_batch_size=x"], "expected an integer"),
        (["--preset", "tiny", "--ratio", "5"], "--ratio needs --depth or --flops"),
        (["--preset", "tiny", "--train.seq_ln=5"], "unknown key train.seq_ln"),
    ],
)
def test_mistakes_are_refused_without_a_file(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        init.main(words)
    assert refused.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def manifest(tokens):
    return Manifest(1, "uint16", tokens, 10, 256, 0, 257, "byte", "0", (Shard("a.npy", tokens, 1),))


def test_little_data_is_read_in_epochs_with_a_comment(tmp_path):
    data = PreparedData(tmp_path, manifest(10**6))
    wish = Wish.of(data)
    assert (wish.vocab_size, wish.seq_len) == (257, 2048)
    run = dialled_run(dial_depth(4, wish), wish, Target.of_topology(NODE), data)
    (why,) = (line.why for line in run.tables["train"] if line.key == "max_steps")
    assert "epochs: more than 4 help little" in why
    assert Wish.of(PreparedData(tmp_path, manifest(300))).seq_len == 256


def test_cost_follows_from_assumed_speed():
    run = dialled_run(dial_depth(12, WISH), WISH, Target.of_topology(NODE), None)
    cost, train = cells(table_of_cost(run), 1), run.config.train
    per_device = train.global_batch_size * train.seq_len / 8
    flops = StepCost.of(run.config, 1).causal_flops
    expected = per_device * flops / (0.4 * 989e12)
    assert update_seconds(run.config, run.target) == pytest.approx(expected)
    assert cost["time of an update"] == f"{expected:.3g} s"
    hours = 8 * expected * train.max_steps / 3600
    assert float(cost["device hours"].replace(",", "")) == pytest.approx(hours, rel=0.01)


@pytest.mark.parametrize(
    ("depth", "machine", "remat"),
    [
        (4, "h100:1x8", "none"),
        (20, "h100:1x8", "none"),
        (12, "v6e:2x4", "selective"),
        (32, "v5e:4x4", "full"),
        (4, "cpu:1", "none"),
    ],
)
def test_microbatches_make_up_the_batch(depth, machine, remat):
    target = Target.of_topology(Topology.parse(machine))
    run = dialled_run(dial_depth(depth, WISH), WISH, target, None)
    rows, accum, chosen, _ = run.split
    n = target.n_devices
    assert rows * accum * n == run.config.train.global_batch_size
    assert run.config.train.microbatch_size(n) == rows * n
    assert run.config.train.activation_checkpointing == chosen == remat
    assert rows * 2048 <= 2**15
    assert rows * 2048 >= 2**13 or accum == 1


def driver(tmp_path, name, monkeypatch):
    path = tmp_path / "nvidia-smi"
    kind = f"{name}, 9.0"
    path.write_text(
        f"#!/bin/sh\ncase $1 in *memory*) printf '81559\\n81559\\n';; *) echo '{kind}';; esac\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


def test_this_machine_is_known_by_its_driver(tmp_path, monkeypatch):
    driver(tmp_path, "NVIDIA H100 80GB HBM3", monkeypatch)
    target = Target.of_machine(Machine.here())
    assert target == Target.of_topology(Topology.parse("h100:1x2"))
    driver(tmp_path, "NVIDIA H100 PCIe", monkeypatch)
    target = Target.of_machine(Machine.here())
    assert target.n_devices == 2
    assert target.rate == pytest.approx(0.4 * 756e12)
    assert target.device.capacity == int(81559 * 2**20 * 0.75)


def test_unknown_machines_need_a_name_or_have_no_time(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="Add --topology"):
        Target.of_machine(Machine(4, 16e9))
    driver(tmp_path, "NVIDIA X9000", monkeypatch)
    target = Target.of_machine(Machine.here())
    run = dialled_run(dial_depth(4, WISH), WISH, target, None)
    assert cells(table_of_cost(run), 1)["time"] == "unknown"


def test_documentation_has_the_sizes():
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (.*) \| (.*) \| (.*) \| (.*) \| (.*) \|$", PAGE, re.M)
    assert len(rows) > 5
    for depth, *row in rows:
        dial = dial_depth(int(depth), Wish.of(None))
        batch = 2048 * sequences(dial.batch_tokens, 2048, 1)
        sizes = (dial.parameters, dial.tokens, f"{dial.flops:.2e}", batch)
        texts = [size if isinstance(size, str) else human(size) for size in sizes]
        assert row == [str(dial.config.model.dim), *texts, f"{round(dial.tokens / batch):,}"]
