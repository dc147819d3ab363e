"""Direct preference optimization (DPO, arXiv:2305.18290): answers that people prefer.

    python examples/preference.py RUN PAIRS --config configs/debug.toml [--section.key=value ...]

RUN is the run directory to go on from, and the reference. What is trained is runs/preference unless
--checkpoint.dir names another. PAIRS is a JSONL file of objects with
`prompt`, `chosen` and `rejected`. A pair is one sequence of two documents, which attention keeps
apart; the batch has a field more, `reference`: the log-probabilities that the reference gives to
the two answers, computed once before training.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxforge.cli import run_main
from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.corpus.tokenizer import Tokenizer
from jaxforge.data.dataset import Example
from jaxforge.data.packing import IGNORE
from jaxforge.data.sources import register_dataset
from jaxforge.inference import open_run
from jaxforge.model.transformer import Batch, Model, Params
from jaxforge.run_directory import read_tokenizer
from jaxforge.side import LossWeights, Mean, Side
from jaxforge.step.losses import LossFunction, register_loss
from jaxforge.train import main

BETA = 0.1
"""How much it costs to depart from the reference."""

ROWS = 8  # of a batch, while the reference is asked


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs in random access."""

    examples: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.examples["labels"])

    def batch(self, indices: Sequence[int]) -> Example:
        """`input_ids`, `labels`, `segment_ids` [n, s] and `reference` [n, 2] of `indices`."""
        return {name: array[list(indices)] for name, array in self.examples.items()}


def answer_log_p(
    params: Params, model: Model, hidden_BSD: Array, batch: Batch
) -> Float[Array, "b answer"]:
    """Σ log p of the tokens of both answers."""
    labels_BS = batch["labels"]
    log_p_BSV = jax.nn.log_softmax(model.logits(params, hidden_BSD))
    index_BS1 = jnp.where(labels_BS == IGNORE, 0, labels_BS)[..., None]
    log_p_BS = jnp.take_along_axis(log_p_BSV, index_BS1, axis=-1)[..., 0]
    of_answer_BSA = batch["segment_ids"][..., None] == jnp.arange(2)
    counts_BSA = of_answer_BSA & (labels_BS != IGNORE)[..., None]
    return jnp.sum(jnp.where(counts_BSA, log_p_BS[..., None], 0.0), axis=1)


@register_loss("dpo")
def dpo(config: TrainConfig, model: Model) -> LossFunction:
    """-log σ(β (log p/q of the chosen answer - log p/q of the rejected one)), q the reference's."""

    def loss(params: Params, hidden_BSD: Array, batch: Batch, loss_weights: LossWeights) -> Side:
        ratio_BA = answer_log_p(params, model, hidden_BSD, batch) - batch["reference"]
        margin_B = BETA * (ratio_BA[:, 0] - ratio_BA[:, 1])
        term = -loss_weights.sequence * jnp.sum(jax.nn.log_sigmoid(margin_B))
        n, kept = jnp.float32(margin_B.size), jax.lax.stop_gradient(margin_B)
        metrics = {"margin": Mean(jnp.sum(kept), n), "right": Mean(jnp.sum(kept > 0), n)}
        return Side({"dpo": term}, metrics, {})

    return loss


def tokenized(path: Path, tokenizer: Tokenizer, length: int) -> dict[str, np.ndarray]:
    """All pairs, each [chosen, rejected], cut to `length` tokens."""
    rows = []
    for line in path.read_text().splitlines():
        pair = json.loads(line)
        prompt = tokenizer.encode(pair["prompt"])
        tokens, labels, documents = [], [], []
        for number, key in enumerate(("chosen", "rejected")):
            both = [*prompt, *tokenizer.encode(pair[key]), tokenizer.eos_id]
            tokens += both
            labels += [IGNORE] * (len(prompt) - 1) + both[len(prompt) :] + [IGNORE]
            documents += [number] * len(both)
        pad = length - len(tokens)
        row = tokens + [0] * pad, labels + [IGNORE] * pad, documents + [2] * pad
        rows.append(np.array(row, np.int32)[:, :length])
    return dict(zip(("input_ids", "labels", "segment_ids"), np.stack(rows, axis=1), strict=True))


def with_reference(run: Path, examples: dict[str, np.ndarray]) -> Pairs:
    """The pairs, with what the reference thinks of them."""
    found, trained = [], open_run(run)
    with trained.in_use() as params:
        ask = jax.jit(
            lambda params, batch: answer_log_p(
                params, trained.model, trained.model.forward(params, batch)[0], batch
            )
        )
        for first in range(0, len(examples["labels"]), ROWS):
            few = {name: array[first : first + ROWS] for name, array in examples.items()}
            found.append(jax.device_get(ask(params, few)))
    return Pairs({**examples, "reference": np.concatenate(found)})


def train_on(run: Path, path: Path, arguments: Sequence[str]) -> int:
    """Registers the pairs as a dataset, and trains."""

    @register_dataset("pairs")
    def pairs(config: JobConfig) -> Pairs:
        examples = tokenized(path, read_tokenizer(run), config.train.seq_len)
        return with_reference(run, examples)

    own = ["--data.dataset_type=pairs", "--train.loss_fn=dpo", f"--checkpoint.load_path={run}"]
    fresh = '--checkpoint.exclude_from_loading=["optimizer","progress"]'
    return main(["--checkpoint.dir=runs/preference", *arguments, *own, fresh])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    run, path, *arguments = sys.argv[1:]
    raise SystemExit(run_main(functools.partial(train_on, Path(run), Path(path), arguments)))
