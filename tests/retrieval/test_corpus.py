import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.retrieval import corpus as corpus_module
from verl_bridge.retrieval.corpus import Corpus, Document

TWO_WIKI = Path(__file__).resolve().parents[3] / "shared" / "data" / "2wiki"


def write(path, records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_both_forms_give_the_same_kind_of_document(tmp_path):
    corpus = Corpus.open(
        write(
            tmp_path / "c.jsonl",
            [
                {"id": "a", "contents": '"Rome"\nRome is a city.\nIt is old.'},
                {"id": 7, "title": "Oslo", "text": "Oslo is a city."},
                {"id": "c", "contents": "one line alone"},
                {"id": "d", "title": None, "text": "no title"},
            ],
        )
    )
    assert len(corpus) == 4
    assert corpus[0] == Document("a", '"Rome"', "Rome is a city.\nIt is old.")
    assert corpus[0].contents == '"Rome"\nRome is a city.\nIt is old.'
    assert corpus.by_id("7") == corpus[1] == Document("7", "Oslo", "Oslo is a city.")
    assert (corpus[2].title, corpus[2].text, corpus[2].contents) == ("one line alone", "", "one line alone")
    assert corpus[3].contents == "no title"
    assert [d.id for d in corpus] == ["a", "7", "c", "d"]


def test_rows_never_wrap_around(tmp_path):
    corpus = Corpus.open(write(tmp_path / "c.jsonl", [{"id": "0", "text": "x"}, {"id": "1", "text": "y"}]))
    for row in (-1, 2):
        with pytest.raises(IndexError, match="outside the corpus of 2 documents"):
            corpus[row]
    # ids equal the row numbers, so no table is kept; what only looks like a row number is still unknown
    assert corpus.by_id("1").text == "y"
    for unknown in ("2", "-1", "01", "٣", "x", "", "9" * 5000):
        with pytest.raises(KeyError, match="not in corpus"):
            corpus.by_id(unknown)


titles = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n"), min_size=1, max_size=12)
texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(titles, texts).filter(lambda pair: pair[0].strip()), min_size=1, max_size=8))
def test_any_text_is_read_back_as_written_from_plain_and_gz(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("any")
    body = "".join(
        json.dumps({"id": f"d{i}", "contents": f"{title}\n{text}"}, ensure_ascii=bool(i % 2)) + "\n\n"[: 1 + i % 2]
        for i, (title, text) in enumerate(pairs)
    ).encode()
    (folder / "c.jsonl").write_bytes(body)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(body))
    plain, packed = Corpus.open(folder / "c.jsonl"), Corpus.open(folder / "c.jsonl.gz")
    for i in reversed(range(len(pairs))):
        assert plain[i] == packed[i] == plain.by_id(f"d{i}") == Document(f"d{i}", *pairs[i])
    assert len(plain) == len(packed) == len(pairs)
    assert plain.sha256 == packed.sha256 and plain.size == packed.size == len(body)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{oops", "line 2: not a JSON object"),
        ("[1]", 'line 2: no "id"'),
        ({"contents": "x"}, 'line 2: no "id"'),
        ({"id": "", "contents": "x"}, 'line 2: no "id"'),
        ({"id": True, "contents": "x"}, 'line 2: no "id"'),
        ({"id": "  ", "contents": "x"}, 'line 2: no "id"'),
        ('{"id": "b", "text": "half \\ud83d"}', "line 2: not valid Unicode"),
        ("[" * 200_000, "line 2: not a JSON object"),
        ({"id": "b"}, 'line 2: neither "contents" nor "text"'),
        ({"id": "b", "contents": " \n "}, "line 2: the document is empty"),
        ({"id": "b", "title": 3, "text": "x"}, "line 2: the document is empty or its title is not a string"),
        ('{"id": 12345678901234567890.5, "text": "x"}', 'line 2: no "id"'),
        ({"id": "a", "contents": "x"}, "line 2: id 'a' was used before .document 0"),
    ],
)
def test_a_bad_line_is_named_by_number(tmp_path, bad, message):
    path = write(tmp_path / "c.jsonl", [{"id": "a", "contents": "fine"}, bad])
    with pytest.raises(ValueError, match=message):
        Corpus.open(path)


def test_ids_that_equal_rows_may_not_repeat_either(tmp_path):
    path = write(tmp_path / "c.jsonl", [{"id": "0", "text": "x"}, {"id": "1", "text": "y"}, {"id": "1", "text": "z"}])
    with pytest.raises(ValueError, match="line 3: id '1' was used before"):
        Corpus.open(path)


def test_what_the_standard_library_reads_is_read(tmp_path):
    """A faster parser reads the lines; where it is stricter or rounds, the standard library has the last word."""
    path = tmp_path / "c.jsonl"
    lines = ['{"id": 0, "text": "x", "score": NaN}', f'{{"id": {10**25}, "text": "big"}}', '{"id": 2, "text": "z"}']
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    assert [document.id for document in Corpus.open(path)] == ["0", str(10**25), "2"]
    assert Corpus.open(path).by_id(str(10**25)).text == "big"


def test_the_first_repeated_id_is_named_with_both_places(tmp_path):
    records = [{"id": f"d{i}", "text": "x"} for i in range(20)]
    records[7] = records[15] = {"id": "d3", "text": "y"}
    records[10] = {"id": "d9", "text": "y"}
    path = write(tmp_path / "c.jsonl", ["", *records])
    with pytest.raises(ValueError, match=r"line 9: id 'd3' was used before \(document 3 counted"):
        Corpus.open(path)


def test_ids_with_one_digest_are_told_apart_by_the_documents(tmp_path, monkeypatch):
    """Forced here: every id gets the same digest."""
    monkeypatch.setattr(corpus_module, "_digest", lambda identifier: 7)
    records = [{"id": name, "text": f"text of {name}"} for name in "abcde"]
    corpus = Corpus.open(write(tmp_path / "c.jsonl", records))
    assert [corpus.by_id(name).text for name in "ecadb"] == [f"text of {name}" for name in "ecadb"]
    with pytest.raises(KeyError, match="'f' is not in corpus"):
        corpus.row("f")
    with pytest.raises(ValueError, match=r"line 6: id 'b' was used before \(document 1"):
        Corpus.open(write(tmp_path / "c.jsonl", [*records, {"id": "b", "text": "again"}]))


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        Corpus.open(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="holds no documents"):
        Corpus.open(write(tmp_path / "c.jsonl", ["", " "]))


def test_gz_is_unpacked_once_into_the_cache_and_again_when_it_changed(tmp_path):
    path, cache = tmp_path / "c.jsonl.gz", tmp_path / "cache"
    path.write_bytes(gzip.compress(b'{"id": "0", "text": "old"}\n'))
    first = Corpus.open(path, cache)
    stamp = first.path.stat().st_mtime_ns
    assert Corpus.open(path, cache).path == first.path and first.path.stat().st_mtime_ns == stamp
    assert first.path.parent == cache and [p.name for p in tmp_path.iterdir() if p.is_file()] == ["c.jsonl.gz"]
    path.write_bytes(gzip.compress(b'{"id": "0", "text": "new"}\n'))
    assert Corpus.open(path, cache)[0].text == "new"


def test_gz_in_a_folder_that_cannot_be_written_is_unpacked_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_BRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus_module.os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"id": "0", "text": "x"}\n'))
    assert Corpus.open(tmp_path / "c.jsonl.gz").path.parent == tmp_path / "cache"


def test_a_cut_off_gz_leaves_nothing_behind(tmp_path):
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "0", "text": "x"}\n' * 1000)[:-20])
    with pytest.raises(ValueError, match="not a complete gzip file"):
        Corpus.open(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="not a complete gzip file"):
        Corpus.open(path)
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl.gz"]


FULL = r"corpus .*c\.jsonl\.gz cannot be unpacked into .* \(No space left on device\); make room there, or unpack"


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [(OSError(28, "No space left on device"), ValueError, FULL), (KeyboardInterrupt(), KeyboardInterrupt, None)],
)
def test_unpacking_that_ends_early_names_the_cause_and_leaves_nothing(tmp_path, monkeypatch, error, raised, says):
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "0", "text": "x"}\n'))

    def copy(source, target, size):
        target.write(source.read(9))
        raise error

    monkeypatch.setattr(corpus_module.shutil, "copyfileobj", copy)
    with pytest.raises(raised, match=says):
        Corpus.open(path)
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl.gz"]


@pytest.fixture
def parses(monkeypatch):
    """How many lines were parsed."""
    lines = []
    parse = corpus_module._parse
    monkeypatch.setattr(corpus_module, "_parse", lambda line, where: lines.append(where) or parse(line, where))
    return lines


@pytest.fixture(params=["row numbers", "names"])
def large(request, tmp_path, monkeypatch):
    """A corpus above the size that is worth a cache, and the ids of its documents."""
    monkeypatch.setenv("VERL_BRIDGE_CACHE", str(tmp_path / "cache"))
    ids = [str(i) if request.param == "row numbers" else f"doc {i}" for i in range(1500)]
    path = write(tmp_path / "c.jsonl", [{"id": name, "text": f"{name} " + 900 * "x"} for name in ids])
    assert path.stat().st_size > corpus_module.CACHED_FROM
    return path, ids


def cached(path):
    return sorted((path.parent / "cache").rglob("*.*"))


def test_a_large_corpus_is_parsed_once(large, parses):
    path, ids = large
    first = Corpus.open(path)
    assert len(parses) == len(ids)
    parses.clear()
    second = Corpus.open(path)
    assert parses == [] and (len(second), second.sha256, second.size) == (len(first), first.sha256, first.size)
    for row in (0, 7, 1499):
        assert second[row] == first[row] == second.by_id(ids[row]) and second.row(ids[row]) == row
    with pytest.raises(KeyError):
        second.row("1500")
    assert not [file for file in cached(path) if file.name.startswith(".")]


@pytest.mark.parametrize("keep_times", [False, True])
def test_a_changed_file_is_noticed(large, parses, keep_times):
    """Also one of the same size, and with the modification time put back."""
    path, ids = large
    before, times = Corpus.open(path).sha256, path.stat()
    parses.clear()
    text = path.read_text()
    path.write_text(text[: text.index("xxx")] + "y" + text[text.index("xxx") + 1 :])
    if keep_times:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = Corpus.open(path)
    assert len(parses) == len(ids) and changed.sha256 != before and "yxx" in changed[0].text
    parses.clear()
    assert Corpus.open(path).sha256 == changed.sha256 and parses == []
    assert len({file.parent for file in cached(path)}) == 1  # what was kept of the old state is gone


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("corpus.json", lambda data: data[:20]),
        ("corpus.json", lambda data: b"[]"),
        ("corpus.json", lambda data: b"{}"),
        ("corpus.json", lambda data: b"[" * 200_000),
        ("offsets.npy", lambda data: data[:-8]),
        ("offsets.npy", lambda data: data[:-8] + b"\0" * 8),
        ("offsets.npy", lambda data: b""),
        ("offsets.npy", lambda data: None),
    ],
)
def test_a_damaged_cache_is_made_again(large, parses, file, damage):
    path, ids = large
    right = Corpus.open(path)
    (kept,) = [found for found in cached(path) if found.name == file]
    good = kept.read_bytes()
    data = damage(good)
    kept.unlink() if data is None else kept.write_bytes(data)
    parses.clear()
    again = Corpus.open(path)
    assert len(parses) == len(ids) and again.sha256 == right.sha256 and again.by_id(ids[-1]) == right[1499]
    assert kept.read_bytes() == good


def test_a_small_corpus_leaves_no_cache_and_no_place_for_one_is_a_warning(tmp_path, monkeypatch, large, caplog):
    path, ids = large
    small = write(tmp_path / "small.jsonl", [{"id": "a", "text": "x"}])
    assert len(Corpus.open(small)) == 1 and cached(path) == [] and caplog.text == ""
    (tmp_path / "file").touch()
    monkeypatch.setenv("VERL_BRIDGE_CACHE", str(tmp_path / "file" / "below"))
    assert len(Corpus.open(path)) == len(ids)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"corpus {path} cannot be kept in {tmp_path / 'file' / 'below'}" in warning
    assert "(Not a directory)" in warning and "the next start parses it again; make room" in warning


def test_the_look_up_of_ids_stays_small(tmp_path):
    """28 bytes or so a document, not a string and an entry in a table: 21 million documents fit."""
    import tracemalloc

    sizes = {}
    for count in (2_000, 20_000):
        path = write(tmp_path / f"{count}.jsonl", [{"id": f"document {i}", "text": "x"} for i in range(count)])
        tracemalloc.start()
        corpus = Corpus.open(path, tmp_path / "cache")
        sizes[count] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert corpus.row(f"document {count - 1}") == count - 1
    assert (sizes[20_000] - sizes[2_000]) / 18_000 < 40


def test_two_wiki_loads_and_is_read_at_random(tmp_path):
    """Real passages and questions, as the data folder's README describes them."""
    if not TWO_WIKI.is_dir():
        pytest.skip(f"no real data at {TWO_WIKI}: the shared data folder is not next to this checkout")
    corpus = Corpus.open(TWO_WIKI / "corpus.jsonl.gz", tmp_path)
    assert len(corpus) == 6119
    assert corpus.by_id("0").title == '"Teutberga"' and corpus.by_id("0").text.startswith("Teutberga( died 11")
    with gzip.open(TWO_WIKI / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    again = Corpus.open(TWO_WIKI / "corpus.jsonl.gz", tmp_path)  # from what the first opening kept
    for row in [6118, *range(0, 6119, 97)]:
        assert again[row] == corpus[row] == again.by_id(lines[row]["id"])
        assert (again[row].id, again[row].contents) == (lines[row]["id"], lines[row]["contents"])
    with gzip.open(TWO_WIKI / "questions.jsonl.gz", "rt", encoding="utf-8") as file:
        questions = [json.loads(line) for line in file]
    assert len(questions) == 757
    named = [corpus.by_id(i) for question in questions for i in question["passages_with_answer"]]
    assert named and all(document.text for document in named)
