"""Requests per second of lm_eval's tasks, compared with lm_eval's backend for the export.

    python benchmarks/harness.py [--quick]

Needs `pip install '.[lm-eval,torch]' 'lm_eval[hf]'`. Both use the same float32 weights, requests
and batch size, and alternate in one process. Their answers are compared.

Not in `make bench`: needs lm_eval (`make test-lm-eval`).
"""

import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import results
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from jaxforge.commands import prepare, train
from jaxforge.tools.lm_eval import JaxforgeLM
from torch_compat.commands import convert

CONFIG = """
[model]
dim = {dim}
n_layers = {layers}
n_heads = 8
n_kv_heads = 4
vocab_size = 4096
max_seq_len = 512
[train]
batch_size = 4
seq_len = 128
max_steps = 20
mixed_precision = "fp32"
[optimizer]
lr = 3e-3
"""
TOLERANCE = 1e-4  # of a log-probability, relative: float32, in other orders


def make_run(directory: Path, dim: int, layers: int) -> tuple[str, str]:
    """Train a run on the source of Python's library and export it."""
    sources = sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py")))
    data, run, export = (directory / name for name in ("data", "run", "export"))
    prepare.main([*sources, "--output", str(data), "--tokenizer", "bpe", "--vocab-size", "4096"])
    config = directory / "run.toml"
    config.write_text(CONFIG.format(dim=dim, layers=layers))
    paths = [f"--checkpoint.dir={run}", f"--data.dataset_path={data / 'train'}"]
    train.main(["--config", str(config), *paths])
    convert.main([str(run), str(export), "--to", "hf", "--dtype", "float32"])
    return str(run), str(export)


def requests(n: int) -> dict[str, tuple[str, list[tuple]]]:
    """Return case -> method of lm_eval's models and its requests."""
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()
    contexts = [text[i * 400 : i * 400 + 300 + 40 * (i % 8)] for i in range(n)]
    words = ["self.value", "return None", "import os", "for x in y:"]
    endings = [text[7 * i : 7 * i + 120] for i in range(4)]
    greedy = {"until": ["\n\n"], "max_gen_toks": 64}
    return {
        "4 choices, a letter each": (
            "loglikelihood",
            [(c, f" {x}") for c in contexts for x in "ABCD"],
        ),
        "4 choices of some words": (
            "loglikelihood",
            [(c, f" {w}") for c in contexts for w in words],
        ),
        "4 choices of 120 characters": (
            "loglikelihood",
            [(c, f" {e}") for c in contexts for e in endings],
        ),
        "perplexity of 6,000 characters": (
            "loglikelihood_rolling",
            [(text[i * 4000 : i * 4000 + 6000],) for i in range(n // 4)],
        ),
        "64 tokens, greedy": ("generate_until", [(c, greedy) for c in contexts]),
    }


def ask(lm: object, method: str, arguments: list[tuple]) -> tuple[list, float]:
    """Return answers and seconds."""
    asked = [Instance(method, {}, each, i) for i, each in enumerate(arguments)]
    started = time.perf_counter()
    return getattr(lm, method)(asked, disable_tqdm=True), time.perf_counter() - started


def are_alike(ours: list, theirs: list) -> float:
    """Return the fraction of equal answers, with log-probabilities equal to `TOLERANCE`."""

    def same(first: object, other: object) -> bool:
        if isinstance(first, tuple) and isinstance(other, tuple):
            return first[1] == other[1] and same(first[0], other[0])
        if isinstance(first, float) and isinstance(other, float):
            return abs(first - other) <= TOLERANCE * abs(other)
        return first == other

    return sum(map(same, ours, theirs)) / len(ours)


def measure(
    ours: object, theirs: object, method: str, arguments: list[tuple], rounds: int
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Return the fraction of equal answers, and seconds of the first and of later passes."""
    models = {"ours": ours, "theirs": theirs}
    first = {name: ask(lm, method, arguments) for name, lm in models.items()}
    later: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, lm in models.items():
            later[name].append(ask(lm, method, arguments)[1])
    alike = are_alike(first["ours"][0], first["theirs"][0])
    medians = {name: statistics.median(seconds) for name, seconds in later.items()}
    return alike, {name: seconds for name, (_, seconds) in first.items()}, medians


def main() -> int:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    results.leave_room()
    n, rounds, (dim, layers) = (8, 1, (64, 2)) if quick else (32, 3, (256, 6))
    rows, shares = [], []
    with tempfile.TemporaryDirectory() as directory:
        run, export = make_run(Path(directory), dim, layers)
        ours = JaxforgeLM(run, batch_size=16)
        theirs = HFLM(export, device="cpu", batch_size=16)
        for case, (method, arguments) in requests(n).items():
            alike, first, later = measure(ours, theirs, method, arguments, rounds)
            shares.append(f"{case}: {alike:.1%}")
            for when, seconds in ((", compilation included", first), ("", later)):
                speeds = {name: len(arguments) / each for name, each in seconds.items()}
                peer = ("lm_eval's hf, torch", speeds["theirs"])
                rows.append(results.Row(f"{case}{when}", speeds["ours"], *peer, "requests/s"))
    notes = [
        f"{layers} layers of {dim}, float32, {n} contexts of 300 to 580 characters, 16 at a time",
        f"answers that are the same: {'; '.join(shares)}",
    ]
    packages = ("jax", "lm_eval", "torch", "transformers")
    results.report("harness", rows, packages, notes=notes, write=not quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
