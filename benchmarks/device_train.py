"""Check that a default run trains and resumes on this device and matches reference attention.

    python benchmarks/device_train.py [--quick]

`jaxforge train` trains on the bytes of the standard library's source, without a
tokenizer. The run is stopped and resumed with the same command. Its first part is repeated with
attention as plain products. Each row states its claim.
"""

import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
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


def train(config: Path, run: Path, *settings: str, shares: bool = False) -> tuple[int, str]:
    """Return exit code and output of a run, which allocates GPU memory on demand."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "jaxforge.train", f"--config={config}",
               f"--checkpoint.dir={run}", *settings]  # fmt: skip
    done = subprocess.run(
        command, env=env | (SHARED if shares else {}), cwd=ROOT, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


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
    quick = results.arguments(__doc__).parse_args().quick
    with tempfile.TemporaryDirectory() as directory:
        size = SIZES[quick]
        claims = claims_of(size, Path(directory).resolve())
    note = f"{size.n_layers} layers of {size.dim}, 8 x {size.seq} bytes a step, {size.dtype}"
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "grain")
    return results.judge("train", claims, packages, notes=[note], write=not quick)


if __name__ == "__main__":
    raise SystemExit(main())
