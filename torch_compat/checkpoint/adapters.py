"""LoRA adapters: merged weights W + s B A, and the directories of PEFT.

    layers.3.attention.q_proj.lora_a  <->  base_model.model.KEY.lora_A.weight
    layers.3.attention.q_proj.lora_b  <->  base_model.model.KEY.lora_B.weight

KEY is the layer's name in the family of the base model, `model.layers.3.self_attn.q_proj` in Llama.
Both matrices have the same shape in PEFT. Where a family orders the rows of the weight differently,
the rows of B are reordered in the same way.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.config.lora import ADAPTER, LoraConfig, is_adapter
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.state.block_checksum import block_checksum
from jaxforge.storage.untrusted_json import load_object
from torch_compat.checkpoint.orbax_store import split_blocks
from torch_compat.checkpoint.shapes import parameters
from torch_compat.checkpoint.stacking import Stacking
from torch_compat.checkpoint.state import CheckpointState, Tensors
from torch_compat.formats import safetensors
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES, Index, LazyTensor, first_position
from torch_compat.names.table import InterleavedRotary, InterleavedTail, NameMap, Rule

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRICES = {"lora_a": "lora_A", "lora_b": "lora_B"}
_BLOCK = 32 << 20  # bytes of a base weight that are hashed at a time


# Merged weights


def without_adapters(config: JobConfig) -> JobConfig:
    """Return the config of the model with merged adapters."""
    return config.model_copy(update={"lora": LoraConfig()}) if config.lora.rank else config


def merge(base: CheckpointState, adapters: Tensors, scale: float) -> CheckpointState:
    """Return the weights of a base model with merged adapters, in the dtypes of the base.

    Raises:
        UserError: an adapter has no weight of its shape in the base.
    """
    params = dict(base.params)
    for name, a in adapters.items():
        layer, _, matrix = name.rpartition(".")
        if matrix != ADAPTER[0]:
            continue
        weight, b = params.get(f"{layer}.weight"), adapters[f"{layer}.{ADAPTER[1]}"]
        if weight is None or weight.shape != (b.shape[0], a.shape[1]):
            shape = "absent" if weight is None else list(weight.shape)
            raise UserError(
                f"{layer}: the adapter is for a weight [{b.shape[0]}, {a.shape[1]}], which is "
                f"{shape} in the base model. Name the model that the adapter was trained with"
            )
        params[f"{layer}.weight"] = _merged(weight, a, b, scale)
    return dataclasses.replace(base, params=params, moments=None, scalars={}, progress=None)


def _merged(weight: LazyTensor, a: LazyTensor, b: LazyTensor, scale: float) -> LazyTensor:
    """Return W + scale · B A, computed in float64 and rounded to the dtype of W.

    The order of the sums of B A depends on the shape of the block. In float32, an element would
    have different last digits in different blocks.
    """

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        low = a.read((slice(0, a.shape[0]), columns)).astype(np.float64)
        high = b.read((rows, slice(0, b.shape[1]))).astype(np.float64)
        whole = weight.read(index).astype(np.float64) + scale * (high @ low)
        return whole.astype(np.float32).astype(weight.dtype)

    return dataclasses.replace(weight, read=read)


def check_base(base: Tensors, record: Mapping[str, Any], model: ModelConfig, where: str) -> None:
    """Compare a base model with the hashes that a run recorded (`Progress.base`).

    Raises:
        UserError: the base is another model.
    """
    arrays = Stacking(model).join(base)
    for name, (dtype, value) in record.items():
        array = arrays[name].cast(DTYPES[dtype]) if name in arrays else None
        if array is None or _checksum(array) != value:
            raise UserError(
                f"{where} is not the model that the adapters were trained with: {name} differs. "
                "Restore that model, or set --checkpoint.load_path to a copy"
            )


def _checksum(array: LazyTensor) -> int:
    total = 0
    for index in split_blocks(array, _BLOCK):
        block = np.ascontiguousarray(array.read(index))
        total += block_checksum(block, first_position(index, array.shape))
    return total % 2**32


# Directories of PEFT


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """Values of `adapter_config.json`.

    Attributes:
        base: path or name of the base model; "" if unknown.
        scale: factor of the adapters' outputs.
    """

    base: str
    scale: float


def is_peft(directory: Directory) -> bool:
    """Return whether a directory is a PEFT adapter."""
    return {CONFIG, WEIGHTS} <= set(directory.names())


def read_config(directory: Directory) -> PeftConfig:
    """Read `adapter_config.json`.

    Raises:
        UserError: the adapter is damaged, or of a kind that jaxforge does not support.
    """
    where = f"{directory}/{CONFIG}"
    values = load_object(directory.read(CONFIG), where)
    if values.get("peft_type") != "LORA":
        raise UserError(
            f"{where}: peft_type is {values.get('peft_type')!r}: only LORA is supported"
        )
    unsupported = {
        "bias": "none", "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None,
        "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None, "lora_bias": False,
        "trainable_token_indices": None, "target_parameters": None,
    }  # fmt: skip
    for key, usual in unsupported.items():
        if values.get(key, usual) not in (usual, None, [], {}):
            raise UserError(f"{where}: {key} = {values[key]!r} is not supported")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not (type(rank) is int and rank > 0 and isinstance(alpha, int | float) and alpha > 0):
        raise UserError(
            f"{where}: r = {rank!r} and lora_alpha = {alpha!r} must be positive numbers"
        )
    lora = LoraConfig(rank=rank, alpha=alpha, use_rslora=values.get("use_rslora") is True)
    base = values.get("base_model_name_or_path")
    return PeftConfig(base if isinstance(base, str) else "", lora.scale)


def read_peft(directory: Directory, dialect: NameMap, model: ModelConfig) -> dict[str, LazyTensor]:
    """Return the tensors of a PEFT adapter by our names.

    Raises:
        UserError: the adapter is damaged, or does not fit the model.
    """
    where = f"{directory}/{WEIGHTS}"
    tensors = dict(safetensors.open_file(directory.open(WEIGHTS), where))
    result: dict[str, LazyTensor] = {}
    for layer, key, rule in _layers(dialect, model):
        keys = {m: f"{_PREFIX}{key}.{name}.weight" for m, name in _MATRICES.items()}
        if not any(k in tensors for k in keys.values()):
            continue
        _check_rule(rule, layer, key)
        if missing := [k for k in keys.values() if k not in tensors]:
            raise UserError(f"{where}: {missing[0]} is missing")
        a, b = (tensors.pop(keys[m]) for m in ADAPTER)
        result[f"{layer}.lora_a"] = a
        result[f"{layer}.lora_b"] = rule.change.to_jaxforge(b, model) if rule.change else b
    if tensors or not result:
        key = next(iter(tensors), "no adapter")
        raise UserError(
            f"{where}: {key} belongs to no linear layer of this model as {dialect.name}"
        )
    return result


def peft_tensors(adapters: Tensors, dialect: NameMap, model: ModelConfig) -> dict[str, LazyTensor]:
    """Return adapters by PEFT's keys.

    Raises:
        UserError: the family has no matrix of its own for an adapted layer.
    """
    result: dict[str, LazyTensor] = {}
    for layer, key, rule in _layers(dialect, model):
        if f"{layer}.lora_a" not in adapters:
            continue
        _check_rule(rule, layer, key)
        a, b = (adapters[f"{layer}.{matrix}"] for matrix in ADAPTER)
        result[f"{_PREFIX}{key}.lora_A.weight"] = a
        changed = rule.change.to_dialect(b, model) if rule.change else b
        result[f"{_PREFIX}{key}.lora_B.weight"] = changed
    return result


def config_json(lora: LoraConfig, base: str | None, modules: list[str]) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Args:
        lora: the `[lora]` section.
        base: path of the base model.
        modules: names of the adapted modules.
    """
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora,
        "lora_dropout": 0.0, "target_modules": modules, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    }  # fmt: skip


def modules_of(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """Return the names of the adapted modules in a model of transformers."""
    ends = tuple(f".{name}.weight" for name in _MATRICES.values())
    names = {key.removeprefix(_PREFIX) for key in tensors}
    return sorted({name.removesuffix(end) for name in names for end in ends if name.endswith(end)})


def adapters_of(params: Tensors) -> dict[str, LazyTensor]:
    """Return the adapters among parameters."""
    return {name: tensor for name, tensor in params.items() if is_adapter(name)}


def _layers(dialect: NameMap, model: ModelConfig) -> Iterator[tuple[str, str, Rule]]:
    """Yield each layer with a weight: our name, the dialect's name, and the rule of its weight."""
    for name in parameters(model):
        layer, _, parameter = name.rpartition(".")
        if parameter == "weight" and dialect.find_key(name) is not None:
            rule, key = dialect.rule_of(name)
            yield layer, key.removesuffix(".weight"), rule


def _check_rule(rule: Rule, layer: str, key: str) -> None:
    if not (rule.change is None or isinstance(rule.change, InterleavedRotary | InterleavedTail)):
        raise UserError(
            f"{layer}: this family stores the matrix as a part of {key} or transposed, for which "
            "adapters of PEFT cannot be converted. Export merged weights with --to hf"
        )
