"""The model that lm_eval evaluates: a `TextModel` behind lm_eval's interface.

Results equal those of lm_eval's backend "hf" on the run's export to Hugging Face: special tokens at
the ends of texts, truncation and stop sequences are the same.

lm_eval sees a single rank in each process (rank 0 of 1), so it does not distribute requests as it
does among data-parallel processes: each process makes all requests in the same order.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxforge.errors import UserError
from jaxforge.model.likelihood import Continuation
from jaxforge.model.sampling import Sampling
from jaxforge.tasks.task import TextModel, first_known

if TYPE_CHECKING:
    from jaxforge.data.corpus.chat import IsolatedTemplate

_SAMPLING = ("temperature", "top_k", "top_p")


class LmEvalModel(TemplateLM):
    """Model for lm_eval's tasks.

    Args:
        text: model and tokenizer.
        max_gen_toks: tokens to generate, for tasks without a number of their own.
        add_bos_token: begin texts with BOS; by default as in the tokenizer's file.
        seed: random seed, for tasks that sample.
        shows_progress: write a progress bar while texts are encoded.
    """

    def __init__(
        self,
        text: TextModel,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        seed: int = 0,
        *,
        shows_progress: bool = True,
    ) -> None:
        super().__init__()
        self._text, self._tokenizer = text, text.tokenizer
        self._shows_progress = shows_progress
        self._max_gen_toks, self._add_bos, self._seed = max_gen_toks, add_bos_token, seed

    @property
    def eot_token_id(self) -> int:
        """Id of EOS."""
        return first_known(self._tokenizer.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text that is scored from its first token on."""
        return self._text.prefix

    @property
    def max_length(self) -> int:
        """Maximum number of tokens that the model reads."""
        return self._text.max_length

    @property
    def tokenizer_name(self) -> str:
        """Identity of the tokenizer for lm_eval's caches."""
        return self._tokenizer.fingerprint

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
            # A text may spell BOS itself, as those of chat templates do.
            prefix = self._tokenizer.decode([self._text.prefix], special_tokens=True) or None
            add_special_tokens = not has_bos_prefix(string, prefix)
        if not add_special_tokens or self._add_bos is False:
            return self._tokenizer.encode(string)
        if self._add_bos and self._tokenizer.bos_id is not None:
            return [self._tokenizer.bos_id, *self._tokenizer.encode(string)]
        return self._tokenizer.encode(string, special_tokens=True)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return log-probability of each continuation, and True if it is the greedy one."""
        is_quiet = disable_tqdm or not self._shows_progress
        return super().loglikelihood(requests, disable_tqdm=is_quiet)

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
                tokens, self._text.prefix, self._text.max_length, context_len=1
            )
            texts.append([Continuation(*make_disjoint_window(window)) for window in rolling])
        # The windows of all texts in one call, so that batches are full.
        likelihoods = iter(self._text.score([window for windows in texts for window in windows]))
        sums = [sum(next(likelihoods).log_probability for _ in windows) for windows in texts]
        for request, total in zip(requests, sums, strict=True):
            # For lm_eval's `--use_cache`.
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Return log-probability of each continuation, and True if it is the greedy one."""
        for (_, text), _, tokens in requests:
            self.check_continuation(text, len(tokens))
        scores = self._text.score([Continuation(*tokens) for _, *tokens in requests])
        answers = [(score.log_probability, score.is_greedy) for score in scores]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation for each request, up to its first stop sequence."""
        numbered = [(*request.args, number) for number, request in enumerate(requests)]
        collator = Collator(
            numbered,
            # Longest first, as in lm_eval: a batch that exceeds the memory fails at once.
            sort_fn=lambda request: (-len(self.tok_encode(request[0])), request[0]),
            group_fn=lambda request: request[1],
            group_by="gen_kwargs",
        )
        texts: list[str] = []
        rows = self._text.batch_size(len(requests))
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
        until, count, sampling = self.generation_settings(gen_kwargs)
        max_context = self._text.max_length - count
        eos = self._tokenizer.decode([self.eot_token_id], special_tokens=True)
        stops = handle_stop_sequences(until, eos=eos)

        def should_stop(tokens: list[int]) -> bool:
            # As text: a stop sequence may end within a token.
            text = self._tokenizer.decode(tokens)
            return any(stop and stop in text for stop in stops)

        # Truncated on the left, as by "hf": the question is at the end.
        prompts = [
            self.tok_encode(context)[-max_context:] or [self._text.prefix] for context in contexts
        ]
        completions = self._text.complete(
            prompts, numbers, count, sampling, seed=self._seed, rows=rows, is_enough=should_stop
        )
        texts = [self._tokenizer.decode(completion.tokens) for completion in completions]
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def check_continuation(self, text: str, n_tokens: int) -> None:
        """Check the length of a continuation.

        Raises:
            UserError: the model cannot read that many tokens.
        """
        if n_tokens > self._text.max_length:
            raise UserError(
                f"a continuation has {n_tokens} tokens, more than the {self._text.max_length} that "
                f"the model reads: {text[:60]!r} cannot be scored"
            )

    def generation_settings(self, gen_kwargs: dict[str, Any]) -> tuple[Any, int, Sampling]:
        """Return stop sequences, number of tokens and sampling for generation arguments.

        Raises:
            UserError: an argument is not supported, or no room is left for a context.
        """
        settings = dict(normalize_gen_kwargs(gen_kwargs, self._max_gen_toks))
        until, count = settings.pop("until"), settings.pop("max_gen_toks")
        if count >= self._text.max_length:
            raise UserError(
                f"max_gen_toks = {count} leaves no room for a context: the model reads "
                f"{self._text.max_length} tokens. Lower it (--gen_kwargs max_gen_toks=N, or "
                "generation_kwargs of the task)"
            )
        return until, count, _sampling(settings)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the tokenizer's chat template, for lm_eval's records."""
        return self._tokenizer.chat.get("chat_template") if chat_template else None

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
        from jaxforge.data.corpus.chat import IsolatedTemplate

        if not self._tokenizer.chat:
            raise UserError(
                "the run's tokenizer has no chat template. Remove --apply_chat_template"
            )
        return IsolatedTemplate(self._tokenizer.chat)


def _sampling(settings: dict[str, Any]) -> Sampling:
    """Return the sampling for generation arguments of transformers.

    Raises:
        UserError: an argument that would change the samples is not supported.
    """
    if unsupported := settings.keys() - {*_SAMPLING, "do_sample"}:
        raise UserError(
            f"unsupported generation arguments: {', '.join(sorted(unsupported))}. Use until, "
            f"max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
        )
    if not settings.pop("do_sample"):
        return Sampling(temperature=0.0)
    # The default of transformers.
    return Sampling(**{"temperature": 1.0, **settings})
