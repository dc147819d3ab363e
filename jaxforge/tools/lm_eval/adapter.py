"""Model "jaxforge" for lm_eval, registered by importing this module.

    import lm_eval
    import jaxforge.tools.lm_eval.adapter

    lm_eval.simple_evaluate("jaxforge", "run=runs/mine,step=4000", tasks=["lambada_openai"])

Results equal those of lm_eval's backend "hf" on the run's export to Hugging Face: special tokens at
the ends of texts, truncation and stop sequences are the same.

Several processes cooperate as in training: each receives all requests in the same order and returns
all results. lm_eval sees a single rank in each process (rank 0 of 1), so it does not distribute
requests as it does among data-parallel processes.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxforge import inference
from jaxforge.checkpoint.weights import Weights
from jaxforge.cli.sampling_options import check
from jaxforge.errors import UserError
from jaxforge.model.decoding import Decoder, padded_batch
from jaxforge.model.likelihood import Continuation, Likelihood, Scorer
from jaxforge.model.sampling import Sampling
from jaxforge.runs import run_directory
from jaxforge.storage import urls

if TYPE_CHECKING:
    from jaxforge.data.corpus.isolated_chat import IsolatedTemplate

_SAMPLING = ("temperature", "top_k", "top_p")


@register_model("jaxforge")
class JaxforgeLM(TemplateLM):
    """A checkpoint of a run, for lm_eval's tasks.

    Args:
        run: a run directory, or one of its checkpoints.
        step: step of the checkpoint; by default the newest, or the checkpoint that `run` names.
        batch_size: sequences per batch, over all devices.
        max_length: maximum number of tokens that the model reads; by default `model.max_seq_len`.
        max_gen_toks: tokens to generate, for tasks without a number of their own.
        add_bos_token: begin texts with BOS; by default as in the tokenizer's file.
        prefix_token_id: token before texts that are scored from their first token on; by default
            BOS, or EOS if the tokenizer has no BOS.
        seed: random seed, for tasks that sample.
        weights: "ema" for the average of the parameters.
        device: PyTorch's device; without effect. JAX chooses devices (`JAX_PLATFORMS`).
        max_batch_size: limit for lm_eval's batch_size = "auto", which does not exist here; without
            effect.
        settings: settings over the run's config, such as `**{"distributed.tp": 2}`.

    Raises:
        UserError: the checkpoint does not exist, or cannot be used with these arguments.
    """

    def __init__(
        self,
        run: str,
        step: int | None = None,
        batch_size: int | str = 32,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        seed: int = 0,
        weights: Weights = "raw",
        device: str | None = None,
        max_batch_size: int | None = None,
        **settings: object,
    ) -> None:
        super().__init__()
        overrides = [f"--{key}={value}" for key, value in settings.items()]
        self._trained = inference.open_run(
            urls.path(run), _settings(overrides), step=step, weights=weights
        )
        self._text = run_directory.read_tokenizer(self._trained.run)
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UserError(f"batch_size={batch_size}: must be an integer of at least 1")
        self._rows = int(batch_size)
        check({"seed": seed}, spelt=str)
        self._max_gen_toks, self._add_bos, self._seed = max_gen_toks, add_bos_token, seed
        self._max_length = max_length or self._trained.config.model.max_seq_len
        self._prefix = _first_known(prefix_token_id, self._text.bos_id, self._text.eos_id)
        with self._trained.in_use() as params:
            self._params = params

    @property
    def eot_token_id(self) -> int:
        """Id of EOS."""
        return _first_known(self._text.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text that is scored from its first token on."""
        return self._prefix

    @property
    def max_length(self) -> int:
        """Maximum number of tokens that the model reads."""
        return self._max_length

    @property
    def tokenizer_name(self) -> str:
        """Identity of the tokenizer for lm_eval's caches."""
        return self._text.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Encode a text as lm_eval's "hf" does.

        Args:
            string: the text. By default nothing is added if it begins with the prefix token.
            add_special_tokens: add special tokens, as chosen by `add_bos_token`.
            kwargs: arguments of other models; without effect.
        """
        if add_special_tokens is None:
            prefix = self._text.decode([self._prefix], special_tokens=True) or None
            add_special_tokens = not has_bos_prefix(string, prefix)
        if not add_special_tokens or self._add_bos is False:
            return self._text.encode(string)
        if self._add_bos and self._text.bos_id is not None:
            return [self._text.bos_id, *self._text.encode(string)]
        return self._text.encode(string, special_tokens=True)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, scored in windows of `max_length` tokens.

        Every token is scored exactly once.
        """
        texts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(
                tokens, self._prefix, self._max_length, context_len=1
            )
            texts.append([Continuation(*make_disjoint_window(window)) for window in rolling])
        likelihoods = iter(self._score([window for windows in texts for window in windows]))
        sums = [sum(next(likelihoods).log_probability for _ in windows) for windows in texts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Return log-probability of each continuation, and True if it is the greedy one."""
        for (_, text), _, tokens in requests:
            if len(tokens) > self._max_length:
                raise UserError(
                    f"a continuation has {len(tokens)} tokens, more than the {self._max_length} "
                    f"that the model reads: {text[:60]!r} cannot be scored"
                )
        scores = self._score([Continuation(*tokens) for _, *tokens in requests])
        answers = [(score.log_probability, score.is_greedy) for score in scores]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _score(self, continuations: Sequence[Continuation]) -> list[Likelihood]:
        trained = self._trained
        scorer = Scorer(trained.model, self._params, self._max_length, trained.mesh, self._rows)
        with trained.in_use(self._params):
            return scorer.score(continuations)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation for each request, up to its first stop sequence."""
        numbered = [(*request.args, number) for number, request in enumerate(requests)]
        collator = Collator(
            numbered,
            sort_fn=lambda request: (-len(self.tok_encode(request[0])), request[0]),
            group_fn=lambda request: request[1],
            group_by="gen_kwargs",
        )
        texts: list[str] = []
        rows = padded_batch(len(requests), self._rows, self._trained.mesh)
        for chunk in collator.get_batched(n=rows):
            contexts, (settings, *_), numbers = zip(*chunk, strict=True)
            generated = self._generate(contexts, settings, numbers, rows)
            for context, text in zip(contexts, generated, strict=True):
                self.cache_hook.add_partial("generate_until", (context, settings), text)
            texts += generated
        return collator.get_original(texts)

    def _generate(
        self,
        contexts: Sequence[str],
        gen_kwargs: dict[str, Any],
        numbers: Sequence[int],
        rows: int,
    ) -> list[str]:
        """Continue a batch of contexts with the same settings; the batch is padded to `rows`."""
        settings = dict(normalize_gen_kwargs(gen_kwargs, self._max_gen_toks))
        until, count = settings.pop("until"), settings.pop("max_gen_toks")
        max_context = self._max_length - count
        if max_context < 1:
            raise UserError(
                f"max_gen_toks = {count} leaves no room for a context: the model reads "
                f"{self._max_length} tokens. Lower it (--gen_kwargs max_gen_toks=N)"
            )
        eos = self._text.decode([self.eot_token_id], special_tokens=True)
        stops = handle_stop_sequences(until, eos=eos)

        def should_stop(tokens: list[int]) -> bool:
            text = self._text.decode(tokens)
            return any(stop and stop in text for stop in stops)

        prompts = [
            self.tok_encode(context)[-max_context:] or [self._prefix] for context in contexts
        ]
        trained = self._trained
        decoder = Decoder(trained.model, self._params, count, _sampling(settings),
                          self._text.eos_ids, self._seed, trained.mesh, rows)  # fmt: skip
        with trained.in_use(self._params):
            completions = decoder.complete(prompts, numbers, should_stop)
        texts = [self._text.decode(completion.tokens) for completion in completions]
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the tokenizer's chat template, for lm_eval's records."""
        return self._text.chat.get("chat_template") if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Format a conversation with the tokenizer's chat template.

        Raises:
            UserError: the tokenizer has no template, or it cannot format this conversation.
        """
        options = {"add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(chat_history, options=options)[0]
        except ValueError as error:
            raise UserError(f"the tokenizer's chat template: {error}") from error

    @functools.cached_property
    def _template(self) -> "IsolatedTemplate":
        from jaxforge.data.corpus.isolated_chat import IsolatedTemplate

        if not self._text.chat:
            raise UserError(
                "the run's tokenizer has no chat template. Remove --apply_chat_template"
            )
        return IsolatedTemplate(self._text.chat)

    def get_model_info(self) -> dict[str, Any]:
        """Return the model information that lm_eval stores with its results."""
        mesh = {axis: size for axis, size in self._trained.mesh.shape.items() if size > 1}
        return {"run": str(self._trained.run), "step": self._trained.step, "mesh": mesh}


def _settings(overrides: list[str]) -> list[str]:
    """Return settings of the config; raise UserError for unknown arguments of the model."""
    for override in overrides:
        if "." not in override.partition("=")[0]:
            known = "run, step, batch_size, max_length, max_gen_toks, add_bos_token, "
            name = override[2:].partition("=")[0]
            raise UserError(
                f"the model jaxforge has no argument {name}: it has {known}"
                "prefix_token_id, seed, and settings of the run's config such as distributed.tp=2"
            )
    return overrides


def _first_known(*ids: int | None) -> int:
    first = next((id_ for id_ in ids if id_ is not None), None)
    if first is None:
        raise UserError("the run's tokenizer has no end-of-text token, which lm_eval needs")
    return first


def _sampling(settings: dict[str, Any]) -> Sampling:
    """Return the sampling for generation arguments of transformers.

    Raises:
        UserError: an argument that would change the samples is not supported.
    """
    if others := settings.keys() - {*_SAMPLING, "do_sample"}:
        raise UserError(
            f"unsupported generation arguments: {', '.join(sorted(others))}. Use until, "
            f"max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
        )
    if not settings.pop("do_sample"):
        return Sampling(temperature=0.0)
    return Sampling(**{"temperature": 1.0, **settings})
