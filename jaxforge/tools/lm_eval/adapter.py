"""The model "jaxforge" of lm_eval: importing this module registers it.

    import lm_eval
    import jaxforge.tools.lm_eval.adapter

    lm_eval.simple_evaluate("jaxforge", "run=runs/mine,step=4000", tasks=["lambada_openai"])

Answers are those of lm_eval's backend "hf" for the run's export to Hugging Face: the same special
tokens at the ends of texts, the same cuts, the same stop sequences.

Several processes work together as in training: each has all requests, in the same order, and gets
all answers. To lm_eval they are one (rank 0 of 1), so that it does not share out requests among
them, as it does among data-parallel processes.
"""

import functools
from collections.abc import Callable, Sequence
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
        step: the checkpoint; by default the newest, or the one that `run` names.
        batch_size: sequences at a time, over all devices.
        max_length: tokens that the model reads at most; by default `model.max_seq_len`.
        max_gen_toks: tokens to generate, for tasks that do not say how many.
        add_bos_token: whether texts begin with BOS; by default as the tokenizer's file has it.
        prefix_token_id: what comes before texts that are scored from their first token on; by
            default BOS, or EOS where the tokenizer has none.
        seed: of draws, for tasks that sample.
        device: PyTorch's; without effect, for JAX says which there are (`JAX_PLATFORMS`).
        max_batch_size: lm_eval's; without effect, for there is no batch_size = "auto".
        settings: over the run's config, such as `**{"distributed.tp": 2}`.

    Raises:
        UserError: there is no such checkpoint, or it cannot be used as asked.
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
        device: str | None = None,
        max_batch_size: int | None = None,
        **settings: object,
    ) -> None:
        super().__init__()
        overrides = [f"--{key}={value}" for key, value in settings.items()]
        self._trained = inference.open_run(urls.path(run), _settings(overrides), step=step)
        self._text = run_directory.read_tokenizer(self._trained.run)
        self._rows = _batch_size(batch_size)
        check({"seed": seed}, spelt=str)
        self._max_gen_toks, self._add_bos, self._seed = max_gen_toks, add_bos_token, seed
        self._max_length = max_length or self._trained.config.model.max_seq_len
        self._prefix = _first_known(prefix_token_id, self._text.bos_id, self._text.eos_id)
        with self._trained.in_use() as params:
            self._params = params

    @property
    def eot_token_id(self) -> int:
        """EOS."""
        return _first_known(self._text.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text that is scored from its first token on."""
        return self._prefix

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most."""
        return self._max_length

    @property
    def tokenizer_name(self) -> str:
        """Identity of the tokenizer for lm_eval's caches."""
        return self._text.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Ids of a text, as lm_eval's "hf" has them.

        Args:
            string: the text; if it begins with the prefix, nothing is added to it.
            add_special_tokens: whether anything may be; what it is, `add_bos_token` says.
            kwargs: of other models; without effect.
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
        """The log-probability of each text, every token of it once, in windows of `max_length`."""
        windows = [self._windows(text) for (text,) in (request.args for request in requests)]
        likelihoods = iter(self._score([window for of_text in windows for window in of_text]))
        sums = [sum(next(likelihoods).log_probability for _ in of_text) for of_text in windows]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _windows(self, text: str) -> list[Continuation]:
        rolling = get_rolling_token_windows(
            self.tok_encode(text), self._prefix, self._max_length, context_len=1
        )
        return [Continuation(*make_disjoint_window(window)) for window in rolling]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Compute lm_eval's `loglikelihood` of tokenized texts."""
        for (_, text), _, tokens in requests:
            if len(tokens) > self._max_length:
                raise UserError(
                    f"a continuation has {len(tokens)} tokens, and the model reads "
                    f"{self._max_length}: {text[:60]!r} cannot be scored"
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
        """Continuations, each up to the first of its stop sequences."""
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
            contexts, (how, *_), numbers = zip(*chunk, strict=True)
            generated = self._generate(contexts, how, numbers, rows)
            for context, text in zip(contexts, generated, strict=True):
                self.cache_hook.add_partial("generate_until", (context, how), text)
            texts += generated
        return collator.get_original(texts)

    def _generate(
        self, contexts: Sequence[str], how: dict[str, Any], numbers: Sequence[int], rows: int
    ) -> list[str]:
        """A batch of contexts that are continued alike, filled up to `rows`."""
        settings = dict(normalize_gen_kwargs(how, self._max_gen_toks))
        until, count = settings.pop("until"), settings.pop("max_gen_toks")
        room = self._max_length - count
        if room < 1:
            raise UserError(
                f"{count} tokens are to be generated, and the model reads {self._max_length} with "
                "what comes before them: set max_gen_toks lower (--gen_kwargs max_gen_toks=N)"
            )
        eos = self._text.decode([self.eot_token_id], special_tokens=True)
        stops = handle_stop_sequences(until, eos=eos)
        prompts = [self.tok_encode(context)[-room:] or [self._prefix] for context in contexts]
        trained = self._trained
        decoder = Decoder(trained.model, self._params, count, _sampling(settings),
                          self._text.eos_ids, self._seed, trained.mesh, rows)  # fmt: skip
        with trained.in_use(self._params):
            completions = decoder.complete(prompts, numbers, self._meets(stops))
        texts = [self._text.decode(completion.tokens) for completion in completions]
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def _meets(self, stops: Sequence[str]) -> Callable[[list[int]], bool]:
        """Return a predicate that tells whether a completion contains a stop sequence."""

        def meets(tokens: list[int]) -> bool:
            text = self._text.decode(tokens)
            return any(stop and stop in text for stop in stops)

        return meets

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's own, for lm_eval's records."""
        return self._text.chat.get("chat_template") if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, by the tokenizer's chat template.

        Raises:
            UserError: it has none, or cannot write this conversation.
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
            raise UserError("the run's tokenizer has no chat template: leave --apply_chat_template")
        return IsolatedTemplate(self._text.chat)

    def get_model_info(self) -> dict[str, Any]:
        """Return the model information that lm_eval stores with its results."""
        mesh = {axis: size for axis, size in self._trained.mesh.shape.items() if size > 1}
        return {"run": str(self._trained.run), "step": self._trained.step, "mesh": mesh}


def _settings(overrides: list[str]) -> list[str]:
    """Settings of the config; others are meant for this class and misspelled."""
    for override in overrides:
        if "." not in override.partition("=")[0]:
            known = "run, step, batch_size, max_length, max_gen_toks, add_bos_token, "
            name = override[2:].partition("=")[0]
            raise UserError(
                f"the model jaxforge has no argument {name}: it has {known}"
                "prefix_token_id, seed, and settings of the run's config such as distributed.tp=2"
            )
    return overrides


def _batch_size(batch_size: int | str) -> int:
    if not str(batch_size).isdigit() or int(batch_size) < 1:
        raise UserError(f"batch_size={batch_size}: expected a number, 1 or more")
    return int(batch_size)


def _first_known(*ids: int | None) -> int:
    first = next((id_ for id_ in ids if id_ is not None), None)
    if first is None:
        raise UserError("the run's tokenizer names no end-of-text token, which lm_eval needs")
    return first


def _sampling(settings: dict[str, Any]) -> Sampling:
    """By arguments as transformers has them.

    Raises:
        UserError: there are others, which would change what is drawn.
    """
    if others := settings.keys() - {*_SAMPLING, "do_sample"}:
        raise UserError(
            f"generation arguments {', '.join(sorted(others))} are not built: there are until, "
            f"max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
        )
    if not settings.pop("do_sample"):
        return Sampling(temperature=0.0)
    return Sampling(**{"temperature": 1.0, **settings})
