"""The package for another kind of machine, compiled here: its two C extensions, and nothing else.

Code for GPUs does not depend on the machine that they are in, so products.py puts this machine's archives
into every platform's package. zig compiles C against any glibc, so the platform's manylinux tag is kept to;
gcc would take this machine's. The stable ABI's headers are those of the Python here: ``check_headers`` has
the target's compiler compare what they state of the machine.

Needs nothing but Python until it builds.
"""

from __future__ import annotations

import re
import shlex
import shutil
import struct
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ci.matrix import Platform
from ci.workspace import ROOT, DevError, Environment, build_wheel, require
from scan_registry.packaging.wheel import Wheel

#: As pip takes it. Pinned, since machine code differs from version to version.
COMPILER = "ziglang==0.16.0"

#: By what a platform calls its machine: the machine in the header of an ELF file.
MACHINES: Mapping[str, int] = {"x86_64": 62, "aarch64": 183}
_HEADER = struct.Struct("<4sBB10xHH")  # the magic, 64 bits, little-endian; the type and the machine

#: What Python itself is compiled with that changes what code means.
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
    """The platform's wheel without archives, in a folder of its own under ``work``. The environment has
    COMPILER for that."""
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
    """The wheel under the platform's manylinux tag, in a folder. auditwheel repairs wheels of the machine that
    it runs on alone; these have no libraries to bring along, and the gates have it look at their symbols."""
    wheel = Wheel.read(path)
    if wrong := foreign(wheel.files, platform.name):
        raise DevError(f"{path.name}: {', '.join(wrong)} is not machine code for {platform.name}")
    tag = wheel.tag.replace(f"linux_{platform.name}", platform.tag)
    stated = wheel.information["WHEEL"].replace(wheel.tag.encode(), tag.encode())
    shutil.rmtree(folder, ignore_errors=True)
    return replace(wheel, tag=tag).with_information({"WHEEL": stated}).write(folder)


def compiler_in(folder: Path, python: Path, platform: Platform) -> Path:
    """A program that is called as gcc is, and compiles for the platform."""
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
    """This Python's headers, with the pyconfig.h that Debian keeps elsewhere, for each machine its own."""
    place = folder / "include"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(sysconfig.get_path("include"), place)
    shutil.copy(sysconfig.get_config_h_filename(), place / "pyconfig.h")
    return place


def check_headers(compiler: Path, headers: Path, folder: Path) -> None:
    """``DevError`` if what the headers state of sizes and byte order is not so on the target."""
    probe = folder / "probe.c"
    probe.write_text(_PROBE, encoding="utf-8")
    command = [compiler, "-DPy_LIMITED_API=0x030A0000", f"-I{headers}", "-c", probe, "-o"]
    require("try Python's headers on the target", [*command, folder / "probe.o"])


def foreign(files: Mapping[str, bytes], machine: str) -> list[str]:
    """The shared libraries among files that are not machine code for the machine; all are if there are none,
    as then there is nothing that could be."""
    libraries = {name: content for name, content in files.items() if name.endswith(".so")}
    wanted = (b"\x7fELF", 2, 1, 3, MACHINES[machine])
    wrong = [
        name
        for name, content in libraries.items()
        if len(content) < _HEADER.size or _HEADER.unpack_from(content) != wanted
    ]
    return wrong if libraries else ["no file"]
