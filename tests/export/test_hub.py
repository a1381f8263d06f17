"""Publishing: only what belongs in public leaves the folder, nothing private does, and what arrives loads.

The Hub is played by a small server in this process; clients are fresh processes, which read its address at import.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from regraft.convert.export.hub import export
from regraft.convert.graft import graft
from regraft.convert.mixers.registry import parse_options
from regraft.convert.sources import SourceInfo, load_source
from regraft.errors import UserError

SHA = "0" * 40


class FakeHub(BaseHTTPRequestHandler):
    """create_repo, create_branch, preupload, LFS upload, commit, listing, download: what a push and a load need."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Quiet."""

    def _body(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, code, content=b"", **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers.setdefault("Content_Type", "application/json")
        self.send_response(code)
        for name, value in {**headers, "Content_Length": str(len(content))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _handle(self):
        body, path = self._body(), self.path.split("?")[0]
        hub = self.server.hub
        hub.log.append((self.command, self.path))
        here = f"http://127.0.0.1:{self.server.server_port}"
        if (
            path.startswith("/api/")
            and self.headers.get("Authorization") != "Bearer hf_fake"
            and self.command == "POST"
        ):
            return self._answer(401, {"error": "Invalid username or password."})
        if path == "/api/validate-yaml":
            bad = "licence: " in json.loads(body)["content"]
            return self._answer(400 if bad else 200, {"errors": [{"message": "no such key"}] * bad, "warnings": []})
        if path == "/api/repos/create":
            told = json.loads(body)
            name = f"{told['organization']}/{told['name']}" if told.get("organization") else told["name"]
            hub.private[name] = told.get("visibility") == "private" or told.get("private")
            hub.repos.setdefault(name, {}).setdefault("main", {})
            return self._answer(200, {"url": f"{here}/{name}", "id": name, "name": name})
        if match := re.match(r"/api/models/(.+/.+)/branch/(.+)$", path):
            hub.repos[match[1]].setdefault(match[2], dict(hub.repos[match[1]]["main"]))
            return self._answer(200, {})
        if match := re.match(r"/api/models/.+/preupload/.+", path):
            files = [
                {"path": f["path"], "shouldIgnore": False, "oid": None,
                 "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                for f in json.loads(body)["files"]
            ]  # fmt: skip
            return self._answer(200, {"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    "actions": {"upload": {"href": f"{here}/lfs/{o['oid']}", "header": {}}},
                }
                for o in json.loads(body)["objects"]
            ]
            kind = "application/vnd.git-lfs+json"
            return self._answer(200, {"transfer": "basic", "objects": objects}, Content_Type=kind)
        if self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == path.rsplit("/", 1)[1]
            hub.lfs[path.rsplit("/", 1)[1]] = body
            return self._answer(200)
        if match := re.match(r"/api/models/(.+/[^/]+)/commit/(.+)$", path):
            branch = "refs/pr/1" if "create_pr=1" in self.path else match[2]
            files = hub.repos[match[1]].setdefault(branch, dict(hub.repos[match[1]]["main"]))
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.lfs[value["oid"]]
                elif entry["key"] == "deletedFile":
                    del files[value["path"]]
            told = {"success": True, "commitOid": SHA, "commitUrl": f"{here}/{match[1]}/commit/{SHA}", "hookOutput": ""}
            if branch.startswith("refs/pr"):
                told["pullRequestUrl"] = f"{here}/{match[1]}/discussions/1"
            return self._answer(200, told)
        if match := re.match(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$", path):
            content = hub.repos.get(match[1], {}).get("main", {}).get(match[3])
            if content is None:
                return self._answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=SHA)
            tag = f'"{hashlib.sha256(content).hexdigest()}"'
            return self._answer(200, content, ETag=tag, X_Repo_Commit=SHA, X_Linked_Size=str(len(content)))
        if match := re.match(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?$", path):
            revision, _, inside = (match[3] or "main").partition("/")
            files = hub.repos.get(match[1], {}).get("main" if revision == SHA else revision)
            if files is None:
                return self._answer(404, X_Error_Code="RepoNotFound")
            if inside:  # every repository here is flat
                return self._answer(404, X_Error_Code="EntryNotFound")
            if match[2] == "tree":
                rows = [{"type": "file", "path": n, "size": len(c), "oid": "1" * 40} for n, c in files.items()]
                return self._answer(200, rows)
            told = {"id": match[1], "modelId": match[1], "sha": SHA, "private": False, "tags": [], "downloads": 0}
            return self._answer(200, {**told, "siblings": [{"rfilename": name} for name in files]})
        return self._answer(404, {"error": path}, X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = _handle


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.hub = SimpleNamespace(repos={}, lfs={}, log=[], private={}, url=f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.hub
    server.shutdown()
    server.server_close()


def client(code, arguments, hub, tmp_path, token="hf_fake"):
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False,
    )  # fmt: skip


PUSH = """
import json, sys
from pathlib import Path
from regraft.convert.export.hub import export
from regraft.errors import UserError
for folder, options in json.loads(sys.argv[1]):
    try:
        print(export(Path(folder), **options).render(), end="\\0")
    except UserError as error:
        print(error, end="\\0")
"""


def pushes(jobs, hub, tmp_path):
    """What was told of each (folder, options), pushed one after the other by one process."""
    done = client(PUSH, [json.dumps([[str(folder), options] for folder, options in jobs])], hub, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("\0")


LOAD = """
import sys, torch
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "regraft":
            raise ImportError("hidden")
sys.meta_path.insert(0, Hidden())
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
wanted = load_file(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert len(AutoTokenizer.from_pretrained(sys.argv[1])) == 260
with torch.no_grad():
    print("gap", (model(wanted["ids"]).logits - wanted["logits"]).abs().max().item())
model.save_pretrained(sys.argv[3])
again = AutoModelForCausalLM.from_pretrained(sys.argv[3], trust_remote_code=True).eval()
with torch.no_grad():
    print("again", (again(wanted["ids"]).logits - wanted["logits"]).abs().max().item())
print("code from", type(again).__module__.split(".")[1])
"""


@pytest.fixture
def student(tiny_llama):
    info = SourceInfo("some/model", "hub", "main", "abc123", None, "mit", "llama")
    return graft(
        tiny_llama(vocab=260), {1: ("window_linear", parse_options("window_linear", {"window": 5}))}, info=info
    ).model


@pytest.fixture
def checkpoint(student, tiny_tokenizer, tmp_path):
    student.save_pretrained(tmp_path / "m")
    tiny_tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_pushed_pulled_and_pushed_again(student, checkpoint, hub, tmp_path):
    """The whole way: push, load elsewhere without regraft, save that again; then a push of other shards over it."""
    (checkpoint / "optimizer.pt").write_bytes(b"x")
    told = pushes([(checkpoint, {"push": "me/half"})], hub, tmp_path)[0]
    assert "left out: optimizer.pt" in told and "/me/half/commit/" in told
    there = hub.repos["me/half"]["main"]
    assert {"config.json", "model.safetensors", "modeling_regraft.py", "tokenizer.json", "README.md"} <= set(there)
    assert "optimizer.pt" not in there and b'from_pretrained("me/half"' in there["README.md"]
    assert b"base_model: some/model" in there["README.md"] and b"license: mit" in there["README.md"]
    assert there["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    ids = torch.randint(3, 260, (2, 25))
    with torch.no_grad():
        save_file({"ids": ids, "logits": student(ids).logits.contiguous()}, tmp_path / "wanted")
    done = client(LOAD, ["me/half", tmp_path / "wanted", tmp_path / "again"], hub, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "gap 0.0" in done.stdout and "again 0.0" in done.stdout and "code from again" in done.stdout

    shutil.rmtree(checkpoint)
    student.save_pretrained(checkpoint, max_shard_size="100KB")
    pushes([(checkpoint, {"push": "me/half", "private": True})], hub, tmp_path)
    there = hub.repos["me/half"]["main"]
    assert "model.safetensors" not in there and "model.safetensors.index.json" in there
    assert "tokenizer.json" in there  # what belongs to no model file is left alone
    done = client(LOAD, ["me/half", tmp_path / "wanted", tmp_path / "third"], hub, tmp_path)
    assert "gap 0.0" in done.stdout, done.stderr[-3000:]


def test_branches_pull_requests_and_refusals(checkpoint, hub, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "bad")
    (tmp_path / "bad" / "README.md").write_text("---\nlicence: mit\n---\n")
    told = pushes(
        [
            (checkpoint, {"push": "me/a", "revision": "trial", "private": True}),
            (checkpoint, {"push": "me/b", "create_pr": True}),
            (checkpoint, {"push": "me/c", "token": "hf_wrong"}),
            (tmp_path / "bad", {"push": "me/d"}),
            (checkpoint, {"push": "not a name"}),
        ],
        hub,
        tmp_path,
    )
    assert "config.json" in hub.repos["me/a"]["trial"] and not hub.repos["me/a"]["main"] and hub.private["me/a"]
    assert "/discussions/1" in told[1] and not hub.private["me/b"]
    assert "config.json" in hub.repos["me/b"]["refs/pr/1"] and not hub.repos["me/b"]["main"]
    assert told[2].startswith("error: the Hub refused") and "401" in told[2] and "hf_wrong" not in told[2]
    assert "error: the Hub refuses the card's front matter" in told[3] and "no such key" in told[3]
    assert not hub.repos["me/d"]["main"]
    assert told[4].startswith("error: not a repository name")
    nowhere = SimpleNamespace(url="http://127.0.0.1:9")
    assert pushes([(checkpoint, {"push": "me/c"})], nowhere, tmp_path)[0].startswith("error: the Hub refused")


def test_a_dry_run_checks_lists_and_touches_nothing(checkpoint, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a dry run opened a connection")

    monkeypatch.setattr("socket.socket.connect", refuse)
    for name in ("optimizer.pt", "trainer.safetensors", "optimizer.safetensors", "notes.py", "trainer.safetensors.tmp"):
        (checkpoint / name).write_text("x")
    (checkpoint / "checkpoint-000100").mkdir()
    before = {p: p.stat().st_mtime_ns for p in checkpoint.parent.rglob("*")}
    manifest = export(checkpoint, push="me/model", dry_run=True)
    assert {p: p.stat().st_mtime_ns for p in checkpoint.parent.rglob("*")} == before
    code = {name for name in manifest.files if name.endswith(".py")}
    assert code == {p.name for p in checkpoint.glob("*regraft*.py")}
    assert set(manifest.files) - code == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert manifest.files["model.safetensors"] == (checkpoint / "model.safetensors").stat().st_size
    assert manifest.left_out == [
        "checkpoint-000100/", "notes.py", "optimizer.pt", "optimizer.safetensors", "trainer.safetensors",
        "trainer.safetensors.tmp",
    ]  # fmt: skip
    assert "left out: checkpoint-000100/" in manifest.render()


def test_an_exported_folder_is_clean_and_loads(checkpoint, tmp_path):
    export(checkpoint, out=tmp_path / "public")
    card = (tmp_path / "public" / "README.md").read_text()
    assert card.startswith("---\n") and "trust_remote_code=True" in card and "SLSS" in card
    assert load_source(str(tmp_path / "public")).tokenizer is not None
    with pytest.raises(UserError, match="exists already"):
        export(checkpoint, out=tmp_path / "public")


def test_a_local_source_goes_by_its_last_name(student, tiny_tokenizer, tmp_path):
    local = str(tmp_path / "models" / "my-base")
    student.config.regraft["source"].update(ref=local, kind="folder")
    student.save_pretrained(tmp_path / "m")
    tiny_tokenizer.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "recipe.yaml").write_text(f"base: {local}\n")
    tokenizer = tmp_path / "m" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "name_or_path": local}))
    export(tmp_path / "m", out=tmp_path / "public")
    for file in (tmp_path / "public").iterdir():
        if file.suffix in (".json", ".md", ".yaml", ".py", ".jinja"):
            assert str(tmp_path) not in file.read_text(), file.name
    assert (tmp_path / "public" / "recipe.yaml").read_text() == "base: my-base\n"
    assert "base_model" not in (tmp_path / "public" / "README.md").read_text()
    assert json.loads((tmp_path / "public" / "config.json").read_text())["regraft"]["source"]["ref"] == "my-base"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("README.md", "token hf_" + "a" * 30, "access token"),
        ("chat_template.jinja", "-----BEGIN RSA PRIVATE KEY-----", "access token"),
        ("README.md", "made in /home/me/models/x", "/home/me/models/x"),
        ("recipe.yaml", "data: {source: '/scratch/me/x.txt'}", "/scratch/me/x.txt"),
        ("recipe.yaml", "data: file:///nfs/x.txt", "file:///nfs/x.txt"),
        ("recipe.yaml", "data: ~/texts/x.txt", "~/texts/x.txt"),
        ("generation_config.json", r'{"from": "C:\\Users\\me\\x"}', "Users"),
    ],
)
def test_secrets_and_local_paths_are_refused(checkpoint, tmp_path, name, text, told):
    (checkpoint / name).write_text(text)
    for options in ({"out": tmp_path / "a"}, {"push": "me/x", "dry_run": True}, {"push": "me/x", "token": "t"}):
        with pytest.raises(UserError, match=re.escape(told)) as caught:
            export(checkpoint, **options)
        assert caught.value.where == name
    assert not (tmp_path / "a").exists()


def test_addresses_and_relative_names_are_no_local_paths(checkpoint):
    (checkpoint / "README.md").write_text("https://host/home/x, data/text.txt, a/tmp/b, and/or, ~2 KB, ./work/x")
    export(checkpoint, push="me/x", dry_run=True)


def test_incomplete_checkpoints_are_refused(student, checkpoint, tmp_path):
    (checkpoint / "regraft_kernels_ragged.py").unlink()
    with pytest.raises(UserError, match=r"regraft_kernels_ragged\.py is missing"):
        export(checkpoint, push="me/x", dry_run=True)
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated"):
        export(checkpoint, push="me/x", dry_run=True)
    student.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    with pytest.raises(UserError, match="a shard is missing: model-00002"):
        export(tmp_path / "shards", push="me/x", dry_run=True)
    for shard in (tmp_path / "shards").glob("model*"):
        shard.unlink()
    with pytest.raises(UserError, match="no weights"):
        export(tmp_path / "shards", push="me/x", dry_run=True)


def test_a_run_folder_points_to_its_final_model(checkpoint, tmp_path):
    (tmp_path / "run").mkdir()
    checkpoint.rename(tmp_path / "run" / "final")
    with pytest.raises(UserError) as caught:
        export(tmp_path / "run", push="me/x", dry_run=True)
    assert str(tmp_path / "run" / "final") in caught.value.fix
    with pytest.raises(UserError, match="nowhere to export to"):
        export(tmp_path / "run" / "final")


def test_pushing_without_a_token_is_one_clear_error(checkpoint, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="no access token"):
        export(checkpoint, push="me/model", out=tmp_path / "public")
    assert not (tmp_path / "public").exists()
