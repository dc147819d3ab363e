"""Small texts, data, configs and runs for the commands of the documentation."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxforge.commands import init, prepare, replay
from jaxforge.config.job import JobConfig
from jaxforge.training import launch
from tests.conftest import tiny_config
from tests.helpers import cli
from tests.torch_compat.megatron_golden import GOLDEN, write_hybrid

ROOT = Path(__file__).parents[1]
PAGES = ("data", "experts", "library", "metrics", "plan", "reliability")
VOCAB = 320
SMALL = {
    "dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": 4, "ffn_hidden_dim": 48,
    "vocab_size": VOCAB, "max_seq_len": 512,
}  # fmt: skip
CONFIGS = ("run", "my_run", "my", "a", "b", "base")
MYMODEL = '''
from transformers import LlamaConfig, LlamaForCausalLM


class Mine(LlamaForCausalLM):
    def forward(self, tokens):
        return super().forward(tokens).logits


def build(config):
    ours = config.model
    return Mine(LlamaConfig(
        vocab_size=ours.vocab_size, hidden_size=ours.dim, intermediate_size=ours.ffn_hidden_dim,
        num_hidden_layers=ours.n_layers, num_attention_heads=ours.n_heads,
        rms_norm_eps=ours.norm_eps, rope_theta=ours.rope_theta,
    ))
'''  # fmt: skip


def make(here: Path) -> None:
    """Create all files in a directory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(here)
        _texts()
        _data()
        _configs()
        _runs()
        _old()
        _megatron()


def _texts() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    (rules,) = re.findall(r"```python\n(def keep_long.*?)```", page, re.DOTALL)
    Path("my_rules.py").write_text(rules)
    Path("my_texts").mkdir()
    for name in PAGES:
        for i, part in enumerate((ROOT / "docs" / f"{name}.md").read_text().split("\n\n")):
            Path("my_texts", f"{name}_{i}.md").write_text(part)
    Path("questions.jsonl").write_text('{"prompt": "What is"}\n{"prompt": "The"}\n')
    Path("pairs.jsonl").write_text(
        "".join(
            f'{{"prompt": "{i}?", "chosen": " Yes.", "rejected": " I do not know."}}\n'
            for i in range(20)
        )
    )
    Path("chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Hello"},'
        ' {"role": "assistant", "content": "Hello there"}]}\n' * 20
    )


def _data() -> None:
    """Write `data/mine` with `prepare`, and copies under the names used in pages."""
    prepare.main([
        "my_texts", "--output", "data/mine", "--tokenizer", "bpe", "--vocab-size", str(VOCAB),
        "--validation-fraction", "0.05", "--workers", "1",
    ])  # fmt: skip
    for name in ("web", "tokens"):
        shutil.copytree("data/mine/train", f"data/{name}")
    shutil.copytree("data/mine/validation", "data/code/validation")
    (shard,) = Path("data/mine/validation").glob("*.npy")
    Path("data/de").mkdir()
    tokens = np.load(shard).astype(np.uint16)
    tokens[: len(tokens) - 1 | 1].tofile("data/de/1.bin")  # an odd number is read as uint16
    shutil.copytree("data/mine/tokenizer", "chat_tokenizer")
    Path("chat_tokenizer/chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )


def _config(run: str, steps: int, interval: int, **sections: dict) -> JobConfig:
    keys = {
        "model": SMALL,
        "train": {"max_steps": steps, "seq_len": 32, "batch_size": 1},
        "distributed": {"dp_shard": -1},
        "data": {"dataset_path": "data/mine/train", "tokenizer_path": "data/mine/tokenizer"},
        "checkpoint": {"dir": run, "interval": interval},
        "eval": {
            "enabled": True,
            "datasets": {"dataset_path": "data/mine/validation"},
            "steps": 2,
        },
        "metrics": {"log_interval": 1},
        "lora": {},
    }
    return tiny_config(**{name: keys.get(name, {}) | sections.get(name, {}) for name in keys})


def _configs() -> None:
    for name in CONFIGS:
        steps = 60 if name == "run" else 4
        Path(f"{name}.toml").write_text(_config(f"runs/of_{name}", steps, steps).to_toml())
    init.main(["--preset", "124m", "--data", "data/mine", "--output", "124m.toml"])
    (Path("configs")).symlink_to(ROOT / "configs")
    written = Path("data/mine/train.toml")
    steps = [line for line in written.read_text().splitlines() if line.startswith("max_steps")]
    written.write_text(written.read_text().replace(steps[0], "max_steps = 4"))


def _runs() -> None:
    """Train runs with the steps and layers used in pages; others are copies."""
    launch.fit(_config("runs/mine", 410, 400, train={"seq_len": 8, "ema_decay": 0.99},
                      metrics={"log_interval": 100}))  # fmt: skip
    launch.fit(_config("runs/quickstart", 100, 50, model={"n_layers": 6}))
    for name in ("one", "two", "other"):
        shutil.copytree("runs/quickstart", f"runs/{name}")
    adapted = {"dir": "runs/adapted", "load_path": "runs/mine", "interval": 4}
    launch.fit(_config("runs/adapted", 4, 4, lora={"rank": 2}, checkpoint=adapted))
    replay.main(["runs/mine", "--capsule", "mine.zip"])


def _old() -> None:
    """Write a KempnerForge run (`old/checkpoints` and its TOML file) and its imports."""
    launch.fit(_config("before", 12, 10, train={"exit_interval": 10}))
    cli(["convert", "before", "old/checkpoints", "--to", "dcp"])
    cli(["convert", "before", "checkpoint.pt", "--to", "pt"])
    goes_on = Path("before/config.toml").read_text().replace("exit_interval = 10\n", "")
    Path("old/config.toml").write_text(goes_on)
    shutil.rmtree("before")
    shutil.copytree("data/tokens", "tokens")
    cli(["convert", "--to=jaxforge", "old/checkpoints", "new", "--config", "old/config.toml",
                       "--data.dataset_path=tokens", "--data.order=torch"])  # fmt: skip
    for name in ("my_run", "runs/taken_over"):
        shutil.copytree("new", name)
        config = Path(name, "config.toml")  # contains its own directory, like an import
        config.write_text(config.read_text().replace('dir = "new"', f'dir = "{name}"', 1))
    Path("mymodel.py").write_text(MYMODEL)


def _megatron() -> None:
    """Write checkpoints of Megatron-Core (`megatron`), and models of all jobs (`hf`)."""
    names = {"dense": "dense", "moe": "experts", "mtp": "latent"}
    for name, golden in names.items():
        shutil.copytree(GOLDEN / golden, f"megatron/{name}")
    write_hybrid(Path("megatron/hybrid/iter_0000002"))
    for name in (*names, "hybrid"):
        cli(["convert", f"megatron/{name}", f"hf/{name}", "--to=hf"])
    cli(["convert", "old/checkpoints", "hf/old", "--to=hf", "--config=old/config.toml"])
