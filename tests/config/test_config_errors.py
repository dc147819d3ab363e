"""Error messages of configs, with their location."""

import pytest
from pydantic import ValidationError

from jaxforge.config import JobConfig, load_config
from jaxforge.config.reading.explain import Sources, explain
from jaxforge.config.reading.load import Setting
from jaxforge.errors import UserError


@pytest.fixture
def error_text(tmp_path, monkeypatch):
    """Return the error message for TOML text in x.toml with overrides."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str) -> str:
        (tmp_path / "x.toml").write_text(text)
        with pytest.raises(UserError) as caught:
            load_config("x.toml", overrides)
        return str(caught.value)

    return load_text


OWN = "; to use a registered name, import its module: --plugins.modules=MODULE"
NAMES = "cosine, linear, wsd, constant, rex, none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[train]\n\nbatchsize = 3",
            "x.toml:3: unknown key train.batchsize; did you mean train.batch_size?",
        ),
        (
            "# first\n[model]\nlr = 3",
            "x.toml:3: unknown key model.lr; did you mean optimizer.lr or outer_optimizer.lr?",
        ),
        (
            "[train]\ninterval = 3",
            "x.toml:2: unknown key train.interval; did you mean eval.interval or "
            "eval.datasets.interval or checkpoint.interval or metrics.writers.interval?",
        ),
        (
            "[model]\nbatchsize = 3",
            "x.toml:2: unknown key model.batchsize; did you mean train.batch_size or "
            "eval.batch_size?",
        ),
        ("dim = 64\n[train]", "x.toml:1: unknown key dim; did you mean model.dim?"),
        ("[optimiser]\nlr = 1", "x.toml:1: unknown key optimiser; did you mean optimizer?"),
        ("[train]\nqqq = 1", "x.toml:2: unknown key train.qqq"),
        (
            "[model.rope_scaling]\nfaktor = 2",
            "x.toml:2: unknown key model.rope_scaling.faktor; did you mean "
            "model.rope_scaling.factor?",
        ),
        (
            "[[data.datasets]]\npath = 'a'\n[[data.datasets]]\npath = 'a'\nwieght = 2",
            "x.toml:5: unknown key data.datasets[1].wieght; did you mean data.datasets.weight?",
        ),
        (
            '[train]\nbatch_size = "many"',
            'x.toml:2: train.batch_size = "many": expected an integer greater than 0',
        ),
        (
            "[train]\nbatch_size = 512.7",
            "x.toml:2: train.batch_size = 512.7: expected an integer greater than 0",
        ),
        (
            "[train]\nbatch_size = true",
            "x.toml:2: train.batch_size = true: expected an integer greater than 0",
        ),
        ("[train]\nseed = []", "x.toml:2: train.seed = []: expected an integer"),
        (
            "[optimizer]\nlr = nan",
            "x.toml:2: optimizer.lr = nan: expected a number greater than 0",
        ),
        (
            "[scheduler]\nmin_lr_ratio = 2",
            "x.toml:2: scheduler.min_lr_ratio = 2: expected a number of at least 0 and at most 1",
        ),
        (
            "[optimizer]\nbetas = [0.9]",
            "x.toml:2: optimizer.betas = [0.9]: expected a list of 2 values",
        ),
        (
            "[optimizer]\nbetas = 0.9",
            "x.toml:2: optimizer.betas = 0.9: expected a list of 2 values",
        ),
        (
            "[optimizer]\nbetas = [\n  0.9,\n  1.0,\n]",
            "x.toml:2: optimizer.betas[1] = 1.0: expected a number of at least 0 and less than 1",
        ),
        (
            "[train]\nrerun_bad_steps = 'maybe'",
            'x.toml:2: train.rerun_bad_steps = "maybe": expected true or false',
        ),
        ("[data]\ndataset_path = []", "x.toml:2: data.dataset_path = []: expected text"),
        (
            "train = 3",
            "x.toml:1: train = 3: expected a table of batch_size, global_batch_size, seq_len, ...",
        ),
        (
            '[scheduler]\nname = "cosin"',
            f'x.toml:2: scheduler.name = "cosin": expected one of {NAMES}; did you mean "cosine"?',
        ),
        (
            "[train]\nmixed_precision = 'BF16'",
            'x.toml:2: train.mixed_precision = "BF16": expected one of bf16, fp16, fp32, fp8; '
            'did you mean "bf16"?',
        ),
        (
            "[scheduler]\nname = 'x'",
            f'x.toml:2: scheduler.name = "x": expected one of {NAMES}{OWN}',
        ),
        (
            "[checkpoint]\nexclude_from_loading = ['progres']",
            'x.toml:2: checkpoint.exclude_from_loading[0] = "progres": expected one of model, '
            'optimizer, progress, indexer; did you mean "progress"?',
        ),
        (
            "[data]\nanneal_start_step = 1\nanneal_weights = {a = -1}",
            "x.toml:3: data.anneal_weights.a = -1: expected a number of at least 0",
        ),
        (
            "[train]\nseed = 1\n[model]\ndim = 65\nn_heads = 4\nn_kv_heads = 3",
            "x.toml:3: [model] dim = 65 must be a multiple of n_heads = 4: change dim or "
            "n_heads, or set head_dim\n"
            "x.toml:3: [model] n_heads = 4 must be a multiple of n_kv_heads = 3: change n_heads or "
            "n_kv_heads",
        ),
        (
            "[model]\ndim = 64\nn_heads = 4\nhead_dim = 15",
            "x.toml:1: [model] head_dim = 15 must be even: rotary embeddings pair the two "
            "halves of a head",
        ),
        (
            "[model]\ndim = 12\nn_heads = 4",
            "x.toml:1: [model] dim / n_heads = 12 / 4 = 3 must be even: rotary embeddings pair "
            "the two halves of a head",
        ),
        (
            "[data]\ndatasets = [{path = 'a'},\n  {weight = 2}]",
            "x.toml:2: [data.datasets[1]] a source requires path or hf_name",
        ),
        ("[vlm]\narch = 'mot'", "x.toml:1: [vlm] cannot be used: jaxforge trains text models only"),
        ("[video]", "x.toml:1: [video] cannot be used: jaxforge trains text models only"),
        ("a = 1\n[train]\nseed 3", "x.toml:3:6: not valid TOML: Expected '=' after a key in a"),
        ("a = 1\na = 2\n", "x.toml:2:6: not valid TOML: Cannot overwrite a value"),
        ("[train", "x.toml: not valid TOML: "),
    ],
)
def test_file_errors_are_reported_with_line(error_text, text, message):
    actual = error_text(text)
    assert actual.startswith(message) if "not valid" in message else actual == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["--train.lr=3"],
            "--train.lr=3: unknown key train.lr; did you mean optimizer.lr or outer_optimizer.lr?",
        ),
        (["--nonsense"], "--nonsense: unknown key nonsense"),
        (
            ["--train.batch_size=many"],
            "--train.batch_size=many: expected an integer greater than 0",
        ),
        (
            ["--train.batch_size=True"],
            "--train.batch_size=True: expected an integer greater than 0",
        ),
        (
            ["--train.batch_size", "--scheduler.name", "seed=3"],
            "--train.batch_size needs a value: an integer greater than 0\n"
            f"--scheduler.name needs a value: one of {NAMES}\n"
            "seed=3: expected --section.key=value",
        ),
        (
            ["--scheduler.name=cosin"],
            f'--scheduler.name=cosin: expected one of {NAMES}; did you mean "cosine"?',
        ),
        (
            ["--train=3"],
            "--train=3: expected a table of batch_size, global_batch_size, seq_len, ...",
        ),
        (["--train={1: 2}"], "--train={1: 2}: unknown key train[1]"),
        (
            ["--data.datasets=[{'path':'a','weight':0}]"],
            "--data.datasets=[{'path':'a','weight':0}]: data.datasets[0].weight = 0: "
            "expected a number greater than 0",
        ),
        (
            ["--train={'seed':'x'}"],
            "--train={'seed':'x'}: expected an integer",
        ),
        (
            ["--train.seed=1", "--train.seed=x", "--train.lr=2"],
            "--train.lr=2: unknown key train.lr; did you mean optimizer.lr or outer_optimizer.lr?\n"
            "--train.seed=x: expected an integer",
        ),
        (["--train.seed.x=1"], "--train.seed.x=1: train.seed = {x = 1}: expected an integer"),
        (
            ["--train.opt_state_dtype=int8"],
            "--train.opt_state_dtype=int8: expected one of float32, bfloat16, float16, 8bit",
        ),
        (
            ["--train.opt_state_dtype=8bits"],
            "--train.opt_state_dtype=8bits: expected one of float32, bfloat16, float16, 8bit; did "
            'you mean "8bit"?',
        ),
        (
            ["--optimizer.options={'b1':[1]}"],
            "--optimizer.options={'b1':[1]}: optimizer.options.b1 = [1]: expected true or false, "
            "an integer, a number or text",
        ),
        (
            ["--optimizer.options.b1"],
            "--optimizer.options.b1 needs a value: true or false, an integer, a number or text",
        ),
        (["--vlm.arch=mot"], "--vlm.arch=mot: [vlm] cannot be used: jaxforge trains text models"),
    ],
)
def test_command_line_errors_are_reported(error_text, settings, message):
    actual = error_text("", *settings).splitlines()
    assert len(actual) == len(message.splitlines())
    assert all(any(line.startswith(start) for line in actual) for start in message.splitlines())


ZERO, LARGEST = "rounds to 0 in float32: use at least 1.19e-38", "use at most 2,147,483,647"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("optimizer.eps=1e-50", ZERO),
        ("optimizer.lr=1e-46", ZERO),
        ("optimizer.weight_decay=1e-40", ZERO),  # a subnormal number, which processors flush
        ("model.norm_eps=1e-50", ZERO),
        ("model.rope_theta=1e39", "rounds to infinity in float32: use at most 3.4e+38"),
        ("optimizer.betas=[1e-60,0.9]", ZERO),
        ("optimizer.lr_patterns={'head':1e-50}", ZERO),
        ("optimizer.options={'b1':1e-50}", ZERO),
        ("data.datasets=[{'path':'a','weight':1e-50}]", ZERO),
        ("train.max_steps=2147483648", LARGEST),
        ("data.phases=[{'start_step':3000000000}]", LARGEST),
        ("checkpoint.keep_last_n=-2147483649", "use at least -2,147,483,648"),
    ],
)
def test_numbers_that_32_bits_cannot_hold_are_refused(error_text, setting, problem):
    actual = error_text("", f"--{setting}")
    assert actual.startswith(f"--{setting}: ")
    assert actual.endswith(problem)


@pytest.mark.parametrize(
    "setting",
    [
        "train.max_steps=2147483647",
        "optimizer.weight_decay=0",
        "optimizer.betas=[0.0,0.9999999]",
        "data.datasets=[{'path':'a','max_tokens':'3T tok'}]",
        "train.seed=4294967295",
    ],
)
def test_numbers_that_32_bits_can_hold_are_accepted(setting):
    load_config(None, [f"--{setting}"])


@pytest.mark.parametrize("key", ["seed", "data_seed"])
@pytest.mark.parametrize(("seed", "same"), [(2**32 + 1, 1), (-1, 2**32 - 1), (7 - 2**32, 7)])
def test_seeds_that_repeat_another_one_are_refused(error_text, key, seed, same):
    assert error_text("", f"--train.{key}={seed}") == (
        f"--train.{key}={seed}: [train] {key} = {seed} must be from 0 to 4294967295, because seeds "
        f"that differ by 2^32 make the same random numbers: set {key} to {same}"
    )


@pytest.mark.parametrize(
    ("key", "most"),
    [("model.n_layers", 10_000), ("model.mtp_depth", 10_000), ("distributed.tp", 2**20),
     ("distributed.dp_shard", 2**20), ("distributed.elastic_processes", 2**20)],
)  # fmt: skip
def test_counts_beyond_any_machine_are_refused_at_once(error_text, key, most):
    section, _, name = key.partition(".")
    for number in (most + 1, 10**9):
        message = error_text(f"[{section}]\n{name} = {number}")
        assert message.startswith(f"x.toml:2: {key} = {number}: expected an integer ")
        assert message.endswith(f"at most {most:,}")
    load_config("x.toml", [f"--{key}={most}"])


@pytest.mark.parametrize(
    "key",
    ["model.n_layers", "model.dim", "model.head_dim", "model.n_kv_heads", "model.vocab_size",
     "train.seed", "distributed.tp", "data.datasets", "eval.activations_layers"],
)  # fmt: skip
def test_numbers_of_many_digits_have_a_short_message(error_text, key):
    for digits in (400, 5000):
        assert len(error_text("", f"--{key}={'9' * digits}")) < 1000


def test_problems_are_reported_together_in_file_order(error_text):
    text = "[train]\nseed = 'x'\nlr = 1\n[eval]\nsteps = 0\n[optimizer]\nlr = -1"
    assert error_text(text, "--metrics.log_interval=0").splitlines() == [
        'x.toml:2: train.seed = "x": expected an integer',
        "x.toml:3: unknown key train.lr; did you mean optimizer.lr or outer_optimizer.lr?",
        "x.toml:5: eval.steps = 0: expected an integer greater than 0",
        "x.toml:7: optimizer.lr = -1: expected a number greater than 0",
        "--metrics.log_interval=0: expected an integer greater than 0",
    ]


def test_broken_rule_names_its_setting(error_text):
    text = "[model]\ndim = 64\nn_heads = 4"
    rule = (
        "[model] dim = 64 must be a multiple of n_heads = 5: change dim or n_heads, or set head_dim"
    )
    assert error_text(text, "--model.n_heads=5") == f"--model.n_heads=5: {rule}"
    wrong = "[model]\ndim = 64\nn_heads = 5"
    assert error_text(wrong, "--model.vocab_size=5") == f"x.toml:1: {rule}"


def test_broken_rule_without_line_names_last_setting_of_section():
    setting = Setting("--profiling.trace_dir=x", ("profiling", "trace_dir"), "x")
    with pytest.raises(ValidationError) as caught:
        JobConfig.model_validate({"profiling": {"start_step": 9}})
    text = explain(caught.value, Sources("", {}, [setting]))
    assert text.startswith("--profiling.trace_dir=x: [profiling] end_step = 8 must be greater")


def test_long_values_are_shortened(error_text):
    assert len(error_text(f"[train]\nseed = '{'x ' * 999}'")) < 120


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.toml", "no config file at missing.toml"),
        (".", "no config file at .: it is a directory"),
        ("latin.toml", "latin.toml: not valid TOML: not UTF-8 at byte 3"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"#: \xe4")
    with pytest.raises(UserError) as caught:
        load_config(name)
    assert str(caught.value) == message
