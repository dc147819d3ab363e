"""Loss curves of the quickstart in every precision, 300 steps.

    python benchmarks/precision.py [--kept] [--quick]

All runs have the same seed, data and batch; the loss is the mean of the last 20 steps. The effect
of rounding on learning is measured, and no time: CPUs gain nothing from less than 32 bits. `--kept`
compares the storage formats of parameters and moments in bf16. Needs `data/quickstart` (`make
data/quickstart`).

Not in `make bench`: needs the quickstart's data.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import results
from rich.console import Console

ROOT = Path(__file__).parents[1]
PRECISIONS = {
    "fp32": ("fp32",),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
    "fp8, tensor": ("fp8", "--train.fp8_scaling=tensor"),
    "fp8, delayed": ("fp8", "--train.fp8_scaling=delayed"),
    "fp8, block": ("fp8", "--train.fp8_scaling=block"),
}
NARROW, EIGHT = "--train.param_dtype=bfloat16", "--train.opt_state_dtype=8bit"
STOCHASTIC, KAHAN = (f"--train.param_rounding={how}" for how in ("stochastic", "kahan"))
STORAGES = {
    "bf16": ("bf16",),
    "moments in bfloat16": ("bf16", "--train.opt_state_dtype=bfloat16"),
    "moments in 8 bits": ("bf16", EIGHT),
    "parameters in bfloat16, nearest": ("bf16", NARROW),
    "parameters in bfloat16, stochastic": ("bf16", NARROW, STOCHASTIC),
    "parameters in bfloat16, kahan": ("bf16", NARROW, KAHAN),
    "parameters in bfloat16, kahan, moments in 8 bits": ("bf16", NARROW, KAHAN, EIGHT),
}
"""All else is float32."""
BATCH, SEQ, LAST = 4, 128, 20
WITHIN = 0.01  # above the loss in bf16: more is a loss


def losses(precision: str, more: tuple[str, ...], steps: int) -> list[float]:
    """Return the loss of each step."""
    with tempfile.TemporaryDirectory() as run:
        command = [
            sys.executable, "-m", "jaxforge.train", "--config", "configs/quickstart.toml",
            f"--train.mixed_precision={precision}", *more, f"--train.max_steps={steps}",
            f"--train.batch_size={BATCH}", f"--train.seq_len={SEQ}", "--eval.enabled=false",
            f"--checkpoint.dir={run}", "--checkpoint.interval=1000000", "--metrics.log_interval=1",
        ]  # fmt: skip
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": paths}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def main() -> None:
    """Print the table and write the results."""
    parser = results.arguments(__doc__)
    parser.add_argument("--kept", action="store_true", help="what parameters and moments are in")
    args = parser.parse_args()
    curves = {
        name: losses(precision, tuple(more), 3 if args.quick else 300)
        for name, (precision, *more) in (STORAGES if args.kept else PRECISIONS).items()
    }
    final = {name: statistics.fmean(curve[-LAST:]) for name, curve in curves.items()}
    rows = [
        {
            "kept" if args.kept else "precision": name,
            "loss": round(loss, 4),
            "of bf16": f"{loss / final['bf16'] - 1:+.2%}",
        }
        for name, loss in final.items()
    ]
    for row in rows:
        Console().print(*row.values(), highlight=False)
    if not args.quick:
        notes = [f"configs/quickstart.toml with {BATCH} x {SEQ} tokens a step"]
        name = "precision_kept" if args.kept else "precision"
        results.write_json(name, rows, ("jax",), notes=notes, curves=curves)
    worse = [name for name in final if final[name] / final["bf16"] - 1 > WITHIN]
    raise SystemExit(f"{', '.join(worse)}: more than {WITHIN:.0%} above bf16" if worse else 0)


if __name__ == "__main__":
    main()
