"""`hf:ORG/NAME` in a run of several ranks: one of a node asks the Hub."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from megalith.errors import ConfigError
from megalith.hub import fetched

from ..e2e.fake_hub import FakeHub, running
from .conftest import Ranks


def test_one_rank_of_a_node_fetches_and_all_see_its_errors(ranks: Ranks, tmp_path: Path) -> None:
    hub = FakeHub({"models/org/model": {"config.json": b"{}"}, "models/org/gated": (403, "GatedRepo")})
    with running(hub):
        one, other = ranks.run(2, _fetch, hub.url, str(tmp_path))
    assert one == other and Path(one[0], "config.json").read_bytes() == b"{}" and "org/gated" in one[1]
    assert sum(path.startswith("/api/models/org/model/revision") for path in hub.asked) == 1, hub.asked


def _fetch(url: str, folder: str) -> tuple[str, str]:
    import torch.distributed as dist

    rank = str(dist.get_rank())
    os.environ |= {"HF_ENDPOINT": url, "HF_HOME": folder, "RANK": rank, "TORCHELASTIC_RUN_ID": folder}
    tempfile.tempdir = folder
    found = fetched("hf:org/model", ("*.json",))
    dist.barrier()  # a rank that ends releases its lock
    try:
        fetched("hf:org/gated", ("*.json",))
    except ConfigError as error:
        return found, str(error)
    return found, ""
