"""Parsing of options and settings, and suggestions for unknown words."""

import pytest

from jaxforge.commands.command_line import CommandParser
from jaxforge.commands.train import parse_command_line
from jaxforge.errors import UserError


def parser(**options):
    parser = CommandParser("generate", takes_settings=True, **options)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--step", type=int)
    parser.add_argument("--format", choices=("npy", "bin"))
    return parser


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        (["--train.lr=1"], ["--train.lr=1"]),
        (["--optimizer.lr", "3e-4"], ["--optimizer.lr=3e-4"]),
        (["--optimizer.lr", "-1"], ["--optimizer.lr=-1"]),
        (["--train.max_steps", "300B tok"], ["--train.max_steps=300B tok"]),
        (["--train.max_steps=300B tok"], ["--train.max_steps=300B tok"]),
        (["--checkpoint.dir", "a=b"], ["--checkpoint.dir=a=b"]),
        (["--metrics.enable_wandb", "--step", "3"], ["--metrics.enable_wandb"]),
        (["--metrics.enable_wandb", "false"], ["--metrics.enable_wandb=false"]),
        (["--data.datasets", "[{'path': 'a'}]"], ["--data.datasets=[{'path': 'a'}]"]),
    ],
)
def test_settings_and_options_mix_in_any_order(line, settings):
    for words in ([*line, "runs/a"], ["runs/a", *line]):
        args, result = parser().parse(words)
        assert (args.run, result) == ("runs/a", settings)


def test_words_after_double_dash_are_not_settings():
    args, settings = parser().parse(["--", "--train.lr=1"])
    assert (args.run, settings) == ("--train.lr=1", [])


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("--stepp=3", "unknown option --stepp; did you mean --step?"),
        ("--lr=3", "unknown option --lr; did you mean --optimizer.lr or --outer_optimizer.lr?"),
        ("--max-steps", "unknown option --max-steps; did you mean --train.max_steps or "
         "--early_stop.max_steps?"),
        ("--max_step=3", "unknown option --max_step; did you mean --train.max_steps or"),
        ("--xyzzy", "unknown option --xyzzy; `jaxforge generate --help` lists"),
        ("--format=np", "(choose from 'npy', 'bin'); did you mean npy?"),
    ],
)  # fmt: skip
def test_unknown_option_gets_suggestion(word, answer):
    with pytest.raises(UserError) as error:
        parser().parse(["runs/a", word])
    assert answer in str(error.value)


def test_required_option_accepts_an_alias():
    command_parser = CommandParser("prepare")
    command_parser.add_argument("--output", required=True)
    command_parser.add_argument("--tokenizer")
    for line, answer in (
        (["--outputs=a", "--tokenizer=bpe"], "unknown option --outputs; did you mean --output[?]$"),
        (["--tokenizer=bpe"], "^the following arguments are required: --output; `.*--help` lists"),
    ):
        with pytest.raises(UserError, match=answer):
            command_parser.parse(line)


def test_config_without_option_gets_suggestion():
    with pytest.raises(UserError, match=r"argument run.toml; did you mean --config run.toml\?$"):
        parse_command_line(["run.toml"])


@pytest.mark.parametrize(
    "line",
    [
        ["--prompt", "optimizer.lr=3e-4"], ["--prompt==", "runs/a"], ["--", "optimizer.lr=1"],
        ["--checkpoint.dir=", "runs/a"],
    ],
)  # fmt: skip
def test_values_that_look_like_typos_are_accepted(line):
    command_parser = parser()
    command_parser.add_argument("--prompt")
    command_parser.parse(line)


def test_forwarded_arguments_are_not_checked():
    _, forwarded = parser(allows_unknown=True).parse(
        ["a", "--num_fewshot", "--distributed.tp", "2"]
    )
    assert forwarded == ["--num_fewshot", "--distributed.tp=2"]


def test_help_explains_a_key(capsys):
    with pytest.raises(SystemExit) as end:
        parser().parse(["--help", "lr"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("optimizer.lr\n")
