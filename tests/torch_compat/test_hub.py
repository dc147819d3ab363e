"""`export --push-to-hub` against a server that speaks the Hub's endpoints of uploads."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from jaxforge.cli.running import run_main
from jaxforge.errors import StorageError, UserError
from tests.helpers import cli
from tests.torch_compat.stage_runs import write_run

TOKEN = "hf_" + "tokenOfTheTest" * 2


class Hub(ThreadingHTTPServer):
    """Hub that accepts a token, and remembers repositories, branches and files."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories, self.branches, self.files = {}, [], {}
        self.requests, self.status = [], 200


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append(path)
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid credentials"})
        if hub.status != 200:
            return self.answer(hub.status, {"error": "out of order"})
        return self.answer(200, self.result(path, body))

    def result(self, path, body):
        hub = self.server
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}"
            hub.repositories[name] = request.get("visibility", request.get("private"))
            return {"url": f"{hub.url}/{name}"}
        kind, _, revision = path.removeprefix("/api/models/me/mine/").partition("/")
        if kind == "branch":
            hub.branches.append(revision)
        if kind == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular"} for name in names]
            return {"files": [{**file, "shouldIgnore": False} for file in files]}
        if kind == "commit":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    content = base64.b64decode(value["content"])
                    hub.files[revision, value["path"]] = content
            return {"commitUrl": f"{hub.url}/me/mine/commit/0a1b", "commitOid": "0a1b"}
        return {}

    def do_GET(self):
        name = self.path.removeprefix("/api/models/")
        if name in self.server.repositories:
            return self.answer(200, {"id": name})
        return self.answer(404, {"error": "Repository not found"})

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("source") / "run")


def export(run, to, *options):
    return cli(["convert", str(run), str(to), "--to=hf", "--push-to-hub=me/mine", *options])


def files_of(directory):
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("is_login", [False, True], ids=["variable", "login"])
def test_export_is_uploaded_file_by_file(run, tmp_path, hub, monkeypatch, capfd, is_login):
    if is_login:
        (tmp_path / "token").write_text(TOKEN)
    else:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = tmp_path / "result"
    assert export(run, result) == 0
    uploaded = {name: content for (branch, name), content in hub.files.items() if branch == "main"}
    assert uploaded == files_of(result)
    assert {"config.json", "README.md"} < uploaded.keys()
    assert hub.repositories == {"me/mine": hub.repositories["me/mine"]}
    assert hub.repositories["me/mine"] in (None, False, "public")
    said = capfd.readouterr()
    assert f"{hub.url}/me/mine/commit/0a1b" in said.out
    assert "uploaded to me/mine" in said.err
    assert TOKEN not in said.out + said.err
    assert not [name for name, content in uploaded.items() if TOKEN.encode() in content]


def test_private_repository_and_branch_are_created(run, tmp_path, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert export(run, tmp_path / "result", "--private", "--revision=step-4") == 0
    assert hub.repositories["me/mine"] in (True, "private")
    assert hub.branches == ["step-4"]
    assert {branch for branch, _ in hub.files} == {"step-4"}


def test_missing_token_is_refused_before_the_export(run, tmp_path, hub, capsys):
    assert run_main(lambda: export(run, tmp_path / "result")) == 2
    assert "no token of the Hugging Face Hub. Set HF_TOKEN" in capsys.readouterr().err
    assert not (tmp_path / "result").exists()
    assert not hub.requests


@pytest.mark.parametrize(
    ("status", "error"), [(403, UserError), (500, StorageError)], ids=["refused", "broken"]
)
def test_failed_upload_leaves_the_export(run, tmp_path, hub, monkeypatch, status, error):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.status = status
    with pytest.raises(error, match="the upload failed") as raised:
        export(run, tmp_path / "result")
    assert f"hf upload me/mine {tmp_path / 'result'} ." in str(raised.value)
    assert (tmp_path / "result" / "config.json").exists()
    assert not hub.files
    assert TOKEN not in str(raised.value)


def test_wrong_token_is_refused(run, tmp_path, hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_wrongTokenOfTheTest")
    assert run_main(lambda: export(run, tmp_path / "result")) == 2
    assert "hf_wrong" not in capsys.readouterr().err
    assert not hub.files


def test_unreachable_hub_leaves_the_export(run, tmp_path, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="The export is complete in"):
        export(run, tmp_path / "result")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to=dcp", "--push-to-hub=me/mine"], "only applies to --to hf and --to peft"),
        (["--to=hf", "--push-to-hub=mine"], "must be OWNER/NAME"),
        (["--to=hf", "--push-to-hub=me/mi ne"], "must be OWNER/NAME"),
        (["--to=hf", "--private"], "--private only applies to --push-to-hub"),
        (["--to=hf", "--revision=x"], "--revision only applies to --push-to-hub"),
    ],
)
def test_options_without_effect_are_refused(run, tmp_path, hub, monkeypatch, options, message):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(UserError, match=message):
        cli(["convert", str(run), str(tmp_path / "result"), *options])
    assert not hub.requests
    assert not (tmp_path / "result").exists()


def test_dry_run_uploads_nothing(run, tmp_path, hub, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert export(run, tmp_path / "result", "--dry-run") == 0
    assert "uploaded to me/mine" in capfd.readouterr().err
    assert not hub.requests
