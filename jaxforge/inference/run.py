"""A run directory in Python: `jaxforge.Run("runs/quickstart").generate("def")`."""

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxforge.checkpoint.paths import SUBDIRECTORY, find
from jaxforge.checkpoint.weights import Weights
from jaxforge.cli.sampling_options import check
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.inference import completion, evaluation
from jaxforge.inference.trained import TrainedModel, open_run
from jaxforge.model.decoding import Decoder
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Params
from jaxforge.parallel import multihost
from jaxforge.runs import run_directory
from jaxforge.runs.reading import read_metrics
from jaxforge.storage import trust, urls
from jaxforge.tasks.prompts import Prompt, encode
from jaxforge.training.callbacks import activations as activation_files


class Run:
    """Interface to a finished or running run: metrics, generation, evaluation, export.

    Parameters are read when they are first needed, and stay in memory.

    Args:
        path: a run directory, or one of its checkpoints.
        overrides: settings over the run's config, such as "--distributed.tp=2".
        step: the checkpoint to use; by default the newest, or the one that `path` names.
        weights: "ema" uses the average of the parameters (`train.ema_decay`) in their place.
        trust_plugins: import the modules of the run's `[plugins]`, which runs their code. For runs
            that this user has trained on this machine, they are always imported.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        overrides: Sequence[str] = (),
        *,
        step: int | None = None,
        weights: Weights = "raw",
        trust_plugins: bool = False,
    ) -> None:
        self._path, self._overrides, self._step = urls.path(path), tuple(overrides), step
        self._weights = weights
        if trust_plugins:
            trust.grant(find(self._path)[0])

    def __repr__(self) -> str:
        return f"Run({str(self._path)!r})"

    @property
    def step(self) -> int:
        """Step of the checkpoint."""
        return self._trained.step

    @property
    def config(self) -> JobConfig:
        """Config of the last start of the run."""
        return run_directory.shown_config(self._trained.run)

    @property
    def metrics(self) -> Any:  # noqa: ANN401
        """Logged metrics by name: a pandas DataFrame over steps if pandas is installed.

        Otherwise a dict of `runs.reading.Series`, which may have several values per step.
        """
        series = read_metrics(self._trained.run)
        if importlib.util.find_spec("pandas") is None:
            return series
        import pandas as pd

        columns = {name: pd.Series(curve.value, curve.step) for name, curve in series.items()}
        # A resumed run may log a step again: the last value counts.
        latest = {
            name: curve[~curve.index.duplicated(keep="last")] for name, curve in columns.items()
        }
        return pd.DataFrame(latest).rename_axis("step")

    def generate(
        self,
        prompts: str | Sequence[str] = "",
        *,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        batch_size: int = 32,
    ) -> Any:  # noqa: ANN401
        """Continue one or several prompts.

        Args:
            prompts: one text, or several; an empty one starts a document.
            max_tokens: tokens to generate.
            temperature: sampling temperature; 0 takes the most likely token.
            top_k: number of most likely tokens to sample from; 0: all.
            top_p: probability of the tokens to sample from.
            seed: seed of the sampling.
            batch_size: prompts per batch.

        Returns:
            The continuation, or a list of them.

        Raises:
            UserError: the run has no tokenizer, a prompt is too long or has a token that the model
                lacks, or a number is out of range.
        """
        check(
            {"temperature": temperature, "top_k": top_k, "top_p": top_p,
             "max_tokens": max_tokens, "batch_size": batch_size, "seed": seed},
            spelt=str,
        )  # fmt: skip
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        trained, tokenizer = self._trained, run_directory.read_tokenizer(self._trained.run)
        model = trained.config.model
        asked = [Prompt(text, f"prompt {n}") for n, text in enumerate(texts)]
        ids = [
            encode(tokenizer, prompt, model.max_seq_len, max_tokens, vocab_size=model.vocab_size)
            for prompt in asked
        ]
        sampling = Sampling(temperature, top_k, top_p, tokenizer.vocab_size)
        with trained.in_use(self._params) as params:
            decoder = Decoder(trained.model, params, max_tokens, sampling, tokenizer.eos_ids, seed,
                              trained.mesh, min(batch_size, len(asked)))  # fmt: skip
            parts = completion.results(decoder, asked, ids, tokenizer)
            texts = [record["completion"] for records in parts for record in records]
        return texts[0] if isinstance(prompts, str) else texts

    def evaluate(self, *, steps: int | None = None, **sets: str) -> dict[str, Any]:
        """Return loss, perplexity and bits per byte, as `jaxforge evaluate --json`.

        Args:
            steps: batches of each set; by default all.
            sets: directories of token shards by name; by default the sets of the run's `[eval]`.
        """
        named = [f"{name}={path}" for name, path in sets.items()]
        sums = evaluation.evaluate(
            self._path, self._overrides, sets=named, step=self._step, steps=steps,
            weights=self._weights,
        )  # fmt: skip
        return evaluation.report(*sums)

    @property
    def captured_steps(self) -> list[int]:
        """Steps with captured activations (`eval.activations_interval`), ascending."""
        return activation_files.steps(self._trained.run)

    def activations(self, step: int) -> dict[str, np.ndarray]:
        """Return the activations captured after a step, by name, memory-mapped.

        Args:
            step: an element of `captured_steps`.

        Raises:
            UserError: the step has no captured activations, or the run is in a bucket.
        """
        run = self._trained.run
        if urls.in_bucket(run):
            raise UserError(
                f"{run}: copy {activation_files.DIRECTORY}/ to this machine, and read it with NumPy"
            )
        if step not in (there := self.captured_steps):
            raise UserError(f"{run} has no activations of step {step}: there are {there}")
        return activation_files.read(activation_files.step_directory(run, step))

    def export(self, destination: str | os.PathLike, *options: str, to: str = "hf") -> Path:
        """Write a checkpoint for transformers ("hf"), PyTorch ("dcp"), Megatron or PEFT ("peft").

        Args:
            destination: a new directory.
            options: further options of `jaxforge convert`, such as "--dtype=bfloat16".
            to: the format.

        Raises:
            UserError: the checkpoint cannot be written, or the format does not support the model.
        """
        source = self._trained.run / SUBDIRECTORY / f"step_{self.step}"
        command = [sys.executable, "-m", "jaxforge", "convert", str(source), str(destination)]
        command += [f"--weights={self._weights}"]
        command += ["--trust-plugins"] if trust.is_granted(self._trained.run) else []
        done = subprocess.run(
            [*command, "--to", to, *options], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(done.stderr.rpartition("error: ")[2].strip())
        return Path(destination)

    @functools.cached_property
    def _trained(self) -> TrainedModel:
        multihost.initialize()
        return open_run(self._path, self._overrides, step=self._step, weights=self._weights)

    @functools.cached_property
    def _params(self) -> Params:
        with self._trained.in_use() as params:
            return params
