"""A head to the Hub and back, over HTTP, with a stand-in for the Hub on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from selfspec.heads.base import TargetIdentity
from selfspec.heads.medusa import MedusaConfig, MedusaHead

REPO = "someone/a-head"
TOKEN = "hf_right"
COMMIT = "c0ffee" + "0" * 34


class HubHandler(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the Hub to create, fill and read one repository; weights go by LFS, as they do there."""

    server: StandIn

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid credentials in Authorization header"}, status=401)
        elif self.path == "/api/repos/create":
            self._json({"url": f"{self.server.url}/{REPO}", "id": "1", "name": REPO})
        elif self.path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif self.path == f"/api/models/{REPO}/preupload/main":
            files = [entry["path"] for entry in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            self._json({"files": [{"path": k, "uploadMode": v, "shouldIgnore": False} for k, v in modes.items()]})
        elif self.path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{entry['oid']}"}}
            self._json({"transfer": "basic", "objects": objects})
        elif self.path == f"/api/models/{REPO}/commit/main":
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "lfsFile":
                    self.server.files[entry["value"]["path"]] = self.server.objects[entry["value"]["oid"]]
            self._json({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.server.url}/{REPO}/commit/{COMMIT}"})
        else:
            self._json({"error": "not here"}, status=404)

    def do_PUT(self) -> None:
        content = self._body()
        assert self.path == f"/lfs/{hashlib.sha256(content).hexdigest()}"
        self.server.objects[self.path.removeprefix("/lfs/")] = content
        self._json({})

    def do_GET(self) -> None:
        name = self.path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
        if self.path.startswith(f"/api/models/{REPO}/revision/"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._json({"id": REPO, "sha": COMMIT, "siblings": siblings})
        elif self.path.startswith(f"/api/models/{REPO}/tree/"):
            entries = {
                name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in self.server.files.items()
            }
            self._json([{"type": "file", "path": k, "size": size, "oid": oid} for k, (size, oid) in entries.items()])
        elif name in self.server.files:
            content = self.server.files[name]
            etag = hashlib.sha256(content).hexdigest()
            self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self._json({"error": "not here"}, status=404)

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        self.server.requests.append(f"{self.command} {self.path}")

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _json(self, record: object, status: int = 200) -> None:
        self._send(status, json.dumps(record).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class StandIn(ThreadingHTTPServer):
    """The Hub, with one repository in it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    """A Hub that huggingface_hub talks to, as if HF_ENDPOINT had named it."""
    with StandIn() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
            # The stand-in speaks LFS, which the Hub takes beside its own storage protocol.
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        yield server
        server.shutdown()


def test_a_run_pushes_its_head_and_nothing_else(
    hub: StandIn, recipe: Callable[[str], ModuleType], flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")
    output = tmp_path / "run"
    recipe("medusa").main(flags(output, push_to_hub=True, hub_model_id=REPO, hub_token=TOKEN))
    assert hub.files == {file.name: file.read_bytes() for file in (output / "head").iterdir()}
    assert set(hub.files) == {"README.md", "config.json", "curves.svg", "model.safetensors"}
    assert TOKEN not in (output / "run.json").read_text()

    pulled, trained = MedusaHead.from_pretrained(REPO), MedusaHead.from_pretrained(output / "head")
    assert f"GET /{REPO}/resolve/{COMMIT}/model.safetensors" in hub.requests
    assert pulled.config == trained.config
    for name, value in trained.state_dict().items():
        assert torch.equal(pulled.state_dict()[name], value), name


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_push_that_fails_is_one_sentence(
    is_reachable: bool, hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 8, "num_layers": 2, "vocab_size": 16, "embedding": (0.0,), "lm_head": (0.0,)}
    identity = TargetIdentity(name="t", revision=None, model_type="llama", tokenizer="", **shape)
    head = MedusaHead(MedusaConfig(target=identity))
    head.save_pretrained(tmp_path / "head")
    # A port that was free a moment ago.
    with StandIn() as closed:
        if not is_reachable:
            monkeypatch.setattr(constants, "ENDPOINT", closed.url)
    sentence = (
        rf"^{REPO} could not be uploaded to the Hugging Face Hub \(.*{'401' if is_reachable else 'onnect'}.*\): check your "
        rf"token, its write access and your network; the head is in {tmp_path / 'head'}$"
    )
    with pytest.raises(ValueError, match=sentence):
        head.push_to_hub(REPO, directory=tmp_path / "head", token="hf_wrong" if is_reachable else TOKEN)
    assert {file.name for file in (tmp_path / "head").iterdir()} == {"config.json", "model.safetensors"} and not hub.files
