"""Rules between sections and the mesh, each with a violating and a valid config."""

import math

import pytest

from jaxforge.config import (
    axes,
    check,
    load_config,
    mesh_shape,
    section_rules,
)
from jaxforge.errors import UserError

SMALL = [
    "--model.dim=64",
    "--model.n_heads=4",
    "--model.vocab_size=256",
    "--model.max_seq_len=64",
    "--train.seq_len=32",
]


PIPELINED = ["distributed.pp=2", "train.grad_accum_steps=4", "train.batch_size=1"]
MIXED = ["data.datasets=[{'path':'a','name':'web'},{'path':'b','name':'code'}]"]
DIFFERENT = [
    "model.num_experts=4",
    "model.moe_first_dense_layers=1",
    "distributed.pp=2",
    "distributed.cp=2",
]
INTERLEAVED = ["distributed.pp_schedule=interleaved_1f1b", "distributed.pp_chunks=3"]
CAPTURING = [
    "eval.activations_interval=2",
    "eval.datasets=[{'name':'web','dataset_path':'a'},{'name':'code','dataset_path':'b'}]",
]
DPO = ["train.objective=dpo", "checkpoint.load_path=base", "data.dataset_path=pairs"]
STOPPING = ["early_stop.active", "early_stop.patience_steps=5"]


def small(*overrides: str):
    return load_config(None, [*SMALL, *(f"--{override}" for override in overrides)])


def complaints(config, n_devices: int) -> list[str]:
    with pytest.raises(UserError) as caught:
        check(config, n_devices)
    return str(caught.value).splitlines()


def test_small_run_accepts_any_power_of_two_devices():
    for n_devices in (1, 2, 4, 8):
        check(small(), n_devices)


CASES = [
    (
        1,
        ["distributed.heartbeat_timeout_sec=50"],
        ["distributed.heartbeat_timeout_sec=49"],
        "train.hang_timeout = 30 requires distributed.heartbeat_timeout_sec of at least 50, not"
        " 49, so that processes report a hang before JAX ends them: change one of them",
    ),
    (
        1,
        ["distributed.heartbeat_timeout_sec=10", "train.hang_timeout=0"],
        ["distributed.heartbeat_timeout_sec=10", "train.hang_timeout=10"],
        "train.hang_timeout = 10 requires distributed.heartbeat_timeout_sec of at least 30, not"
        " 10, so that processes report a hang before JAX ends them: change one of them",
    ),
    (
        1,
        ["train.seq_len=64"],
        ["train.seq_len=65"],
        "train.seq_len = 65 exceeds model.max_seq_len = 64: lower the first, or raise the second",
    ),
    (
        2,
        ["train.global_batch_size=67108862"],
        ["train.global_batch_size=67108864"],
        "an update of 67,108,864 sequences of train.seq_len = 32 has 2,147,483,648 tokens, "
        "which must be less than 2^31: lower train.global_batch_size or train.grad_accum_steps",
    ),
    (
        2,
        ["train.batch_size=8388607", "train.grad_accum_steps=4"],
        ["train.batch_size=8388608", "train.grad_accum_steps=4"],
        "an update of 67,108,864 sequences of train.seq_len = 32 has 2,147,483,648 tokens, "
        "which must be less than 2^31: lower train.batch_size or train.grad_accum_steps",
    ),
    (
        1,
        ["eval.enabled", "eval.dataset_path=a"],
        ["eval.enabled"],
        "eval.enabled = true requires data: set eval.datasets or eval.tasks, or "
        "eval.enabled = false",
    ),
    (
        1,
        ["eval.activations_interval=2", "eval.dataset_path=a"],
        ["eval.activations_interval=2"],
        "eval.activations_interval = 2 requires data: set eval.datasets, or "
        "eval.activations_interval = 0",
    ),
    (
        1,
        [*CAPTURING, "model.n_layers=3", "eval.activations_layers=[0,2]"],
        [*CAPTURING, "model.n_layers=3", "eval.activations_layers=[0,3]"],
        "eval.activations_layers: layer 3 does not exist: the layers of model.n_layers = 3 are "
        "0 to 2",
    ),
    (
        2,
        [*CAPTURING, "distributed.cp=2"],
        [*CAPTURING, "distributed.cp=2", "eval.activations_points=att*"],
        'eval.activations_points = ["att*"] includes attention_weights, but with distributed.cp'
        " = 2 no device has all keys of a query: remove it, or set distributed.cp to 1",
    ),
    (
        1,
        ["eval.enabled", "eval.dataset_path=a", "checkpoint.best_metric=eval/bits_per_byte"],
        ["eval.enabled", "eval.dataset_path=a", "checkpoint.best_metric=eval/los"],
        'checkpoint.best_metric = "eval/los" is not a metric of [eval]; did you mean '
        '"eval/loss"? Choose from eval/loss, eval/perplexity, eval/bits_per_byte',
    ),
    (
        1,
        [
            "eval.enabled",
            "eval.datasets=[{'name':'a','dataset_path':'a'}]",
            "checkpoint.best_metric=eval/a/loss",
        ],
        [
            "eval.enabled",
            "eval.datasets=[{'name':'a','dataset_path':'a'}]",
            "checkpoint.best_metric=eval/b/loss",
        ],
        'checkpoint.best_metric = "eval/b/loss" is not a metric of [eval]; did you mean '
        '"eval/a/loss"? Choose from eval/loss, eval/perplexity, eval/bits_per_byte, '
        "eval/a/loss, eval/a/perplexity, eval/a/bits_per_byte",
    ),
    (
        1,
        ["data.hf_dataset_name=wiki", "data.tokenizer_path=byte"],
        ["data.hf_dataset_name=wiki"],
        'data.hf_dataset_name = "wiki" requires data.tokenizer_path',
    ),
    (
        1,
        ["data.hf_streaming", "data.hf_dataset_name=wiki", "data.tokenizer_path=byte"],
        ["data.hf_streaming"],
        "data.hf_streaming = true requires data.hf_dataset_name without data.dataset_path: set "
        "only data.hf_dataset_name, or set data.hf_streaming to false",
    ),
    (
        1,
        ["data.hf_dataset_name=a", "data.tokenizer_path=byte", "data.order=torch"],
        [
            "data.hf_dataset_name=a",
            "data.tokenizer_path=byte",
            "data.order=torch",
            "data.hf_streaming",
        ],
        'data.order = "torch" shuffles the whole dataset, which data.hf_streaming = true does '
        'not load: set data.order to "grain" or data.hf_streaming to false',
    ),
    (
        1,
        [*MIXED, "data.tokenizer_path=byte"],
        [*MIXED, "data.datasets=[{'path':'a'},{'hf_name':'wiki'}]"],
        'data.datasets[1].hf_name = "wiki" requires data.tokenizer_path',
    ),
    (
        1,
        [*MIXED],
        [*MIXED, "data.hf_streaming"],
        "data.hf_streaming = true does not support data.datasets, which require random access: "
        "set it to false to tokenize Hugging Face datasets once",
    ),
    (
        1,
        [*MIXED, "data.phases=[{'dataset_weights':{'code':1}}]"],
        [*MIXED, "data.phases=[{'dataset_weights':{'cod':1}}]"],
        'data.phases[0].dataset_weights names "cod", which is not a source; did you mean '
        '"code"? Choose from web, code',
    ),
    (
        1,
        [*MIXED, "data.phases=[{'dataset_weights':{'code':1}}]"],
        [*MIXED, "data.phases=[{'dataset_weights':{'poems':1}}]"],
        'data.phases[0].dataset_weights names "poems", which is not a source; choose from web, '
        "code",
    ),
    (
        1,
        ["data.phases=[{'lr_scale':0.5}]"],
        ["data.anneal_start_step=3", "data.anneal_weights={'code':1}"],
        'data.phases[0].dataset_weights names "code", but data.datasets is empty: add the source '
        "there",
    ),
    (
        1,
        [*MIXED, "data.anneal_start_step=3", "data.anneal_weights={'web':0}"],
        [*MIXED, "data.anneal_start_step=3", "data.anneal_weights={'web':0,'code':0}"],
        "data.phases[0].dataset_weights are all 0: at least one source must have a weight above 0",
    ),
    (
        2,
        [*MIXED, "data.order=torch", "data.torch_ranks=4"],
        [*MIXED, "data.order=torch", "data.torch_ranks=3"],
        "data.torch_ranks = 3 must divide the 16 sequences of a global microbatch: change "
        "train.global_batch_size or train.grad_accum_steps",
    ),
    (
        1,
        [*MIXED, "data.order=torch", "data.torch_ranks=4"],
        [*MIXED, "data.torch_ranks=4"],
        "data.torch_ranks = 4 applies only to mixtures: remove it, or set "
        'data.datasets and data.order = "torch"',
    ),
    (
        8,
        ["distributed.tp=4"],
        ["distributed.tp=8"],
        "model.n_heads = 4 must be a multiple of distributed.tp = 8: change one of them",
    ),
    (
        4,
        ["distributed.tp=2", "model.n_kv_heads=2"],
        ["distributed.tp=4", "model.n_kv_heads=2"],
        "model.n_kv_heads = 2 must be a multiple of distributed.tp = 4: change one of them",
    ),
    (
        2,
        ["distributed.tp=2", "train.seq_len=30"],
        ["distributed.tp=2", "train.seq_len=31"],
        "train.seq_len = 31 must be a multiple of distributed.tp = 2: change one of them",
    ),
    (
        2,
        ["distributed.tp=2", "model.ffn_hidden_dim=98"],
        ["distributed.tp=2", "model.ffn_hidden_dim=99"],
        "model.ffn_hidden_dim = 99 must be a multiple of distributed.tp = 2: change one of them",
    ),
    (
        2,
        ["distributed.tp=2", "model.vocab_size=50258"],
        ["distributed.tp=2", "model.vocab_size=50257"],
        "model.vocab_size = 50257 must be a multiple of distributed.tp = 2: change one of them",
    ),
    (
        4,
        [*PIPELINED, "distributed.tp=2", "model.vocab_size=50260"],
        [*PIPELINED, "distributed.tp=2", "model.vocab_size=50258"],
        "model.vocab_size = 50258 must be a multiple of distributed.pp * tp = 2 * 2 = 4: change"
        " one of them",
    ),
    (
        2,
        [*PIPELINED, "model.vocab_size=50258"],
        [*PIPELINED, "model.vocab_size=50257"],
        "model.vocab_size = 50257 must be a multiple of distributed.pp = 2: change one of them",
    ),
    (
        2,
        [*PIPELINED, "model.n_layers=4", "model.o_bias=true"],
        [*PIPELINED, "model.n_layers=3", "model.o_bias=true"],
        "model.n_layers = 3 must be a multiple of 2 pipeline stages in a model with "
        "model.o_bias or mlp_bias: change model.n_layers or distributed.pp",
    ),
    (
        2,
        [*PIPELINED, "model.mixer=short_convolution", "model.n_layers=3"],
        [
            *PIPELINED,
            "model.mixer=short_convolution",
            "model.n_layers=3",
            "model.short_convolution.bias=true",
        ],
        "model.n_layers = 3 must be a multiple of 2 pipeline stages in a model with biases in "
        "model.short_convolution: change model.n_layers or distributed.pp",
    ),
    (
        2,
        [*PIPELINED, "model.n_layers=2"],
        [*PIPELINED, "model.n_layers=1"],
        "model.n_layers = 1 is less than distributed.pp = 2: lower it",
    ),
    (
        2,
        [*PIPELINED, *INTERLEAVED, "model.n_layers=6"],
        [*PIPELINED, *INTERLEAVED, "model.n_layers=5"],
        "model.n_layers = 5 is less than distributed.pp * pp_chunks = 2 * 3 = 6: lower one of them",
    ),
    (
        2,
        [*PIPELINED, "train.grad_accum_steps=3"],
        [*PIPELINED, "train.grad_accum_steps=1"],
        "train.grad_accum_steps = 1 leaves some of the distributed.pp = 2 stages idle all the "
        "time: set it to 2",
    ),
    (
        2,
        [*PIPELINED, *INTERLEAVED, "model.n_layers=6", "train.grad_accum_steps=4"],
        [*PIPELINED, *INTERLEAVED, "model.n_layers=6", "train.grad_accum_steps=3"],
        "train.grad_accum_steps = 3 must be a multiple of distributed.pp = 2 with "
        'distributed.pp_schedule = "interleaved_1f1b": set it to 4',
    ),
    (
        2,
        [
            *PIPELINED,
            "train.batch_ramp=[{'grad_accum_steps':2},{'start':9,'grad_accum_steps':4}]",
        ],
        [
            *PIPELINED,
            "train.batch_ramp=[{'grad_accum_steps':1},{'start':9,'grad_accum_steps':4}]",
        ],
        "train.batch_ramp[0] = 1 microbatches leaves some of the distributed.pp = 2 stages "
        "idle all the time: set it to 2",
    ),
    (
        2,
        [
            *[*PIPELINED, *INTERLEAVED, "model.n_layers=6"],
            "train.batch_ramp=[{'grad_accum_steps':2},{'start':9,'grad_accum_steps':4}]",
        ],
        [
            *[*PIPELINED, *INTERLEAVED, "model.n_layers=6"],
            "train.batch_ramp=[{'grad_accum_steps':3},{'start':9,'grad_accum_steps':4}]",
        ],
        "train.batch_ramp[0] = 3 microbatches must be a multiple of distributed.pp = 2 with "
        'distributed.pp_schedule = "interleaved_1f1b": set it to 4',
    ),
    (
        1,
        [*STOPPING, "eval.enabled", "eval.dataset_path=a"],
        STOPPING,
        'early_stop.metric = "eval/loss" requires eval.enabled = true; or use "train/loss"',
    ),
    (
        1,
        ["early_stop.active", "early_stop.target=3", "early_stop.metric=train/loss"],
        ["early_stop.active", "early_stop.target=3"],
        'early_stop.metric = "eval/loss" requires eval.enabled = true; or use "train/loss"',
    ),
    (
        1,
        [*STOPPING, "eval.enabled", "eval.dataset_path=a", "early_stop.metric=train/loss"],
        [*STOPPING, "eval.enabled", "eval.dataset_path=a", "early_stop.metric=eval/perplex"],
        'early_stop.metric = "eval/perplex" is not a metric of [eval]; did you mean '
        '"eval/perplexity"? Choose from eval/loss, eval/perplexity, eval/bits_per_byte',
    ),
    (
        1,
        [*STOPPING, "early_stop.metric=train/loss"],
        [*STOPPING, "early_stop.metric=val_loss"],
        'early_stop.metric = "val_loss" is not a metric of a run; did you mean "eval/loss"? Choose '
        "from train/loss, train/grad_norm, train/lr, smoothed/loss, eval/loss, eval/perplexity, "
        "eval/bits_per_byte",
    ),
    (
        3,
        ["model.dim=72", "model.num_experts=6", "distributed.ep=3"],
        ["model.num_experts=6", "distributed.ep=3"],
        "model.dim = 64 must be a multiple of distributed.ep = 3: change one of them",
    ),
    (
        6,
        ["distributed.tp=2"],
        ["distributed.tp=3", "model.vocab_size=258", "train.seq_len=33", "model.ffn_hidden_dim=96"],
        "model.n_heads = 4 must be a multiple of distributed.tp = 3: change one of them",
    ),
    (
        4,
        ["distributed.tp=2", "distributed.dp_shard=2", "model.n_kv_heads=2"],
        ["distributed.tp=4", "distributed.dp_shard=1", "model.n_kv_heads=2"],
        "model.n_kv_heads = 2 must be a multiple of distributed.tp = 4: change one of them",
    ),
    (
        2,
        ["distributed.tp=2", "train.seq_len=62", "model.max_seq_len=63"],
        ["distributed.tp=2", "train.seq_len=63", "model.max_seq_len=63"],
        "train.seq_len = 63 must be a multiple of distributed.tp = 2: change one of them",
    ),
    (
        2,
        ["train.global_batch_size=12", "train.grad_accum_steps=3"],
        ["train.global_batch_size=15", "train.grad_accum_steps=3"],
        "train.global_batch_size = 15 must be a multiple of train.grad_accum_steps * "
        "distributed.dp_replicate * dp_shard = 3 * 1 * 2 = 6: change one of them",
    ),
    (
        1,
        ["train.global_batch_size=12", "train.grad_accum_steps=3"],
        ["train.global_batch_size=13", "train.grad_accum_steps=3"],
        "train.global_batch_size = 13 must be a multiple of train.grad_accum_steps * "
        "distributed.dp_replicate * dp_shard = 3 * 1 * 1 = 3: change one of them",
    ),
    (
        2,
        ["train.global_batch_size=16", "train.batch_size=8"],
        ["train.global_batch_size=16", "train.batch_size=4"],
        "train.global_batch_size = 16, but train.batch_size = 4 on 2 data-parallel ranks with "
        "train.grad_accum_steps = 1 makes 8: remove train.batch_size, which follows",
    ),
    (
        2,
        ["train.global_batch_size=2"],  # the default batch_size = 8 does not conflict
        ["train.global_batch_size=2", "train.batch_size=8"],
        "train.global_batch_size = 2, but train.batch_size = 8 on 2 data-parallel ranks with "
        "train.grad_accum_steps = 1 makes 16: remove train.batch_size, which follows",
    ),
    (
        1,
        ["optimizer.name=schedule_free_adamw", "scheduler.name=none"],
        ["optimizer.name=schedule_free_adamw"],
        'optimizer.name = "schedule_free_adamw" requires scheduler.name = "none", not '
        '"cosine": it warms up by optimizer.schedule_free_adamw.warmup_steps and averages weights '
        "instead of decaying the rate",
    ),
    (
        4,
        ["distributed.dp_shard=2", "distributed.tp=2"],
        ["distributed.dp_shard=4", "distributed.tp=2"],
        "distributed.dp_shard = 4 * distributed.tp = 2 needs 8 devices, not 4: set "
        "distributed.dp_shard to -1, or change an axis",
    ),
    (
        4,
        ["distributed.tp=2", "distributed.dp_shard=2"],
        [
            "distributed.tp=3",
            "distributed.dp_shard=2",
            "model.n_heads=3",
            "model.head_dim=16",
            "model.vocab_size=258",
            "train.seq_len=33",
            "model.ffn_hidden_dim=96",
        ],
        "distributed.dp_shard = 2 * distributed.tp = 3 needs 6 devices, not 4: set "
        "distributed.dp_shard to -1, or change an axis",  # 2 does not divide the heads
    ),
    (
        4,
        ["distributed.tp=4"],
        ["distributed.dp_replicate=3"],
        "distributed.dp_replicate = 3 needs a multiple of 3 devices, not 4: lower an axis",
    ),
    (
        4,
        ["distributed.dp_shard=4"],
        ["distributed.dp_shard=1"],
        "distributed.dp_shard = 1 needs 1 devices, not 4: set distributed.dp_shard to -1, or "
        "change an axis",
    ),
]


@pytest.mark.parametrize(("n_devices", "good", "bad", "message"), CASES)
def test_broken_rule_names_keys_and_remedy(n_devices, good, bad, message):
    check(small(*good), n_devices)
    assert complaints(small(*bad), n_devices) == [message]


@pytest.mark.parametrize(
    ("rule", "good", "bad", "keys"),
    [
        (
            axes.different_stages_exchange_in_groups,
            [*DIFFERENT, "distributed.cp_strategy=ulysses"],
            [*DIFFERENT, "distributed.cp_strategy=ring"],
            ("distributed.cp_strategy", "distributed.pp", "distributed.cp"),
        ),
        (
            axes.different_stages_exchange_in_groups,
            ["model.mixer=mamba2", "distributed.pp=2", "distributed.cp=2"],
            ["model.mixer=mamba2", *DIFFERENT],
            ("distributed.pp", "distributed.cp"),
        ),
        (
            axes.ep_has_experts,
            ["model.num_experts=4", "distributed.ep=2"],
            ["distributed.ep=2"],
            ("distributed.ep", "model.num_experts"),
        ),
        (
            axes.shares_are_equal,
            ["model.num_experts=4", "distributed.ep=2"],
            ["model.num_experts=3", "distributed.ep=2"],
            ("model.num_experts", "distributed.ep"),
        ),
        (
            axes.shares_are_equal,
            ["model.num_experts=4", "model.moe_expert_dim=36", "distributed.tp=2"],
            ["model.num_experts=4", "model.moe_expert_dim=37", "distributed.tp=2"],
            ("model.moe_expert_dim", "distributed.tp"),
        ),
        (
            section_rules.used_average_exists,
            ["checkpoint.export_weights=ema", "train.ema_decay=0.9"],
            ["checkpoint.export_weights=ema"],
            ("train.ema_decay", 'checkpoint.export_weights to "raw"'),
        ),
        (
            section_rules.adapters_have_model,
            ["lora.rank=2", 'checkpoint.exclude_from_loading=["optimizer"]'],
            ["lora.rank=2", 'checkpoint.exclude_from_loading=["model"]'],
            ("lora.rank", "checkpoint.exclude_from_loading"),
        ),
        (
            section_rules.distillation_has_teacher,
            ["train.objective=distillation", "distillation.teacher=run"],
            ["train.objective=distillation"],
            ("set distillation.teacher",),
        ),
        (
            section_rules.distillation_has_teacher,
            ["train.objective=distillation", "distillation.logits=logits"],
            ["train.objective=distillation", "distillation.logits=a", "distillation.teacher=b"],
            ("remove one",),
        ),
        (
            section_rules.distillation_has_teacher,
            ["train.objective=distillation", "distillation.teacher=run"],
            ["train.objective=distillation", "distillation.teacher=run", "distillation.top_k=300"],
            ("distillation.top_k", "model.vocab_size"),
        ),
        (
            section_rules.dpo_has_pairs_and_reference,
            [*DPO, "lora.rank=2"],
            [*DPO, "checkpoint.load_path=None"],
            ("checkpoint.load_path", "dpo.reference"),
        ),
        (
            section_rules.dpo_has_pairs_and_reference,
            [*DPO, "lora.rank=2", "lora.adapter=run", "dpo.reference=merged"],
            [*DPO, "lora.rank=2", "lora.adapter=run"],
            ("dpo.reference",),
        ),
        (
            section_rules.dpo_has_pairs_and_reference,
            DPO,
            [*DPO, "data.dataset_path="],
            ("jaxforge prepare --preferences",),
        ),
        (
            section_rules.dpo_has_pairs_and_reference,
            DPO,
            [*DPO, "train.z_loss_weight=0.1"],
            ("train.z_loss_weight",),
        ),
        (
            section_rules.dpo_has_pairs_and_reference,
            DPO,
            [*DPO, "model.mtp_depth=1"],
            ("model.mtp_depth",),
        ),
        (
            section_rules.fp8_has_layers,
            ["train.mixed_precision=fp8", "distributed.tp=2", "model.n_layers=3"],
            ["train.mixed_precision=fp8", "model.n_layers=2"],
            ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        ),
        (
            axes.fp8_experts_have_no_stages,
            ["model.num_experts=4", "train.mixed_precision=fp8", "distributed.pp=2"],
            [
                "model.num_experts=4",
                "train.mixed_precision=fp8",
                "train.num_layers_at_start_in_bf16=0",
                "train.num_layers_at_end_in_bf16=0",
                "train.fp8_exclude=[]",
                "distributed.pp=2",
            ],
            ('"experts"', "train.fp8_exclude", "distributed.pp"),
        ),
        (
            axes.pipeline_offloads_nothing,
            ["distributed.pp=2", "train.activation_checkpointing=full"],
            [
                "distributed.pp=2",
                "train.offload=['activations']",
                "train.activation_checkpointing=full",
            ],
            ("train.offload", "distributed.pp"),
        ),
        (
            axes.shares_are_equal,
            ["distributed.cp=2"],
            ["distributed.cp=2", "train.seq_len=31"],
            ("train.seq_len", "distributed.cp"),
        ),
    ],
)
def test_partial_mesh_rules_report_their_keys(rule, good, bad, keys):
    assert list(rule(small(*good), mesh_shape(small(*good), 8))) == []
    [problem] = rule(small(*bad), mesh_shape(small(*bad), 8))
    assert problem in complaints(small(*bad), 8)
    assert all(key in problem for key in keys)


def test_objective_refuses_a_registered_loss():
    config = small(*DPO)
    assert not list(section_rules.objective_has_one_loss(config, mesh_shape(config, 1)))
    train = config.train.model_copy(update={"loss_fn": "smoothed"})
    with pytest.raises(UserError, match=r"remove train\.loss_fn"):
        check(config.model_copy(update={"train": train}), 1)


def test_mesh_shape_resolves_dp_shard():
    config = small("distributed.tp=2", "distributed.dp_replicate=2")
    mesh = mesh_shape(config, 16)
    assert tuple(mesh) == ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
    assert tuple(mesh.values()) == (1, 2, 4, 1, 1, 2)


def test_mesh_shape_refuses_wrong_device_count():
    with pytest.raises(UserError, match=r"distributed.tp = 4 needs a multiple of 4 devices, not 2"):
        mesh_shape(small("distributed.tp=4"), 2)


@pytest.mark.parametrize(
    ("dim", "sizes", "built"),
    [
        (4096, {"dp_shard": 16}, (1, 16)),
        (4096, {"dp_shard": 12}, (3, 4)),
        (5120, {"dp_shard": 24}, (3, 8)),
        (4096, {"dp_shard": 7}, (7, 1)),
        (4096, {"dp_replicate": 2, "dp_shard": 6}, (6, 2)),
        (4096, {"dp_shard": 12, "ep": 2048}, (6, 2)),  # ep leaves a factor of 2
    ],
    ids=str,
)
def test_indivisible_dp_shard_is_replicated(dim, sizes, built):
    check_shards([f"model.dim={dim}"], sizes, built)


def test_shards_divide_the_latent_of_experts():
    model = ["model.dim=64", "model.num_experts=8", "model.moe_latent_dim=24"]
    check_shards(model, {"dp_shard": 16, "ep": 4}, (2, 8))  # ep does not split the latent


def test_shards_divide_the_bottlenecks_of_a_mixer():
    mixer = "kimi_delta_attention"
    model = ["model.dim=64", f"model.mixer_pattern=['{mixer}']", f"model.{mixer}.head_dim=24"]
    check_shards(model, {"dp_shard": 16}, (2, 8))


def check_shards(model, sizes, built):
    config = small(*model, *(f"distributed.{axis}={n}" for axis, n in sizes.items()))
    asked = mesh_shape(config, math.prod(sizes.values()))
    mesh = axes.with_equal_shards(config, asked)
    assert (mesh["dp_replicate"], mesh["dp_shard"]) == built
    assert {**mesh, "dp_replicate": 0, "dp_shard": 0} == {**asked, "dp_replicate": 0, "dp_shard": 0}
    assert axes.data_parallel(mesh) == axes.data_parallel(asked)
