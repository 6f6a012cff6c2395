"""The cache of compiled binaries: what it keeps, what it refuses, and that nothing breaks it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scan_registry.artifact import archive
from scan_registry.artifact.archive import Binary
from scan_registry.cache import store
from scan_registry.cache.store import Cache, CacheWarning, Entry, jit_cache, jit_folder
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.runtime import jit

Make = Callable[..., tuple[Binary, bytes]]

SM90 = Target.parse("sm90")
KEY, OTHER = "ab" + 62 * "0", "cd" + 62 * "1"
NOBODY = 65_534


@pytest.fixture
def entry(a_binary: Make) -> Entry:
    return a_binary(content=bytes(range(256)) * 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@contextmanager
def unwarned() -> Iterator[None]:
    """Nothing may warn meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def never() -> Entry:
    raise AssertionError("compiled, although the entry is there")


def path_of(folder: Path, key: str = KEY) -> Path:
    return folder / key[:2] / key / "sm90.scanreg"


def files(folder: Path) -> list[Path]:
    """Everything but folders and locks."""
    result = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in result if path.parent.name != "locks"]


# --- Entries ----------------------------------------------------------------------------------


def test_what_is_put_is_found_again(folder: Path, entry: Entry) -> None:
    with unwarned():
        assert Cache(folder).get(KEY, SM90) is None
        assert Cache(folder).obtain(KEY, SM90, lambda: entry) == entry
        assert Cache(folder).get(KEY, SM90) == entry
        assert Cache(folder).obtain(KEY, SM90, never) == entry
        assert Cache(folder).get(OTHER, SM90) is None
        assert Cache(folder).get(KEY, Target.parse("sm80")) is None
    assert [item.path for item in Cache(folder).entries()] == [path_of(folder)]


def test_a_failed_compile_leaves_nothing_and_frees_its_turn(folder: Path, entry: Entry) -> None:
    kept = Cache(folder)

    def fail() -> Entry:
        raise jit.CompileError("no")

    with pytest.raises(jit.CompileError):
        kept.obtain(KEY, SM90, fail)
    assert files(folder) == []
    assert kept.obtain(KEY, SM90, lambda: entry) == entry


def test_the_folder_is_this_users_alone_whatever_the_umask(folder: Path, entry: Entry) -> None:
    before = os.umask(0)
    try:
        Cache(folder).obtain(KEY, SM90, lambda: entry)
    finally:
        os.umask(before)
    for place in (folder, folder / "locks", folder / KEY[:2], folder / KEY[:2] / KEY):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert not path_of(folder).stat().st_mode & 0o022


def test_an_entry_under_another_key_is_not_it(folder: Path, entry: Entry) -> None:
    Cache(folder).put(KEY, SM90, entry)
    path_of(folder, OTHER).parent.mkdir(parents=True, mode=0o700)
    path_of(folder).rename(path_of(folder, OTHER))
    assert Cache(folder).get(OTHER, SM90) is None


def test_an_entry_of_two_binaries_is_none(folder: Path, a_binary: Make) -> None:
    two = [a_binary(variant) for variant in FAMILY.variants()[:2]]
    folder.mkdir(mode=0o700)
    archive.write(path_of(folder), SM90, two, {"cache_key": KEY})
    assert Cache(folder).get(KEY, SM90) is None


def test_flipped_bits_are_noticed_and_the_entry_is_written_again(
    folder: Path, entry: Entry
) -> None:
    Cache(folder).put(KEY, SM90, entry)
    path = path_of(folder)
    whole = path.read_bytes()
    for position in [*range(0, 64, 5), *range(64, len(whole), 97), len(whole) - 1]:
        content = bytearray(whole)
        content[position] ^= 1 << position % 8
        path.write_bytes(content)
        with unwarned():
            assert Cache(folder).get(KEY, SM90) is None
            assert Cache(folder).obtain(KEY, SM90, lambda: entry) == entry
        assert path.read_bytes() == whole


@pytest.mark.parametrize("length", [0, 47, -1])
def test_a_cut_entry_is_written_again(folder: Path, entry: Entry, length: int) -> None:
    Cache(folder).put(KEY, SM90, entry)
    whole = path_of(folder).read_bytes()
    path_of(folder).write_bytes(whole[:length])
    assert Cache(folder).get(KEY, SM90) is None
    assert Cache(folder).obtain(KEY, SM90, lambda: entry) == entry
    assert path_of(folder).read_bytes() == whole


# --- Clearing ---------------------------------------------------------------------------------


def test_clearing_takes_entries_and_leftovers_and_leaves_locks(folder: Path, entry: Entry) -> None:
    kept = Cache(folder)
    for key in (KEY, OTHER):
        kept.obtain(key, SM90, lambda: entry)
    leftover = path_of(folder).with_name("sm90.scanreg12ab")
    leftover.write_bytes(b"a process was killed here")
    assert kept.clear() == 2
    assert sorted(path.name for path in folder.iterdir()) == ["locks"]
    assert len(list((folder / "locks").iterdir())) == 2
    assert kept.get(KEY, SM90) is None
    assert kept.obtain(KEY, SM90, lambda: entry) == entry


def test_clearing_touches_nothing_but_entries(tmp_path: Path, entry: Entry) -> None:
    """Somebody may have chosen a folder that has other things in it."""
    others = [
        tmp_path / "go" / "bin" / "tool",
        tmp_path / "ab" / "notes" / "sm90.scanreg",
        tmp_path / KEY[:2] / KEY / "notes.txt",
        tmp_path / "file",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text("mine", encoding="utf-8")
    tmp_path.chmod(0o700)
    kept = Cache(tmp_path)
    kept.put(KEY, SM90, entry)
    assert [item.path for item in kept.entries()] == [path_of(tmp_path)]
    assert kept.clear() == 1
    assert [path.read_text(encoding="utf-8") for path in others] == ["mine"] * 4
    assert not path_of(tmp_path).exists()


def test_clearing_while_others_write(folder: Path, a_binary: Make) -> None:
    """Everybody gets the right bytes, and what is left in the end is intact."""
    entries = {f"{n:02x}" + 62 * "0": a_binary(content=bytes([n]) * 500) for n in range(4)}
    problems: list[object] = []
    done = threading.Event()
    cleared: list[int] = []  # of each call: two threads would lose sums of each other

    def write() -> None:
        kept = Cache(folder)
        while not done.is_set():
            for key, created in entries.items():
                if kept.obtain(key, SM90, lambda created=created: created) != created:
                    problems.append(key)

    def clear() -> None:
        while not done.is_set():
            cleared.append(Cache(folder).clear())

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            problems.append(error)
            done.set()

    threads = [threading.Thread(target=guarded, args=(what,)) for what in 2 * (write, clear)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)  # in vain twice; then kept in memory
        for thread in threads:
            thread.start()
        for _ in range(1200):
            if sum(cleared) > 10 or done.wait(0.05):
                break
        done.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert sum(cleared) > 10
    for entry in Cache(folder).entries():
        assert entry.read(entry.binaries[0])


# --- Folders that are refused -----------------------------------------------------------------


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the path another user's: really so, or by being another one from here on."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


def put_a_file_there(folder: Path, _: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder)
    folder.write_text("", encoding="utf-8")


def put_a_folder_there(folder: Path, _: pytest.MonkeyPatch) -> None:
    path_of(folder).unlink()
    path_of(folder).mkdir()


def break_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path_of(folder).unlink()
    monkeypatch.setattr(os, "replace", fail)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda folder, _: folder.chmod(0o1777),
            "others can write to it .*mode 1777.*chmod go-w.*SCAN_REGISTRY_CACHE",
        ),
        (lambda folder, _: folder.chmod(0o770), "others can write to it .*mode 0770"),
        # The cache's own folder may have been open to others once; what they left is still inside.
        (lambda folder, _: path_of(folder).parent.chmod(0o777), f"/{KEY}: others can write to it"),
        (lambda folder, _: path_of(folder).parent.parent.chmod(0o777), "others can write to it"),
        (give_away, "belongs to another user"),
        (put_a_file_there, "not a folder"),
        (put_a_folder_there, "Is a directory"),
        (break_the_disk, "Input/output error"),
    ],
)
def test_a_folder_that_cannot_be_used(
    spoil: Any, words: str, folder: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it is believed, nothing is written to it, and what is compiled stays in memory."""
    Cache(folder).put(KEY, SM90, entry)
    spoil(folder, monkeypatch)
    before, cache = files(folder), Cache(folder)
    assert cache.get(KEY, SM90) is None
    with pytest.warns(CacheWarning, match=words) as caught:
        assert cache.obtain(KEY, SM90, lambda: entry) == entry
    assert str(folder) in str(caught[0].message)
    assert files(folder) == before
    with unwarned():  # it has been said, and is in memory
        assert cache.obtain(KEY, SM90, never) == entry
        assert cache.obtain(OTHER, SM90, lambda: entry) == entry
        assert cache.obtain(OTHER, SM90, never) == entry


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can fill a folder as root")
def test_a_folder_of_root_is_trusted(
    folder: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator may fill a folder for everybody."""
    Cache(folder).put(KEY, SM90, entry)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert Cache(folder).obtain(KEY, SM90, never) == entry


# --- Locks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks(
    folder: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(store.time, "sleep", lambda _: never())
    with unwarned():
        assert Cache(folder).obtain(KEY, SM90, lambda: entry) == entry
        assert Cache(folder).obtain(KEY, SM90, never) == entry


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """The key's lock, held through another handle."""
    (folder / "locks").mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    handle = os.open(folder / "locks" / KEY[:2], os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def test_a_holder_that_hangs_is_not_waited_for(
    folder: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_PATIENCE", 0.3)
    with held(folder), unwarned():
        assert Cache(folder).obtain(KEY, SM90, lambda: entry) == entry
    assert Cache(folder).get(KEY, SM90) == entry


def test_who_waits_gets_what_the_holder_has_made(folder: Path, entry: Entry) -> None:
    results: list[Entry] = []
    waiting = threading.Thread(
        target=lambda: results.append(Cache(folder).obtain(KEY, SM90, never))
    )
    with held(folder) as handle:
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
        Cache(folder).put(KEY, SM90, entry)
        fcntl.flock(handle, fcntl.LOCK_UN)
        waiting.join(10)
    assert results == [entry]


def test_an_entry_that_is_there_waits_for_nobody(
    folder: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cache(folder).put(KEY, SM90, entry)
    monkeypatch.setattr(store.time, "sleep", lambda _: never())
    with held(folder):
        assert Cache(folder).obtain(KEY, SM90, never) == entry


def test_a_fork_during_a_compile_does_not_keep_the_lock(folder: Path, entry: Entry) -> None:
    children = []

    def make() -> Entry:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        return entry

    try:
        Cache(folder).obtain(KEY, SM90, make)
        handle = os.open(folder / "locks" / KEY[:2], os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)


# --- Places -----------------------------------------------------------------------------------


def test_the_folder_is_chosen_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", "~/mine")
    assert jit_folder() == tmp_path / "mine"
    assert jit_cache() is jit_cache()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", "relative")
    assert jit_folder() == tmp_path / "relative"
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit_folder() == tmp_path / "xdg" / "scan-registry" / "jit"
    monkeypatch.setenv("SCAN_REGISTRY_BUILD_CACHE", str(tmp_path / "built"))
    assert store.build_folder() == tmp_path / "built"
    assert jit_folder() != store.build_folder()
