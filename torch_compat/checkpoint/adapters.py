"""LoRA adapters: merged weights W + s B A, and the directories of PEFT.

    layers.3.attention.q_proj.lora_a  <->  base_model.model.KEY.lora_A.weight
    layers.3.attention.q_proj.lora_b  <->  base_model.model.KEY.lora_B.weight

KEY is the layer's name in the family of the base model, `model.layers.3.self_attn.q_proj` in Llama.
Both matrices have the same shape in PEFT. Where a family orders the rows of the weight differently,
the rows of B are reordered in the same way. A tensor that holds several layers has one adapter
(`fused_adapters`).
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np

from jaxforge.config.fine_tuning import ADAPTER, LoraConfig, is_adapter
from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.kernels.hashing import block_checksum
from jaxforge.storage.untrusted_json import load_object
from torch_compat.checkpoint.fused_adapters import Adapter, fuse, split
from torch_compat.checkpoint.orbax_store import split_blocks
from torch_compat.checkpoint.shapes import parameters
from torch_compat.checkpoint.stacking import Stacking
from torch_compat.checkpoint.state import CheckpointState, Tensors
from torch_compat.formats import safetensors
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES, Index, LazyTensor, first_position
from torch_compat.names.table import (
    Fused,
    InterleavedChannels,
    InterleavedRotary,
    LayoutChange,
    NameMap,
    Rule,
    Transposed,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRICES = {"lora_a": "lora_A", "lora_b": "lora_B"}
_READ = {
    "peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern",
    "alpha_pattern", "init_lora_weights",
}  # fmt: skip
"""Keys of `adapter_config.json` that are read."""
_IRRELEVANT = {
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
    "megatron_config", "megatron_core", "runtime_config", "ensure_weight_tying",
    "eva_config", "corda_config", "lora_ga_config", "loftq_config", "qalora_group_size",
}  # fmt: skip
"""Keys that do not change what trained matrices compute. All other keys must be off."""
_PLAIN_INITS = {"gaussian", "orthogonal", "eva", "mica"}
"""Initial values of A and B for which PEFT leaves the base model as it is."""
_MODULE = re.compile(r"[\w.]+", re.ASCII)
_BLOCK = 32 << 20  # bytes of a base weight that are hashed at a time
_MERGED = 1 << 20  # elements of a base weight that are merged at a time


# Merged weights


def without_adapters(config: JobConfig) -> JobConfig:
    """Return the config of the model with merged adapters."""
    return config.with_values({"lora": LoraConfig()}) if config.lora.rank else config


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
    # Moments and progress of the base belong to its weights without adapters.
    return dataclasses.replace(base, params=params, moments=None, scalars={}, progress=None)


def _merged(weight: LazyTensor, a: LazyTensor, b: LazyTensor, scale: float) -> LazyTensor:
    """Return W + scale · B A, computed in float64 and rounded to the dtype of W.

    A product in float32 would depend on the block that is read: BLAS adds up blocks of other shapes
    in another order.
    """

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        # low [rank, columns], high [rows, rank].
        low = a.read((slice(0, a.shape[0]), columns)).astype(np.float64)
        high = scale * b.read((rows, slice(0, b.shape[1]))).astype(np.float64)
        before = weight.read(index)
        after = np.empty_like(before)
        # Bounds the float64 temporaries of a large block.
        step = max(1, _MERGED // max(1, low.shape[1]))
        for first in range(0, len(before), step):
            at = slice(first, first + step)
            after[at] = before[at].astype(np.float64) + high[at] @ low
        return after

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
        # The checksums of blocks add up to that of the array, however the array is cut.
        total += block_checksum(block, first_position(index, array.shape))
    return total % 2**32


# Directories of PEFT


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """Values of `adapter_config.json`.

    Attributes:
        base: path or name of the base model; "" if unknown.
        lora: rank and factor of the adapters.
        ranks: name of a module, or its last parts -> another rank.
        alphas: name of a module, or its last parts -> another alpha.
    """

    base: str
    lora: LoraConfig
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @property
    def scale(self) -> float:
        """Factor of the adapters' outputs."""
        return self.lora.scale

    def of_module(self, module: str) -> LoraConfig:
        """Return rank and factor of the adapter of a module."""

        def find(values: Mapping[str, float], usual: float) -> float:
            # PEFT matches a pattern at the end of a module's name, and the first match counts.
            names = (name for name in values if f".{module}".endswith(f".{name}"))
            return values.get(next(names, ""), usual)

        rank, alpha = find(self.ranks, self.lora.rank), find(self.alphas, self.lora.alpha)
        return self.lora.with_values({"rank": int(rank), "alpha": alpha})


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
    _check_plain(values, where)
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not (_is_rank(rank) and _is_alpha(alpha)):
        raise UserError(
            f"{where}: r = {rank!r} and lora_alpha = {alpha!r} must be positive numbers"
        )
    lora = LoraConfig(rank=rank, alpha=alpha, use_rslora=values.get("use_rslora") or False)
    base = values.get("base_model_name_or_path")
    patterns = (
        _pattern(values, key, is_valid, where)
        for key, is_valid in (("rank_pattern", _is_rank), ("alpha_pattern", _is_alpha))
    )
    return PeftConfig(base if isinstance(base, str) else "", lora, *patterns)


def _check_plain(values: Mapping[str, Any], where: str) -> None:
    """Check that the trained model is W + s B A with the W of the base model.

    Raises:
        UserError: PEFT computes another function, or the meaning of a key is unknown.
    """
    initial = values.get("init_lora_weights")
    if not isinstance(initial, bool | None) and str(initial).lower() not in _PLAIN_INITS:
        raise UserError(
            f"{where}: init_lora_weights = {initial!r} changes the weights of the base model, "
            "which is not supported. Save the adapter as plain LoRA with PEFT's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    if not isinstance(values.get("use_rslora"), bool | None):
        raise UserError(f"{where}: use_rslora = {values['use_rslora']!r} must be true or false")
    for key, value in values.items():
        # Features of later versions of PEFT are off if their key is false, empty or null.
        if key not in _READ | _IRRELEVANT and value and (key, value) != ("bias", "none"):
            raise UserError(
                f"{where}: {key} = {value!r} is not supported. Only plain LoRA is: merge the "
                "adapter with PEFT's merge_and_unload()"
            )


def _is_rank(value: Any) -> TypeGuard[int]:  # noqa: ANN401 (untrusted)
    return type(value) is int and value > 0


def _is_alpha(value: Any) -> TypeGuard[float]:  # noqa: ANN401 (untrusted)
    return type(value) in (int, float) and 0 < value < math.inf


def _pattern(
    values: Mapping[str, Any], key: str, is_valid: Callable[[Any], bool], where: str
) -> dict[str, Any]:
    """Return `rank_pattern` or `alpha_pattern`, in which names of modules are the only patterns.

    Raises:
        UserError: a value is invalid, or a name is another regular expression.
    """
    pattern = values.get(key) or {}
    if not isinstance(pattern, dict) or not all(map(is_valid, pattern.values())):
        raise UserError(f"{where}: {key} = {pattern!r} must have a positive number for each module")
    for name in pattern:
        if not _MODULE.fullmatch(name):
            raise UserError(
                f"{where}: {key} has the regular expression {name!r}, which is not supported. "
                "Write the names of the modules in its place"
            )
    return pattern


def read_peft(directory: Directory, dialect: NameMap, model: ModelConfig) -> dict[str, LazyTensor]:
    """Return the tensors of a PEFT adapter by our names, for the factor of its config.

    Raises:
        UserError: the adapter is damaged, or does not fit the model.
    """
    where, config = f"{directory}/{WEIGHTS}", read_config(directory)
    tensors = dict(safetensors.open_file(directory.open(WEIGHTS), where))
    result: dict[str, LazyTensor] = {}
    for key, layers in _layers_by_key(dialect, model).items():
        keys = {m: f"{_PREFIX}{key}.{name}.weight" for m, name in _MATRICES.items()}
        if not any(k in tensors for k in keys.values()):
            continue
        if missing := [k for k in keys.values() if k not in tensors]:
            raise UserError(f"{where}: {missing[0]} is missing")
        a, b = (tensors.pop(keys[m]) for m in ADAPTER)
        lora = config.of_module(key)
        if not len(a.shape) == len(b.shape) == 2 or {a.shape[0], b.shape[1]} != {lora.rank}:
            raise UserError(
                f"{where}: {key} has matrices {list(a.shape)} and {list(b.shape)}, and not the "
                f"rank {lora.rank} of {CONFIG}"
            )
        # A run has one factor for all adapters. B absorbs any other factor.
        if not math.isclose(lora.scale, config.scale):
            b = _times(b, lora.scale / config.scale)
        for layer, matrices in _to_jaxforge(Adapter(a, b), layers, config, model).items():
            result |= {f"{layer}.{m}": matrix for m, matrix in zip(ADAPTER, matrices, strict=True)}
    if tensors or not result:
        key = next(iter(tensors), "no adapter")
        raise UserError(
            f"{where}: {key} belongs to no linear layer of this model as {dialect.name}"
        )
    return result


def _to_jaxforge(
    adapter: Adapter, layers: Mapping[str, Rule], config: PeftConfig, model: ModelConfig
) -> dict[str, Adapter]:
    """Return the adapters of the layers whose weights are stored in one tensor of the dialect.

    Raises:
        UserError: the tensor has another size, or the layout of an adapter is unknown.
    """
    changes = {layer: _row_change(rule, layer) for layer, rule in layers.items()}
    parts = {0: adapter}
    # One tensor of q, k and v has one A. Its B is split by rows, with A repeated for each part.
    if fused := [rule.change for rule in layers.values() if isinstance(rule.change, Fused)]:
        rows, outputs = fused[0].layout(model), adapter.b.shape[0]
        if outputs != sum(map(len, rows)):
            raise UserError(
                f"{next(iter(layers))}: the adapter has {outputs} outputs, and the tensor of its "
                f"family {sum(map(len, rows))}. Name the model that the adapter was trained with"
            )
        parts = split(adapter, rows, config.lora.rank)
    result = {}
    for layer, rule in layers.items():
        part = rule.change.part if isinstance(rule.change, Fused) else 0
        if part in parts:
            (a, b), change = parts[part], changes[layer]
            result[layer] = Adapter(a, change.to_jaxforge(b, model) if change else b)
    return result


def _times(tensor: LazyTensor, factor: float) -> LazyTensor:
    """Return a tensor times a factor in float32."""
    whole = tensor.cast(DTYPES["float32"])
    return dataclasses.replace(whole, read=lambda index: whole.read(index) * np.float32(factor))


def peft_tensors(adapters: Tensors, dialect: NameMap, model: ModelConfig) -> dict[str, LazyTensor]:
    """Return adapters by PEFT's keys.

    Raises:
        UserError: the layout of an adapted layer is unknown.
    """
    result: dict[str, LazyTensor] = {}
    for key, layers in _layers_by_key(dialect, model).items():
        parts, rows = {}, None
        for layer, rule in layers.items():
            if f"{layer}.lora_a" not in adapters:
                continue
            a, b = (adapters[f"{layer}.{matrix}"] for matrix in ADAPTER)
            change, part = _row_change(rule, layer), 0
            if isinstance(rule.change, Fused):
                part, rows = rule.change.part, rule.change.layout(model)
            parts[part] = Adapter(a, change.to_dialect(b, model) if change else b)
        if not parts:
            continue
        # PEFT has one adapter per tensor, and a fused tensor holds several layers.
        adapter = parts[0] if rows is None else fuse(parts, rows)
        for name, matrix in zip(_MATRICES.values(), adapter, strict=True):
            result[f"{_PREFIX}{key}.{name}.weight"] = matrix
    return result


def stores_transposed(dialect: NameMap, model: ModelConfig) -> bool:
    """Return whether a dialect stores matrices as [in, out], which PEFT's config must say."""
    rules = (rule for layers in _layers_by_key(dialect, model).values() for rule in layers.values())
    return any(isinstance(rule.change, Transposed) for rule in rules)


def config_json(
    lora: LoraConfig, base: str | None, tensors: Tensors, *, fan_in_fan_out: bool
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    Args:
        lora: the `[lora]` section.
        base: path of the base model.
        tensors: the adapters by PEFT's keys.
        fan_in_fan_out: whether the base stores matrices as [in, out].
    """
    ranks = {
        key.removeprefix(_PREFIX).removesuffix(end): tensor.shape[0]
        for key, tensor in tensors.items()
        if key.endswith(end := f".{_MATRICES['lora_a']}.weight")
    }
    fused = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    # A fused adapter has n times the rank. Its alpha grows so that its factor stays the same.
    alphas = {
        module: lora.alpha * (rank / lora.rank) ** (0.5 if lora.use_rslora else 1)
        for module, rank in fused.items()
    }
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora,
        "rank_pattern": fused, "alpha_pattern": alphas,
        "lora_dropout": lora.dropout, "target_modules": sorted(ranks), "bias": "none",
        "fan_in_fan_out": fan_in_fan_out, "inference_mode": True, "init_lora_weights": True,
    }  # fmt: skip


def adapters_of(params: Tensors) -> dict[str, LazyTensor]:
    """Return the adapters among parameters."""
    return {name: tensor for name, tensor in params.items() if is_adapter(name)}


def _layers_by_key(dialect: NameMap, model: ModelConfig) -> dict[str, dict[str, Rule]]:
    """Return the dialect's name of each linear layer -> our layers in it, with their rules."""
    result: dict[str, dict[str, Rule]] = {}
    for name in parameters(model):
        layer, _, parameter = name.rpartition(".")
        if parameter == "weight" and dialect.find_key(name) is not None:
            rule, key = dialect.rule_of(name)
            result.setdefault(key.removesuffix(".weight"), {})[layer] = rule
    return result


def _row_change(rule: Rule, layer: str) -> LayoutChange | None:
    """Return the change of the rows of a layer's weight, which are those of B, too.

    Raises:
        UserError: the weight is stored in another way.
    """
    change = rule.change.change if isinstance(rule.change, Fused) else rule.change
    if isinstance(change, Transposed):
        change = None  # PEFT's matrices are the same for both layouts
    if rule.is_packed or not isinstance(change, InterleavedRotary | InterleavedChannels | None):
        raise UserError(
            f"{layer}: adapters of PEFT cannot be converted for the way in which this family "
            "stores the matrix. Export merged weights with --to hf"
        )
    return change
