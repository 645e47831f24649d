"""Checkpoints that earlier versions wrote stay loadable, in other layouts and formats, for ever (F34).

`fixtures/checkpoints/<version>.tar.xz` holds, of each format, iteration 2 of a run of four; the losses of iterations 3
and 4 are in `RUNS`. A new version adds its own file, with the same command lines, when what it writes differs.
"""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from ..e2e.warm import WarmProcess, other_warnings

ARCHIVES = sorted((Path(__file__).parent / "fixtures" / "checkpoints").glob("*.tar.xz"))
BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 30 --make-vocab-size-divisible-by 8 --eval-iters 0 --device cpu --seed 7 --hidden-dropout 0 "
    "--attention-dropout 0 --log-interval 1 --save-interval 2"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --ffn-hidden-size 16"
)
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
RUNS = {
    # written by two tensor ranks with ZeRO-1, and by two pipeline stages
    "torch_dist": (f"{BASE} --bf16", (3.410315, 3.454251), 5e-3),
    "torch": (f"{BASE} {LLAMA}", (3.304759, 3.303831), 2e-6),
}
LAYOUTS = {"one": (1, ""), "tp2": (2, TP2), "pp2-torch": (2, f"{PP2} --ckpt-format torch")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize(
    "archive",
    [pytest.param(path, marks=pytest.mark.full if path.name == "0.1.0.dev0.tar.xz" else ()) for path in ARCHIVES],
    ids=lambda path: path.name.removesuffix(".tar.xz"),
)
def test_a_run_of_an_earlier_version_goes_on(
    archive: Path, kind: str, layout: str, tmp_path: Path, warm: WarmProcess
) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    flags, losses, tolerance = RUNS[kind]
    number, more = LAYOUTS[layout]
    words = [*flags.split(), *more.split(), "--load", tmp_path / kind, "--save", tmp_path / "on"]
    data = {"MOCK_DOCUMENTS": "100000"}  # which samples the losses are of depends on it
    ended = warm.run_ranks(number, words, tmp_path, **data) if number > 1 else [warm.run(words, tmp_path, **data)]
    assert [end.code for end in ended] == [0] * number, ended[0].text
    found = [float(loss) for loss in re.findall(r"lm loss: (\S+)", ended[0].text)]
    assert found == pytest.approx(losses, abs=tolerance)
    assert other_warnings(ended[0].text) == []
