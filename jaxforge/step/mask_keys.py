"""Keys of the dropout masks of a step."""

from jaxtyping import Array, Int

from jaxforge.config.job import JobConfig
from jaxforge.model.dropout import MASK_KEYS
from jaxforge.optim.random_bits import draw_key, random_words
from jaxforge.parallel.sharding import TOKENS, constrain
from jaxforge.step.update_loss import Batch


def with_mask_keys(batch: Batch, config: JobConfig, step: Int[Array, ""]) -> Batch:
    """Return the batch with the key of each token, if adapters have dropout.

    A key depends on the seed, the step and the index of the token in the batch.

    Args:
        batch: a batch whose tokens are in the order of the data.
        config: a validated config.
        step: number of the step.
    """
    if not config.lora.dropout:
        return batch
    key = draw_key(config.train.seed, "lora.dropout", step)
    words = random_words(key, batch["labels"].shape)
    return {**batch, MASK_KEYS: constrain(words, *TOKENS)}
