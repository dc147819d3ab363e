"""Files next to the tensors of a Megatron-Core checkpoint: config and progress of the job.

- `run_config.yaml`: config of Megatron-Bridge
- `common.pt`: state shared by all ranks, such as Megatron-LM's `args` and `iteration`
- `metadata.json`: name of the format, torch_dist
- `train_state.pt`: step and samples of Megatron-Bridge
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from jaxforge.errors import UserError
from jaxforge.storage.untrusted_json import load_object
from torch_compat.formats import limits
from torch_compat.formats.dcp_reader import METADATA, Dcp, open_dcp
from torch_compat.formats.files import Directory
from torch_compat.formats.limits import shown
from torch_compat.formats.pickle_machine import Record
from torch_compat.formats.torch_zip import Archive

COMMON, RUN_CONFIG, FORMAT = "common.pt", "run_config.yaml", "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
TORCH_DIST = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
              "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
"""Content of `metadata.json`."""
ITERATION = re.compile(r"iter_(\d{7,})")
_LEGACY = re.compile(r"mp_rank_\d\d(_\d\d\d)*")
_ARGUMENTS, ITERATION_KEY = "args", "iteration"
_YAML = 256 << 10  # maximum bytes of a run_config.yaml; parsing more takes seconds
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")  # a number that YAML 1.1 reads as text
_SECTIONS = ("model", "train", "optimizer", "scheduler")

_RENAMED = {
    "norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}  # fmt: skip
"""Megatron-LM's arguments that have another name in `TransformerConfig`."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
"""Settings of Megatron-LM's --use-rope-scaling in addition to the factor."""


class Job(NamedTuple):
    """Config of the job that wrote a checkpoint.

    Attributes:
        model: settings of the model by the names of `megatron_config`.
        train: `seq_length`, `global_batch_size`, `train_iters`.
        optimizer: `lr`, `adam_beta1`, `weight_decay` and so on.
        scheduler: `lr_decay_style`, `lr_warmup_iters` and so on.
        where: the file of the config.
    """

    model: Mapping[str, Any]
    train: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    where: str

    @property
    def padded_vocabulary(self) -> int | None:
        """Rows of the embedding: the vocabulary, padded to be divisible among tensor ranks."""
        if type(padded := self.model.get("padded_vocab_size")) is int:
            return padded
        keys = ("vocab_size", "make_vocab_size_divisible_by", "tensor_model_parallel_size")
        numbers = [n for key in keys if type(n := self.model.get(key)) is int and n > 0]
        if len(numbers) < len(keys) or not self.model.get("should_pad_vocab"):
            return None
        size, divisor, ranks = numbers
        # The part of each tensor rank is a multiple of the divisor.
        return -(-size // (divisor * ranks)) * divisor * ranks


def latest(directory: Directory) -> Directory | None:
    """Return the checkpoint that the tracker file names; None without such a file.

    Raises:
        UserError: the file is damaged, or its checkpoint does not exist.
    """
    if not directory.has(TRACKER):
        return None
    where = f"{directory}/{TRACKER}"
    text = directory.read(TRACKER, 64).decode("ascii", "replace").strip()
    if text != "release" and not (text.isdecimal() and len(text) < 19):
        raise UserError(f"{where}: {shown(text)!r} is not an iteration. Name the checkpoint itself")
    name = text if text == "release" else f"iter_{int(text):07d}"
    if not (directory / name).names():
        raise UserError(f"{where} names {name}, which does not exist. Name the checkpoint itself")
    return directory / name


def check_format(directory: Directory) -> None:
    """Check that a checkpoint of Megatron-Core has a supported format.

    Raises:
        UserError: the format is not supported.
    """
    names = directory.names()
    how = "Save it with --ckpt-format torch_dist"
    if METADATA in names:
        return
    if any(_LEGACY.fullmatch(name) for name in names):
        raise UserError(
            f"{directory}: Megatron's legacy format (a pickle per rank, mp_rank_*) is not "
            f"supported. {how}"
        )
    if FORMAT in names:
        about = load_object(directory.read(FORMAT), f"{directory}/{FORMAT}")
        backend = about.get("sharded_backend")
        if isinstance(backend, str) and backend != TORCH_DIST["sharded_backend"]:
            what = f"sharded_backend = {shown(backend)}"
            raise UserError(f"{directory}: {what} is not supported. {how}")


def read_job(directory: Directory, dcp: Dcp | None = None) -> Job | None:
    """Return the config of the job that wrote a checkpoint; None if no file has one.

    Args:
        directory: directory of the checkpoint.
        dcp: the opened checkpoint, if available. `fsdp_dtensor` of Megatron-LM contains the
            arguments.

    Raises:
        UserError: a file is damaged.
    """
    # First: its names are those of `TransformerConfig` and need no translation.
    if directory.has(RUN_CONFIG):
        where = f"{directory}/{RUN_CONFIG}"
        sections = _read_yaml(directory.read(RUN_CONFIG, _YAML), where)
        model = sections["model"]
        train = {**sections["train"], "seq_length": model.get("seq_length")}
        return Job(model, train, sections["optimizer"], sections["scheduler"], where)
    if directory.has(COMMON):
        arguments = read_common(directory).get(_ARGUMENTS)
        return _parse_arguments(arguments, f"{directory}/{COMMON}")
    if dcp is None and ITERATION.fullmatch(directory.name) and directory.has(METADATA):
        dcp = open_dcp(directory)
    if dcp is not None and _ARGUMENTS in dcp.objects:
        arguments = dcp.objects(_ARGUMENTS, is_tolerant=True)
        return _parse_arguments(arguments, f"{directory}: {_ARGUMENTS}")
    return None


def is_known(directory: Directory) -> bool:
    """Return whether a directory has the files or the name of a Megatron-Core checkpoint."""
    names = directory.names()
    return bool({COMMON, RUN_CONFIG} & {*names}) or bool(ITERATION.fullmatch(directory.name))


def read_common(directory: Directory) -> dict[str, Any]:
    """Return `common.pt`; instances of unknown classes are opaque.

    Raises:
        UserError: the file is damaged.
    """
    where = f"{directory}/{COMMON}"
    file = directory.open(COMMON)
    common = Archive(file, 0, file.size, where).object(is_tolerant=True)
    if not isinstance(common, dict):
        raise UserError(f"{where}: not a state of Megatron-Core")
    return common


def read_iteration(dcp: Dcp) -> object:
    """Return the number of steps that a job of Megatron-LM attempted; None if not stored."""
    if dcp.directory.has(COMMON):
        return read_common(dcp.directory).get(ITERATION_KEY)
    return dcp.objects(ITERATION_KEY) if ITERATION_KEY in dcp.objects else None


def _parse_arguments(arguments: object, where: str) -> Job | None:
    """Return the job of Megatron-LM's arguments, by the names of `TransformerConfig`."""
    if not isinstance(arguments, Record):
        return None
    args = {key: value for key, value in vars(arguments).items() if key != "state"}
    if "num_layers" not in args:
        return None
    model = {_RENAMED.get(key, key): value for key, value in args.items()}
    model["share_embeddings_and_output_weights"] = not args.get(
        "untie_embeddings_and_output_weights", False
    )
    is_silu = bool(args.get("swiglu"))
    model["gated_linear_unit"] = is_silu
    model["activation_func"] = "silu" if is_silu else _activation(args)
    model["bias_activation_fusion"] = args.get("bias_gelu_fusion", True)
    # Megatron-LM ignores --num-query-groups without this flag.
    if not args.get("group_query_attention"):
        model["num_query_groups"] = None
    if args.get("use_rope_scaling"):
        model |= {"scale_factor": args.get("rope_scaling_factor") or 8.0, **_LLAMA3}
    return Job(model, args, args, args, where)


def _activation(args: Mapping[str, Any]) -> str:
    names = ("squared_relu", "quick_geglu", "openai_gelu", "onnx_safe")
    return next((name for name in names if args.get(name)), "gelu")


def _read_yaml(data: bytes, where: str) -> dict[str, dict[str, Any]]:
    """Return the plain values of the relevant sections, without constructing other objects.

    Raises:
        UserError: the document is not YAML, or has no model.
    """
    try:
        root = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"{where}: not YAML ({shown(error)})") from error
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for name, node in _items(root):
        if name in sections:
            sections[name] = {key: _value(value, where) for key, value in _items(node)}
    if not sections["model"]:
        raise UserError(f"{where}: no section `model`")
    return sections


def _items(node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((k.value, v) for k, v in node.value if isinstance(k, yaml.ScalarNode))


def _value(node: yaml.Node, where: str) -> object:
    """Return a scalar, a list of scalars, or the `_target_` of a table."""
    if isinstance(node, yaml.ScalarNode):
        if _EXPONENT.fullmatch(node.value):
            return float(node.value)
        try:
            return yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise UserError(f"{where}: {shown(node.value)} is not a value") from error
    if isinstance(node, yaml.SequenceNode) and len(node.value) <= limits.LAYERS:
        plain = [each for each in node.value if isinstance(each, yaml.ScalarNode)]
        return [_value(each, where) for each in plain]
    return next((v.value for k, v in _items(node) if k == "_target_"), None)
