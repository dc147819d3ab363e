"""Model "jaxforge" for lm_eval, registered by importing this module.

import lm_eval
import jaxforge.tools.lm_eval

lm_eval.simple_evaluate("jaxforge", "run=runs/mine,step=4000", tasks=["lambada_openai"])
"""

from typing import Any

from lm_eval.api.registry import register_model

from jaxforge import inference
from jaxforge.checkpoint.weights import Weights
from jaxforge.cli.sampling_options import check
from jaxforge.errors import UserError
from jaxforge.runs import run_directory
from jaxforge.storage import urls
from jaxforge.tasks.lm_eval_model import LmEvalModel
from jaxforge.tasks.task import TextModel, prefix_token


@register_model("jaxforge")
class JaxforgeLM(LmEvalModel):
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
        overrides = [f"--{key}={value}" for key, value in settings.items()]
        trained = inference.open_run(
            urls.path(run), _settings(overrides), step=step, weights=weights
        )
        tokenizer = run_directory.read_tokenizer(trained.run)
        # lm_eval passes text, which may be "auto".
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UserError(f"batch_size={batch_size}: must be an integer of at least 1")
        check({"seed": seed}, spelt=str)
        with trained.in_use() as params:
            text = TextModel(
                trained.model, trained.mesh, tokenizer, int(batch_size),
                max_length or trained.config.model.max_seq_len,
                prefix_token(tokenizer, prefix_token_id), params,
                lambda: trained.in_use(params),
            )  # fmt: skip
        super().__init__(text, max_gen_toks, add_bos_token, seed)
        self._trained = trained

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
