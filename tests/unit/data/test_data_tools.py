"""`megalith data inspect | stats | verify | merge`, and the sentence splitter's parameters."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from megalith.cli.main import main
from megalith.cli.preprocess import parse
from megalith.config import DataConfig, TokenizerConfig
from megalith.data.build import build_gpt_datasets
from megalith.data.dataset_tools import dataset_statistics
from megalith.data.encoding import SentenceSettings
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.sentences import SentenceSplitter, find_parameters
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import build_tokenizer, train_byte_level_bpe
from megalith.tokenizers.fingerprint import read_fingerprint, write_fingerprint
from megalith.tokenizers.null import NullTokenizer

CARD = {"class": "NullTokenizer", "vocab_size": 100, "special": {"eod": 99}, "files": {}}


def write(prefix: Path, documents: list[list[int]], card: dict[str, object] | None = CARD) -> str:
    with IndexedWriter(str(prefix), "uint16") as writer:
        for tokens in documents:
            writer.add_document(tokens, [len(tokens)] if tokens else [])
        writer.finalize()
    if card:
        write_fingerprint(str(prefix), card)
    return str(prefix)


def write_masked(prefix: Path, documents: list[list[int]]) -> str:
    """Write a dataset with a fingerprint, a chat template and a loss mask that learns every token."""
    write(prefix, documents)
    with IndexedWriter(f"{prefix}_loss_mask", "uint8") as writer:
        for tokens in documents:
            writer.add_document([1] * len(tokens), [len(tokens)])
        writer.finalize()
    Path(f"{prefix}.jinja").write_text("template")
    return str(prefix)


def test_a_survey_counts_by_length(tmp_path: Path) -> None:
    lengths = [0, 1, 2, 3, 4, 7, 8, 100, 0, 1]
    found = dataset_statistics(IndexedDataset(write(tmp_path / "a", [[5] * length for length in lengths])))
    assert (found.documents, found.empty, found.sequences, found.tokens) == (10, 2, 8, sum(lengths))
    assert (found.shortest, found.longest) == (1, 100)
    bins = [(part.low, part.high, part.documents, part.tokens) for part in found.histogram]
    assert bins == [(1, 1, 2, 2), (2, 3, 2, 5), (4, 7, 2, 11), (8, 15, 1, 8), (64, 127, 1, 100)]


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 99], [], [3, 99]])
    assert main(["data", "inspect", prefix]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"documents 3\b.*\b1\b.*\bempty", shown) and "document 0: 3 tokens\n  1 2 99" in shown
    assert '"class": "NullTokenizer"' in shown
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size"]
    assert main(["data", "inspect", prefix, "--first", "2", *flags, "99"]) == 0
    assert "document 2: 2 tokens\n  '3 99'" in capsys.readouterr().out
    assert main(["data", "inspect", prefix, *flags, "50"]) == 3
    assert re.search(r"vocab_size +\d+ +\d+", capsys.readouterr().err)
    assert main(["data", "inspect", prefix, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["documents"], record["tokens"], record["lengths"]) == (3, 5, [[2, 3, 2, 5]])


def test_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["same words", "other", "\u4e2d\u6587 \u043c\u0438\u0440", "same words", "", "same words"]
    vocab_file, merge_file = train_byte_level_bpe(texts, 280, tmp_path / "tokenizer")
    tokenizer = build_tokenizer(TokenizerConfig(vocab_file=str(vocab_file), merge_file=str(merge_file)))
    ids = [tokenizer.encode(text) for text in texts]
    prefix = write(tmp_path / "a", ids, tokenizer.fingerprint())
    flags = ["--vocab-file", str(vocab_file), "--merge-file", str(merge_file)]
    assert main(["data", "stats", prefix, *flags, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["documents"], record["tokens"], record["longest"]) == (6, sum(map(len, ids)), max(map(len, ids)))
    assert (record["duplicate_documents"], record["duplicate_tokens"]) == (2, 2 * len(ids[0]))
    assert record["letters_by_script"] == {"Latin": 32, "Cyrillic": 3, "Han": 2}
    assert main(["data", "stats", prefix, *flags, "--sample", "1", "--documents", "2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\b2 documents\b", shown) and "Latin 100.0%" in shown
    assert re.findall(r"^document (\d+):", shown, re.MULTILINE) == ["1", "4"]
    assert main(["data", "stats", write(tmp_path / "b", [[], []])]) == 0
    with IndexedWriter(str(tmp_path / "c"), "uint16") as writer:
        for _ in range(2):  # documents of one sequence without tokens
            writer.add_document([], [0])
        writer.finalize()
    capsys.readouterr()
    assert main(["data", "stats", str(tmp_path / "c"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["duplicate_documents"] == 0
    assert main(["data", "inspect", prefix]) == 0
    assert "equal" not in capsys.readouterr().out.splitlines()[-1]


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good", [[1, 99], [2]])
    assert main(["data", "verify", good]) == 0
    assert re.search(r"\b99 of 100\b.*\b1 of 2 documents\b.*\b99\b", capsys.readouterr().out)
    tokens = np.array([1, 99, 7], "<u2")
    tokens[1] = 500
    Path(good + ".bin").write_bytes(tokens.tobytes())
    short = write(tmp_path / "short", [[1, 2]], card=None)
    Path(short + ".bin").write_bytes(b"\1\0\2")
    assert main(["data", "verify", good, short]) == 3
    screen = capsys.readouterr().out
    line = next(line for line in screen.splitlines() if "good.bin" in line)
    assert all(re.search(rf"\b{number}\b", line) for number in (500, 2, 0, 100))
    assert re.search(r"short\.bin\b.*\b3\b", screen)
    assert main(["data", "verify", good, "--structure-only"]) == 0
    assert main(["data", "verify", good, "--vocab-size", "501"]) == 0


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (["inspect", "--first", "-1", "--documents", "-4", "--seq-length", "0"], ["first", "documents", "seq-length"]),
        (["inspect", "--vocab-file", "vocab.json", "--first", "-1"], ["first", "merge-file"]),
        (["inspect", "--first", "2"], ["first"]),
        (["stats", "--sample", "-4", "--documents", "-1"], ["sample", "documents"]),
        (["verify", "--vocab-size", "0"], ["vocab-size"]),
        (["verify", "--vocab-size", "-5"], ["vocab-size"]),
    ],
)
def test_numbers_out_of_range_are_refused_together(
    command: list[str], flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write(tmp_path / "a", [[1], [2]])
    assert main(["data", command[0], prefix, *command[1:]]) == ConfigError.exit_code
    shown = capsys.readouterr()
    assert all(f"--{flag}" in shown.err for flag in flags) and not shown.out


def test_no_documents_are_shown_of_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", write(tmp_path / "a", [[1], [2]]), "--documents", "0"]) == 0
    assert main(["data", "inspect", write(tmp_path / "b", [])]) == 0
    assert "document 0:" not in capsys.readouterr().out


def test_the_json_of_inspect_is_all_of_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "a", [[1], [2]], card=None)
    assert main(["data", "inspect", prefix, "--json", "--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["documents"] == 2
    assert f"{prefix}.card" in shown.err


def test_verify_reads_the_loss_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_masked(tmp_path / "a", [[1, 2, 99], [3, 99]])
    mask = {end: Path(f"{prefix}_loss_mask.{end}") for end in ("bin", "idx")}
    whole = {end: path.read_bytes() for end, path in mask.items()}
    for flags in ([], ["--structure-only"]):
        assert main(["data", "verify", prefix, *flags]) == 0
    for end, path in mask.items():
        path.write_bytes(whole[end][:-1])
        assert main(["data", "verify", prefix]) == 3
        path.unlink()
        capsys.readouterr()
        assert main(["data", "verify", prefix, "--structure-only"]) == 3
        assert str(path) in capsys.readouterr().out
        path.write_bytes(whole[end])
    mask["bin"].write_bytes(b"\1\0\1\2\1")
    assert main(["data", "verify", prefix, "--structure-only"]) == 0
    capsys.readouterr()
    assert main(["data", "verify", prefix]) == 3
    assert re.search(r"_loss_mask\.bin\b.*\b3\b.*\b2\b", capsys.readouterr().out)
    write(tmp_path / "a", [[1, 2], [3, 99, 4]])  # of which it is not the mask
    mask["bin"].write_bytes(whole["bin"])
    assert main(["data", "verify", prefix]) == 3


def test_verify_reads_the_index_caches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3, 99]] * 20)
    for folder in (None, str(tmp_path / "cache")):
        data = DataConfig(seq_length=4, data_path=(prefix,), split="1,0,0", data_cache_path=folder)
        build_gpt_datasets(data, NullTokenizer(99), sizes=(30, 0, 0), seed=1)
    caches = {"beside": Path(prefix, "cache", "GPTDataset_indices"), "apart": tmp_path / "cache"}
    assert main(["data", "verify", prefix, "--data-cache-path", str(caches["apart"])]) == 0
    capsys.readouterr()
    for place, folder in caches.items():
        (path,) = folder.glob("*-shuffle_index.npy")
        content = path.read_bytes()
        path.write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])
        assert main(["data", "verify", prefix, "--data-cache-path", str(caches["apart"])]) == 3, place
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("damaged")]
        assert any(str(path) in line for line in shown) and not any(prefix + ".bin" in line for line in shown)
        path.unlink()
        assert main(["data", "verify", prefix, "--data-cache-path", str(caches["apart"])]) == 3, place
        assert f"{path}: " in capsys.readouterr().out
        path.write_bytes(content)
    (record,) = caches["beside"].glob("*-checksums.json")
    record.unlink()
    assert main(["data", "verify", prefix]) == 0
    assert re.search(r"\b1\b.*\bno checksums", capsys.readouterr().out)
    assert main(["data", "verify", prefix, "--data-cache-path", str(tmp_path / "absent")]) == 3


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["verify", "a", "--data-cache-path"], ["merge", "a"]])
def test_remote_paths_are_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--output-prefix", "whole"] if command[0] == "merge" else []
    assert main(["data", *command, "s3://bucket/corpus", *more]) == 2
    assert "mount" in capsys.readouterr().err


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    second, first = write(folder / "b", [[3], []]), write(folder / "a", [[1, 2], [4]])
    whole = str(tmp_path / "whole")
    assert main(["data", "merge", "--input", str(folder), "--output-prefix", whole]) == 0
    dataset = IndexedDataset(whole)
    assert [tokens.tolist() for tokens in dataset[:]] == [[1, 2], [4], [3]]
    assert dataset.document_index.tolist() == [0, 1, 2, 3, 3]
    assert read_fingerprint(whole) == CARD
    assert main(["data", "merge", second, first, "--output-prefix", whole]) == 0
    assert IndexedDataset(whole).get(0).tolist() == [3]
    assert main(["data", "merge", first, "--output-prefix", first]) == 2
    (tmp_path / "link").symlink_to(folder)
    assert main(["data", "merge", first, second, "--output-prefix", str(tmp_path / "link" / "a")]) == 2
    assert main(["data", "merge", first, second, "--output-prefix", str(folder / ".." / "parts" / "a")]) == 2
    assert main(["data", "merge", first, "--input", str(folder), "--output-prefix", whole]) == 2
    capsys.readouterr()
    write_fingerprint(second, {**CARD, "vocab_size": 50})
    assert main(["data", "merge", first, second, "--output-prefix", str(tmp_path / "no")]) == 3
    assert "vocab_size" in capsys.readouterr().err
    (folder / "c.idx").touch()
    (folder / "notes.txt").touch()
    assert main(["data", "merge", "--input", str(folder), "--output-prefix", whole]) == 2
    screen = capsys.readouterr().err
    assert "c.bin" in screen and "notes.txt" in screen
    assert not (tmp_path / "no.bin").exists()


def test_merge_checks_all_inputs_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, wide, damaged = write(tmp_path / "good", [[1]]), str(tmp_path / "wide"), write(tmp_path / "damaged", [[1, 2]])
    with IndexedWriter(wide, "int32") as writer:
        writer.add_document([1], [1])
        writer.finalize()
    Path(damaged + ".bin").write_bytes(b"\0")
    inputs = [good, str(tmp_path / "absent1"), wide, damaged, str(tmp_path / "absent2")]
    assert main(["data", "merge", *inputs, "--output-prefix", str(tmp_path / "whole")]) == 3
    shown = capsys.readouterr()
    assert all(prefix in shown.err for prefix in inputs) and "int32" in shown.err and "uint16" in shown.err
    assert shown.out == "" and not list(tmp_path.glob("whole*"))


def test_merge_removes_what_the_earlier_dataset_had_beside_it(tmp_path: Path) -> None:
    masked, plain = write_masked(tmp_path / "masked", [[1, 2]]), write(tmp_path / "plain", [[3]], card=None)
    whole = str(tmp_path / "whole")
    assert main(["data", "merge", masked, masked, "--output-prefix", whole]) == 0
    endings = {path.name.removeprefix("whole") for path in tmp_path.glob("whole*")}
    assert endings == {".bin", ".idx", ".card", ".jinja", "_loss_mask.bin", "_loss_mask.idx"}
    assert len(IndexedDataset(whole + "_loss_mask")) == 2
    assert main(["data", "merge", plain, masked, "--output-prefix", whole]) == 3  # which leaves all in place
    assert {path.name.removeprefix("whole") for path in tmp_path.glob("whole*")} == endings
    assert main(["data", "merge", plain, "--output-prefix", whole]) == 0
    assert {path.name for path in tmp_path.glob("whole*")} == {"whole.bin", "whole.idx"}
    assert main(["data", "merge", masked + "_loss_mask", "--output-prefix", masked]) == 2
    assert len(IndexedDataset(masked + "_loss_mask")) == 1


TABLES = {
    "abbrev_types.txt": "dr\nz.b\n",
    "collocations.tab": "##number##\tjanuar\n",
    "sent_starters.txt": "der\n",
    "ortho_context.tab": "haus\t46\njanuar\t4\n",
}
TEXT = "Dr. Haus kam am 3. Januar. Er sah z.B. ein Haus! Und? (Ja.) Ende..."
SENTENCES = ["Dr. Haus kam am 3. Januar.", "Er sah z.B. ein Haus!", "Und?", "(Ja.)", "Ende..."]


def test_punkt_parameters_of_nltk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences as nltk 3.8.1 splits them with these parameters; more of it in tests/parity/test_indexed.py."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = [str(tmp_path / "none"), str(tmp_path)]
    tokenizers = tmp_path / "tokenizers"
    (tokenizers / "punkt").mkdir(parents=True)
    with pytest.raises(DataError, match=r"german.*--lang.*NLTK_DATA"):
        find_parameters("german", None, folders)
    with zipfile.ZipFile(tokenizers / "punkt_tab.zip", "w") as archive:
        for name, content in TABLES.items():
            archive.writestr(f"punkt_tab/german/{name}", content)
    packed = find_parameters("german", None, folders)
    folder = tokenizers / "punkt_tab" / "german"
    folder.mkdir(parents=True)
    for name, content in TABLES.items():
        (folder / name).write_text(content)
    assert find_parameters("german", None, folders) == packed == find_parameters("any", str(folder))
    assert SentenceSplitter(packed, keep_newlines=False).split(TEXT) == SENTENCES
    (tmp_path / "in.jsonl").write_text('{"text": "1"}\n')
    line = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/out --tokenizer-type NullTokenizer --vocab-size 9"
    understood = parse([*line.split(), "--split-sentences", "--lang", "german"], {"NLTK_DATA": ":".join(folders)})
    assert understood.options.sentences == SentenceSettings("german", nltk_folders=tuple(folders))
    kept = SentenceSplitter(packed, keep_newlines=True).split("Eins.\n\nZwei. Drei.")
    assert kept == ["Eins.\n\n", "Zwei. ", "Drei."]
    (folder / "ortho_context.tab").write_text("haus\tmany\n")
    with pytest.raises(DataError, match=str(folder)):
        find_parameters("german", None, folders)
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(DataError, match="abbrev_types"):
        find_parameters("german", str(tmp_path / "p.json"))
