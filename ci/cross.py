"""Cross-compiles the package for a machine of another kind: its two C extensions, and nothing else.

Code for GPUs does not depend on the host, so products.py puts this machine's archives into every platform's
package. zig links against the glibc of the platform's manylinux tag; gcc would link against this machine's
glibc. Python's headers are those of the Python that runs this module. ``check_headers`` compiles assertions
for the target, which fail if sizes or byte order in the headers are wrong for it.

Importing this module needs nothing but Python; building needs COMPILER.
"""

from __future__ import annotations

import re
import shlex
import shutil
import struct
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ci.matrix import Platform
from ci.workspace import ROOT, DevError, Environment, build_wheel, require
from scan_registry.packaging.wheel import Wheel

#: As a requirement for pip. Pinned, since machine code differs from version to version.
COMPILER = "ziglang==0.16.0"

#: By a platform's name of its machine: the number of the machine in the header of an ELF file.
MACHINES: Mapping[str, int] = {"x86_64": 62, "aarch64": 183}
#: By a platform's name of its machine: the largest pages that its Linux kernels have, in bytes. The loader refuses a
#: library whose parts are aligned to less than a page. Pages of 64 KiB are usual on Grace.
PAGES: Mapping[str, int] = {"x86_64": 4096, "aarch64": 65536}
_HEADER = struct.Struct("<4sBB10xHH")  # magic, 64 bits, little-endian; type and machine
_PARTS = struct.Struct("<32xQ14xHH")  # where program headers start; size of one, how many there are
_PART, _LOADED = struct.Struct("<I44xQ"), 1  # kind and alignment

#: The flags of Python's own build that change the meaning of code.
_FLAGS = "-DNDEBUG -fwrapv"

_PROBE = """\
#include <Python.h>
#define SAME(stated, is) _Static_assert((stated) == (is), #stated " is not " #is)
SAME(SIZEOF_SHORT, sizeof(short));
SAME(SIZEOF_INT, sizeof(int));
SAME(SIZEOF_LONG, sizeof(long));
SAME(SIZEOF_LONG_LONG, sizeof(long long));
SAME(SIZEOF_VOID_P, sizeof(void *));
SAME(SIZEOF_SIZE_T, sizeof(size_t));
SAME(SIZEOF_WCHAR_T, sizeof(wchar_t));
SAME(SIZEOF_TIME_T, sizeof(time_t));
SAME(SIZEOF_FLOAT, sizeof(float));
SAME(SIZEOF_DOUBLE, sizeof(double));
SAME(ALIGNOF_SIZE_T, _Alignof(size_t));
#ifdef WORDS_BIGENDIAN
SAME(__BYTE_ORDER__, __ORDER_BIG_ENDIAN__);
#else
SAME(__BYTE_ORDER__, __ORDER_LITTLE_ENDIAN__);
#endif
#ifdef Py_DEBUG
#error "these are the headers of a debug build"
#endif
"""


def target(platform: Platform) -> str:
    """What zig calls a platform: aarch64-linux-gnu.2.28."""
    glibc = re.fullmatch(r"manylinux_(\d+)_(\d+)", platform.manylinux)
    if glibc is None:
        raise DevError(f"{platform.manylinux} does not state a version of glibc")
    return f"{platform.name}-linux-gnu.{glibc[1]}.{glibc[2]}"


def build(environment: Environment, work: Path, platform: Platform, source: Path = ROOT) -> Path:
    """The platform's wheel without archives, in a folder of its own under ``work``. COMPILER has to be
    installed in the environment."""
    folder = work / platform.name
    folder.mkdir(parents=True, exist_ok=True)
    compiler = compiler_in(folder, environment.python, platform)
    headers = headers_in(folder)
    check_headers(compiler, headers, folder)
    variables = {
        "CC": str(compiler),
        "LDSHARED": f"{compiler} -shared",
        "CFLAGS": _FLAGS,  # in place of those of this machine's Python
        "CPPFLAGS": f"-I{headers}",
        "_PYTHON_HOST_PLATFORM": f"linux-{platform.name}",
    }
    wheel = build_wheel(
        environment, folder, source, archs="none", isolated=False, variables=variables
    )
    return tagged(wheel.path, platform, folder / "tagged")


def tagged(path: Path, platform: Platform, folder: Path) -> Path:
    """The wheel under the platform's manylinux tag, in a folder. auditwheel repairs only wheels for the
    machine that it runs on. This wheel has no libraries to bundle, and the gates check its symbols with
    auditwheel."""
    wheel = Wheel.read(path)
    if wrong := foreign(wheel.files, platform.name):
        raise DevError(f"{path.name}: {', '.join(wrong)} is not machine code for {platform.name}")
    tag = wheel.tag.replace(f"linux_{platform.name}", platform.tag)
    stated = wheel.information["WHEEL"].replace(wheel.tag.encode(), tag.encode())
    shutil.rmtree(folder, ignore_errors=True)
    return replace(wheel, tag=tag).with_information({"WHEEL": stated}).write(folder)


def compiler_in(folder: Path, python: Path, platform: Platform) -> Path:
    """A program that takes gcc's arguments, and compiles for the platform."""
    path = folder / "cc"
    words = (
        "env",
        f"ZIG_GLOBAL_CACHE_DIR={folder / 'zig'}",
        f"ZIG_LOCAL_CACHE_DIR={folder / 'zig'}",
    )
    command = shlex.join([*words, str(python), "-m", "ziglang", "cc", "-target", target(platform)])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def headers_in(folder: Path) -> Path:
    """This Python's headers with its pyconfig.h, which Debian keeps in a folder for each kind of machine."""
    place = folder / "include"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(sysconfig.get_path("include"), place)
    shutil.copy(sysconfig.get_config_h_filename(), place / "pyconfig.h")
    return place


def check_headers(compiler: Path, headers: Path, folder: Path) -> None:
    """Raise ``DevError`` if sizes or byte order in the headers are wrong for the target."""
    probe = folder / "probe.c"
    probe.write_text(_PROBE, encoding="utf-8")
    command = [compiler, "-DPy_LIMITED_API=0x030A0000", f"-I{headers}", "-c", probe, "-o"]
    require("try Python's headers on the target", [*command, folder / "probe.o"])


def foreign(files: Mapping[str, bytes], machine: str) -> list[str]:
    """The shared libraries among ``files`` that are not machine code for the machine. If there are no shared
    libraries, the result is not empty either, as a wheel without any is wrong, too."""
    libraries = {name: content for name, content in files.items() if name.endswith(".so")}
    wanted = (b"\x7fELF", 2, 1, 3, MACHINES[machine])
    wrong = [
        name
        for name, content in libraries.items()
        if len(content) < _HEADER.size or _HEADER.unpack_from(content) != wanted
    ]
    return wrong if libraries else ["no file"]


def crowded(files: Mapping[str, bytes], machine: str) -> list[str]:
    """The shared libraries among ``files`` that do not load where the machine's pages have their largest size."""
    libraries = {name: content for name, content in files.items() if name.endswith(".so")}
    return [
        name
        for name, content in libraries.items()
        if any(alignment % PAGES[machine] for alignment in _alignments(content))
    ]


def _alignments(library: bytes) -> Iterator[int]:
    """How the parts of a library that get loaded are aligned."""
    start, size, count = _PARTS.unpack_from(library)
    for number in range(count):
        kind, alignment = _PART.unpack_from(library, start + size * number)
        if kind == _LOADED:
            yield alignment
