"""Registry of writers by format."""

from collections.abc import Mapping

from torch_compat.convert.to_dcp import DcpWriter
from torch_compat.convert.to_hf import HfWriter
from torch_compat.convert.to_jaxforge import RunWriter
from torch_compat.convert.to_torch_file import TorchFileWriter
from torch_compat.convert.writer import Writer

WRITERS: Mapping[str, type[Writer]] = {
    "jaxforge": RunWriter,
    "dcp": DcpWriter,
    "pt": TorchFileWriter,
    "hf": HfWriter,
}
"""Format -> writer."""
