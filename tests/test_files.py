"""Complete or absent, and an error names the place that was asked for."""

import os
import subprocess
import sys

import pytest

from verl_bridge.files import YOUNG, cache_dir, new_file, new_folder, sha256


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


def test_what_was_there_comes_back_when_the_last_step_fails(tmp_path, monkeypatch):
    with new_folder(tmp_path / "a") as folder:
        (folder / "old").touch()
    replace = os.replace

    def failing(source, target):
        if target == tmp_path / "a" and ".new-" in str(source):
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match=r"/a cannot be written \(Input/output error\)"), new_folder(tmp_path / "a"):
        pass
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_is_there_by_then_is_kept_if_wanted(tmp_path):
    with new_folder(tmp_path / "a", keep_existing=True) as slow:
        (slow / "slow").touch()
        with new_folder(tmp_path / "a", keep_existing=True) as quick:
            (quick / "quick").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["quick"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="/file cannot be written"), new_folder(tmp_path / "file", keep_existing=True):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]


def test_bytes_are_written_as_they_are_and_digested(tmp_path):
    with new_file(tmp_path / "b", "wb") as file:
        file.write(b"\xff\r\n")
    assert (tmp_path / "b").read_bytes() == b"\xff\r\n"
    (tmp_path / "c").write_bytes(b"abc")  # the digest of FIPS 180-4's own example
    assert sha256(tmp_path / "c") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256(str(tmp_path / "b")) != sha256(tmp_path / "c")


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("VERL_BRIDGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == tmp_path / ".cache" / "verl_bridge"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache_dir()) == "/x/verl_bridge"
    monkeypatch.setenv("VERL_BRIDGE_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"


def age(folder, seconds=2 * YOUNG):
    then = os.stat(folder).st_mtime - seconds
    os.utime(folder, (then, then))


KILLED = """
import os, signal, sys
from verl_bridge import files
if sys.argv[2] == "writing":
    with files.new_folder(sys.argv[1]) as folder:
        (folder / "half").touch()
        os.kill(os.getpid(), signal.SIGKILL)
files.shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # the last it does
with files.new_folder(sys.argv[1]) as folder:
    pass
"""


@pytest.mark.parametrize("when", ["writing", "cleaning up"])
def test_what_a_killed_writer_left_goes_with_the_next_save_of_the_same_name(tmp_path, when):
    with new_folder(tmp_path / "a[1]"):
        pass
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a[1]"), when])
    assert killed.returncode == -9
    (left,) = tmp_path.glob(".*")
    assert left.name.startswith(".a[[]1].".replace("[[]", "["))
    others = [tmp_path / name for name in (".a1.new-x", ".a[1].notes", ".b.old-x", "a[1].new-x")]
    for other in others:
        other.mkdir()
    (tmp_path / ".a[1].new-file").write_text("of new_file")
    for path in tmp_path.iterdir():
        age(path)
    with new_folder(tmp_path / "b2"):
        pass
    assert left.exists()  # of another name
    with new_folder(tmp_path / "a[1]") as folder:
        (folder / "new").touch()
        assert left.exists()  # the only copy, maybe, until the new one is complete
    assert not left.exists() and all(other.is_dir() for other in others)
    assert (tmp_path / ".a[1].new-file").exists()
    assert [path.name for path in (tmp_path / "a[1]").iterdir()] == ["new"]


def test_a_writer_that_lives_is_not_swept_nor_one_that_has_just_begun(tmp_path):
    (tmp_path / ".a.new-begun").mkdir()
    with new_folder(tmp_path / "a") as slow:
        (slow / "slow").touch()
        age(slow)
        with new_folder(tmp_path / "a") as quick:
            (quick / "quick").touch()
        assert (slow / "slow").exists() and (tmp_path / "a" / "quick").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.new-begun", "a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["slow"]


def test_an_old_folder_on_its_way_out_is_not_swept_by_another_writer(tmp_path, monkeypatch):
    with new_folder(tmp_path / "a"):
        pass
    age(tmp_path / "a")
    replace, swept = os.replace, []

    def interrupted(source, target):
        replace(source, target)
        if ".old-" in str(target) and not swept:
            swept.append(target)
            with new_folder(tmp_path / "a"):
                pass
            assert target.is_dir()
            (tmp_path / "a").rmdir()

    monkeypatch.setattr(os, "replace", interrupted)
    with new_folder(tmp_path / "a") as folder:
        (folder / "x").touch()
    assert swept and [path.name for path in tmp_path.iterdir()] == ["a"]
