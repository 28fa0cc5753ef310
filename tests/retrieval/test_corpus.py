import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    for unknown in ("2", "-1", "01", "٣", "x", ""):
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
        ({"id": "b", "title": 3, "text": "x"}, "line 2: the document is empty or its title is no string"),
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


def test_a_cut_off_gz_leaves_nothing_behind(tmp_path):
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "0", "text": "x"}\n' * 1000)[:-20])
    with pytest.raises(ValueError, match="no complete gzip file"):
        Corpus.open(path)
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl.gz"]


def test_two_wiki_loads(tmp_path):
    """Real passages and questions, as the data folder's README describes them."""
    if not TWO_WIKI.is_dir():
        pytest.skip(f"no real data at {TWO_WIKI}: the shared data folder is not next to this checkout")
    corpus = Corpus.open(TWO_WIKI / "corpus.jsonl.gz", tmp_path)
    assert len(corpus) == 6119
    assert corpus.by_id("0").title == '"Teutberga"' and corpus.by_id("0").text.startswith("Teutberga( died 11")
    with gzip.open(TWO_WIKI / "questions.jsonl.gz", "rt", encoding="utf-8") as file:
        questions = [json.loads(line) for line in file]
    assert len(questions) == 757
    named = [corpus.by_id(i) for question in questions for i in question["passages_with_answer"]]
    assert named and all(document.text for document in named)
