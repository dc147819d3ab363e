"""`data.mixture_file`: TOML and YAML with datasets and phases, and its messages."""

import pytest

from jaxforge.config import load_config, load_unresolved
from jaxforge.config.reading.load import load_config_of_run
from jaxforge.errors import UserError

BATCH = ["--train.seq_len=100", "--train.global_batch_size=10"]
"""1,000 tokens per update."""
TOML = """
[datasets.web]
path = "web"

[datasets.code]
path = "code"
weight = 0.5
max_epochs = 4
max_tokens = "3M"

[[phases]]
length = "1.5M tok"
weights = { web = 3 }

[[phases]]
tokens = { web = "300K tok", code = 200_000 }
lr_scale = 0.5

[[phases]]
weights = { web = 0 }
"""
YAML = """
datasets:
  web:
    path: web
  code: {path: code, weight: 0.5, max_epochs: 4, max_tokens: 3M}
phases:
  - length: 1.5M tok
    weights: {web: 3}
  - tokens: {web: 300K tok, code: 200000}
    lr_scale: 0.5
  - weights: {web: 0}
"""
EXPANDED = """
[[data.datasets]]
name = "web"
path = "web"

[[data.datasets]]
name = "code"
path = "code"
weight = 0.5
max_epochs = 4
max_tokens = 3_000_000

[[data.phases]]
dataset_weights = { web = 3 }

[[data.phases]]
start_step = 1500
dataset_weights = { web = 300_000, code = 200_000 }
lr_scale = 0.5

[[data.phases]]
start_step = 2000
dataset_weights = { web = 0 }
"""


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """Return a function that loads a config with a mixture file."""
    monkeypatch.chdir(tmp_path)

    def load(text, *settings, name="mix.toml"):
        (tmp_path / name).write_text(text)
        return load_unresolved(None, [*BATCH, f"--data.mixture_file={name}", *settings]).resolve(1)

    return load


@pytest.mark.parametrize(("text", "name"), [(TOML, "mix.toml"), (YAML, "mix.yaml")])
def test_file_expands_to_datasets_and_phases(loaded, tmp_path, text, name):
    (tmp_path / "expanded.toml").write_text(EXPANDED)
    expected = load_config(tmp_path / "expanded.toml", BATCH)
    config = loaded(text, name=name)
    assert config.data == expected.data
    (tmp_path / "stored.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "stored.toml").data == expected.data


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ((10, 20), [0, 10, 30]),
        (("1K samples", "500 samples"), [0, 100, 150]),
        (("12.5%", "0.5%"), [0, 125, 130]),
    ],
)
def test_lengths_add_up_in_their_unit(loaded, lengths, starts):
    phases = "".join(f"[[phases]]\nlength = {length!r}\n" for length in lengths)
    config = loaded(f"datasets.web.path = 'w'\n{phases}[[phases]]\n", "--train.max_steps=1000")
    assert [phase.start_step for phase in config.data.phases] == starts


def test_file_without_phases_has_weights_only(loaded):
    config = loaded("[datasets]\nweb = { path = 'w', weight = 2 }\n")
    assert config.data.weights() == {"web": 2.0}
    assert config.data.phases == ()


def test_example_loads(request):
    file = request.config.rootpath / "examples" / "mixture.toml"
    config = load_unresolved(None, [*BATCH, f"--data.mixture_file={file}"]).resolve(1)
    assert [phase.start_step for phase in config.data.phases] == [0, 20_000_000, 25_000_000]
    assert config.data.weights(config.data.phases[2]) == {
        "web": 5e8, "code": 5e8, "textbooks": 1e9,
    }  # fmt: skip


DATASETS = "datasets.web.path = 'w'\ndatasets.code.path = 'c'\n"


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("phases = []\n", (), "mix.toml: datasets: field required"),
        ("[datasets]\n", (), "mix.toml: datasets has no dataset: add a table such as [datas"),
        ("datasets.web.pth = 'w'\n", (),
         'mix.toml: unknown key datasets.web.pth; did you mean "path"?'),
        ("datasets.web.weight = 2\n", (), "mix.toml: datasets.web: a source requires path or"),
        ("datasets.web = { path = 'w', name = 'x' }\n", (), "datasets.web.name: the name of the"),
        ("datasets.web = { path = 'w', max_epochs = 0 }\n", (),
         "mix.toml: datasets.web.max_epochs: input should be greater than 0"),
        ("datasets.web = { path = 'w', max_tokens = '2 bananas' }\n", (),
         "mix.toml: datasets.web.max_tokens: input should be a valid integer"),
        (DATASETS + "[[phases]]\nlength = 3\nweights.wbe = 1\n", (),
         'mix.toml: phases[0] names "wbe", which is not in datasets; did you mean "web"?'),
        (DATASETS + "[[phases]]\n[[phases]]\n", (),
         "mix.toml: phases[0] requires length or tokens, because another phase follows"),
        (DATASETS + "[[phases]]\nlength = 3\n[[phases]]\nlength = '1K tok'\n[[phases]]\n", (),
         "mix.toml: lengths of phases have different units (tokens, updates): use one"),
        (DATASETS + "[[phases]]\nlength = '2ep'\n", (), 'length = "2ep": expected updates, or a'),
        (DATASETS + "[[phases]]\nlength = 3\ntokens.web = 3\n", (),
         "mix.toml: phases[0]: tokens give length and weights: remove tokens, or length and"),
        (DATASETS + "[[phases]]\ntokens.web = 3\n", ("--data.mix_temperature=2",),
         'data.mixture_file = "mix.toml" has phases with tokens, which data.mix_temperature = 2'),
        (DATASETS, ("--data.anneal_start_step=3",),
         "--data.mixture_file=mix.toml: data.anneal_start_step is another form of this setting"),
        (DATASETS, ("--data.mixture_file=other.toml",), "data.mixture_file: no file at other.toml"),
        (DATASETS, ("--data.mixture_file=gs://bucket/mix.toml",),
         "only local paths are supported here; copy the file to this machine"),
        ("datasets.web.max_epochs = 3\ndatasets.web.path = 'w'\n", ("--data.order=torch",),
         "max_epochs and max_tokens of web do not exist in KempnerForge"),
        ("[datasets\n", (), "mix.toml:1:10: not valid TOML"),
    ],
)  # fmt: skip
def test_mistakes_name_file_and_key(loaded, text, settings, message):
    with pytest.raises(UserError) as error:
        loaded(text, *settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets:\n  web: {path: a}\n  web: {path: b}\n",
         "mix.yml:3: not valid YAML: web occurs twice"),
        ("a: &a [x, x]\nb: [*a, *a]\n", "mix.yml:2: not valid YAML: anchors and aliases are not"),
        ("datasets: [\n", "mix.yml:2: not valid YAML"),
        ("[" * 5000, "mix.yml: not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "mix.yml:1: not valid YAML: could not determine"),
        ("- web\n", "mix.yml: input should be a valid dictionary"),
    ],
)  # fmt: skip
def test_yaml_is_plain_and_bounded(loaded, text, message):
    with pytest.raises(UserError) as error:
        loaded(text, name="mix.yml")
    assert message in str(error.value)


def test_untrusted_run_does_not_read_a_mixture_file(tmp_path):
    (tmp_path / "config.toml").write_text(f'[data]\nmixture_file = "{tmp_path / "secret"}"\n')
    assert load_config_of_run(tmp_path / "config.toml", tmp_path).data.datasets == ()
