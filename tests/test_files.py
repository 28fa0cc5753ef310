"""Complete or absent, and an error names the place that was asked for."""

import pytest

from verl_bridge.files import cache_dir, new_file, new_folder


@pytest.mark.parametrize("make", [new_folder, new_file])
def test_a_place_that_cannot_be_written_is_named(tmp_path, make):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(OSError, match=r"/taken/deep/x cannot be written \(Not a directory\); choose another place"):
        with make(tmp_path / "taken" / "deep" / "x"):
            raise AssertionError("the body may not run")


def test_what_is_of_the_other_kind_stays_and_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="/file cannot be written"), new_folder(tmp_path / "file"):
        pass
    with pytest.raises(OSError, match="/folder cannot be written"), new_file(tmp_path / "folder"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "mine"


def test_replaced_when_complete_and_kept_when_not(tmp_path):
    for text in ("old", "new"):
        with new_folder(tmp_path / "a") as folder, new_file(tmp_path / "b") as file:
            (folder / text).touch()
            file.write(text)
    with pytest.raises(RuntimeError), new_folder(tmp_path / "a"), new_file(tmp_path / "b"):
        raise RuntimeError
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["new"] and (tmp_path / "b").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("VERL_BRIDGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == tmp_path / ".cache" / "verl_bridge"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache_dir()) == "/x/verl_bridge"
    monkeypatch.setenv("VERL_BRIDGE_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"
