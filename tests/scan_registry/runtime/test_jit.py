"""Compiling here: which compilers there are, what the cache saves, and the worker for Triton."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import captured

from scan_registry.aot import compile as compiling
from scan_registry.aot import nvrtc, worker
from scan_registry.aot.compile import COMPILERS, compile_variant
from scan_registry.aot.toolchain import CompileError, MissingCompilerError
from scan_registry.artifact.archive import Binary, digest
from scan_registry.catalog import distributions
from scan_registry.dispatch.fit import Toolchain, jit_driver
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant
from scan_registry.runtime import jit

KERNEL = "time_last_forward"
CUDA = FAMILY.kernel(KERNEL, "cuda").variants[0]
TRITON = FAMILY.kernel(KERNEL, "triton").variants[0]
SM90, PTX80 = Target.parse("sm90"), Target.parse("ptx80")

AVAILABLE = jit.toolchains()
needs_nvrtc = pytest.mark.skipif(
    isinstance(AVAILABLE["cuda"], str), reason="NVRTC is not installed"
)
needs_triton = pytest.mark.skipif(
    isinstance(AVAILABLE["triton"], str), reason="Triton is not installed"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, which is empty."""
    monkeypatch.setenv("SCAN_REGISTRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fresh(script: str, *, check: bool = True, **variables: str) -> dict[str, Any]:
    """What a script prints as JSON, in a fresh process away from the sources."""
    done = captured([sys.executable, "-c", script], cwd=os.sep, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- Toolchains -------------------------------------------------------------------------------


def test_what_is_installed_is_found_by_version() -> None:
    for language, result in AVAILABLE.items():
        if isinstance(result, Toolchain):
            assert result.identity == COMPILERS[language].identity()
            assert result.cuda >= (11, 8)


def test_looking_loads_and_imports_nothing(folder: Path) -> None:
    report = fresh("""
import json, sys
from scan_registry.runtime import jit
found = jit.toolchains()
with open("/proc/self/maps", encoding="utf-8") as maps:
    loaded = "libnvrtc" in maps.read()
heavy = [name for name in ("torch", "triton") if name in sys.modules]
print(json.dumps({"loaded": loaded, "heavy": heavy, "languages": sorted(found)}))
""")
    if isinstance(AVAILABLE["cuda"], Toolchain) and nvrtc._candidates()[0].version:
        assert not report["loaded"]
    assert (report["heavy"], report["languages"]) == ([], ["cuda", "triton"])
    assert not folder.exists()


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither compiler: no package states a version, and no library opens."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(distributions, "version", lambda name: None)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: (nvrtc._Library("libnvrtc.so.12"),))
    monkeypatch.setattr(nvrtc, "_library", nvrtc._library.__wrapped__)
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", refuse)


def test_missing_compilers_are_named_with_what_gives_them(nothing_installed: None) -> None:
    result = jit.toolchains.__wrapped__()
    assert result["cuda"] == (
        "NVRTC is not installed; `pip install nvidia-cuda-nvrtc-cu12` gives it"
    )
    assert result["triton"] == "Triton is not installed; `pip install triton` gives it"


@needs_nvrtc
@needs_triton
@pytest.mark.parametrize(("variant", "arch"), [(CUDA, "sm120"), (CUDA, "ptx90"), (TRITON, "sm90")])
def test_the_driver_that_is_needed_is_known_before(variant: Variant, arch: str) -> None:
    toolchain, target = AVAILABLE[variant.language], Target.parse(arch)
    assert isinstance(toolchain, Toolchain)
    binary, _ = compile_variant(variant, target)
    assert jit_driver(toolchain, target) == binary.oldest_driver


def test_compiling_without_a_compiler(folder: Path, nothing_installed: None) -> None:
    for variant in (CUDA, TRITON):
        with pytest.raises(MissingCompilerError, match="is not installed"):
            jit.compile(variant, SM90)
    assert not folder.exists()


# --- The cache --------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("target", [SM90, PTX80])
def test_what_was_compiled_is_taken_from_the_cache(folder: Path, target: Target) -> None:
    first, second = jit.compile(CUDA, target), jit.compile(CUDA, target)
    assert (first.cached, second.cached) == (False, True)
    assert (first.binary, first.content) == (second.binary, second.content)
    assert (first.binary, first.content) == compile_variant(CUDA, target)
    assert first.milliseconds > second.milliseconds > 0
    assert len(list(folder.rglob("*.scanreg"))) == 1


@needs_nvrtc
def test_a_warm_start_loads_no_compiler(folder: Path) -> None:
    script = f"""
import json
from scan_registry.runtime import jit
from scan_registry.kernels.model import Variant
from scan_registry.hardware.target import Target
found = jit.compile(Variant.parse({str(CUDA)!r}), Target.parse("sm90"))
with open("/proc/self/maps", encoding="utf-8") as maps:
    loaded = "libnvrtc" in maps.read()
print(json.dumps(dict(cached=found.cached, loaded=loaded, sha256=found.binary.sha256)))
"""
    first, second = fresh(script), fresh(script)
    assert (first["cached"], first["loaded"]) == (False, True)
    assert second["cached"]
    assert not second["loaded"] or nvrtc._candidates()[0].version is None
    assert first["sha256"] == second["sha256"]


# --- The worker -------------------------------------------------------------------------------

#: A script that runs as the worker does, with a compiler of the test's own in place of the real one.
FAKE = """
import json, os, sys
from scan_registry.aot import worker
from scan_registry.aot.toolchain import CompileError
from scan_registry.artifact.archive import Binary
def compile_variant(variant, target):
    {body}
worker.compile_variant = compile_variant
worker.main()
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def set_body(body: str) -> None:
        monkeypatch.setattr(worker, "_START", FAKE.format(body=body))

    return set_body


Fake = Callable[[str], None]


def returned(binary: Binary, content: bytes, before: str = "pass") -> str:
    """The body of a compiler that returns these."""
    record = json.dumps(binary.to_json())
    return f"{before}; return Binary.from_json(json.loads({record!r})), {content!r}"


def test_a_compile_error_passes_through(fake: Fake) -> None:
    fake('raise CompileError("ptxas fatal : two\\nlines, and an é")')
    with pytest.raises(CompileError) as caught:
        worker.compile_apart(TRITON, SM90)
    assert str(caught.value) == "ptxas fatal : two\nlines, and an é"


@pytest.mark.parametrize(
    ("body", "ending", "words"),
    [
        ('raise RuntimeError("the worker is broken")', "1", "RuntimeError: the worker is broken"),
        ("os.kill(os.getpid(), 9)", "-9", ""),
        ('print("last words", file=sys.stderr); os._exit(7)', "7", "last words"),
    ],
)
def test_a_worker_that_dies_is_a_compile_error(
    fake: Fake, body: str, ending: str, words: str
) -> None:
    fake(body)
    with pytest.raises(CompileError) as caught:
        worker.compile_apart(TRITON, SM90)
    assert f"{TRITON} for sm_90: the compiler's process ended with {ending}" in str(caught.value)
    assert words in str(caught.value)


def test_what_compilers_print_does_not_reach_the_result(
    fake: Fake, a_binary: Callable[..., tuple[Binary, bytes]]
) -> None:
    binary, content = a_binary(TRITON, SM90, bytes(range(256)) * 100)
    noise = 'print("noise"); os.system("echo more noise"); os.write(1, b"and more\\n")'
    fake(returned(binary, content, noise))
    assert worker.compile_apart(TRITON, SM90) == (binary, content)


def test_damaged_bytes_are_refused(
    fake: Fake, a_binary: Callable[..., tuple[Binary, bytes]]
) -> None:
    binary, _ = a_binary(TRITON, SM90, b"compiled")
    fake(returned(binary, b"compile"))
    with pytest.raises(CompileError, match="sent damaged bytes"):
        worker.compile_apart(TRITON, SM90)


def test_nothing_in_the_current_folder_enters(
    tmp_path: Path,
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    a_binary: Callable[..., tuple[Binary, bytes]],
) -> None:
    """A user's own ``triton.py`` or ``scan_registry`` beside their script is not ours."""
    for name in ("triton", "json", "scan_registry"):
        (tmp_path / f"{name}.py").write_text(
            'raise SystemExit("imported from the current folder")', encoding="utf-8"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    binary, content = a_binary(TRITON, SM90)
    fake(returned(binary, content))
    assert worker.compile_apart(TRITON, SM90) == (binary, content)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("", r"sys\.executable names no Python"),
        ("/bin/false", "ended with 1"),  # an application that embeds Python may name itself
        ("/nowhere/python", "for sm_90: .*/nowhere/python"),
    ],
)
def test_no_python_to_start(monkeypatch: pytest.MonkeyPatch, program: str, words: str) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(CompileError, match=words):
        worker.compile_apart(TRITON, SM90)


@pytest.mark.parametrize("printed", [b"", b"not JSON\n", b'{"variant": 1}\nx'])
def test_a_worker_that_says_something_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed: bytes
) -> None:
    program = tmp_path / "python"
    (tmp_path / "printed").write_bytes(printed)
    program.write_text(f"#!/bin/sh\ncat {tmp_path / 'printed'}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(CompileError, match=f"{TRITON} for sm_90: .*{program}"):
        worker.compile_apart(TRITON, SM90)


@needs_triton
def test_the_users_settings_do_not_enter(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a user's settings for their own Triton kernels, the same bytes come out; what is cached
    is found again; and this process and the user's folders are left alone."""
    plain = worker.compile_apart(TRITON, SM90)
    settings = {
        "TRITON_CACHE_DIR": str(tmp_path / "triton-cache"),
        "TRITON_DUMP_DIR": str(tmp_path / "dump"),
        "TRITON_DISABLE_LINE_INFO": "0",
        "TRITON_INTERPRET": "1",
        "TRITON_DEBUG": "1",
        "TRITON_DEFAULT_FP_FUSION": "0",
        "TRITON_PTXAS_PATH": "/bin/false",
        "PTXAS_OPTIONS": "-O0",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    compiled = jit.compile(TRITON, SM90)
    assert not compiled.cached
    assert (compiled.binary, compiled.content) == plain
    assert digest(compiled.content) == plain[0].sha256
    assert {name: os.environ[name] for name in settings} == settings
    assert not (tmp_path / "triton-cache").exists()
    assert not (tmp_path / "dump").exists()
    for name in settings:
        monkeypatch.delenv(name)
    assert jit.compile(TRITON, SM90).cached


@needs_nvrtc
@needs_triton
def test_each_language_is_compiled_where_it_should_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA C++ in this process, which has no state to disturb, and Triton in one of its own."""
    where: list[tuple[str, str]] = []

    def here(variant: Variant, target: Target) -> Any:
        where.append(("here", variant.language))
        raise CompileError("enough")

    def apart(variant: Variant, target: Target) -> Any:
        where.append(("apart", variant.language))
        raise CompileError("enough")

    monkeypatch.setattr(compiling, "compile_variant", here)
    monkeypatch.setattr(worker, "compile_apart", apart)
    for variant in (CUDA, TRITON):
        with pytest.raises(CompileError, match="enough"):
            jit.compile(variant, SM90)
    assert where == [("here", "cuda"), ("apart", "triton")]
