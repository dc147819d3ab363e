"""Tokens per second of greedy generation, compared with `generate` of transformers.

    python benchmarks/decode.py [--quick] [--cases WORDS]

Both have the same weights, exported from one checkpoint, the same prompts, threads and precision,
and alternate in one run. transformers uses its defaults: SDPA and a cache of keys and values. In
float32 all tokens must be equal. On a GPU the models are larger and compute in bfloat16, where ties
are decided by rounding: a note has the fraction of equal tokens. Without transformers, notes have
jaxforge's speed alone.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import results
import step
import torch

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.job import JobConfig
from jaxforge.inference import open_run
from jaxforge.model.decoding import Decoder
from jaxforge.model.sampling import Sampling
from jaxforge.parallel import host_memory
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.runs import run_directory
from jaxforge.state.progress import Progress
from torch_compat.commands import convert

PROMPT, TOKENS = 64, 256
BATCHES = (1, 8)
PEER = "transformers"
HAS_PEER = importlib.util.find_spec(PEER) is not None


class Case(NamedTuple):
    """Model and precision.

    Attributes:
        name: name in the table.
        model: the `[model]` section.
        precision: `train.mixed_precision`, also of transformers.
    """

    name: str
    model: dict
    precision: str = "fp32"


QUICK = Case("0.7M", {"dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": 512})
CPU_CASES = tuple(
    Case(size, case.model) for size, case in zip(("7M", "38M"), step.CPU_CASES, strict=True)
)
GPU_CASES = (Case("1B", step.DENSE_1B, "bf16"),)


class Subject(NamedTuple):
    """Generation of all tokens, and of the first one of each prompt."""

    generate: Callable[[], list[list[int]]]
    first: Callable[[], object]


def cases(words: str, *, quick: bool) -> list[Case]:
    """Return the cases for this device whose names have these words."""
    on_device = GPU_CASES if jax.default_backend() == "gpu" else CPU_CASES
    return [case for case in ((QUICK,) if quick else on_device) if words in case.name]


def write_checkpoints(case: Case, directory: Path) -> tuple[Path, Path]:
    """Write random weights as a run and as a checkpoint of Hugging Face; return both paths."""
    run, export = directory / "run", directory / "export"
    length = PROMPT + TOKENS
    config = JobConfig.model_validate({
        "model": {**case.model, "max_seq_len": length},
        "train": {"mixed_precision": case.precision, "seq_len": length},
        "checkpoint": {"dir": str(run), "async_mode": "disabled"},
    })  # fmt: skip
    program = Program(config, make_mesh(config, jax.devices()[:1]))
    run_directory.prepare(run, config)
    saved = Checkpoints(run, config.checkpoint, program.model.axes, config.model_dump(mode="json"))
    saved.save(Progress(step=1), program.init(0))
    saved.close()
    convert.main([str(run), str(export), "--to", "hf", "--dtype", "float32"])
    return run, export


@contextmanager
def ours(run: Path, prompts: list[list[int]]) -> Iterator[Subject]:
    """Yield jaxforge's generation."""
    trained = open_run(run, devices=jax.devices()[:1])
    with trained.in_use() as params:
        decoder = Decoder(trained.model, params, TOKENS, Sampling(0.0), mesh=trained.mesh)

        def generate() -> list[list[int]]:
            return [completion.tokens for completion in decoder.complete(prompts, numbers)]

        numbers = range(len(prompts))
        yield Subject(generate, lambda: next(decoder.stream(prompts)))


def theirs(export: Path, prompts: list[list[int]], dtype: torch.dtype) -> Subject:
    """Return the generation of transformers."""
    from transformers import AutoModelForCausalLM  # optional (`HAS_PEER`)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = AutoModelForCausalLM.from_pretrained(export, dtype=dtype).to(device).eval()
    ids = torch.tensor(prompts, device=device)

    def generate(tokens: int) -> list[list[int]]:
        with torch.no_grad():
            output = network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return output[:, PROMPT:].tolist()

    return Subject(lambda: generate(TOKENS), lambda: generate(1))


def compare(case: Case, *, quick: bool) -> tuple[list[results.Row], list[str]]:
    """Return the rows and notes of a case.

    Raises:
        SystemExit: tokens differ in float32.
    """
    rows, notes = [], []
    dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
    with tempfile.TemporaryDirectory() as directory:
        run, export = write_checkpoints(case, Path(directory))
        for batch in BATCHES:
            rng = np.random.default_rng(batch)
            prompts = rng.integers(0, case.model["vocab_size"], (batch, PROMPT)).tolist()
            named = f"{case.name} parameters, batch {batch}"
            rounds = 1 if quick else 3
            with ours(run, prompts) as subject:
                subjects = {"our first": subject.first, "ours": subject.generate}
                if HAS_PEER:
                    peer = theirs(export, prompts, dtype)
                    tokens = np.array(subject.generate()), np.array(peer.generate())
                    alike = float(np.mean(tokens[0] == tokens[1]))
                    if alike < 1 and dtype == torch.float32:
                        raise SystemExit(f"{named}: {alike:.2%} of tokens are equal")
                    subjects |= {"their first": peer.first, "theirs": peer.generate}
                seconds = step.measure(subjects, rounds, repeats=1)
            speeds = {who: round(batch * TOKENS / each, 1) for who, each in seconds.items()}
            firsts = {who: round(1e3 * each, 1) for who, each in seconds.items()}
            if not HAS_PEER:
                notes.append(f"{named}: {speeds['ours']} tokens/s, first {firsts['our first']} ms")
                continue
            rows += [
                results.Row(named, speeds["ours"], PEER, speeds["theirs"], "tokens/s"),
                results.Row(f"{named}, first token", firsts["our first"], PEER,
                            firsts["their first"], "ms", smaller_is_better=True),
            ]  # fmt: skip
            notes.append(f"{named}: {alike:.1%} of tokens are equal")
    return rows, notes


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    results.leave_room()
    host_memory.keep_freed_memory()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    rows = []
    notes = [
        f"prompts of {PROMPT} tokens, {TOKENS} new tokens, greedy, medians of 3, {threads} threads"
    ]
    for case in cases(args.cases, quick=args.quick):
        result = compare(case, quick=args.quick)
        rows += result[0]
        notes += result[1]
    packages = ("jax", "torch", *([PEER] if HAS_PEER else []))
    results.report("decode", rows, packages, notes=notes, write=not args.quick and not args.cases)


if __name__ == "__main__":
    main()
