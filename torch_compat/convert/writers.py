"""Registry of writers by format, and by dialect where a dialect has its own directories."""

from collections.abc import Mapping

from jaxforge.errors import UserError
from torch_compat.convert import to_mindspeed
from torch_compat.convert.source import Request, Source
from torch_compat.convert.to_dcp import DcpWriter
from torch_compat.convert.to_hf import HfWriter
from torch_compat.convert.to_jaxforge import RunWriter
from torch_compat.convert.to_megatron import MegatronWriter
from torch_compat.convert.to_peft import PeftWriter
from torch_compat.convert.to_torch_file import TorchFileWriter
from torch_compat.convert.writer import Writer
from torch_compat.names.megatron import MEGATRON

WRITERS: Mapping[str, type[Writer]] = {
    "jaxforge": RunWriter,
    "dcp": DcpWriter,
    "pt": TorchFileWriter,
    "hf": HfWriter,
    "megatron": MegatronWriter,
    "peft": PeftWriter,
}
"""Format -> writer."""


def create_writer(request: Request, source: Source) -> Writer:
    """Return the writer for a request.

    Raises:
        UserError: the source has no counterpart in the format, or the dialect belongs to another.
    """
    formats = {MEGATRON.name: "megatron", to_mindspeed.NAME: "dcp"}
    required = formats.get(request.dialect or "", request.to)
    if request.to != required:
        raise UserError(f"--dialect {request.dialect}: it has its own format. Use --to {required}")
    is_mindspeed = request.dialect == to_mindspeed.NAME
    writer = to_mindspeed.MindSpeedWriter if is_mindspeed else WRITERS[request.to]
    return writer(request, source)
