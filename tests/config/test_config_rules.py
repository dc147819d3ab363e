"""Rules between sections and the mesh, each with a violating and a valid config."""

import math
import random
import re

import pytest

from jaxforge.config import (
    axes,
    check,
    load_config,
    mesh_shape,
    rules,
    section_rules,
)
from jaxforge.config.problems import Problem
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
        "train.hang_timeout = 30 requires distributed.heartbeat_timeout_sec of at least 50, "
        "not 49, so that processes report a hang before JAX ends them: change "
        "train.hang_timeout to 29 or distributed.heartbeat_timeout_sec to 50",
    ),
    (
        1,
        ["distributed.heartbeat_timeout_sec=10", "train.hang_timeout=0"],
        ["distributed.heartbeat_timeout_sec=10", "train.hang_timeout=10"],
        "train.hang_timeout = 10 requires distributed.heartbeat_timeout_sec of at least 30, "
        "not 10, so that processes report a hang before JAX ends them: change "
        "train.hang_timeout to 0 or distributed.heartbeat_timeout_sec to 30",
    ),
    (
        1,
        ["train.seq_len=64"],
        ["train.seq_len=65"],
        "train.seq_len = 65 exceeds model.max_seq_len = 64: change train.seq_len to 64 or "
        "model.max_seq_len to 65",
    ),
    (
        2,
        ["train.global_batch_size=67108862"],
        ["train.global_batch_size=67108864"],
        "an update of 67,108,864 sequences of train.seq_len = 32 has 2,147,483,648 tokens, which "
        "must be less than 2^31: change train.global_batch_size to 67108862",
    ),
    (
        2,
        ["train.batch_size=8388607", "train.grad_accum_steps=4"],
        ["train.batch_size=8388608", "train.grad_accum_steps=4"],
        "an update of 67,108,864 sequences of train.seq_len = 32 has 2,147,483,648 tokens, which "
        "must be less than 2^31: change train.batch_size to 8388607 or train.grad_accum_steps to 3",
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
        [*CAPTURING, "eval.activations_set=code"],
        [*CAPTURING, "eval.activations_set=cod"],
        'eval.activations_set = "cod" is not an evaluation set; did you mean "code"? Choose '
        "from web, code",
    ),
    (
        1,
        ["eval.activations_interval=2", "eval.dataset_path=a"],
        ["eval.activations_interval=2", "eval.dataset_path=a", "eval.activations_set=a"],
        'eval.activations_set = "a": the only evaluation set has no name; remove it',
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
        'eval.activations_points = ["att*"] includes attention_weights, but with '
        "distributed.cp = 2 no device has all keys of a query: change distributed.cp to 1 or "
        'eval.activations_points to "residual"',
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
        "model.n_heads = 4 must be a multiple of distributed.tp = 8: change model.n_heads to 8 "
        "or distributed.tp to 4",
    ),
    (
        4,
        ["distributed.tp=2", "model.n_kv_heads=2"],
        ["distributed.tp=4", "model.n_kv_heads=2"],
        "model.n_kv_heads = 2 must be a multiple of distributed.tp = 4: change "
        "model.n_kv_heads to 4 or distributed.tp to 2",
    ),
    (
        2,
        ["distributed.tp=2", "train.seq_len=30"],
        ["distributed.tp=2", "train.seq_len=31"],
        "train.seq_len = 31 must be a multiple of distributed.tp = 2: change train.seq_len to "
        "32 or distributed.tp to 1",
    ),
    (
        2,
        ["distributed.tp=2", "model.ffn_hidden_dim=98"],
        ["distributed.tp=2", "model.ffn_hidden_dim=99"],
        "model.ffn_hidden_dim = 99 must be a multiple of distributed.tp = 2: change "
        "model.ffn_hidden_dim to 100 or distributed.tp to 1",
    ),
    (
        2,
        ["distributed.tp=2", "model.vocab_size=50258"],
        ["distributed.tp=2", "model.vocab_size=50257"],
        "model.vocab_size = 50257 must be a multiple of distributed.tp = 2: change "
        "model.vocab_size to 50258 or distributed.tp to 1",
    ),
    (
        4,
        [*PIPELINED, "distributed.tp=2", "model.vocab_size=50260"],
        [*PIPELINED, "distributed.tp=2", "model.vocab_size=50258"],
        "model.vocab_size = 50258 must be a multiple of distributed.pp * tp = 2 * 2 = 4: "
        "change model.vocab_size to 50260 or distributed.pp to 1 or distributed.tp to 1",
    ),
    (
        2,
        [*PIPELINED, "model.vocab_size=50258"],
        [*PIPELINED, "model.vocab_size=50257"],
        "model.vocab_size = 50257 must be a multiple of distributed.pp = 2: change "
        "model.vocab_size to 50258 or distributed.pp to 1",
    ),
    (
        2,
        [*PIPELINED, "model.n_layers=4", "model.o_bias=true"],
        [*PIPELINED, "model.n_layers=3", "model.o_bias=true"],
        "model.n_layers = 3 must be a multiple of 2 pipeline stages in a model with "
        "model.o_bias or mlp_bias: change model.n_layers to 4 or distributed.pp to 1",
    ),
    (
        2,
        [*PIPELINED, "model.n_layers=2"],
        [*PIPELINED, "model.n_layers=1"],
        "model.n_layers = 1 is less than distributed.pp = 2: change distributed.pp to 1",
    ),
    (
        2,
        [*PIPELINED, *INTERLEAVED, "model.n_layers=6"],
        [*PIPELINED, *INTERLEAVED, "model.n_layers=5"],
        "model.n_layers = 5 is less than distributed.pp * pp_chunks = 2 * 3 = 6: change "
        "distributed.pp to 1 or distributed.pp_chunks to 2",
    ),
    (
        2,
        [*PIPELINED, "train.grad_accum_steps=3"],
        [*PIPELINED, "train.grad_accum_steps=1"],
        "train.grad_accum_steps = 1 leaves some of the distributed.pp = 2 stages idle all the "
        "time: change train.grad_accum_steps to 2",
    ),
    (
        2,
        [*PIPELINED, *INTERLEAVED, "model.n_layers=6", "train.grad_accum_steps=4"],
        [*PIPELINED, *INTERLEAVED, "model.n_layers=6", "train.grad_accum_steps=3"],
        "train.grad_accum_steps = 3 must be a multiple of distributed.pp = 2 with "
        'distributed.pp_schedule = "interleaved_1f1b": change train.grad_accum_steps to 4',
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
        "model.dim = 64 must be a multiple of distributed.ep = 3: change model.dim to 72 or "
        "distributed.ep to 1",  # 66 / n_heads is not a valid head size
    ),
    (
        6,
        ["distributed.tp=2"],
        ["distributed.tp=3", "model.vocab_size=258", "train.seq_len=33", "model.ffn_hidden_dim=96"],
        "model.n_heads = 4 must be a multiple of distributed.tp = 3: change distributed.tp to "
        "1",  # no other head count divides the width
    ),
    (
        4,
        ["distributed.tp=2", "distributed.dp_shard=2", "model.n_kv_heads=2"],
        ["distributed.tp=4", "distributed.dp_shard=1", "model.n_kv_heads=2"],
        "model.n_kv_heads = 2 must be a multiple of distributed.tp = 4: change "
        "model.n_kv_heads to 4 or distributed.tp to 2 and distributed.dp_shard to -1",
    ),
    (
        2,
        ["distributed.tp=2", "train.seq_len=62", "model.max_seq_len=63"],
        ["distributed.tp=2", "train.seq_len=63", "model.max_seq_len=63"],
        "train.seq_len = 63 must be a multiple of distributed.tp = 2: change train.seq_len to "
        "62 or distributed.tp to 1",  # the maximum length is 63
    ),
    (
        2,
        ["train.global_batch_size=12", "train.grad_accum_steps=3"],
        ["train.global_batch_size=15", "train.grad_accum_steps=3"],
        "train.global_batch_size = 15 must be a multiple of train.grad_accum_steps * "
        "distributed.dp_replicate * dp_shard = 3 * 1 * 2 = 6: change train.global_batch_size "
        "to 18",  # no number of microbatches divides 15 evenly
    ),
    (
        1,
        ["train.global_batch_size=12", "train.grad_accum_steps=3"],
        ["train.global_batch_size=13", "train.grad_accum_steps=3"],
        "train.global_batch_size = 13 must be a multiple of train.grad_accum_steps * "
        "distributed.dp_replicate * dp_shard = 3 * 1 * 1 = 3: change train.global_batch_size "
        "to 15 or train.grad_accum_steps to 1",
    ),
    (
        2,
        ["train.global_batch_size=16", "train.batch_size=8"],
        ["train.global_batch_size=16", "train.batch_size=4"],
        "train.global_batch_size = 16, but train.batch_size = 4 on 2 data-parallel ranks with "
        "train.grad_accum_steps = 1 makes 8: change train.batch_size to 8 or "
        "train.global_batch_size to 8",
    ),
    (
        2,
        ["train.global_batch_size=2"],  # the default batch_size = 8 does not conflict
        ["train.global_batch_size=2", "train.batch_size=8"],
        "train.global_batch_size = 2, but train.batch_size = 8 on 2 data-parallel ranks with "
        "train.grad_accum_steps = 1 makes 16: change train.batch_size to 1 or "
        "train.global_batch_size to 16",
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
        "distributed.dp_shard = 4 * distributed.tp = 2 needs 8 devices, not 4: change "
        "distributed.dp_shard to -1",
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
        "distributed.dp_shard = 2 * distributed.tp = 3 needs 6 devices, not 4: change "
        "distributed.tp to 1 and distributed.dp_shard to -1",  # 2 does not divide the heads
    ),
    (
        4,
        ["distributed.tp=4"],
        ["distributed.dp_replicate=3"],
        "distributed.dp_replicate = 3 needs a multiple of 3 devices, not 4: change "
        "distributed.dp_replicate to 2",
    ),
    (
        4,
        ["distributed.dp_shard=4"],
        ["distributed.dp_shard=1"],
        "distributed.dp_shard = 1 needs 1 devices, not 4: change distributed.dp_shard to -1",
    ),
]


@pytest.mark.parametrize(("n_devices", "good", "bad", "message"), CASES)
def test_broken_rule_proposes_change(n_devices, good, bad, message):
    check(small(*good), n_devices)
    assert complaints(small(*bad), n_devices) == [message]


def proposals(message):
    """Yield the alternatives that a message proposes, as overrides."""
    changes = message.rpartition(": change ")[2] if ": change " in message else ""
    for item in changes.split(" or "):
        if pairs := re.findall(r"([a-z_]+\.[a-z_]+) to (-?\d+)", item):
            yield [f"{key}={value}" for key, value in pairs]


PROPOSED = [(n, [*bad, *change]) for n, _, bad, message in CASES for change in proposals(message)]


@pytest.mark.parametrize(("n_devices", "settings"), PROPOSED, ids=str)
def test_proposed_changes_fix_the_rule(n_devices, settings):
    check(small(*settings), n_devices)


CHOICES = {
    "model.dim": (48, 60, 64, 96), "model.n_heads": (2, 3, 4, 6, 8),
    "model.n_kv_heads": (None, 1, 2, 3), "model.vocab_size": (250, 256, 257),
    "model.ffn_hidden_dim": (95, 96), "model.n_layers": (1, 2, 3, 5),
    "model.num_experts": (0, 4, 6), "model.moe_first_dense_layers": (0, 1),
    "model.o_bias": ("true", "false"), "train.seq_len": (31, 32, 48, 64),
    "train.global_batch_size": (None, 8, 12, 15), "train.grad_accum_steps": (1, 2, 3, 4),
    "distributed.tp": (1, 2, 3, 4, 8), "distributed.pp": (1, 2, 3), "distributed.ep": (1, 2, 3),
    "distributed.dp_shard": (-1, 2, 4), "distributed.pp_schedule": ("1f1b", "interleaved_1f1b"),
}  # fmt: skip


SEVERAL = re.compile(r"these (\d+) problems: ")


def broken(config, n_devices):
    """Return what is wrong with a config, without the search for changes."""
    try:
        mesh, wrong = mesh_shape(config, n_devices), set()
    except UserError as error:
        mesh, wrong = axes.declared_sizes(config), {str(error).partition(": change ")[0]}
    problems = (problem for rule in rules.RULES for problem in rule(config, mesh))
    return wrong | {getattr(problem, "what", problem) for problem in problems}


@pytest.mark.slow
def test_proposals_break_no_other_rule():
    """Proposals are valid also if other rules are broken."""
    rng, tried = random.Random(0), 0
    for _ in range(45):
        settings = [f"{key}={rng.choice(values)}" for key, values in CHOICES.items()]
        n_devices = rng.choice((4, 6, 8, 12, 24))
        try:
            config = small(*settings)
        except UserError:
            continue  # an invalid section
        before = broken(config, n_devices)
        for message in complaints(config, n_devices) if before else ():
            what = message.partition(": change ")[0]
            for change in proposals(message):
                after = broken(small(*settings, *change), n_devices)
                if match := SEVERAL.match(message):
                    assert after <= before, (settings, message)
                    assert len(before) - len(after) == int(match[1])
                    settings, before = [*settings, *change], after  # of the following lines
                elif " devices, not " in what:  # other rules may then propose other numbers
                    assert not any(" devices, not " in item for item in after), (settings, message)
                else:
                    assert after <= before - {what}, (settings, message)
                tried += 1
    assert tried > 40


def test_all_proposals_are_tested():
    assert len(PROPOSED) > 30
    messages = [message for *_, message in CASES if re.search(r": change .* to ", message)]
    assert all(list(proposals(message)) for message in messages)


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
            ("train.ema_decay to 0.999", 'checkpoint.export_weights to "raw"'),
        ),
        (
            section_rules.adapters_have_model,
            ["lora.rank=2", 'checkpoint.exclude_from_loading=["optimizer"]'],
            ["lora.rank=2", 'checkpoint.exclude_from_loading=["model"]'],
            ("lora.rank to 0",),
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
            ("distillation.top_k to 256",),
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
            ("train.z_loss_weight to 0.0",),
        ),
        (
            section_rules.dpo_has_pairs_and_reference,
            DPO,
            [*DPO, "model.mtp_depth=1"],
            ("model.mtp_depth to 0",),
        ),
        (
            section_rules.fp8_has_layers,
            ["train.mixed_precision=fp8", "distributed.tp=2", "model.n_layers=3"],
            ["train.mixed_precision=fp8", "model.n_layers=2"],
            ("num_layers_at_start_in_bf16 to 0", "num_layers_at_end_in_bf16 to 0", "bf16"),
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
    what = getattr(problem, "what", problem)
    assert any(line.startswith(what) for line in complaints(small(*bad), 8))
    fixes = getattr(problem, "fixes", ())
    message = Problem(what, *fixes).message_with_fix(lambda _: True)
    assert all(key in message for key in keys)


def test_objective_refuses_a_registered_loss():
    config = small(*DPO)
    assert not list(section_rules.objective_has_one_loss(config, mesh_shape(config, 1)))
    train = config.train.model_copy(update={"loss_fn": "smoothed"})
    with pytest.raises(UserError, match=r'change train.loss_fn to "cross_entropy"'):
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
    config = small(f"model.dim={dim}", *(f"distributed.{axis}={n}" for axis, n in sizes.items()))
    asked = mesh_shape(config, math.prod(sizes.values()))
    mesh = axes.with_equal_shards(config, asked)
    assert (mesh["dp_replicate"], mesh["dp_shard"]) == built
    assert {**mesh, "dp_replicate": 0, "dp_shard": 0} == {**asked, "dp_replicate": 0, "dp_shard": 0}
    assert axes.data_parallel(mesh) == axes.data_parallel(asked)


def test_change_that_fixes_several_problems_is_proposed_once():
    config = small("train.seq_len=65", "distributed.tp=3")
    assert complaints(config, 8) == [
        "distributed.tp = 3 needs a multiple of 3 devices, not 8",
        "model.n_heads = 4 must be a multiple of distributed.tp = 3",
        "model.vocab_size = 256 must be a multiple of distributed.tp = 3",
        "model.ffn_hidden_dim = 256 must be a multiple of distributed.tp = 3",
        "train.seq_len = 65 must be a multiple of distributed.tp = 3",
        "these 5 problems: change distributed.tp to 1",
        "train.seq_len = 65 exceeds model.max_seq_len = 64: change train.seq_len to 64 or "
        "model.max_seq_len to 65",
    ]


def test_independent_problems_keep_their_own_changes():
    config = small("train.seq_len=65", "model.num_experts=5", "distributed.ep=2")
    assert complaints(config, 2) == [
        "train.seq_len = 65 exceeds model.max_seq_len = 64: change train.seq_len to 64 or "
        "model.max_seq_len to 65",
        "model.num_experts = 5 must be a multiple of distributed.ep = 2: change "
        "model.num_experts to 6 or distributed.ep to 1",
    ]
