"""The Hugging Face Hub and ModelScope, by their own libraries: `hf:ORG/NAME[@REVISION]` or `ms:ORG/NAME[@REVISION]` in
the place of a local path.

Nothing is fetched without the prefix, and no code or pickle at all. Endpoint, tokens, cache, offline mode, resumed
transfers and their progress are those of huggingface_hub (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE) and of
modelscope-hub (MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN, MODELSCOPE_CACHE). Of the ranks of a
run on one node the first fetches, and the others wait for what it found.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from megalith.errors import ConfigError

PREFIX = "hf:"
_MODELSCOPE = "ms:"
_NAME = re.compile(r"(?:hf|ms):(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?P<inside>/[^@]+)?(?:@(?P<revision>[^@]+))?")
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")
_TEXTS = ("json", "jsonl", "ndjson", "txt", "text", "csv", "tsv")
DATASET_FILES = tuple(
    [f"*.{form}{packed}" for form in _TEXTS for packed in ("", ".gz", ".xz", ".zst", ".bz2")]
    + ["*.parquet", "*.arrow", "*.tar", "*.tar.*", "*.tgz", "*.zip"]
)
UPLOADED_FILES = (*MODEL_FILES, "*.md", "*.gguf", "Modelfile", "LICENSE*", "NOTICE*")
_NOT_READ = ("original/*", "consolidated*")  # the same weights again, in the form of their makers
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID")
_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID")
"""Variables that launchers set for the processes of a run, and those in which two runs on a node differ."""


def is_named(name: str) -> bool:
    """Return whether a name has the prefix of a hub, and is no URL."""
    return name.startswith((PREFIX, _MODELSCOPE)) and not name[len(PREFIX) :].startswith("/")


@cache  # of one command, so that a branch that moves meanwhile is read once
def fetched(name: str, patterns: Sequence[str], repo_type: str = "model") -> str:
    """Return the local folder, in the cache of the hub, of what `name` names; `name` itself without the prefix.

    Args:
        name: `hf:ORG/NAME[@REVISION]`; of a dataset also `hf:ORG/NAME/PATH`, a folder, file or glob in it; or `ms:...`.
        patterns: of the files to fetch.

    Raises:  ConfigError if it does not exist, may not be read, has no such files, or the hub cannot be reached.
    """
    if not is_named(name):
        return name
    match = _NAME.fullmatch(name)
    if match is None or (match["inside"] and repo_type != "dataset"):
        raise ConfigError(f"{name}: give {name[:3]}ORG/NAME or {name[:3]}ORG/NAME@REVISION")
    inside = (match["inside"] or "").strip("/")
    if inside:
        patterns = (inside, f"{inside}/*")
    repo = match["repo"]
    wanted = {"revision": match["revision"], "allow_patterns": list(patterns), "ignore_patterns": list(_NOT_READ)}

    def fetch() -> str:
        if name.startswith(_MODELSCOPE):
            return _from_modelscope(name, repo, repo_type, wanted)
        with _explained(name, repo, repo_type) as library:
            return str(library.snapshot_download(repo, repo_type=repo_type, **wanted))

    folder = Path(_once_a_node(fetch, repr((name, patterns, repo_type))))
    if not any(path.is_file() for pattern in patterns for path in folder.rglob(Path(pattern).name)):
        raise ConfigError(f"{name} has no file that is read here: {', '.join(patterns)}")
    if "*.safetensors" in patterns and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{name} has no *.safetensors; pickles of weights (*.bin) are not fetched")
    return str(folder / inside)


def _from_modelscope(name: str, repo: str, repo_type: str, wanted: Mapping[str, Any]) -> str:
    """Return the folder of a snapshot of ModelScope, that of the cache without a network. Raises ConfigError."""
    try:
        import modelscope_hub as library
    except ImportError as error:
        raise ConfigError(f"{name} needs the package modelscope-hub: pip install modelscope-hub") from error
    hub = library.HubApi()
    try:
        return str(hub.download_repo(repo, repo_type, **wanted))
    except library.NetworkError as error:
        with suppress(library.HubError):
            return str(hub.download_repo(repo, repo_type, **wanted, local_files_only=True))
        raise ConfigError(f"{name} is not in the cache, and its hub was not reached: {error}") from error
    except (library.HubError, OSError) as error:
        raise ConfigError(f"{name}: {error}. {getattr(error, 'suggestion', '')}".rstrip()) from error


def _once_a_node(fetch: Callable[[], str], what: str) -> str:
    """Return the result of `fetch` by the first rank of this run on this node, for which the others wait.

    Each rank keeps a lock on the file of the result as long as it lives. Who meets no other lock is the first: so
    no result of an earlier run is used, and a rank that dies delays none. An error is raised by those that wait, too.
    """
    if not any(variable in os.environ for variable in _RANK):
        return fetch()
    import hashlib  # here, because every command imports this module
    import json
    import tempfile

    run = repr([what, *(os.environ.get(variable) for variable in _RUN)])
    path = Path(tempfile.gettempdir(), f"megalith-hub-{os.getuid()}-{hashlib.sha256(run.encode()).hexdigest()[:16]}")
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+", encoding="utf-8")
    except OSError:
        return fetch()
    if os.fstat(file.fileno()).st_uid != os.getuid():  # laid there by another user
        return fetch()
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            result = {"folder": fetch()}
        except ConfigError as error:
            result = {"error": str(error)}
        file.truncate(0)
        json.dump(result, file)
        file.flush()
    fcntl.flock(file, fcntl.LOCK_SH)  # waits for the first; of the first it lets the others read
    file.seek(0)
    result = json.loads(file.read() or "{}")
    if "error" in result:
        _leave(file, path)
        raise ConfigError(result["error"])
    atexit.register(_leave, file, path)
    return result.get("folder") or fetch()  # the first died


def _leave(file: TextIO, path: Path) -> None:
    """Unlock the file of a result; the last rank removes it."""
    with file, suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def push(folder: Path, repo: str, *, private: bool, revision: str | None, message: str | None) -> str:
    """Upload the files of a folder that other programs read; return the URL of the commit. Raises ConfigError."""
    with _explained(f"{PREFIX}{repo}", repo, "model") as library:
        hub = library.HfApi()
        hub.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            hub.create_branch(repo, branch=revision, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            commit_message=message or f"Upload {folder.resolve().name} with megalith",
            allow_patterns=list(UPLOADED_FILES),
        )
    return str(commit.commit_url)


@contextmanager
def _explained(name: str, repo: str, repo_type: str) -> Iterator[Any]:
    """Import the library; its errors become a ConfigError with the remedy."""
    try:
        import huggingface_hub as library
        from huggingface_hub import constants, utils
    except ImportError as error:
        raise ConfigError(f"{name} needs the package huggingface_hub: pip install huggingface_hub") from error
    page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{repo}"
    login = "`hf auth login` or HF_TOKEN"
    try:
        yield library
    except utils.GatedRepoError as error:
        raise ConfigError(f"{name} is gated: accept its terms at {page}, then give a token by {login}") from error
    except utils.RevisionNotFoundError as error:
        raise ConfigError(f"{name}: no such revision; {page}/tree/main has its branches and tags") from error
    except utils.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name}: no such {repo_type} at {page}; if it is private, give a token that may read it by {login}"
        ) from error
    except utils.HFValidationError as error:
        raise ConfigError(f"{name}: {error}") from error
    except (utils.LocalEntryNotFoundError, utils.OfflineModeIsEnabled) as error:
        offline = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} was not reached"
        raise ConfigError(
            f"{name} is not in the cache ({constants.HF_HUB_CACHE}), and {why}; fetch it where there is a "
            f"network (`hf download {repo}`) and copy the cache, or set HF_ENDPOINT to a mirror"
        ) from error
    except utils.HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else "?"
        remedy = f"give a token that may do this by {login}" if code in (401, 403) else "try again later"
        raise ConfigError(f"{name}: {page} answered {code}: {error}; {remedy}") from error
    except OSError as error:
        raise ConfigError(f"{name}: {error}; is {constants.ENDPOINT} reachable?") from error
