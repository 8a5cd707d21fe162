"""Files are whole or absent, and nothing is left next to them."""

import errno
import os
import stat
import subprocess
import sys
import threading

import pytest

from megatron_lossy.base.errors import UsageError, machine_error
from megatron_lossy.base.files import aside_of, check_folder, naming, publish, replace_file, write_text, writing

pytestmark = pytest.mark.shows("files are whole or absent, whatever fails", device=False)


def names(folder):
    return sorted(os.listdir(folder))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


def test_text_is_utf_8_in_every_locale(tmp_path):
    program = "import sys; from megatron_lossy.base.files import write_text; write_text(sys.argv[1], '\\u00b1')"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "text")], env=environment, check=True)
    assert (tmp_path / "text").read_bytes() == "±".encode()


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, SystemExit])
def test_what_fails_changes_nothing(tmp_path, old, error):
    path = tmp_path / "file"
    if old is not None:
        path.write_text(old)

    def write(aside):
        aside.write_text("half")
        raise error("stopped")

    with pytest.raises(error, match="stopped"):
        replace_file(path, write)
    assert names(tmp_path) == ([] if old is None else ["file"])
    assert old is None or path.read_text() == old


def test_what_cannot_be_synced_does_not_replace(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old" and names(tmp_path) == ["file"]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_permissions_are_those_of_open(tmp_path, umask, mask):
    umask(mask)
    write_text(tmp_path / "new", "text")
    assert mode(tmp_path / "new") == 0o666 & ~mask
    (tmp_path / "old").write_text("text")
    (tmp_path / "old").chmod(0o751)
    write_text(tmp_path / "old", "other\n")
    assert mode(tmp_path / "old") == 0o751
    assert (tmp_path / "old").read_bytes() == b"other\n" and names(tmp_path) == ["new", "old"]


def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_afterwards(tmp_path, monkeypatch):
    path, done = tmp_path / "file", []
    fsync, replace = os.fsync, os.replace

    def sync(handle):
        done.append(("sync", os.fstat(handle).st_ino, path.exists()))
        fsync(handle)

    def rename(source, target):
        done.append(("rename", os.stat(source).st_ino, path.exists()))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    write_text(path, "text")
    inode, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert done == [("sync", inode, False), ("rename", inode, False), ("sync", folder, True)]


def test_nobody_takes_what_lies_aside_for_the_file(tmp_path):
    seen = []

    def write(aside):
        seen.append(aside)
        aside.write_text("text")
        assert aside.parent == tmp_path and aside.name.startswith(".") and aside.suffix != path.suffix

    path = tmp_path / "rank.parquet"
    for _ in range(2):
        replace_file(path, write)
    assert seen[0] != seen[1]


def test_writers_at_once_leave_one_whole_text(tmp_path):
    path = tmp_path / "file"
    texts = [letter * 200_000 for letter in "abcd"]
    write_text(path, texts[0])
    stop = threading.Event()
    seen = set()

    def read():
        while not stop.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=lambda t=text: [write_text(path, t) for _ in range(5)]) for text in texts]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert seen <= set(texts) and path.read_text() in texts
    assert names(tmp_path) == ["file"]


def test_a_folder_gets_its_name_whole(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    aside = aside_of(path)
    (aside / "inner").mkdir(parents=True)
    (aside / "inner" / "weights").write_text("weights")
    (aside / ".metadata").write_text("metadata")
    everything = {entry.stat().st_ino for entry in [aside, *aside.rglob("*")]}
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.add(os.fstat(handle).st_ino), fsync(handle)))
    publish(aside, path)
    assert len(everything) == 4 and synced == everything | {tmp_path.stat().st_ino}
    assert names(tmp_path) == ["checkpoint"] and names(path) == [".metadata", "inner"]


def test_a_folder_does_not_replace_another(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(OSError):
        publish(tmp_path / "second", tmp_path / "first")
    assert (tmp_path / "first" / "file").read_text() == "first"
    assert (tmp_path / "second" / "file").read_text() == "second"


def test_a_file_system_that_cannot_sync_folders_will_do(tmp_path, monkeypatch):
    fsync = os.fsync

    def only_files(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(22, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", only_files)
    write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_an_error_names_what_it_happened_to(tmp_path):
    path = tmp_path / "file"

    def write(aside):
        aside.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left on device: '.*/file'$"):
        replace_file(path, write)
    assert names(tmp_path) == []
    with pytest.raises(OSError, match="No space left on device: 'x'$"), naming("x"):  # as torch's writer ends
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")


def test_whose_fault_it_is():
    for number, kind in ((errno.ENOSPC, OSError), (errno.EIO, OSError), (errno.EACCES, UsageError)):
        with pytest.raises(kind, match="out/x"), writing("--out", "out/x"):
            raise OSError(number, os.strerror(number))
    assert machine_error(ValueError()) is None and machine_error(PermissionError(errno.EACCES, "no")) is None


def test_a_folder_is_checked_and_not_made(tmp_path):
    (tmp_path / "file").touch()
    check_folder("--out", None)
    check_folder("--out", tmp_path / "a" / "b")
    with pytest.raises(UsageError, match="--out .*file: must be a folder that can be written to; it is no folder"):
        check_folder("--out", tmp_path / "file")
    with pytest.raises(UsageError, match=f"must be a folder that can be written to; {tmp_path}/file is no folder"):
        check_folder("--out", tmp_path / "file" / "b")
    os.symlink("nowhere", tmp_path / "link")
    with pytest.raises(UsageError, match="it is no folder"):
        check_folder("--out", tmp_path / "link")
    assert names(tmp_path) == ["file", "link"]
