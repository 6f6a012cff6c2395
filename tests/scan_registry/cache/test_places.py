"""Where nobody knows which folder is meant, what is compiled stays in memory, and nothing is written."""

from __future__ import annotations

import json
import os
import pwd
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scan_registry.artifact.archive import Binary
from scan_registry.cache import store, tuned
from scan_registry.cache.store import Cache, CacheWarning, jit_cache, jit_folder
from scan_registry.catalog import providers
from scan_registry.cli import main
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY

KEY = "ab" * 32
SM90 = Target((9, 0))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is empty. Nobody has a home, and no cache has warned before."""

    def nobody(_: object) -> Any:
        raise KeyError("no such user")

    for name in ("HOME", "XDG_CACHE_HOME", "SCAN_REGISTRY_CACHE", "SCAN_REGISTRY_BUILD_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(pwd, "getpwnam", nobody)
    monkeypatch.setattr(store, "_caches", {})
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


#: What is asked for, the home, and what the warning says.
PLACES = [
    (None, None, "there is no home folder that ~ could stand for"),
    ("~/x", None, "there is no home folder that ~ could stand for"),
    ("~nosuchuser/x", None, "there is no home folder that ~nosuchuser could stand for"),
    ("~/x", "not/from/the/root", "the folder that it is relative to is not there"),
    ("x", "gone", "the folder that it is relative to is not there"),
]


@pytest.fixture(params=PLACES, ids=lambda item: f"{item[0]}-{item[1]}")
def place(
    request: pytest.FixtureRequest, here: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str]:
    """A folder that nobody knows, and why."""
    chosen, home, reason = request.param
    if chosen is not None:
        monkeypatch.setenv("SCAN_REGISTRY_CACHE", chosen)
        monkeypatch.setenv("SCAN_REGISTRY_BUILD_CACHE", chosen)
    if home == "gone":
        here.rmdir()
    elif home is not None:
        monkeypatch.setenv("HOME", home)
    return here, reason


def test_what_is_compiled_stays_in_memory_with_one_warning(
    place: tuple[Path, str], a_binary: Callable[..., tuple[Binary, bytes]]
) -> None:
    here, reason = place
    entry = a_binary(FAMILY.kernel("time_last_forward", "cuda").variants[0], "sm90")
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        assert jit_cache().obtain(KEY, SM90, lambda: entry) == entry
        assert jit_cache().obtain(KEY[::-1], SM90, lambda: entry) == entry
    (warning,) = messages
    assert warning.category is CacheWarning
    assert f"{jit_folder()} cannot be used: {reason}. What is compiled stays" in str(
        warning.message
    )
    assert jit_cache().obtain(KEY, SM90, pytest.fail) == entry
    assert not here.exists() or list(here.iterdir()) == []


def test_a_build_does_without_its_cache(
    place: tuple[Path, str], a_binary: Callable[..., tuple[Binary, bytes]]
) -> None:
    here, _ = place
    entry = a_binary(FAMILY.kernel("time_last_forward", "cuda").variants[0], "sm90")
    kept = Cache(store.build_folder(), "SCAN_REGISTRY_BUILD_CACHE")
    with pytest.warns(CacheWarning, match="set SCAN_REGISTRY_BUILD_CACHE"):
        assert kept.obtain(KEY, SM90, lambda: entry) == entry
    assert not here.exists() or list(here.iterdir()) == []


def test_what_others_left_under_such_a_name_is_not_looked_at(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version may have made a folder called ``~``, and anybody may."""
    (here / "~" / KEY[:2] / KEY).mkdir(parents=True)
    (here / "~" / KEY[:2] / KEY / "sm90.scanreg").write_bytes(b"somebody's")
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", "~")
    assert list(jit_cache().entries()) == []
    assert jit_cache().get(KEY, SM90) is None
    assert jit_cache().clear() == 0
    assert list(tuned.tuned_contents()) == []
    with pytest.raises(OSError, match="no home folder"):
        jit_cache().make_folder()
    assert (here / "~" / KEY[:2] / KEY / "sm90.scanreg").exists()


def test_commands_say_why(
    place: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is installed, and whatever kernels there are: both take doctor long to look through."""
    here, reason = place
    monkeypatch.setattr(providers, "installed", lambda: ((), ()))
    monkeypatch.setattr("scan_registry.kernels.families", dict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["cache", "list", "--json"]) == 1
        listed = json.loads(capsys.readouterr().out)
        assert main(["doctor", "--for", "sm_90", "--json"]) in (0, 1)
        seen = json.loads(capsys.readouterr().out)
        assert main(["cache", "clear"]) == 0
    assert (listed["usable"], listed["obstacle"]) == (False, reason)
    assert (seen["cache"]["unusable"], seen["cache"]["entries"]) == (reason, 0)
    assert not here.exists() or list(here.iterdir()) == []


def test_a_folder_of_that_name_can_be_meant(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", f".{os.sep}~")
    assert jit_folder() == here / "~"
    jit_cache().make_folder()
    assert (here / "~").is_dir()
