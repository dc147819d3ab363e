"""Direct preference optimization (DPO, arXiv:2305.18290): answers that people prefer.

    python examples/preference.py RUN PAIRS --config configs/debug.toml [--section.key=value ...]

RUN is the run directory to go on from, and the reference. PAIRS is a JSONL file of objects with
`prompt`, `chosen` and `rejected`. A pair is one sequence of two documents, which attention keeps
apart; the batch has a field more, `reference`: the log-probabilities that the reference gives to
the two answers, computed once before training.

The run directory is runs/preference, unless --checkpoint.dir names another.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxforge.aux_outputs import AuxOutputs, LossWeights, Mean
from jaxforge.cli.running import run_main
from jaxforge.commands.train import main
from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.dataset import Example
from jaxforge.data.packing import IGNORE
from jaxforge.data.sources import register_dataset
from jaxforge.errors import UserError
from jaxforge.inference import open_run
from jaxforge.model.transformer import Batch, Model, Params
from jaxforge.runs.run_directory import read_tokenizer
from jaxforge.step.losses import LossFunction, register_loss

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

    def loss(
        params: Params, hidden_BSD: Array, batch: Batch, loss_weights: LossWeights
    ) -> AuxOutputs:
        ratio_BA = answer_log_p(params, model, hidden_BSD, batch) - batch["reference"]
        margin_B = BETA * (ratio_BA[:, 0] - ratio_BA[:, 1])
        term = -loss_weights.sequence * jnp.sum(jax.nn.log_sigmoid(margin_B))
        n, retained = jnp.float32(margin_B.size), jax.lax.stop_gradient(margin_B)
        metrics = {"margin": Mean(jnp.sum(retained), n), "right": Mean(jnp.sum(retained > 0), n)}
        return AuxOutputs({"dpo": term}, metrics, {})

    return loss


def read_pairs(path: Path) -> list[dict[str, str]]:
    """Return the objects of a JSONL file.

    Raises:
        UserError: the file cannot be read, or a line is not a pair.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UserError(f"PAIRS {path}: {error}") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        try:
            pair = json.loads(line)
            pairs.append({key: pair[key] + "" for key in ("prompt", "chosen", "rejected")})
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{path}:{number}: expected an object with the texts prompt, chosen and rejected"
            ) from None
    return pairs


def tokenized(path: Path, tokenizer: Tokenizer, length: int) -> dict[str, np.ndarray]:
    """All pairs, each [chosen, rejected], cut to `length` tokens."""
    rows = []
    for pair in read_pairs(path):
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
    """Return the pairs with their log-probabilities under the reference model."""
    result, trained = [], open_run(run)
    with trained.in_use() as params:
        ask = jax.jit(
            lambda params, batch: answer_log_p(
                params, trained.model, trained.model.forward(params, batch)[0], batch
            )
        )
        for first in range(0, len(examples["labels"]), ROWS):
            few = {name: array[first : first + ROWS] for name, array in examples.items()}
            result.append(jax.device_get(ask(params, few)))
    return Pairs({**examples, "reference": np.concatenate(result)})


def train_on(run: Path, path: Path, arguments: Sequence[str]) -> int:
    """Register the pairs as a dataset and train."""

    @register_dataset("pairs")
    def pairs(config: JobConfig) -> Pairs:
        examples = tokenized(path, read_tokenizer(run), config.train.seq_len)
        return with_reference(run, examples)

    own = ["--data.dataset_type=pairs", "--train.loss_fn=dpo", f"--checkpoint.load_path={run}"]
    fresh = '--checkpoint.exclude_from_loading=["optimizer","progress"]'
    return main(["--checkpoint.dir=runs/preference", *arguments, *own, fresh])


def command() -> int:
    """Read the command line, and train."""
    if len(sys.argv) < 3 or any(word.startswith("-") for word in sys.argv[1:3]):
        raise UserError("name a run and a file of pairs: preference.py RUN PAIRS --config FILE")
    run, path, *arguments = sys.argv[1:]
    return train_on(Path(run), Path(path), arguments)


if __name__ == "__main__":
    raise SystemExit(run_main(command))
