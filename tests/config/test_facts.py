"""Facts on the fields of a config: each field has those that its type, name or docstring imply."""

import collections
from operator import attrgetter

from jaxforge.config import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.config.reading.schema import all_keys
from jaxforge.config.section import Interval, Invisible, Location, Needs, SplitBy, facts

KEYS = {key: node for key, node in all_keys().items() if "." in key}
SWITCHES = {
    "train.ema_": "train.ema_decay",
    "model.moe_": "model.num_experts",
    "eval.sample_": "eval.sample_interval",
    "eval.activations_": "eval.activations_interval",
    **{f"metrics.{key.removeprefix('metrics.enable_')}_": key for key in KEYS
       if key.startswith("metrics.enable_")},
    **{f"optimizer.{name}_": "optimizer.name" for name in ("muon", "soap")},
}  # fmt: skip
"""Common beginnings of keys, and the key without which the others have no effect."""
LAYERS_OF_EXPERTS = ("model.moe_frequency", "model.moe_first_dense_layers")


def test_updates_between_events_are_intervals():
    between = {key for key, node in KEYS.items() if node["description"].startswith("Updates betw")}
    assert between <= dict(facts(JobConfig, Interval)).keys()


def test_paths_tell_which_locations_they_accept():
    paths = {key for key in KEYS if key.endswith(("_dir", ".dir", "_path", ".path"))}
    assert paths <= dict(facts(JobConfig, Location)).keys()


def test_keys_of_a_group_need_its_switch():
    needed = collections.defaultdict(set)
    for key, each in facts(JobConfig, Needs):
        needed[key].add(each.absolute(key))
    for beginning, switch in SWITCHES.items():
        for key in KEYS:
            if key.startswith(beginning) and key not in (switch, *LAYERS_OF_EXPERTS):
                further = set().union(*(needed.get(other, ()) for other in needed.get(key, ())))
                assert switch in needed.get(key, set()) | further, key


def test_docstrings_leave_needs_to_facts():
    assert [key for key, node in KEYS.items() if node["description"].startswith("With ")] == []


def test_facts_name_settings_that_exist():
    config = JobConfig()
    for key, needs in facts(JobConfig, Needs):
        if "rope_scaling." not in key:  # a table that is not set
            needs.is_met(attrgetter(needs.absolute(key))(config))
    for key, split in facts(JobConfig, SplitBy):
        attrgetter(f"{key.rpartition('.')[0]}.{split.resolved}" if split.resolved else key)(config)
    for key, fact in facts(ModelConfig, Invisible):
        attrgetter(fact.resolved or key)(config.model)
    assert {needs.value for key, needs in facts(JobConfig, Needs)
            if needs.absolute(key) == "optimizer.name"} <= set(OPTIMIZERS.built_in)  # fmt: skip
