"""`megalith prove --reference` agrees with transformers and the real Megatron in fp64, and finds another model.

Megatron takes part where MEGALITH_MEGATRON_CORE names its folder (`test_megatron_core`), or after `make reference`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megalith.cli import prove
from megalith.config import load
from megalith.errors import ConfigError
from megalith.nn.feed_forward import ACTIVATIONS, Activation
from megalith.prove.reference import require

from ..mutations.test_mutations import BASE, EXPERTS, LLAMA

pytest.importorskip("transformers", reason="the outside truth needs the hf extra (transformers)")
GPT2 = BASE.replace("rope", "learned_absolute")
CASES = {
    "transformers": (GPT2, f"{BASE} {LLAMA} {EXPERTS}"),
    "megatron": (GPT2, f"{BASE} {LLAMA} {EXPERTS} --mtp-num-layers 1"),
}


def proven(reference: str, flags: str, file: Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the first miniature of the certificate."""
    try:
        require(reference, load(flags.split(), {}, files=False).model)
    except ConfigError as error:
        pytest.skip(str(error))
    words = [*flags.split(), "--gpus", "1", "--quick", "--reference", reference, "--json", str(file)]
    code = prove.run(words)
    return code, json.loads(file.read_text())["miniatures"][0]


@pytest.mark.full
@pytest.mark.parametrize(("reference", "flags"), [(name, flags) for name in CASES for flags in CASES[name]])
def test_references_agree(reference: str, flags: str, tmp_path: Path) -> None:
    code, miniature = proven(reference, flags, tmp_path / "certificate.json")
    assert code == 0
    name = {"transformers": "transformers", "megatron": "megatron-core"}[reference]
    (compared,) = (kinds for what, kinds in miniature["checkpoint compared with"].items() if what.startswith(name))
    assert compared["gradient"]["count"] >= 15
    assert compared["output"]["count"] >= 2
    assert 0.0 < compared["gradient"]["worst"] < 1e-10


@pytest.mark.full
@pytest.mark.parametrize("reference", CASES)
def test_another_model_is_found(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates and what they gate are exchanged: every layout agrees with one process, which is wrong as well."""

    def exchanged(self: Activation, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gate * ACTIVATIONS[self.kind](up)

    monkeypatch.setattr(Activation, "__call__", exchanged)
    code, miniature = proven(reference, f"{BASE} {LLAMA}", tmp_path / "certificate.json")
    assert code == 1
    assert miniature["cause"]["layer"] == 0


def test_a_model_without_architecture_is_refused() -> None:
    words = [*f"{BASE} --mtp-num-layers 1".split(), "--gpus", "1", "--quick", "--reference", "transformers"]
    with pytest.raises(ConfigError, match="--reference transformers"):
        prove.run(words)
