"""Check that runs train on this device: a minute on text, and a run that resumes.

    python benchmarks/device_train.py [--quick] [--cases WORDS]

`text`: `jaxforge prepare` tokenizes the source of the standard library, as `make train` does, and
`jaxforge train` learns it for a minute, with evaluations and checkpoints. Speed and memory must be
those of the beginning at the end, and the share of the time that is steps is reported.

`resume`: a run on bytes, without a tokenizer, is stopped and resumed with the same command. Its
first part is repeated with attention as plain products. Each row states its claim.

Not in `make bench`: part of `gpu.py` and `tpu.py`.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import results

from jaxforge.data.corpus.manifest import VERSION, Manifest
from jaxforge.data.corpus.writer import ShardWriter
from jaxforge.exit_codes import Exit

ROOT = Path(__file__).parents[1]
TEXT = 8_000_000  # bytes
KERNELS = {"cpu": "blockwise", "gpu": "cudnn", "tpu": "splash"}
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Size(NamedTuple):
    """Size of the model and the run; `tolerance` is relative, a few roundings of `dtype`."""

    dim: int
    n_layers: int
    seq: int
    steps: int
    dtype: str
    tolerance: float

    @property
    def stop(self) -> int:
        """Step after which the run stops and is resumed."""
        return self.steps * 2 // 3


SIZES = {
    True: Size(64, 2, 64, 20, "fp32", 1e-4),
    False: Size(512, 8, 1024, 60, "bf16", 0.02),
}


class Text(NamedTuple):
    """Size of the run on text.

    Attributes:
        folder: folder of the standard library; "" for all of it.
        vocab: entries of the tokenizer.
        minutes: duration of the run, compilation included.
        every: steps between checkpoints, and between evaluations.
        warmup: steps that no speed is taken of.
    """

    dim: int
    n_layers: int
    rows: int
    seq: int
    folder: str
    vocab: int
    minutes: float
    every: int
    warmup: int
    dtype: str


TEXTS = {
    True: Text(64, 2, 4, 64, "email", 300, 0.75, 20, 5, "fp32"),
    False: Text(768, 12, 32, 1024, "", 4096, 1.3, 200, 50, "bf16"),
}
LEFT_OUT = ("site-packages/*", "test/*", "*/test/*", "*/tests/*", "idlelib/*", "encodings/*")
SLOWER = 0.05  # of the second half of a run, at most


def text_config(size: Text, data: Path) -> str:
    """Return the TOML of the run on text."""
    return f"""
[model]
dim = {size.dim}
n_layers = {size.n_layers}
n_heads = {size.dim // 64}
vocab_size = {size.vocab}
max_seq_len = {size.seq}

[train]
batch_size = {size.rows}
seq_len = {size.seq}
max_steps = 100000
mixed_precision = "{size.dtype}"
exit_duration_in_mins = {size.minutes}

[optimizer]
lr = 1e-3

[scheduler]
warmup_steps = {size.warmup}

[data]
dataset_path = "{data / "train"}"
tokenizer_path = "{data / "tokenizer"}"
pack_sequences = true

[eval]
enabled = true
datasets = {{dataset_path = "{data / "validation"}"}}
interval = {size.every}
steps = 5

[checkpoint]
interval = {size.every}

[metrics]
log_interval = 1
"""


def text_claims(size: Text, directory: Path) -> Iterator[results.Claim]:
    """Yield the claims of a run on text."""
    config, data, run = directory / "text.toml", directory / "text", directory / "text-run"
    config.write_text(text_config(size, data))
    text = str(Path(sysconfig.get_path("stdlib"), size.folder))
    left_out = [f"--exclude={pattern}" for pattern in LEFT_OUT]
    prepared = jaxforge("prepare", text, f"--output={data}", "--glob=*.py", *left_out,
                        "--tokenizer=bpe", f"--vocab-size={size.vocab}",
                        "--validation-fraction=0.05")  # fmt: skip
    yield (first := ended("text: prepare", prepared, Exit.COMPLETED.code))
    if not first.holds:
        return
    done = train(config, run)
    yield (last := ended("text: train", done, Exit.DURATION.code))
    if not last.holds:
        return
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in every if "train/loss" in line]
    logged = results.Claim("text: steps", len(steps), f"{4 * size.warmup} at least",
                           len(steps) >= 4 * size.warmup)  # fmt: skip
    yield logged
    if not logged.holds:
        return
    yield from steady(steps, size)
    evals = [line["eval/loss"] for line in every if "eval/loss" in line]
    yield results.Claim("text: validation loss", f"{evals[0]:.3f} -> {evals[-1]:.3f}"
                        if evals else "none", "at least two", len(evals) > 1)  # fmt: skip


def steady(steps: list[dict], size: Text) -> Iterator[results.Claim]:
    """Yield the claims about loss, speed and memory of the logged steps of a run."""
    begin, end = steps[0]["train/loss"], steps[-1]["train/loss"]
    skipped = steps[-1].get("train/skipped_steps", 0)
    yield results.Claim(f"text: loss of {len(steps)} steps", f"{begin:.3f} -> {end:.3f}",
                        "it falls by a tenth at least", end < 0.9 * begin)  # fmt: skip
    yield results.Claim("text: skipped steps", skipped, "0", skipped == 0)
    timed = steps[size.warmup :]
    halves = timed[: len(timed) // 2], timed[len(timed) // 2 :]
    early, late = (statistics.median(line["train/step_time_sec"] for line in half)
                   for half in halves)  # fmt: skip
    # A busy CPU is not steady.
    is_steady = jax.default_backend() == "cpu" or late < (1 + SLOWER) * early
    yield results.Claim("text: median step, first and second half",
                        f"{1e3 * early:.2f} ms, {1e3 * late:.2f} ms",
                        f"{SLOWER:.0%} slower at most", is_steady)  # fmt: skip
    speed = statistics.median(line["train/tokens_per_sec"] for line in timed)
    spent = timed[-1]["time"] - timed[0]["time"]
    whole = (len(timed) - 1) * size.rows * size.seq / spent
    yield results.Claim("text: tokens/s of the median step; of all time after the warm-up, with "
                        "evaluations and checkpoints", f"{speed:,.0f}; {whole:,.0f}: "
                        f"{whole / speed:.1%}")  # fmt: skip
    if "train/mfu_causal" in timed[-1]:
        mfu = statistics.median(line["train/mfu_causal"] for line in timed)
        yield results.Claim("text: MFU of the median step", f"{mfu:.1%}")
    memory = [half[-1]["gpu/peak_gb"] for half in halves if "gpu/peak_gb" in half[-1]]
    if len(memory) > 1:
        yield results.Claim("text: peak memory, first half and end",
                            f"{memory[0]:.2f} GiB, {memory[1]:.2f} GiB", "equal within 1 %",
                            memory[1] < 1.01 * memory[0])  # fmt: skip


def config_of(size: Size, data: Path) -> str:
    """Return the TOML as a user would write it."""
    return f"""
[model]
dim = {size.dim}
n_layers = {size.n_layers}
n_heads = {size.dim // 64 or 1}
vocab_size = 256
max_seq_len = {size.seq}

[train]
batch_size = 8
seq_len = {size.seq}
max_steps = {size.steps}
mixed_precision = "{size.dtype}"
exit_interval = {size.stop}

[optimizer]
lr = 2e-3

[scheduler]
warmup_steps = {size.steps // 10}

[data]
dataset_path = "{data}"

[checkpoint]
interval = {size.steps}

[metrics]
log_interval = 1
"""


def write_text(directory: Path) -> None:
    """Write shards of bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in paths)[:TEXT]
    with ShardWriter(directory, dtype="uint16") as writer:
        writer.add(np.frombuffer(text, np.uint8).astype(np.uint16))
        Manifest.of_shards(
            writer.complete(), version=VERSION, dtype="uint16", documents=0, eos_id=None,
            vocab_size=256, tokenizer="none", tokenizer_sha256="",
        ).write(directory)  # fmt: skip


def jaxforge(*words: str, **env: str) -> tuple[int, str]:
    """Return exit code and output of a command."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "jaxforge", *words], env={**os.environ, "PYTHONPATH": path, **env},
        cwd=ROOT, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def train(config: Path, run: Path, *settings: str, shares: bool = False) -> tuple[int, str]:
    """Return exit code and output of a run; with `shares`, it allocates GPU memory on demand."""
    paths = [f"--config={config}", f"--checkpoint.dir={run}"]
    return jaxforge("train", *paths, *settings, **(SHARED if shares else {}))


def losses(run: Path) -> dict[int, float]:
    """Return step -> loss."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def ended(case: str, done: tuple[int, str], code: int) -> results.Claim:
    """Return whether a run ended as expected; print its output otherwise."""
    if done[0] != code:
        print(done[1])
    return results.Claim(f"{case}: exit code", done[0], str(code), done[0] == code)


def claims_of(size: Size, directory: Path) -> list[results.Claim]:
    """Return the claims of three runs."""
    write_text(directory / "data")
    config, run, plain = directory / "run.toml", directory / "run", directory / "plain"
    config.write_text(config_of(size, directory / "data"))
    first = train(config, run)
    result = [ended("first part", first, Exit.INTERVAL.code)]
    if not result[0].holds:
        return result
    with ThreadPoolExecutor() as pool:  # both start slowly, and nothing is timed
        second = pool.submit(train, config, run)
        other = pool.submit(train, config, plain, '--model.sdpa_backend="math"', shares=True)
    result += [
        kernel("first part", first, KERNELS[jax.default_backend()]),
        ended("resumed", second.result(), Exit.COMPLETED.code),
        ended("with reference attention", other.result(), Exit.INTERVAL.code),
        kernel("with reference attention", other.result(), "reference"),
    ]
    return [*result, *compared(losses(run), losses(plain), size)]


def kernel(case: str, done: tuple[int, str], name: str) -> results.Claim:
    """Return whether the banner of a run names the attention kernel."""
    banner = next((line for line in done[1].splitlines() if "attention:" in line), "")
    return results.Claim(f"{case}: {' '.join(banner.split())}", name, name,
                         f"attention: {name}," in banner)  # fmt: skip


def compared(ours: dict[int, float], plain: dict[int, float], size: Size) -> list[results.Claim]:
    """Return the claims about losses of the whole run and of the part with plain attention."""
    steps, stop = sorted(ours), size.stop
    begin, end = ours[steps[0]], ours[steps[-1]]
    # A run that had begun anew would be near its first loss again.
    goes_on = stop + 1 in ours and ours[stop + 1] < (begin + ours[stop]) / 2
    worst = max(abs(ours[n] - plain[n]) / plain[n] for n in plain)
    return [
        results.Claim("steps logged", len(steps), str(size.steps), len(steps) == size.steps),
        results.Claim("loss", f"{begin:.3f} -> {end:.3f}", "it falls by a tenth at least",
                      math.isfinite(end) and end < 0.9 * begin),
        results.Claim("loss around the resume", f"{ours[stop]:.3f} -> {ours.get(stop + 1)}",
                      "it goes on", goes_on),
        results.Claim(f"losses of {len(plain)} steps beside reference attention's",
                      f"{worst:.2e} apart at most", f"{size.tolerance:g}, relative",
                      worst < size.tolerance),
    ]  # fmt: skip


def main() -> int:
    """Print the claims and write the results; return 1 if a claim does not hold."""
    args = results.arguments(__doc__, cases=True).parse_args()
    quick = args.quick
    size, text = SIZES[quick], TEXTS[quick]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary).resolve()
        claims = [*(text_claims(text, directory) if args.cases in "text" else ()),
                  *(claims_of(size, directory) if args.cases in "resume" else ())]  # fmt: skip
    notes = [
        f"text: {text.n_layers} layers of {text.dim}, {text.rows} x {text.seq} tokens a step, "
        f"{text.dtype}; {text.minutes * 60:.0f} s with compilation",
        f"resume: {size.n_layers} layers of {size.dim}, 8 x {size.seq} bytes a step, {size.dtype}",
    ]
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "grain")
    return results.judge("train", claims, packages, notes=notes, write=not quick and not args.cases)


if __name__ == "__main__":
    raise SystemExit(main())
