"""Samples of the model during training: continuations of `eval.sample_prompts`.

A sample is a function of the parameters, `train.seed` and the step, so a resumed run writes the
same samples as an uninterrupted one. The state is not changed.
"""

from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.errors import UserError
from jaxforge.model.decoding import Decoder
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model, Params
from jaxforge.tasks.prompts import Prompt, continuation, encode
from jaxforge.telemetry.sinks import Sample
from jaxforge.training.callbacks.callback import IntervalContext, RunCallback, RunParts

_NUMBERS = 2**31  # distinct random streams


class Sampler(RunCallback):
    """Continues the prompts on the mesh of the run.

    Args:
        config: `[eval]` has the prompts and the interval.
        tokenizer: the tokenizer of the run; None without one.

    Raises:
        UserError: there is no tokenizer, or a prompt is too long.
    """

    def __init__(
        self, config: JobConfig, mesh: Mesh, model: Model, tokenizer: Tokenizer | None
    ) -> None:
        if tokenizer is None:
            raise UserError(
                f"eval.sample_interval = {config.eval.sample_interval} needs a tokenizer. Set "
                "data.tokenizer_path, or eval.sample_interval = 0"
            )
        section, limit = config.eval, config.model.max_seq_len
        self._config, self._mesh, self._model, self._tokenizer = config, mesh, model, tokenizer
        self._prompts = [
            Prompt(text, f"eval.sample_prompts[{i}]")
            for i, text in enumerate(section.sample_prompts)
        ]
        self._ids = [
            encode(
                tokenizer,
                prompt,
                limit,
                section.sample_tokens,
                "eval.sample_tokens =",
                vocab_size=config.model.vocab_size,
            )
            for prompt in self._prompts
        ]

    @classmethod
    def of_run(cls, run: RunParts) -> "Sampler | None":
        """Return the callback if `eval.sample_interval` is set."""
        if not run.config.eval.sample_interval:
            return None
        return cls(run.config, run.mesh, run.model, run.tokenizer)

    follows_evaluation = True

    def is_due(self, step: int) -> bool:
        """Return whether samples are due after a step."""
        return self._config.eval.is_sample_due(step)

    def on_interval(self, context: IntervalContext) -> None:
        """Log samples, unless an evaluation of this step was stopped and will resume."""
        if context.progress.validation:
            return
        with context.examining_model("sampling"):
            samples = self(context.state.variables, context.step)
        context.tracker.log_samples(context.step, samples)

    def __call__(self, params: Params, step: int) -> list[Sample]:
        """Return the samples of a step. Collective: all processes must call it.

        Args:
            params: parameters after the step, with non-trainable state.
            step: selects the random stream, with `train.seed`.
        """
        section, n = self._config.eval, len(self._prompts)
        sampling = Sampling(section.sample_temperature, vocab_size=self._tokenizer.vocab_size)
        decoder = Decoder(self._model, params, section.sample_tokens, sampling,
                          self._tokenizer.eos_ids, self._config.train.seed, self._mesh)  # fmt: skip
        # A stream per step and prompt, so that a resumed run writes the same samples.
        numbers = [(step * n + i) % _NUMBERS for i in range(n)]
        completions = decoder.complete(self._ids, numbers)
        texts = (
            continuation(self._tokenizer, ids, completion.tokens)
            for ids, completion in zip(self._ids, completions, strict=True)
        )
        return [
            Sample(prompt.text, text) for prompt, text in zip(self._prompts, texts, strict=True)
        ]
