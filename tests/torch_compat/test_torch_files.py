"""Files of `torch.save` (checkpoint.pt, pytorch_model.bin), read and written."""

import copy
import dataclasses
import io
import json
import pickle
import re
import tarfile
import zipfile

import numpy as np
import pytest

from jaxforge.config.reading.load import make_config
from jaxforge.errors import UserError
from tests.helpers import cli
from tests.torch_compat.tensors import random_array
from torch_compat.checkpoint import checkpoints, orbax_store
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.convert import conversion
from torch_compat.convert.source import Request
from torch_compat.formats import limits, torch_file, torch_zip
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import from_array

torch = pytest.importorskip("torch")
from tests.torch_compat import llama_torch as llama  # noqa: E402 (it imports torch)

STEPS = 3
CONFIG = {
    "model": llama.MODEL,
    "train": {"seq_len": 16, "batch_size": 2},
    "optimizer": {"lr": llama.LR, "betas": list(llama.BETAS), "eps": llama.EPS},
}
NORM = "layers.1.mlp_norm.weight"


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, llama.MODEL["vocab_size"], (2, 17), generator=generator)


def update(model, optimizer, step):
    tokens = batch(step)
    loss = llama.loss_over_all(model(tokens[:, :-1]), tokens[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture(scope="module")
def job():
    """A torch loop after three updates: model, optimizer, scheduler."""
    model = llama.random_weights(llama.Llama())
    optimizer = llama.adamw(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for step in range(STEPS):
        update(model, optimizer, step)
        scheduler.step()
    return model, optimizer, scheduler


@pytest.fixture
def config_file(tmp_path):
    return write_config(tmp_path / "run.toml", CONFIG)


def write_config(file, config):
    lines = []
    for section, table in config.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(v)}" for key, v in table.items())]
    file.write_text("\n".join(lines))
    return file


def save(job, file, **extra):
    model, optimizer, scheduler = job
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            **extra,
        },
        file,
    )
    return file


def read(file, **options):
    return checkpoints.find(file).read(make_config(CONFIG), ReadOptions(**options))


def test_checkpoint_of_a_script_keeps_weights_moments_and_step(job, tmp_path):
    model, optimizer, _ = job
    best = np.float64(1.5)
    state = read(save(job, tmp_path / "checkpoint.pt", epoch=0, step=STEPS, best_val=best))
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert set(state.params) == set(names.values())
    for parameter, fields in optimizer.state.items():
        name = names[parameter]
        np.testing.assert_array_equal(state.params[name].all(), parameter.detach().numpy())
        np.testing.assert_array_equal(state.moments["mu"][name].all(), fields["exp_avg"].numpy())
        np.testing.assert_array_equal(state.moments["nu"][name].all(), fields["exp_avg_sq"].numpy())
    assert int(state.scalars["updates"]) == STEPS
    assert (state.progress.step, state.progress.samples) == (STEPS, 2 * STEPS)


def test_schedule_by_epochs_is_not_taken_for_the_count_of_updates(job, tmp_path):
    model, optimizer, _ = job
    by_epoch = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    file = save((model, optimizer, by_epoch), tmp_path / "a.pt", epoch=0, step=STEPS)
    assert read(file).progress.skipped == 0


def test_step_within_an_epoch_yields_to_the_count_of_updates(job, tmp_path):
    state = read(save(job, tmp_path / "a.pt", epoch=1, step=1))
    assert state.progress.step == STEPS
    assert any("below the 3 updates" in note for note in state.notes)


class Wrapper(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.m = model

    def forward(self, tokens):
        return self.m(tokens)


TEXTBOOK = ["bias", "LayerNorm.weight"]  # norms of this model have other names


def by_names(model, names, has_names=False):
    """Return groups with and without weight decay by parts of the names of parameters."""
    spared = [any(part in name for part in names) for name, _ in model.named_parameters()]
    items = model.named_parameters() if has_names else ((p,) for p in model.parameters())
    items = [item if has_names else item[0] for item in items]
    return [
        {"params": [x for x, is_spared in zip(items, spared, strict=True) if is_spared is group],
         "weight_decay": 0.0 if group else 0.1}
        for group in (False, True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "has_names", "wrap", "note"),
    [
        (TEXTBOOK, False, lambda model: model, "on in PyTorch for layers.0.attention_norm.weight"),
        ([], False, Wrapper, "on in PyTorch for layers.0.attention_norm.weight"),
        (["norm", "bias"], False, lambda model: Wrapper(Wrapper(model)), ""),
        (["down_proj", "norm", "bias"], True, Wrapper,  # only the recorded names tell these
         "off in PyTorch for layers.0.mlp.down_proj.weight, layers.1.mlp.down_proj.weight and is"),
    ],
    ids=["textbook", "empty group", "two wrappers", "recorded names"],
)  # fmt: skip
def test_groups_by_name_and_wrapped_models_are_imported(tmp_path, names, has_names, wrap, note):
    model = wrap(llama.random_weights(llama.Llama()))
    optimizer = torch.optim.AdamW(by_names(model, names, has_names), lr=llama.LR,
                                  betas=llama.BETAS, eps=llama.EPS)  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    update(model, optimizer, 0)
    state = read(save((model, optimizer, scheduler), tmp_path / "a.pt", step=1))
    for name, parameter in model.named_parameters():
        native = re.sub(r"^(m\.)+", "", name)
        np.testing.assert_array_equal(state.params[native].all(), parameter.detach().numpy())
        moment = optimizer.state[parameter]["exp_avg"].numpy()
        np.testing.assert_array_equal(state.moments["mu"][native].all(), moment)
    notes = [text for text in state.notes if text.startswith("weight decay was")]
    assert len(notes) == bool(note)
    assert note in "".join(notes)


def test_export_with_an_empty_group_is_imported(job, tmp_path, config_file):
    """With `decay_patterns` of all names, no parameter is without weight decay."""
    source = save(job, tmp_path / "checkpoint.pt", step=STEPS)
    decays = '--optimizer.decay_patterns=[".*"]'
    command = [
        "convert",
        "--to=jaxforge",
        str(source),
        str(tmp_path / "run"),
        f"--config={config_file}",
        decays,
    ]
    assert cli(command) == 0
    exported = tmp_path / "back.pt"
    assert cli(["convert", str(tmp_path / "run"), str(exported), "--to=pt"]) == 0
    groups = torch.load(exported, weights_only=True)["optimizer"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [26, 0]
    again = read(exported)
    first = read(source)
    for name, moment in first.moments["mu"].items():
        np.testing.assert_array_equal(again.moments["mu"][name].all(), moment.all())


@pytest.mark.parametrize("root", ["", "model_state_dict", "state_dict"])
def test_weights_below_usual_keys_are_found(job, tmp_path, root):
    state = {f"_orig_mod.{key}": tensor for key, tensor in job[0].state_dict().items()}
    torch.save({root: state} if root else state, tmp_path / "a.pth")
    result = read(tmp_path / "a.pth")
    assert set(result.params) == {name for name, _ in job[0].named_parameters()}
    assert result.moments is None
    assert "no optimizer state" in " ".join(result.notes)


def test_import_and_export_resume_in_torch_with_the_same_next_update(
    job, tmp_path, config_file, capsys
):
    source = save(job, tmp_path / "checkpoint.pt", epoch=0, step=STEPS)
    run, exported = tmp_path / "run", tmp_path / "back.pt"
    assert cli(["convert", "--to=jaxforge", str(source), str(run), f"--config={config_file}"]) == 0
    assert cli(["verify", str(run), str(source), f"--config={config_file}", "--weights-only"]) == 0
    assert cli(["convert", str(run), str(exported), "--to=pt"]) == 0
    assert capsys.readouterr().out.endswith(f"{exported}\n")
    state = torch.load(exported, weights_only=True)
    assert (state["step"], state["samples_seen"]) == (STEPS, 2 * STEPS)
    resumed = llama.Llama()
    resumed.load_state_dict(state["model"])
    optimizer = llama.adamw(list(resumed.parameters()))
    optimizer.load_state_dict(state["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = llama.LR  # the run's schedule begins with a warmup
    original = llama.Llama()
    original.load_state_dict(job[0].state_dict())
    uninterrupted = llama.adamw(list(original.parameters()))
    uninterrupted.load_state_dict(copy.deepcopy(job[1].state_dict()))
    for parameter, same in zip(resumed.parameters(), original.parameters(), strict=True):
        assert torch.equal(parameter, same)
        moments, expected = optimizer.state[parameter], uninterrupted.state[same]
        assert all(torch.equal(moments[name], expected[name]) for name in expected)
    # On some processors, the last bits of torch's products depend on addresses in memory.
    for step in (STEPS, STEPS + 1):
        loss = update(resumed, optimizer, step)
        assert loss == pytest.approx(update(original, uninterrupted, step), rel=1e-6)
    for key, tensor in original.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


def test_export_counts_parameters_in_the_order_of_modules(job, tmp_path, config_file):
    source = save(job, tmp_path / "checkpoint.pt", step=STEPS)
    run = tmp_path / "run"
    cli(["convert", "--to=jaxforge", str(source), str(run), f"--config={config_file}"])
    cli(["convert", str(run), str(tmp_path / "b.pt"), "--to=pt"])
    groups = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["param_groups"]
    named = dict(job[0].named_parameters())
    expected = [[n for n, p in named.items() if (p.ndim > 1) == decays] for decays in (True, False)]
    assert [group["param_names"] for group in groups] == expected
    assert [group["params"] for group in groups] == [
        group["params"] for group in job[1].state_dict()["param_groups"]
    ]


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ([], "in the order of PyTorch's DistributedSampler. Check.* set --data.shuffle=false"),
        (["--data.shuffle=false"], "in file order. Check.* set --data.shuffle=true"),
    ],
)
def test_import_notes_the_assumed_order_and_absent_data(job, tmp_path, settings, order):
    source = checkpoints.find(save(job, tmp_path / "checkpoint.pt", step=STEPS))
    config = CONFIG | {"data": {"dataset_path": str(tmp_path / "absent")}}
    file = write_config(tmp_path / "run.toml", config)
    request = Request(source, tmp_path / "run", "jaxforge", config=file, overrides=settings)
    notes = " ".join(conversion.plan(request).notes)
    assert re.search(f"training continues {order}", notes)
    assert f"data.dataset_path = {tmp_path / 'absent'} does not exist on this machine" in notes
    request = dataclasses.replace(request, options=ReadOptions(weights_only=True))
    assert not conversion.plan(request).notes  # training starts at its first sequence


def test_export_without_suffix_is_refused(job, tmp_path, config_file):
    source = save(job, tmp_path / "checkpoint.pt", step=STEPS)
    run = tmp_path / "run"
    cli(["convert", "--to=jaxforge", str(source), str(run), f"--config={config_file}"])
    with pytest.raises(UserError, match=r"Its name must end with \.pt"):
        cli(["convert", str(run), str(tmp_path / "b"), "--to=pt"])


def test_directory_of_files_names_one_of_them(job, tmp_path):
    file = save(job, tmp_path / "checkpoint.pt")
    with pytest.raises(UserError, match=f"Name the file: {file}"):
        checkpoints.find(tmp_path)


@pytest.mark.parametrize("form", ["legacy", "tar"])
def test_older_formats_are_refused_with_the_remedy(tmp_path, form):
    file = tmp_path / "old.pt"
    if form == "legacy":
        torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    else:
        with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as archive:
            archive.addfile(tarfile.TarInfo("sys_info"), io.BytesIO())
    with pytest.raises(UserError, match=r"written by torch\.save of torch before .*save it again"):
        read(file)


def test_pickled_module_is_refused_and_not_run(job, tmp_path):
    torch.save(job[0], tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"Llama.*no checkpoint needs"):
        read(tmp_path / "model.pt")


@pytest.mark.parametrize(("value", "kind"), [(torch.ones(2), "one tensor"), ([1], "a list")])
def test_file_without_dict_is_refused(tmp_path, value, kind):
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(UserError, match=f"holds {kind} instead of a dict"):
        read(tmp_path / "a.pt")


def test_dict_that_names_itself_many_times_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "KEYS", 1000)
    value = {"a": 1}
    for _ in range(40):  # 2**40 entries in 1 kB of pickle
        value = {"x": value, "y": value}
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(UserError, match=f"more than {limits.KEYS} entries"):
        read(tmp_path / "a.pt")


def test_keys_that_meet_after_joining_are_refused(tmp_path):
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"two entries have the key a\.b"):
        read(tmp_path / "a.pt")


@pytest.mark.parametrize("zip64_limit", [10, 1000, zipfile.ZIP64_LIMIT])
def test_written_file_opens_in_torch_and_zipfile(tmp_path, monkeypatch, zip64_limit):
    """Beyond the limit, sizes and positions are 64-bit numbers."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", zip64_limit)
    array = random_array("float32", (7, 11), 0)
    value = {"model": {"a": from_array(array), "b": from_array(array[:, :3].copy())}, "step": 5}
    torch_zip.save(value, tmp_path / "a.pt", block=64)
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    np.testing.assert_array_equal(loaded["model"]["a"].numpy(), array)
    np.testing.assert_array_equal(loaded["model"]["b"].numpy(), array[:, :3])
    assert loaded["step"] == 5
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
    native = torch_file.open_file(Directory(tmp_path), "a.pt")
    np.testing.assert_array_equal(native.tensors["model.a"].all(), array)


def test_huggingface_directory_of_bin_files_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path)
    state = model.state_dict()
    keys = sorted(state)
    files = {key: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, key in enumerate(keys)}
    for file in set(files.values()):
        torch.save({key: state[key] for key in keys if files[key] == file}, tmp_path / file)
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / torch_file.WEIGHTS_INDEX).write_text(json.dumps(index))
    reference = checkpoints.find(tmp_path)
    result = reference.read(reference.required_config(None, ()), ReadOptions())
    weight = result.params["layers.1.attention.q_proj.weight"].all()
    expected = state["model.layers.1.self_attn.q_proj.weight"].numpy()
    np.testing.assert_array_equal(weight, expected)


def test_training_starts_from_a_file(job, tmp_path):
    from jaxforge.training.foreign import open_foreign

    file = save(job, tmp_path / "checkpoint.pt", step=STEPS)
    source = open_foreign(str(file), make_config(CONFIG))
    assert source.has_optimizer
    assert source.progress().step == STEPS
    assert "checkpoint.pt" in source.name


def test_pickle_that_calls_is_refused(tmp_path):
    class Call:
        def __reduce__(self):
            return (print, ("run",))

    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"model": Call()}, protocol=2))
        archive.writestr("a/version", "3\n")
    with pytest.raises(UserError, match="no checkpoint needs"):
        read(tmp_path / "a.pt")


def test_run_of_imported_file_holds_its_state(job, tmp_path, config_file):
    source = save(job, tmp_path / "checkpoint.pt", step=STEPS)
    run = tmp_path / "run"
    cli(["convert", "--to=jaxforge", str(source), str(run), f"--config={config_file}"])
    stored, _ = orbax_store.open_orbax(run)
    expected = read(source)
    np.testing.assert_array_equal(
        stored.moments["nu"][NORM].all(), expected.moments["nu"][NORM].all()
    )
