"""From text files to a sample: prepare, train, generate, as commands."""

import io
import itertools
import json
import subprocess
import sys

import pytest

import jaxforge
from jaxforge.commands import generate, prepare
from jaxforge.data.corpus.tokenizer import ByteTokenizer
from jaxforge.errors import UserError
from jaxforge.inference import completion, conversation
from jaxforge.model.decoding import Decoder
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, Run, environment

pytestmark = pytest.mark.usefixtures("two_devices")


def command(*arguments):
    result = subprocess.run(
        [sys.executable, "-m", "jaxforge.generate", *map(str, arguments)],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trained on one sentence over and over, until it knows it by heart."""
    path = tmp_path_factory.mktemp("generate")
    for i in range(40):
        (path / f"{i:02}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 8)
    texts = [str(text) for text in sorted(path.glob("*.txt"))]
    assert prepare.main([*texts, "--output", str(path / "data")]) == 0
    run = Run(path, "run")
    run.finish_here(
        f"--data.dataset_path={path / 'data' / 'train'}", "--model.vocab_size=264",
        "--train.max_steps=120", "--checkpoint.interval=60", "--metrics.log_interval=60",
    )  # fmt: skip
    return run


def test_one_prompt_is_continued(run):
    text = command(run.directory, "--prompt", "the quick", "--max-tokens", 30,
                   "--temperature", 0)  # fmt: skip
    assert text == "the quick brown fox jumps over the lazy\n"


@pytest.fixture
def here(capsysbinary):
    """Return the command's output in this process, which has two devices."""

    def here(*arguments):
        assert generate.main([*map(str, arguments)]) == 0
        return capsysbinary.readouterr().out.decode()

    return here


def test_several_prompts_of_an_older_checkpoint(run, here):
    text = here(run.directory / "checkpoints" / "step_60", "--prompt", "jumps over",
                "--prompt", "the", "--max-tokens", 5, "--temperature", 0)  # fmt: skip
    first, second = text.split("--- 2\n")
    assert first.startswith("--- 1\njumps over")
    assert second.startswith("the")


def test_seed_decides(run, here):
    def draw(seed):
        return here(run.directory, "--prompt", "the ", "--max-tokens", 20,
                    "--temperature", 3, "--seed", seed)  # fmt: skip

    assert draw(1) == draw(1) != draw(2)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_file_of_prompts_on_a_mesh(run, here, tmp_path):
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = ["the quick brown fox", "jumps", "", "over the", "lazy dog. the quick brown"]
    prompts.write_text("".join(json.dumps({"prompt": t, "id": i}) + "\n"
                               for i, t in enumerate(texts)))  # fmt: skip
    here(run.directory, "--prompts", prompts, "--output", output, "--max-tokens", 12,
         "--temperature", 0, "--batch-size", 2, "--distributed.tp=2")  # fmt: skip
    results = lines(output.read_text())
    assert [(r["prompt"], r["id"]) for r in results] == [(t, i) for i, t in enumerate(texts)]
    assert results[0]["completion"] == " jumps over "
    for result in results:
        assert set(result) == {"prompt", "id", "completion", "tokens", "finish_reason"}
        assert bytes(result["tokens"]).decode() == result["completion"]
        assert result["finish_reason"] == "length"
    prompts.with_suffix(".txt").write_text("\n".join(texts) + "\n")
    split_by_rows = here(run.directory, "--prompts", prompts.with_suffix(".txt"),
                         "--max-tokens", 12, "--temperature", 0)  # fmt: skip
    assert [{**r, "id": i} for i, r in enumerate(lines(split_by_rows))] == results


def test_generation_stops_at_any_eos_id(run, here, monkeypatch):
    """The greedy continuation is " jumps over "."""
    monkeypatch.setattr(ByteTokenizer, "eos_ids", (256, ord("v"), ord("m")))
    text = here(run.directory, "--prompt", "the quick brown fox", "--prompt", "the",
                "--max-tokens", 12, "--temperature", 0)  # fmt: skip
    assert text.startswith("--- 1\nthe quick brown fox ju\n--- 2\n")
    ours = jaxforge.Run(run.directory)
    assert ours.generate("the quick brown fox", max_tokens=12, temperature=0) == " ju"


@pytest.mark.slow
def test_completion_stops_at_the_end_of_text(run, tmp_path, here):
    (tmp_path / "p.txt").write_text("lazy dog. \n" * 3)
    arguments = [run.directory, "--prompts", tmp_path / "p.txt", "--top-k", "5",
                 "--temperature", "3", "--max-tokens", "25", "--seed", "1"]  # fmt: skip

    def results(*more):
        return lines(here(*arguments, *more))

    ended, endless = results(), results("--ignore-eos")
    reasons = {r["finish_reason"] for r in ended}
    assert {r["finish_reason"] for r in endless} == {"length"}
    assert len({r["completion"] for r in endless}) == 3  # each prompt draws for itself
    for item, other in zip(ended, endless, strict=True):
        assert item["tokens"] == other["tokens"][: len(item["tokens"])]
        assert (item["finish_reason"] == "stop") == (256 in other["tokens"])
    assert results("--batch-size", "1") == ended
    assert reasons <= {"stop", "length"}


def test_results_are_written_in_order_as_soon_as_they_are_known(run, tmp_path, monkeypatch):
    """The third batch fails: what the first two have made whole is in the file."""
    (tmp_path / "p.txt").write_text("the quick brown\nthe\nthe lazy\ndog\nfox\njumps\n")
    complete, calls = Decoder.complete, []

    def fails(decoder, prompts, numbers):
        calls.append(list(numbers))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return complete(decoder, prompts, numbers)

    monkeypatch.setattr(Decoder, "complete", fails)
    monkeypatch.setattr(completion, "WINDOW", 1)
    arguments = ["--prompts", tmp_path / "p.txt", "--output", tmp_path / "o.jsonl"]
    with pytest.raises(KeyboardInterrupt):
        generate.main([str(run.directory), *map(str, arguments), "--batch-size=2",
                       "--max-tokens=3"])  # fmt: skip
    assert calls == [[1, 0], [3, 2], [4, 5]]  # each sorted by length
    written = lines((tmp_path / "o.jsonl").read_text())
    assert [r["prompt"] for r in written] == ["the quick brown", "the", "the lazy", "dog"]


def test_prompts_come_from_standard_input(run, here, monkeypatch):
    def given(text):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return lines(here(run.directory, "--prompts=-", "--max-tokens=6", "--temperature=0"))

    expected = [("the quick", " brown"), ("jumps", " over ")]
    assert [(r["prompt"], r["completion"]) for r in given("the quick\njumps")] == expected
    assert given('{"prompt": "the quick", "id": 3}\n')[0]["id"] == 3


def test_without_a_prompt_there_is_a_conversation(run, here, monkeypatch):
    typed = iter(["the quick", " over", "/quit"])
    monkeypatch.setattr(conversation, "is_possible", lambda: True)
    monkeypatch.setattr(conversation.talk, "__kwdefaults__", {
        "ask": lambda prompt: next(typed),
        "say": lambda text: sys.stdout.buffer.write(text.encode()),
    })  # fmt: skip
    said = here(run.directory, "--max-tokens=6", "--temperature=0").splitlines()
    assert said[0].startswith("the tokenizer has no chat template")
    assert said[1] == " brown"
    assert len(said) == 3
    assert next(typed, None) is None


def test_nobody_to_converse_with(run):
    with pytest.raises(UserError, match=r"without a prompt there is .*--prompts - to read"):
        generate.main([str(run.directory)])


def test_batches_hold_prompts_of_similar_length():
    lengths = [9, 1, 8, 2, 7, 3] * 4
    batches = list(completion.split_by_length(lengths, 3))
    assert sorted(itertools.chain(*batches)) == list(range(24))
    assert [[lengths[i] for i in batch] for batch in batches[:2]] == [[1, 1, 1], [1, 2, 2]]
    assert list(completion.split_by_length([5] * 40, 2))[8:] == [
        [i, i + 1] for i in range(16, 40, 2)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x" * 60], "exceed model.max_seq_len = 64"),
        (["--top-p", "0"], "--top-p 0.0: must be greater than 0 and at most 1"),
        (["--max-tokens", "0"], "--max-tokens 0: must be at least 1"),
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--prompt", "a", "--prompts", "b"], "--prompt and --prompts exclude each other"),
        (["--output", "README.md"], "--output README.md exists: name a new file"),
        (["--output", "none/a.jsonl"], "--output none/a.jsonl: directory none does not exist"),
        (["--step", "7"], "no checkpoint at .*step_7: .*the newest of .* is step 120"),
        (["--distributed.tp=3"], "distributed.tp = 3"),
    ],
)
def test_mistakes_are_explained(run, arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=message):
        generate.main([str(run.directory), *arguments])


def test_bad_line_of_a_file_has_its_place(run, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text(f"good\n{'x' * 60}\n")
    with pytest.raises(UserError, match=f"{path}:2: a prompt of 60 tokens and --max-tokens 9"):
        generate.main([str(run.directory), "--prompts", str(path), "--max-tokens", "9"])


def test_directory_without_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="no checkpoint at"):
        generate.main([str(tmp_path)])


@pytest.mark.slow
def test_run_in_python_is_what_the_commands_say(run, here, tmp_path):
    ours = jaxforge.Run(run.directory, step=60)
    prompts = ["the quick", "jumps over"]
    drawn = here(run.directory, "--step=60", "--prompt", prompts[1], "--max-tokens=20", "--seed=3")
    assert prompts[1] + ours.generate(prompts[1], max_tokens=20, seed=3) + "\n" == drawn
    both = ours.generate(prompts, max_tokens=20, temperature=0)
    assert both[0] == ours.generate(prompts[0], max_tokens=20, temperature=0)
    assert (ours.step, ours.config.train.max_steps) == (60, 120)
    logged = [json.loads(line) for line in (run.directory / "metrics.jsonl").open()]
    losses = {line["step"]: line["train/loss"] for line in logged if "train/loss" in line}
    assert ours.metrics["train/loss"].dropna().to_dict() == losses
    assert ours.metrics.index.is_unique  # a save is logged when it ends, several perhaps in a step
    result = ours.evaluate(steps=1, text=str(run.directory.parent / "data" / "train"))
    assert result["step"] == 60
    assert result["sets"][0]["name"] == "text"
    assert (ours.export(tmp_path / "model") / "model.safetensors").is_file()
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| steps | 60 of 120 |" in card
    assert f"| last loss | {losses[60]:.4f} |" in card
    assert "- data/train: " in card
    assert str(tmp_path.parent) not in card
    with pytest.raises(UserError, match=r"model is there already"):
        ours.export(tmp_path / "model")


def test_run_that_is_not_there_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="none"):
        jaxforge.Run(tmp_path / "none").generate("a")
    with pytest.raises(UserError, match=r"top_p 2\.0: must be greater than 0 and at most 1"):
        jaxforge.Run(tmp_path).generate("a", top_p=2.0)
