"""The Prefect API by its settings, without Prefect."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flows import api

PROFILES = """
active = "work"
[profiles.work]
PREFECT_API_URL = "http://from-the-profile/api"
PREFECT_API_KEY = "profile-key"
[profiles.home]
PREFECT_API_URL = "http://home/api"
"""


@pytest.fixture(autouse=True)
def prefect_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("API_URL", "API_KEY", "API_AUTH_STRING", "PROFILE", "PROFILES_PATH"):
        monkeypatch.delenv(f"PREFECT_{name}", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    return tmp_path


def test_nothing_is_configured():
    assert api.url() is None


def test_the_active_profile(prefect_home):
    (prefect_home / "profiles.toml").write_text(PROFILES)
    assert api.url() == "http://from-the-profile/api"
    assert api.setting("PREFECT_API_KEY") == "profile-key"
    assert api.setting("PREFECT_LOGGING_LEVEL") is None


def test_the_environment_comes_first(prefect_home, monkeypatch):
    (prefect_home / "profiles.toml").write_text(PROFILES)
    monkeypatch.setenv("PREFECT_API_URL", "http://from-the-environment/api")
    assert api.url() == "http://from-the-environment/api"
    monkeypatch.setenv("PREFECT_API_URL", "")
    assert api.url() == "http://from-the-profile/api"


def test_another_profile_or_file(prefect_home, monkeypatch, tmp_path):
    (prefect_home / "profiles.toml").write_text(PROFILES)
    monkeypatch.setenv("PREFECT_PROFILE", "home")
    assert (api.url(), api.setting("PREFECT_API_KEY")) == ("http://home/api", None)
    monkeypatch.setenv("PREFECT_PROFILE", "none")
    assert api.url() is None
    monkeypatch.delenv("PREFECT_PROFILE")
    (tmp_path / "other.toml").write_text('active = "a"\n[profiles.a]\nPREFECT_API_URL = "http://o"')
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "other.toml"))
    assert api.url() == "http://o"


@pytest.mark.parametrize("content", ["", "active = ", "active = 'a'", "[profiles]\nx = 1"])
def test_a_torn_profile_configures_nothing(prefect_home, content):
    (prefect_home / "profiles.toml").write_text(content)
    assert api.url() is None


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        code, answer = self.server.answers.pop(0)
        self.send_response(code)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[HTTPServer]:
    """A small server that keeps what it was asked, and gives the answers it was told."""
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    server.asked, server.answers = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api/")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_cancelling_sets_every_flow_run_of_a_run_to_cancelling(server, monkeypatch):
    monkeypatch.setenv("PREFECT_API_KEY", "k")
    server.answers += [(200, b'[{"id": "1"}, {"id": "2"}]'), (201, b"{}"), (201, b"{}")]
    assert api.cancel("tiny-0a") == 2
    paths, headers, bodies = zip(*server.asked, strict=True)
    assert paths == (
        "/api/flow_runs/filter", "/api/flow_runs/1/set_state", "/api/flow_runs/2/set_state",
    )  # fmt: skip
    assert set(headers) == {"Bearer k"}
    assert bodies[0]["flow_runs"]["tags"] == {"all_": ["run:tiny-0a"]}
    assert bodies[1]["state"]["type"] == "CANCELLING"


def test_a_name_and_password(server, monkeypatch):
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:pass")
    server.answers.append((200, b"[]"))
    assert api.flow_runs(5) == []
    assert server.asked[0][1] == "Basic YWRtaW46cGFzcw=="


@pytest.mark.parametrize(
    ("code", "answer", "words"),
    [(500, b"", "answered 500 to /flow_runs/filter"), (200, b"<html>", "is not the Prefect API")],
)
def test_an_answer_that_is_none(server, code, answer, words):
    server.answers.append((code, answer))
    with pytest.raises(api.ApiFailed, match=words):
        api.flow_runs(5)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/api", "nonsense", "ftp://x", "http://[", ""])
def test_an_api_that_cannot_be_reached(monkeypatch, url):
    monkeypatch.setattr(api, "url", lambda: url)
    with pytest.raises(api.ApiFailed, match="cannot be reached"):
        api.flow_runs(5)
