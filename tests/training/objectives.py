"""Configs, data and a base model for runs of `train.objective`."""

import json

from jaxforge.commands import prepare
from jaxforge.exit_codes import Exit
from jaxforge.training import launch
from tests.conftest import tiny_config
from torch_compat.convert import conversion
from torch_compat.convert.source import Request

MODEL = {"vocab_size": 260, "n_layers": 1, "dim": 32, "max_seq_len": 64}


def config(path, name, **sections):
    checkpoint = {"dir": str(path / name), "interval": 2, **sections.pop("checkpoint", {})}
    steps = {"max_steps": 4, "batch_size": 4, "seq_len": 48, **sections.pop("train", {})}
    model = {**MODEL, **sections.pop("model", {})}
    return tiny_config(checkpoint=checkpoint, train=steps, model=model, **sections)


def dpo(path, name, **sections):
    checkpoint = {
        "load_path": str(path / "base"), "exclude_from_loading": ["optimizer", "progress"],
        **sections.pop("checkpoint", {}),
    }  # fmt: skip
    return config(
        path, name,
        train={"objective": "dpo", **sections.pop("train", {})},
        checkpoint=checkpoint,
        data={"dataset_path": str(path / "pairs" / "train"), "num_workers": 0},
        eval={"enabled": True, "datasets": {"dataset_path": str(path / "pairs" / "validation")},
              "interval": 2},
        **sections,
    )  # fmt: skip


def distilled(path, name, teacher="base", **sections):
    settings = {"teacher": str(path / teacher), "top_k": 8, "temperature": 2.0}
    return config(
        path, name,
        train={"objective": "distillation", **sections.pop("train", {})},
        distillation=settings,
        eval={"enabled": True, "datasets": {"dataset_path": str(path / "text" / "train")},
              "interval": 2},
        data={"dataset_path": str(path / "text" / "train"), "num_workers": 0},
        **sections,
    )  # fmt: skip


def stored(run, step):
    return json.loads((run / "checkpoints" / f"step_{step}" / "checksums" / "metadata").read_text())


def progress(run, step):
    file = run / "checkpoints" / f"step_{step}" / "progress" / "metadata"
    return json.loads(file.read_text())


def prepare_data(directory, **sections):
    """Write pairs and texts, and train a base model."""
    words = ["alpha", "beta", "gamma", "delta"]
    records = [
        {"prompt": f"{words[i % 4]} {i}", "chosen": " yes" * (i % 3 + 1), "rejected": " no, never"}
        for i in range(60)
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (directory / "text.txt").write_text("\n".join(f"{r['prompt']}{r['chosen']}" for r in records))
    for name, more in (("pairs.jsonl", ["--preferences", "--validation-fraction=0.3"]),
                       ("text.txt", [])):  # fmt: skip
        output = directory / name.partition(".")[0]
        arguments = [directory / name, "--output", output, "--workers", "1", *more]
        assert prepare.main([str(x) for x in arguments]) == 0
    assert (
        launch.fit(config(directory, "base", train={"max_steps": 2}, **sections)) is Exit.COMPLETED
    )


def student(runs, name, teacher="base", **train):
    shape = {"dim": 16, "n_heads": 2, "n_kv_heads": 1}
    return distilled(runs, name, teacher, model=shape, train=train)


def export(source, directory):
    """Write a checkpoint as a Hugging Face model."""
    request = Request(source, directory, "hf")
    conversion.run(request, conversion.plan(request), lambda _: None)
