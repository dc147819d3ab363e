"""Writer of checkpoints for MindSpeed-LLM's FSDP2 trainer.

The trainer wraps a model of transformers in an engine, hence the prefixes of the keys.

DST/checkpoints/global_step_<n>/                                 DST is the trainer's output_dir
    .metadata, __0_0.distcp                                      model.model.model.layers.0. ...
    extra_state/extra_state_rank_0.pt, extra_state_rank_1.pt ... one file per rank
"""

from pathlib import Path

from jaxforge.errors import UserError
from torch_compat.checkpoint import hf_config, train_state
from torch_compat.checkpoint.name_maps import name_map
from torch_compat.convert.source import Request, Source
from torch_compat.convert.to_dcp import DcpWriter
from torch_compat.convert.writer import Writer
from torch_compat.families import FAMILIES
from torch_compat.formats import torch_zip

NAME = "mindspeed"


class MindSpeedWriter(DcpWriter):
    """Writer of `checkpoints/global_step_<n>` with the names of the model's Hugging Face family."""

    prefix, owner = "model.model.", "model."

    def __init__(self, request: Request, source: Source) -> None:
        if request.layout == "flat":
            raise UserError("--layout flat: MindSpeed-LLM loads nested optimizer state. Remove it")
        super().__init__(request, source)
        self.label = f"{NAME}, {self._dialect}, {request.ranks} ranks"
        self.subdirectory = f"checkpoints/global_step_{source.progress.step}"

    def _choose_dialect(self) -> str:
        """Return the dialect of the model's family.

        Raises:
            UserError: no family can express the model, or the model has experts.
        """
        model, before = self.source.target.config.model, self.source.imported
        if model.is_moe:
            raise UserError(
                "--dialect mindspeed: MindSpeed-LLM has its own layouts for experts, which are not "
                "supported. Export with --to hf and start MindSpeed-LLM from that"
            )
        return FAMILIES[hf_config.select_family(model, None, before and before.config)].dialect.name

    def notes(self) -> list[str]:
        """Return notes for the user."""
        if not self._has_moments:
            return ["the checkpoint has only weights: MindSpeed-LLM starts at step 0"]
        return ["MindSpeed-LLM derives the data position from the step and has its own data order"]

    def _write_train_state(self, directory: Path) -> None:
        """Write the state of each rank."""
        source = self.source
        updates = int(source.checkpoint.scalars["updates"])
        state = train_state.extra_state(
            source.progress, updates, source.target.config,
            self._lr_factors(name_map(self._dialect)),
        )  # fmt: skip
        # Each rank opens the file of its own number.
        for rank in range(self.request.ranks):
            path = directory / train_state.EXTRA_STATE.replace("_rank_0", f"_rank_{rank}")
            path.parent.mkdir(exist_ok=True)
            torch_zip.save(state, path)

    def commit(self) -> None:
        """Rename the checkpoint to its final name; MindSpeed-LLM uses no `latest`."""
        Writer.commit(self)
