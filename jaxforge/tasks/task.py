"""A model with its tokenizer, as tasks use it: likelihoods and completions in batches.

Several processes cooperate as in training: each makes the same requests in the same order and
receives all results.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jax.sharding import Mesh

from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.errors import UserError
from jaxforge.model.decoding import Completion, Decoder, padded_batch
from jaxforge.model.likelihood import Continuation, Likelihood, Scorer
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model, Params


@dataclasses.dataclass
class TextModel:
    """Model and tokenizer; the parameters are set while they are in use.

    Attributes:
        model: the model.
        mesh: mesh of the parameters.
        tokenizer: the tokenizer of the run.
        rows: maximum number of sequences of a batch, over all devices.
        max_length: maximum number of tokens that the model reads.
        prefix: id of the token before texts that are scored from their first token on.
        params: parameters of the model, with non-trainable state; None between uses.
        context: returns the context of all computations.
        before_batch: called before each batch; may raise an exception to stop.
    """

    model: Model
    mesh: Mesh
    tokenizer: Tokenizer
    rows: int
    max_length: int
    prefix: int
    params: Params | None = None
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    before_batch: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def using(self, params: Params, before_batch: Callable[[], object]) -> Iterator[None]:
        """Use parameters within the context; they are released at its end."""
        self.params, self.before_batch = params, before_batch
        try:
            yield
        finally:
            self.params, self.before_batch = None, lambda: None

    def score(
        self, continuations: Sequence[Continuation], *, has_full_batches: bool = False
    ) -> list[Likelihood]:
        """Return the likelihood of each continuation, in order.

        Args:
            continuations: what to score.
            has_full_batches: fill up batches to `rows`, so that several calls share programs.
        """
        least_rows = self.rows if has_full_batches else 1
        scorer = Scorer(
            self.model, self._params, self.max_length, self.mesh, self.rows, self.before_batch,
            least_rows,
        )  # fmt: skip
        with self.context():
            return scorer.score(continuations)

    def batch_size(self, n: int) -> int:
        """Return the number of rows of the batches of n prompts."""
        return padded_batch(n, self.rows, self.mesh)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int,
        rows: int,
        is_enough: Callable[[list[int]], bool],
    ) -> list[Completion]:
        """Complete one batch of prompts, padded to `rows`; see `Decoder.complete`."""
        decoder = Decoder(self.model, self._params, max_tokens, sampling,
                          self.tokenizer.eos_ids, seed, self.mesh, rows)  # fmt: skip
        self.before_batch()
        with self.context():
            return decoder.complete(prompts, numbers, is_enough)

    @property
    def _params(self) -> Params:
        assert self.params is not None, "the model is used outside of `using`"
        return self.params


def prefix_token(tokenizer: Tokenizer, preferred: int | None = None) -> int:
    """Return the first known id of: `preferred`, BOS, EOS.

    Raises:
        UserError: the tokenizer has none of them.
    """
    return first_known(preferred, tokenizer.bos_id, tokenizer.eos_id)


def first_known(*ids: int | None) -> int:
    """Return the first id that is not None.

    Raises:
        UserError: all are None.
    """
    first = next((id_ for id_ in ids if id_ is not None), None)
    if first is None:
        raise UserError("the run's tokenizer has no end-of-text token, which tasks need")
    return first
