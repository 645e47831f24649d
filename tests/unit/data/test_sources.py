"""Sources: any kind of file gives the documents that are in it, wherever it is cut; what is damaged is said."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import resource
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalith.cli.preprocess import parse
from megalith.data.shares import Share, chunks_of_share
from megalith.data.sources import BadDocument, Limits, Source, SourceOptions, find_sources
from megalith.data.sources.encodings import find_encoding
from megalith.data.sources.streams import open_text
from megalith.errors import ConfigError, DataError

CHINESE = [
    "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u6563\u6b65\u3002",
    "\u4ed6\u8bf4\uff1a\u201c\u4e2d\u56fd\u7684\u5386\u53f2\u5f88\u957f\u3002\u201d",
    "",
    "\u4e00\u4e8c\u4e09\uff0c\u56db\u4e94\u516d",
]
SMALL = Limits(chunk_bytes=7)
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


def opened(*inputs: Path | str, **options: Any) -> list[Source]:
    plan = find_sources([str(name) for name in inputs], SourceOptions(**options))
    assert not plan.violations, plan.violations
    return plan.sources


def documents(sources: list[Source], keys: tuple[str, ...] = ("text",), share: Share | None = None) -> list[Any]:
    """The documents of all sources; a bad one as its reason in a tuple."""
    found = []
    for located in chunks_of_share(sources, share or Share(), (0, 0)):
        for _, document in located.chunk.payload.read(keys).documents:
            found.append((document.reason,) if isinstance(document, BadDocument) else document)
    return found


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def one_key(texts: list[str]) -> list[list[str]]:
    return [[text] for text in texts]


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "gb18030", "gbk", "big5"]
)
def test_encodings_are_found(encoding: str, tmp_path: Path) -> None:
    texts = [text for text in CHINESE if encoding != "big5" or not text.startswith(("\u4eca", "\u4ed6"))] * 3
    texts += ["\u4eca\u5929\u5929\u6c23\u5f88\u597d"] if encoding == "big5" else []
    (tmp_path / "a.jsonl").write_bytes(lines(texts).encode(encoding))
    for limits in (SMALL, Limits()):
        (source,) = opened(tmp_path / "a.jsonl", limits=limits)
        assert documents([source]) == one_key(texts)
    expected = {"utf-8-sig": "byte order mark", "gbk": "GB18030", "big5": "Big5"}.get(encoding, encoding[:6].upper())
    assert expected in source.about
    assert ("without byte order mark" in source.about) == encoding.endswith(("-le", "-be"))


@settings(deadline=None, max_examples=50)
@given(text=st.text(min_size=1))
def test_utf_8_is_never_taken_for_another(text: str) -> None:
    found = find_encoding([text.encode()])
    assert found is not None
    assert found.is_utf_8 or text.startswith(("\ufeff", "\ufffe")) or "\x00" in text


def test_an_encoding_that_the_bytes_do_not_tell_is_asked_for(tmp_path: Path) -> None:
    text = (
        "\u0412\u0441\u0435 \u0441\u0447\u0430\u0441\u0442\u043b\u0438\u0432\u044b\u0435 \u0441\u0435\u043c\u044c\u0438"
    )
    (tmp_path / "a.txt").write_bytes(text.encode("koi8-r"))
    (violation,) = find_sources([str(tmp_path / "a.txt")], SourceOptions()).violations
    assert "--encoding" in violation
    assert documents(opened(tmp_path / "a.txt", encoding="koi8-r")) == [[text]]
    (violation,) = find_sources([str(tmp_path / "a.txt")], SourceOptions(encoding="klingon")).violations
    assert "--encoding klingon: unknown encoding" in violation


def test_damage_in_an_encoded_text_is_one_bad_document(tmp_path: Path) -> None:
    content = lines(CHINESE).encode("gb18030").replace("\u4e00".encode("gb18030"), b"\xff\xff")
    (tmp_path / "a.jsonl").write_bytes(content)
    *good, (reason,) = documents(opened(tmp_path / "a.jsonl"))
    assert good == one_key(CHINESE[:3])
    assert "GB18030 (--encoding" in reason


@pytest.mark.parametrize("compression", ["gz", "xz", "bz2", "zst"])
def test_compressed_files(compression: str, tmp_path: Path) -> None:
    if compression == "zst":
        compress = pytest.importorskip("zstandard", reason="of the extra data").ZstdCompressor().compress
    else:
        compress = COMPRESSIONS[compression]
    content = lines([*CHINESE, "more"] * 50).encode()
    path = tmp_path / f"a.jsonl.{compression}"
    path.write_bytes(compress(content[:300]) + compress(content[300:]))  # members one after the other, as `cat` makes
    for limits in (Limits(chunk_bytes=100), Limits()):
        (source,) = opened(path, limits=limits)
        assert documents([source]) == one_key([*CHINESE, "more"] * 50)
    assert source.about == f"jsonl, UTF-8, {compression}"
    path.write_bytes(path.read_bytes()[:-5])
    (violation,) = find_sources([str(path)], SourceOptions()).violations
    assert f"a.jsonl.{compression}" in violation


@pytest.mark.parametrize("magic", [0x50, 0x5F])
def test_zst_with_skippable_frames(magic: int, tmp_path: Path) -> None:
    """As pzstd writes them, in any place."""
    skippable = bytes([magic]) + b"\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"
    frames = [zstandard.ZstdCompressor().compress(lines([text]).encode()) for text in ("one", "two")]
    (tmp_path / "a.jsonl.zst").write_bytes(skippable + skippable.join(frames) + skippable)
    (source,) = opened(tmp_path / "a.jsonl.zst")
    assert documents([source]) == one_key(["one", "two"])
    assert source.about == "jsonl, UTF-8, zst"


def test_a_bomb_is_refused_in_little_memory(tmp_path: Path) -> None:
    """F23: a compressed line of any length."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=9) as file:
        for _ in range(100):
            file.write(bytes(1 << 20))
    sources = opened(tmp_path / "a.jsonl.gz", input_format="jsonl")
    with pytest.raises(DataError, match="250.*--max-expansion"):
        documents(sources)
    raised = opened(tmp_path / "a.jsonl.gz", input_format="jsonl", limits=Limits(max_expansion=2000))
    ((reason,),) = documents(raised)
    assert "longer than 67108864 bytes" in reason
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_one_json_array(tmp_path: Path) -> None:
    objects = [{"text": text, "n": 10 ** (1400 * number)} for number, text in enumerate(CHINESE)]
    for indent in (None, 2):
        (tmp_path / "a.json").write_text(json.dumps(objects, indent=indent, ensure_ascii=False), encoding="utf-8")
        assert documents(opened(tmp_path / "a.json", limits=SMALL)) == one_key(CHINESE)
    (tmp_path / "a.json").write_text(json.dumps(["one", {"text": "two"}, 3, {"no": 1}, {"text": ["a", "b"]}]))
    found = documents(opened(tmp_path / "a.json"))
    assert [found[0], found[1], found[4]] == [["one"], ["two"], [["a", "b"]]]
    assert "found int" in found[2][0] and 'no key "text"' in found[3][0]
    (tmp_path / "a.json").write_text("[]")
    assert documents(opened(tmp_path / "a.json", input_format="json")) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"text": "a"}, {"text": b}]', "element 2 of the JSON array: Expecting value"),
        ('[{"text": "a"}', "element 2 of the JSON array: the file ends within the array"),
        ('[{"text": "a"} {"text": "b"}]', "expected , or ]"),
        ('[{"text": "a"}] x', "after the array comes 'x'"),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_a_broken_array_is_said(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match="a.json") as caught:
        documents(opened(tmp_path / "a.json"))
    assert reason in str(caught.value)


def csv_text(rows: list[list[str]], delimiter: str = ",") -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows(rows)
    return file.getvalue()


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_with_a_header(delimiter: str, tmp_path: Path) -> None:
    texts = [*CHINESE, 'a "quoted", text\nof two lines;\t|', "nan", "NULL"]
    rows = [["id", "text", "n"], *([str(number), text, "7"] for number, text in enumerate(texts))]
    (tmp_path / "a.csv").write_text(csv_text(rows, delimiter), encoding="utf-8", newline="")
    for limits in (SMALL, Limits()):
        assert documents(opened(tmp_path / "a.csv", limits=limits)) == one_key(texts)
    both = documents(opened(tmp_path / "a.csv", keys=("id", "text")), ("id", "text"))
    assert both == [[str(number), text] for number, text in enumerate(texts)]
    assert documents(opened(tmp_path / "a.csv", text_column="3")) == [["7"]] * len(texts)


def test_six_csv_files_in_natural_order_without_a_header(tmp_path: Path) -> None:
    """Six files named by their first row, one column, the first row is text; empty cells are empty."""
    names = [str(10_000 * number) for number in range(12)]
    for name in names:
        (tmp_path / f"{name}.csv").write_text(f"\u7b2c{name}\u7bc7\n\n\u5185\u5bb9{name}\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("about")
    expected = [[text] for name in names for text in (f"\u7b2c{name}\u7bc7", f"\u5185\u5bb9{name}")]
    assert documents(opened(tmp_path)) == expected
    assert documents(opened(tmp_path / "*.csv")) == expected
    for name in names:  # the same with a header that is not called text
        content = csv_text([["content"], [f"\u7b2c{name}\u7bc7"], [""], [f"\u5185\u5bb9{name}"]])
        (tmp_path / f"{name}.csv").write_text(content, encoding="gb18030", newline="")
    with_empty = [[text] for name in names for text in (f"\u7b2c{name}\u7bc7", "", f"\u5185\u5bb9{name}")]
    assert documents(opened(tmp_path)) == with_empty
    assert documents(opened(tmp_path, csv_header="no"))[0] == ["content"]


LONG = [f"some longer text that is number {number}" for number in range(5)]


def test_each_csv_decides_about_its_own_header(tmp_path: Path) -> None:
    """Five files with a header and one without, which is first, last or amid them."""
    for without in (0, 3, 5):
        for number in range(6):
            rows = LONG if number == without else ["content", *LONG]
            (tmp_path / f"{number}.csv").write_text(csv_text([[text] for text in rows]), newline="")
        assert documents(opened(tmp_path)) == one_key(LONG * 6), without
    (tmp_path / "5.csv").write_text("\u7b2c\u4e00\u7ae0\n" + csv_text([[text] for text in LONG]), encoding="utf-8")
    assert documents(opened(tmp_path)) == one_key([*LONG * 5, "\u7b2c\u4e00\u7ae0", *LONG]), "a title is no name"


@pytest.mark.parametrize(
    ("files", "header"),
    [
        ([["content", *LONG]], True),
        ([LONG], False),
        ([["content", *LONG], LONG], True),
        ([["content", "a b", "c"], ["content", "d e"]], True),  # shared, though short texts stand below
        ([["content", *LONG], ["Hello", *LONG]], None),  # two headers, or two first texts
        ([["content"] + ["a"]], None),
        ([["apple", "banana", "cherry"]], None),
        ([["apple", "pear"], ["banana", "plum"], ["cherry", "fig"]], False),
        ([["\u7b2c\u4e00\u7ae0", *LONG]], None),
        ([["\u5185\u5bb9", *LONG], ["\u5185\u5bb9", *LONG]], True),
    ],
)
def test_headers_of_a_column(files: list[list[str]], header: bool | None, tmp_path: Path) -> None:
    for number, texts in enumerate(files):
        (tmp_path / f"{number}.csv").write_text(csv_text([[text] for text in texts]), encoding="utf-8", newline="")
    plan = find_sources([str(tmp_path)], SourceOptions())
    if header is None:
        assert plan.violations and all("--csv-header" in violation for violation in plan.violations)
        assert "0.csv" in plan.violations[0]
        return
    assert documents(plan.sources)[0] == [files[0][int(header)]]


@pytest.mark.parametrize("options", [{}, {"text_column": "content"}, {"keys": ("content",)}])
def test_tables_with_the_same_column_are_read_alike(options: dict[str, Any], tmp_path: Path) -> None:
    """Under the same key, which names the dataset."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"content": LONG})
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text(csv_text([[text] for text in ("content", *LONG)]), newline="")
    for kind in ("csv", "parquet"):
        keys = options.get("keys", ("text",))
        assert documents(opened(tmp_path / f"a.{kind}", **options), keys) == one_key(LONG)


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        ("id,body\n1,some longer text\n", {}, "no column text; its columns are id, body"),
        (
            "1,some text\n2,more text\n",
            {},
            "2 columns and no header; give the number of the column with the text, such as --text-column 2",
        ),
        ("a,b\n1,2\n", {"text_column": "5"}, "--text-column 5: "),
    ],
)
def test_columns_that_are_not_clear_are_asked_for(
    content: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(content)
    (violation,) = find_sources([str(tmp_path / "a.csv")], SourceOptions(**options)).violations
    assert reason in violation


def test_an_array_in_another_encoding_than_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'["good", "\xe9t\xe9 and more"]')
    (source,) = opened(tmp_path / "a.json", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.json.*0xe9.*--encoding"):
        documents([source])
    assert documents(opened(tmp_path / "a.json", encoding="cp1252")) == [["good"], ["\u00e9t\u00e9 and more"]]


def test_a_character_at_the_border_of_two_blocks(tmp_path: Path) -> None:
    text = "x" * (2**18 - 1) + "\u4e00" + "y"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    blocks = [block for block, _ in open_text(tmp_path / "a.txt", "auto", Limits()).texts()]
    assert len(blocks) == 2 and "".join(blocks) == text


def test_bad_rows_of_a_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\ngood\nwithout quotes, so cut\n\xff\xfe\nlast one\n")
    good, cut, damaged, last = documents(opened(tmp_path / "a.csv", csv_delimiter=","))
    assert (good, last) == (["good"], ["last one"])
    assert "2 cells" in cut[0]
    assert "UTF-8 (--encoding" in damaged[0]
    (tmp_path / "a.csv").write_text('text\n"' + "open " * 1000)
    with pytest.raises(DataError, match=r"a\.csv"):
        documents(opened(tmp_path / "a.csv", limits=Limits(max_document_bytes=1000)))


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('text,x\na,1\n"b, 2\nc,3\nd,4\n', "row 3 (line 3)"),
        ('text,x\na,1\n"b\nb",2\n"c",3\n4,"cut\n\nshort', "row 5 (line 6)"),
        ('x,text\n1,"', "row 2 (line 2)"),
        ('x,text\n1,"\n', "row 2 (line 2)"),
        ('text,"x\na,1\n', "row 1 (line 1)"),
        ('text,x\na,1\n"b, 2\nc,3\n"d" said,4\ne,5\n', "row 3 (lines 3 to 5)"),
        ("text,x\nhello\rworld,1\nfoo,2\n", "row 2 (line 2)"),
        ("text\rhello\rworld\r", "row 1 (line 1)"),
        ("text,x\n" + "more,1\n" * 20_000 + "a\rb,1\n", "row 20002 (line 20002)"),  # beyond the preview
    ],
)
def test_a_csv_whose_structure_breaks_stops(content: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content, newline="")
    for limits in (SMALL, Limits()):
        limits = replace(limits, max_document_bytes=1 << 20)
        plan = find_sources([str(tmp_path / "a.csv")], SourceOptions(limits=limits))
        if plan.violations:
            (reason,) = plan.violations
        else:
            with pytest.raises(DataError) as caught:
                documents(plan.sources)
            reason = str(caught.value)
        assert f"a.csv, {place}: " in reason


def test_a_csv_whose_structure_is_odd_is_read(tmp_path: Path) -> None:
    rows = ['"a" and b,1', 'c "d,2', '"e\n\nf ""g""\n",3', '"h\ri",4', '"",5', "j,6\r", '"k\n",7']
    (tmp_path / "a.csv").write_text("\n".join(["text,x", *rows]), newline="")
    found = documents(opened(tmp_path / "a.csv"))
    assert found == one_key(["a and b", 'c "d', 'e\n\nf "g"\n', "h\ri", "", "j", "k\n"])
    (tmp_path / "a.csv").write_text('x,text\n1,"a\rb"\n2,c\n', newline="")  # which `;` would not part
    assert documents(opened(tmp_path / "a.csv")) == one_key(["a\rb", "c"])


def test_rows_with_too_few_cells_are_bad_documents(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,x,y\ngood,1,2\ncut,1\ncut\nlast,,\n")
    good, *cut, last = documents(opened(tmp_path / "a.csv"))
    assert (good, last) == (["good"], ["last"])
    assert ["2 cells" in cut[0][0], "1 cells" in cut[1][0]] == [True, True]


def test_parquet_and_arrow(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="of the extra data")
    parquet = pytest.importorskip("pyarrow.parquet", reason="of the extra data")
    texts: list[Any] = [*CHINESE, None, "more"] * 100
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    with pyarrow.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, max_chunksize=90)
    with pyarrow.OSFile(str(tmp_path / "f.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table, max_chunksize=90)
    for name in ("a.parquet", "s.arrow", "f.arrow"):
        sources = opened(tmp_path / name, limits=Limits(chunk_bytes=500))
        found = documents(sources)
        assert [one for one in found if isinstance(one, list)] == [[text] for text in texts if text is not None]
        assert [one for one in found if not isinstance(one, list) and '"text"' in one[0]]
        parts = [documents(sources, share=Share(number, 3)) for number in range(3)]
        assert sum(parts, []) == found and all(parts)
        (violation,) = find_sources([str(tmp_path / name)], SourceOptions(text_column="id")).violations
        assert "id" in violation and "int64" in violation and "--text-column" in violation
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-3])
    (violation,) = find_sources([str(tmp_path / "a.parquet")], SourceOptions()).violations
    assert "a.parquet" in violation


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_without_a_known_suffix(kind: str, tmp_path: Path) -> None:
    """Their bytes, random ones here, are no text in any encoding."""
    pyarrow = pytest.importorskip("pyarrow", reason="of the extra data")
    parquet = pytest.importorskip("pyarrow.parquet", reason="of the extra data")
    texts = ["one", "two"]
    table = pyarrow.table({"text": texts, "noise": [bytes(range(256)) * 64] * 2})
    if kind == "parquet":
        parquet.write_table(table, tmp_path / "a")
    else:
        with pyarrow.OSFile(str(tmp_path / "a"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
            out.write_table(table)
    (source,) = opened(tmp_path / "a")
    assert documents([source]) == one_key(texts)
    assert source.about.startswith(kind)


@pytest.mark.parametrize("options", [{}, {"text_column": "text"}, {"text_column": "2"}])
def test_two_columns_of_one_name_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="of the extra data")
    parquet = pytest.importorskip("pyarrow.parquet", reason="of the extra data")
    table = pyarrow.table([["a"], ["b"], ["c"], [1], [2]], names=["text", "text", "body", "n", "n"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
    for path in (tmp_path / "a.parquet", tmp_path / "a.arrow"):
        (violation,) = find_sources([str(path)], SourceOptions(**options)).violations
        assert str(path) in violation and "2 columns" in violation and "--text-column" in violation
        assert documents(opened(path, text_column="body")) == [["c"]]


def test_folders_of_hugging_face(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="of the extra data")

    def write(path: Path, texts: list[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.table({"text": texts})
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)

    saved = tmp_path / "saved"
    for split in ("train", "test"):
        files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
        for number, entry in enumerate(files):
            write(saved / split / entry["filename"], [f"{split} {number}"])
        write(saved / split / "cache-123.arrow", ["of a map"])
        (saved / split / "state.json").write_text(json.dumps({"_data_files": files}))
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert documents(opened(saved)) == [["train 0"], ["train 1"]]
    assert documents(opened(saved / "test")) == [["test 0"], ["test 1"]]
    (violation,) = find_sources([str(saved)], SourceOptions(dataset_split="dev")).violations
    assert all(name in violation for name in ("dev", "--dataset-split", "train", "test"))
    cache = tmp_path / "cache"
    for name in ("oscar-train-00000-of-00002", "oscar-train-00001-of-00002", "oscar-test", "cache-1_00000_of_00002"):
        write(cache / f"{name}.arrow", [name])
    (cache / "dataset_info.json").write_text("{}")
    assert documents(opened(cache)) == [["oscar-train-00000-of-00002"], ["oscar-train-00001-of-00002"]]
    assert documents(opened(cache, dataset_split="test")) == [["oscar-test"]]


def test_a_folder_of_several_kinds_is_asked_about(tmp_path: Path) -> None:
    folder = tmp_path / "with {braces}"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(["a"]))
    (folder / "b.txt").write_text("b")
    (violation,) = find_sources([str(folder)], SourceOptions()).violations
    assert "1 jsonl (a.jsonl, ...), 1 txt (b.txt, ...)" in violation
    assert f"{folder}/*.jsonl" in violation


def test_digits_that_are_no_numbers(tmp_path: Path) -> None:
    """A superscript is a digit to str.isdigit, but int does not take it."""
    for name in ("1\u00b22", "1\u00b210", "\u00b2"):
        (tmp_path / f"{name}.txt").write_text(name, encoding="utf-8")
    assert documents(opened(tmp_path)) == one_key(["1\u00b22", "1\u00b210", "\u00b2"])
    (tmp_path / "a.csv").write_text("a,b\n1,some longer text\n")
    (violation,) = find_sources([str(tmp_path / "a.csv")], SourceOptions(text_column="\u00b2")).violations
    assert "--text-column \u00b2" in violation and "a.csv" in violation


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(alphabet="ab\u4e2d-|<> ", max_size=6), min_size=1, max_size=12),
    kind=st.sampled_from(["jsonl", "gz", "array", "txt --", "txt <|>", "txt \n\n", "txt \n \n", "csv"]),
    chunk_bytes=st.integers(1, 40),
    count=st.integers(1, 5),
)
def test_neither_cuts_nor_shares_nor_going_on_change_the_documents(
    texts: list[str], kind: str, chunk_bytes: int, count: int, tmp_path: Path
) -> None:
    """The law of sources: however a file is cut, dealt out or left and entered again, its documents are the same."""
    path = tmp_path / "a"
    options = SourceOptions(input_format="jsonl", limits=Limits(chunk_bytes))
    if kind == "array":
        path.write_text(json.dumps(texts), encoding="utf-8")
        options = replace(options, input_format="json")
    elif kind == "csv":
        path.write_text(csv_text([[text, "x"] for text in texts]), encoding="utf-8", newline="")
        options = replace(options, input_format="csv", csv_header="no", text_column="1")
    elif kind.startswith("txt"):
        path.write_text(kind[4:].join(["x", *texts]), encoding="utf-8")
        options = replace(options, input_format="txt", document_separator=kind[4:])
    else:
        content = lines(texts).encode()
        path.write_bytes(gzip.compress(content) if kind == "gz" else content)
    whole = find_sources([str(path)], replace(options, limits=Limits()))
    cut = find_sources([str(path), str(path)], options)
    assert not whole.violations and not cut.violations
    expected = documents(whole.sources) * 2
    assert documents(cut.sources) == expected
    assert sum((documents(cut.sources, share=Share(number, count)) for number in range(count)), []) == expected
    places = [(at.source, at.chunk.end) for at in chunks_of_share(cut.sources, Share(), (0, 0))]
    for number, place in enumerate(places, start=1):
        later = [at.chunk for at in chunks_of_share(cut.sources, Share(), place)]
        assert len(later) == len(places) - number
    if kind == "jsonl":
        assert expected == one_key(texts) * 2


ARCHIVES = ["tar", "tar.gz", "tar.zst", "zip"]


def archive(path: Path, members: dict[str, bytes]) -> Path:
    """Pack members into the archive that the name of `path` says."""
    packed = io.BytesIO()
    if path.suffix == ".zip":
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as found:
            for name, content in members.items():
                found.writestr(name, content)
    else:
        with tarfile.open(fileobj=packed, mode="w") as tape:
            for name, content in members.items():
                header = tarfile.TarInfo(name)
                header.size = len(content)
                tape.addfile(header, io.BytesIO(content))
    compress = {".gz": gzip.compress, ".zst": lambda content: zstandard.ZstdCompressor().compress(content)}
    path.write_bytes(compress.get(path.suffix, bytes)(packed.getvalue()))
    return path


@pytest.mark.parametrize("kind", ARCHIVES)
def test_archives_are_read_in_their_order(kind: str, tmp_path: Path) -> None:
    shard = archive(
        tmp_path / f"a.{kind}",
        {
            "./10.txt": b"one\n\nstill one\n",
            "10.jpg": b"\xff\xd8 no text",
            "__MACOSX/2.txt": b"x",
            "README.txt": b"about",
            "2.txt.gz": gzip.compress("zw\u00f6lf\n".encode("utf-16")),
            "empty.txt": b"",
            "long" * 30 + ".txt": b"last",
        },
    )
    for limits in (SMALL, Limits()):
        found = opened(shard, limits=limits)
        assert documents(found) == one_key(["one\n\nstill one\n", "zw\u00f6lf\n", "last"])
        assert documents(opened(shard, limits=limits, document_separator="\n\n"))[:2] == one_key(["one", "still one"])
    first, *others = (chunk.end for chunk in opened(shard, limits=SMALL)[0].chunks())
    assert others and [chunk.end for chunk in opened(shard, limits=SMALL)[0].chunks(first)] == others
    several = archive(
        tmp_path / f"b.{kind}",
        {
            "a.json": json.dumps({"text": "spread"}, indent=1).encode(),
            "b.json": b'[{"text": "first"}, "second"]',
            "c.json": lines(["x", "y"]).encode(),
            "d.jsonl": lines(["1", "2", "3"]).encode() + b"bad",
            "e.jsonl": lines(["4"]).encode(),
        },
    )
    for limits in (Limits(chunk_bytes=30), Limits()):
        *before, (bad,), after = documents(opened(several, limits=limits))
        assert [*before, after] == one_key(["spread", "first", "second", "x", "y", "1", "2", "3", "4"])
        assert bad.startswith("d.jsonl, line 4: ")
    several.unlink()
    assert len(documents(opened(tmp_path))) == 3  # a folder with nothing but archives


@pytest.mark.parametrize("kind", ARCHIVES)
def test_archives_that_are_damaged_or_ambiguous(kind: str, tmp_path: Path) -> None:
    texts = {f"part/{number}.txt": f"{number}".encode() * 3000 for number in range(9)}
    whole = archive(tmp_path / f"a.{kind}", texts).read_bytes()
    for end in (len(whole) // 5, len(whole) // 2, 3 * len(whole) // 4):
        (tmp_path / f"cut.{kind}").write_bytes(whole[:end])
        plan = find_sources([str(tmp_path / f"cut.{kind}")], SourceOptions())
        if not plan.violations:
            with pytest.raises(DataError, match=rf"cut.{kind}.*damaged"):
                documents(plan.sources)
    both = archive(tmp_path / f"both.{kind}", {"1.json": b'{"text": "a"}', "1.txt": b"b"})
    with pytest.raises(DataError, match=r"1\.txt.*--input-format"):
        documents(opened(both))
    for input_format, text in (("txt", "b"), ("jsonl", "a")):
        assert documents(opened(both, input_format=input_format)) == [[text]]
    archive(tmp_path / f"none.{kind}", {"a.csv": b"text\nx\n"})
    refused: list[tuple[str, dict[str, Any]]] = [
        ("none", {}),
        ("both", {"input_format": "csv"}),
        ("both", {"keys": ("a", "b"), "input_format": "txt"}),
    ]
    for name, options in refused:
        (violation,) = find_sources([str(tmp_path / f"{name}.{kind}")], SourceOptions(**options)).violations
        assert f"{name}.{kind}" in violation


def test_a_tar_with_a_damaged_header_does_not_end_there(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", {f"{number}.txt": b"text" * 200 for number in range(3)})
    content = bytearray(path.read_bytes())
    content[content.index(b"1.txt")] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"after 0\.txt"):
        documents(opened(path))
    other = archive(tmp_path / "b.tar", {"4.txt": b"more"}).read_bytes()
    path.write_bytes(other + other)  # cat
    assert documents(opened(path)) == one_key(["more", "more"])


def test_text_is_no_archive(tmp_path: Path) -> None:
    for number, text in enumerate(("PK is short for Phil Katz", "ustar " * 200, "7z", "0" * 2000, "x")):
        (tmp_path / f"{number}.txt").write_text(text)
        assert documents(opened(tmp_path / f"{number}.txt")) == [[text]] or text.endswith(" ")


def test_a_folder_names_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(["text"]))
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").write_text("x")
    (note,) = find_sources([str(tmp_path)], SourceOptions()).notes
    assert "left out" not in note
    (tmp_path / "notes.md").write_text("more text")
    (tmp_path / "sub" / "b.tar").write_text("x")
    plan = find_sources([str(tmp_path)], SourceOptions())
    assert documents(plan.sources) == [["text"]]
    assert "notes.md" in plan.notes[0] and "sub/b.tar" in plan.notes[0] and ".hidden" not in plan.notes[0]


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        (" \n = A = \n \n one \n two \n \n three \n", [" \n = A = ", " one \n two ", " three "]),  # WikiText
        ("a\nb\n\t\nc\n \n \nd\n\t\ne", ["a\nb", "c\n \n \nd", "e"]),
        ("a\r\n  \r\nb\r\n  \r\n", ["a", "b"]),
        ("a\n\nb\n \nc\n \nd", ["a", "b\n \nc\n \nd"]),
        ("a\n \nb<|endoftext|>c", ["a\n \nb", "c"]),
        (" \na\n b\n", [" \na\n b\n"]),
    ],
)
def test_lines_of_blanks_separate_where_no_line_is_empty(text: str, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text, newline="")
    for limits in (SMALL, Limits()):
        assert documents(opened(tmp_path / "a.txt", limits=limits)) == one_key(texts)


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for path in (folder / "own", folder / ".hidden", elsewhere / "inner"):
        path.mkdir(parents=True)
        (path / "a.jsonl").write_text(lines([path.name]))
    (folder / "0-twice").symlink_to("own")
    (folder / "1-loop").symlink_to(folder)
    (folder / "2-linked").symlink_to(elsewhere)
    (folder / "3-again").symlink_to(elsewhere / "inner")
    (folder / "4-out-of-hidden").symlink_to(".hidden")
    (folder / "file.jsonl").symlink_to(folder / "own" / "a.jsonl")
    (folder / "dangling.jsonl").symlink_to("nowhere")
    (elsewhere / "back").symlink_to(folder)
    plan = find_sources([str(folder)], SourceOptions())
    assert not plan.violations
    found = [str(source.path.relative_to(folder)) for source in plan.sources]
    assert found == ["2-linked/inner/a.jsonl", "4-out-of-hidden/a.jsonl", "file.jsonl", "own/a.jsonl"]
    assert documents(plan.sources) == one_key(["inner", ".hidden", "own", "own"])
    (note,) = plan.notes
    assert "dangling.jsonl (1 in all)" in note


def test_a_glob_names_the_folders_it_leaves_out(tmp_path: Path) -> None:
    for path in (tmp_path / "a.jsonl", tmp_path / "sub" / "b.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(lines([path.stem]))
    plan = find_sources([str(tmp_path / "*")], SourceOptions())
    assert documents(plan.sources) == [["a"]]
    (note,) = plan.notes
    assert "left out" in note and str(tmp_path / "sub") in note
    for pattern, texts in (("*.jsonl", ["a"]), ("**", ["a", "b"])):
        plan = find_sources([str(tmp_path / pattern)], SourceOptions())
        assert not plan.notes and documents(plan.sources) == one_key(texts)
    (violation,) = find_sources([str(tmp_path / "s*")], SourceOptions()).violations
    assert str(tmp_path / "sub") in violation


def test_a_txt_may_be_one_document(tmp_path: Path) -> None:
    texts = ["one\n\ntwo\n\n\nthree", "four<|endoftext|>five"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    for limits in (SMALL, Limits()):
        assert documents(opened(tmp_path, one_document_per_file=True, limits=limits)) == one_key(texts)
    assert len(documents(opened(tmp_path))) == 5
    options = ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    with pytest.raises(ConfigError, match="--one-document-per-file"):
        both = ["--one-document-per-file", "--document-separator", "x"]
        parse(["--input", str(tmp_path), *options, *both])


@pytest.mark.parametrize("url", ["https://host/a.jsonl", "s3://bucket/a", "hf://datasets/a/b", "smb://host/a.txt"])
def test_urls_are_not_fetched(url: str) -> None:
    (violation,) = find_sources([url], SourceOptions()).violations
    assert url in violation
