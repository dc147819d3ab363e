"""Writers of conversions, one for each format, and of dialects whose directories differ."""

from collections.abc import Mapping

from torch_compat.convert import to_mindspeed
from torch_compat.convert.source import Request, Source
from torch_compat.convert.to_dcp import DcpWriter
from torch_compat.convert.to_hf import HfWriter
from torch_compat.convert.to_jaxforge import RunWriter
from torch_compat.convert.to_megatron import MegatronWriter
from torch_compat.convert.writer import Writer

WRITERS: Mapping[str, type[Writer]] = {
    "jaxforge": RunWriter, "dcp": DcpWriter, "hf": HfWriter, "megatron": MegatronWriter
}  # fmt: skip
"""The usual writer of each format."""


def writer_of(request: Request, source: Source) -> Writer:
    """Return the writer of what the user asks for.

    Raises:
        UserError: the source has no counterpart in the format.
    """
    is_mindspeed = request.to == "dcp" and request.dialect == to_mindspeed.NAME
    kind = to_mindspeed.MindSpeedWriter if is_mindspeed else WRITERS[request.to]
    return kind(request, source)
