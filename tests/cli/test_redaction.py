"""Redaction of secrets in texts, values and commands."""

import json
import logging
import random
import shlex
import string
import sys
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxforge.cli import redaction
from jaxforge.cli.redaction import redacted, redacted_command, redacted_message, redacted_value
from jaxforge.cli.running import run_main
from jaxforge.commands import report as report
from jaxforge.config.job import JobConfig, short_toml, toml
from jaxforge.config.metrics import MetricsWriter
from jaxforge.errors import UserError, printable
from jaxforge.telemetry.writers import TensorBoardSink, WandbSink
from tests.conftest import tiny_config

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = [
    "password", "db_password", "PASSWD", "secret", "client_secret", "aws_secret_access_key",
    "api_key", "apikey", "WANDB_API_KEY", "access_key", "private_key", "token", "hf_token",
    "access_token", "accessToken", "auth_token", "credentials", "authorization", "webhook_url",
    "connection_string", "AZURE_STORAGE_CONNECTION_STRING", "connectionString", "SharedAccessKey",
    "sas_url", "BLOB_SAS_URL", "sas_token", "GITHUB_PAT", "pat",
]  # fmt: skip
LETTERS = string.ascii_letters + string.digits


def literal(secret):
    return "'" + secret.replace("'", "") + "'"


def plain(secret):
    return secret.replace('"', "")


SETTINGS = {
    "TOML": lambda name, s: f"[x]\n{name} = {toml(s)}\nkept = 1",
    "TOML literal": lambda name, s: f"{name} = {literal(s)}  # kept\nkept = 1",
    "TOML in lines": lambda name, s: f'{name} = """\n{plain(s)}\n"""\nkept = 1',
    "TOML list": lambda name, s: f"{name} = [\n  {toml(s)},\n  {toml(s + 'x')}]\nkept = 1",
    "TOML inline table": lambda name, s: f"x = {{a = 1, {name} = {{n = {toml(s)}}}}}\nkept = 1",
    "TOML quoted name": lambda name, s: f'"hf.{name}" = {toml(s)}\nkept = 1',
    "TOML dotted": lambda name, s: f"wandb.{name} = {toml(s)}\nkept = 1",
    "JSON": lambda name, s: json.dumps({"a": {name: s}, "kept": 1}),
    "JSON list": lambda name, s: json.dumps({name: [s, s], "kept": 1}),
    "JSON in JSON": lambda name, s: json.dumps({"a": f'{{"{name}": "{plain(s)}"}}', "kept": 1}),
    "Python": lambda name, s: repr({name: s, "kept": 1}),
    "JSON with all letters": lambda name, s: json.dumps({name: s, "kept": 1}, ensure_ascii=False),
    "assigned": lambda name, s: f"{name}={''.join(c for c in s if c in LETTERS)} kept",
}  # fmt: skip
URLS = {
    "TOML": lambda url: f"dataset_path = {toml(url)}\nkept = 1",
    "JSON": lambda url: json.dumps({"dataset_path": url, "kept": 1}),
    "Python": lambda url: f"--data.datasets={[{'path': url, 'kept': 1}]}",
    "message": lambda url: f"data.dataset_path = {url}: kept, as nothing is there",
}


def secrets(n, alphabet):
    draws = random.Random(39)
    for _ in range(n):
        ends = draws.choices(LETTERS, k=4)  # quotes inside
        yield "".join([*ends[:2], *draws.choices(alphabet, k=draws.randint(12, 40)), *ends[2:]])


def leaks(secret, text, n=5):
    """Return whether text contains any five consecutive characters of a secret."""
    return [secret[i : i + n] for i in range(len(secret) - n + 1) if secret[i : i + n] in text]


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_settings_with_secret_names_are_emptied(name, kind):
    for secret in secrets(40, LETTERS + "/+=-_.,:;@ {}[]\"'#\\éß漢"):
        text = SETTINGS[kind](name, secret)
        assert "kept" in redacted(text, {})
        assert not leaks(secret, redacted(text, {})), text


@pytest.mark.parametrize("kind", URLS)
def test_passwords_of_urls_are_removed(kind):
    for secret in secrets(300, LETTERS + "/+=-_.,:;@ {}[]'%&?#"):
        for scheme, path in (("s3", "/data"), ("sftp", "/data"), ("https", "")):
            text = URLS[kind](f"{scheme}://AKIA:{secret}@bucket{path}")
            for result in (redacted(text, {}), redacted_message(text, {})):
                assert not leaks(secret, result), text
                assert f"{scheme}://bucket{path}" in result
                assert "kept" in result


def test_secrets_in_commands_are_removed():
    for secret in secrets(300, LETTERS + "/+=-_.,:;@ {}[]\"'#"):
        option = repr({"token": secret})
        words = ["train", f"--x.y={option}", f"--x.api_key={secret}", "--my-password", secret,
                 f"--data.dataset_path=s3://A:{plain(secret)}@b/c", "--kept=1"]  # fmt: skip
        command = redacted_command(words, {})
        assert not leaks(secret, command), words
        assert shlex.split(command)[-1] == "--kept=1"
        assert "s3://b/c" in command


def test_secrets_after_options_in_lists_are_removed():
    values = ["train", "--token", "abc", "--x.api_key", "d e", "--kept", "v", "--secret", "--kept"]
    shown = ["train", "--token", "removed", "--x.api_key", "removed", *values[5:]]
    assert redacted_value({"a": [values], "hf.token": "x"}, {}) == {"a": [shown], "hf.token": ""}


def test_paths_of_webhooks_are_removed_from_messages():
    for url in ("https://hooks.slack.com/services/T00/B00/abc123",
                "https://discord.com/api/webhooks/123/abc123",
                "https://x.webhook.office.com/webhookb2/abc123"):  # fmt: skip
        assert "abc123" not in redacted_message(f"cannot reach {url}: 404", {})


def test_secrets_in_values_are_removed():
    for secret in secrets(100, string.printable):
        for name in NAMES:
            result = redacted_value(
                {"a": [{name: secret, "kept": 1}], name: [secret, {"b": secret}]}
            )
            assert not leaks(secret, json.dumps(result))
            assert result["a"][0]["kept"] == 1


@pytest.mark.parametrize(
    "known",
    [
        "ghp_" + "a1" * 18, "github_pat_11AB" + "c2_" * 20, "npm_" + "b3" * 18,
        "pypi-AgEIcHlwaS5vcmc" + "d4" * 20, "AIzaSy" + "e5-" * 11, "ASIA" + "F6" * 8,
        "AKIA" + "G7" * 8, "hf_" + "h8" * 17, "glpat-" + "i9" * 10, "xoxb-" + "1-2" * 10,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9",
        "sk-proj-" + "j1" * 20, "sk_live_" + "k2" * 12, "SG." + "l3" * 11 + "." + "m4" * 20,
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    ],
)  # fmt: skip
def test_known_token_formats_are_removed(known):
    for text in (
        f'name = "{known}"',
        f"--x={known}",
        json.dumps([known, "kept"]),
        f"see {known}: no",
    ):
        for result in (redacted(text, {}), redacted_message(text, {})):
            assert not leaks(known, result, 9), result


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("password = 12345", 'password = ""'),
        ('tokens = ["a", "b"]', "tokens = []"),
        ("tokens = 4096", "tokens = 4096"),
        ("token = 12345", 'token = ""'),
        ("Authorization: Bearer abcdefghijklmnop12", 'Authorization: "" removed'),
        ("http://localhost:8080/x", "http://localhost:8080"),
        ("gs://bucket/run@2/x", "gs://bucket/run@2/x"),
        ("http://[::1]:80/x", "http://[::1]:80"),
        ("s3://AKIA:abc/def", "s3://removed"),  # truncated before the @
    ],
)  # fmt: skip
def test_secret_environment_values_are_replaced(text, expected):
    assert redacted(text, {}) == expected


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.name)
def test_shipped_configs_are_not_redacted(path):
    text = path.read_text()
    urls = [line for line in text.splitlines() if "https://" in line]
    text = "\n".join(line for line in text.splitlines() if line not in urls)
    assert redacted(text, {}) == text


def test_harmless_words_are_not_redacted():
    text = JobConfig().to_toml() + "\n".join([
        'tokenizer_path = "data/tokenizer"', "max_tokens = 128", "eos_token_id = 3",
        'eos_token = "<eos>"', 'token_dtype = "uint16"', "tokens_seen = 5", 'author = "me"',
        "see --max-tokens 5 --eos-token </s> --pad-token=x", "lr_patterns = {a = 1}",
        "stop_tokens = ['<a>']", "num_tokens = 4", "keys = ['a']", "key = 'x'", "n_tokens: many",
        "error: token: 17 is outside of the vocabulary", "tokens: 1,000", "monkey = 'x'",
    ])  # fmt: skip
    assert redacted(text, {}) == text
    assert redacted_message(text, {}) == text
    values = JobConfig().model_dump(mode="json")
    assert redacted_value(values, {}) == json.loads(json.dumps(values))


def test_environment_secrets_are_removed_in_any_encoding():
    environment = {"MY_TOKEN": 's3cr3t"value', "LONG_KEY": 's3cr3t"value-and-more', "HOME": "/home"}
    text = json.dumps({"a": 's3cr3t"value-and-more'}) + ' s3cr3t"value /home'
    assert redacted(text, environment) == '{"a": "removed"} removed /home'
    assert redacted_message("x false y", {"TOKENIZERS_PARALLELISM": "false!"}) == "x false y"


NOTATIONS = {
    "plain": str,
    "Python": repr,
    "Python in Python": lambda s: repr(repr(s)),
    "ASCII": ascii,
    "bytes": lambda s: repr(s.encode()),
    "JSON": json.dumps,
    "JSON with all letters": lambda s: json.dumps(s, ensure_ascii=False),
    "JSON in JSON": lambda s: json.dumps(json.dumps(s)),
    "TOML": toml,
    "shell": shlex.quote,
    "message": printable,
    "percent": urllib.parse.quote,
    "percent, all": lambda s: urllib.parse.quote(s, safe="").lower(),
    "form": urllib.parse.quote_plus,
}


@pytest.mark.parametrize("notation", NOTATIONS)
@pytest.mark.parametrize(
    "name", ["X_CONNECTION_STRING", "X_SAS_URL", "SLACK_WEBHOOK_URL", "GITHUB_PAT", "DB_PASS",
             "MYSQL_PWD", "SENTRY_DSN", "HF_TOKEN"],
)  # fmt: skip
def test_secrets_of_the_environment_are_removed_in_any_notation(name, notation):
    for secret in ("c:\\new\\'x\"y", "größe-漢字-\x85z", "a b/c+d%e&f", "https://h/a?sig=b%2Fc"):
        secret = secret.lower()
        text = f"kept {NOTATIONS[notation](secret)} kept"
        for redact in (redacted, redacted_message):
            shown = redact(text, {name: secret})
            assert shown.startswith("kept ")
            assert shown.endswith(" kept")
            assert not leaks(NOTATIONS[notation](secret).strip("'\""), shown), shown


def test_harmless_variables_are_not_secrets():
    for name in ("PATH", "PWD", "OLDPWD", "SASL_PATH", "COMPASS", "PATTERN"):
        assert redacted_message("x /work/dir y", {name: "/work/dir"}) == "x /work/dir y"


def test_messages_and_logs_are_redacted(capsys, tmp_path):
    from jaxforge.telemetry.console import redacting

    url = "s3://AKIA:wJalrXUtnFEMI/K7MDENG@bucket/x"

    def fail():
        raise UserError(f"data.dataset_path = {short_toml(url + 'y' * 80)}: {url} does not exist")

    assert run_main(fail) == 2
    stderr = capsys.readouterr().err
    assert not leaks("wJalrXUtnFEMI/K7MDENG", stderr)
    assert "s3://bucket/x does not exist" in stderr
    record = logging.LogRecord("x", logging.INFO, "", 1, "opening %s", (url,), None)
    assert redacting("%(message)s").format(record) == "opening s3://bucket/x"
    assert redaction.REMOVED == "removed"


SECRET = "wJalrXUtnFEMI/K7MDENG'bPxRfiCY"


@pytest.fixture
def config(tmp_path):
    """Return a config whose data URL contains a password."""
    path = f"s3://AKIA:{SECRET}@bucket/data"
    return tiny_config(
        data={"dataset_path": path}, checkpoint={"dir": str(tmp_path / "run")},
        metrics={"writers": {"name": "wandb"}},
    )  # fmt: skip


def test_run_page_contains_no_secrets(config, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(config.to_toml())
    line = {"step": 1, "time": 1.0, "train/loss": 2.0, "train/tokens": 1.0,
            "train/step_time_sec": 0.1, "train/skipped_steps": 0.0}  # fmt: skip
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    command = redacted_command(["train", f"--x={{'token': '{SECRET[:20]}'}}"])
    start = {"step": 0, "time": 1.0, "command": command, "versions": {}, "git": {}, "parameters": 1}
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n")
    assert report.main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert not leaks(SECRET, page)
    assert "s3://bucket/data" in page


def test_metric_services_get_no_secrets(config, tmp_path, monkeypatch):
    writers = ({"name": "tensorboard"}, {"name": "wandb"})
    config = config.with_values(
        {"metrics.writers": tuple(MetricsWriter(**writer) for writer in writers)}
    )
    TensorBoardSink(tmp_path / "tb", 0, config).close(0)
    (events,) = (tmp_path / "tb").iterdir()
    assert not leaks(SECRET.encode(), events.read_bytes())
    assert b"s3://bucket/data" in events.read_bytes()
    recorded = {}
    command = ["train", "--x.api_key=abcdefgh"]

    def init(**options):
        recorded.update(options, argv=list(sys.argv))

    wandb = SimpleNamespace(init=init, Settings=dict, errors=SimpleNamespace(
        UsageError=UserError, AuthenticationError=UserError))  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(sys, "argv", command)
    WandbSink(tmp_path, config, "id")
    assert recorded["config"]["data"]["dataset_path"] == "s3://bucket/data"
    assert recorded["config"]["model"]["dim"] == config.model.dim
    assert recorded["argv"] == ["train", "--x.api_key=removed"]
    assert sys.argv is command
