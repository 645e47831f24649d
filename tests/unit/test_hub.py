"""`ms:ORG/NAME` through the calls of modelscope-hub (as of 0.5.1, against which they were run by hand)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hub import MODEL_FILES, fetched


class HubError(Exception):
    suggestion = "log in"


class NetworkError(HubError):
    pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Put a stand-in for the library in its place, and return the requests that it gets."""
    requests: list[dict[str, Any]] = []
    (tmp_path / "model.safetensors").touch()

    class HubApi:
        def download_repo(self, repo_id: str, repo_type: str, *, local_files_only: bool = False, **wanted: Any) -> Path:
            requests.append({"repo": repo_id, "type": repo_type, "offline": local_files_only, **wanted})
            if repo_id == "org/private" or (local_files_only and repo_id == "org/absent"):
                raise HubError(f"{repo_id} is not for you")
            if repo_id in ("org/kept", "org/absent") and not local_files_only:
                raise NetworkError("no route")
            return tmp_path

    library = ModuleType("modelscope_hub")
    vars(library).update(HubApi=HubApi, HubError=HubError, NetworkError=NetworkError)
    monkeypatch.setitem(sys.modules, "modelscope_hub", library)
    return requests


def test_a_name_of_modelscope_is_fetched_without_code_and_pickles(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert fetched("ms:org/model@v1", MODEL_FILES) == str(tmp_path)
    (request,) = asked
    assert (request["repo"], request["type"], request["revision"]) == ("org/model", "model", "v1")
    assert request["allow_patterns"] == list(MODEL_FILES)


def test_without_a_network_the_cache_serves(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert fetched("ms:org/kept", MODEL_FILES) == str(tmp_path)
    assert [request["offline"] for request in asked] == [False, True]


@pytest.mark.parametrize(
    ("name", "said"), [("org/private", "not for you.*log in"), ("org/absent", "no route"), ("a/b/c", "ms:ORG/NAME")]
)
def test_errors_name_the_repository(asked: list[dict[str, Any]], name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"ms:{name}.*{said}"):
        fetched(f"ms:{name}", MODEL_FILES)


def test_without_the_library_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)  # not importable
    with pytest.raises(ConfigError, match="pip install modelscope-hub"):
        fetched("ms:org/other", MODEL_FILES)
