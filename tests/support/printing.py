"""What commands print, on terminals of two widths and into a pipe, as the documentation shows it.

The machine is an imaginary one, so that the pages are the same wherever they are made: no GPU, archives
whose binaries are made up, and the compilers that wheels are built with.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

from forked import captured

from scan_registry.aot.compile import compile_variant
from scan_registry.artifact import archive
from scan_registry.artifact.archive import SUFFIX
from scan_registry.hardware.target import Target
from scan_registry.kernels import families
from scan_registry.version import __version__

FOLDER = Path(__file__).parents[2] / "docs" / "pages" / "reference" / "output"
ARCHS = ("ptx80", "sm90", "sm120")
PROVENANCE = {"version": __version__, "commit": "c0ffee" * 7, "dirty": False}
WIDTHS = (80, 120, None)  # None: a pipe

#: The calls of each page.
PAGES: dict[str, tuple[str, ...]] = {
    "help": ("--help", "inspekt", "inspect --kernal"),
    "inspect": ("inspect", "inspect --arch sm90 --dtype bf16 --kernel channel_last_forward"),
    "explain": (
        "explain linear_scan --dtype bf16 --shape 8,1536,4096 --for H100",
        "explain rnn --dtype bf16 --shape 16,1024,1,768 --device cpu",
    ),
    "doctor": ("doctor", "doctor --for H100", "doctor --for 8.7 --driver 550"),
    "verify": ("verify", "verify --rebuild"),
    "selftest": ("selftest --device cpu --dtype fp32",),
    "bench": ("bench --device cpu --bs 1 --d_model 64 --seqlens 64,128 --no-baselines",),
    "tune": ("tune",),
    "cache": ("cache list", "cache clear"),
}

#: Runs the calls that it is given as JSON, each on a terminal or with a pipe of its own, on the imaginary machine whose
#: archives are in the call's folder, and prints what each has printed. They share a process, as most of a call's time is
#: its imports. What doctor and selftest find at one width they show at the others, as nothing there knows of widths.
_PROGRAM = """
import functools, json, os, sys, traceback
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from benching import time_quickly
from printing import recorded
from pytest import MonkeyPatch

from scan_registry.catalog import providers
from scan_registry.catalog.inventory import catalogue
from scan_registry.cli import doctor, main, selftest
from scan_registry.dispatch.fit import Toolchain
from scan_registry.runtime import jit
from scan_registry.version import __version__

found = {"cuda": Toolchain("nvrtc 12.9.86", (12, 9)), "triton": Toolchain("triton 3.6.0", (12, 9))}
jit.toolchains = lambda: found

@functools.cache
def provider(folder):
    return providers.Provider("scan-registry", __version__, Path(folder), "", {})

def once(call, key):
    kept = {}

    def answer(*given, **named):
        which = key(*given, **named)
        if which not in kept:
            kept[which] = call(*given, **named)
        return kept[which]

    return answer

def tested(family, only, skipped, tell):
    results, left_out = tested_once(family, only, tell)
    skipped.update(left_out)
    return iter(results)

def on_cpu(family, only, tell, original=selftest._on_cpu):
    left_out = {}
    return [*original(family, only, left_out, tell)], left_out

def run(words):
    try:
        return main(words)
    except SystemExit:
        pass
    except Exception:
        traceback.print_exc()

if sys.argv[2]:  # of which pages show the same rows, with other numbers
    selftest._MOST_ON_CPU = int(sys.argv[2])
    time_quickly(MonkeyPatch())
doctor.examine = once(doctor.examine, lambda elsewhere, **options: (elsewhere, options["strict"]))
tested_once = once(on_cpu, lambda family, only, tell: (family.name, only))
selftest._on_cpu = tested
told = []
for width, folder, words in json.load(sys.stdin):
    providers.installed = lambda: ((provider(folder),), ())
    catalogue.cache_clear()
    os.environ.update(COLUMNS=str(width or 80), SCAN_REGISTRY_CACHE=f"{folder}/cache")
    told.append(recorded(lambda: run(words), width))
json.dump(told, sys.stdout)
"""


def archives(folder: Path, make_binary: Callable[..., Any]) -> None:
    """Write archives with the default variants of every kernel."""
    compilers = {"cuda": "nvrtc 12.9.86", "triton": "triton 3.6.0"}
    for arch in ARCHS:
        target = Target.parse(arch)
        held = []
        for family in families().values():
            for kernel in family.kernels:
                for variant in kernel.by_text.values():
                    if kernel.rules.serves(variant.statics, target):
                        content = f"{variant}, {arch}: ".encode() * 200
                        held.append(
                            make_binary(
                                variant,
                                target,
                                content,
                                compiler=compilers[variant.language],
                            )
                        )
        archive.write(folder / "archives" / f"{target.label}{SUFFIX}", target, held, PROVENANCE)


def compiled(folder: Path) -> None:
    """Write an archive with the kernels that measure the memory's speed, as they are really compiled."""
    target = Target.parse("sm90")
    held = [
        compile_variant(variant, target)
        for kernel in families()["roofline"].kernels
        for variant in kernel.by_text.values()
        if kernel.rules.serves(variant.statics, target)
    ]
    archive.write(folder / "archives" / f"{target.label}{SUFFIX}", target, held, PROVENANCE)


def where(width: int | None) -> str:
    return "in a pipe" if width is None else f"on a terminal of {width} columns"


def parts_of(page: str, widths: Sequence[int | None]) -> str:
    """What of a page was printed at these widths."""
    parts = re.split(r"^(?=\$ scan-registry )", page, flags=re.MULTILINE)
    chosen = tuple(f"# {where(width)}" for width in widths)
    return "".join(part for part in parts if part.partition("\n")[0].endswith(chosen))


def pages(folders: Mapping[str, Path], widths: Sequence[int | None] = WIDTHS) -> dict[str, str]:
    """The text of each page, made in its folder, with the machine's own paths replaced."""
    calls = [
        (width, str(folders[name]), call)
        for name in PAGES
        for call in PAGES[name]
        for width in widths
    ]
    given = [(width, folder, call.split()) for width, folder, call in calls]
    most = "" if widths == WIDTHS else "8000"
    result = captured(
        [sys.executable, "-c", _PROGRAM, Path(__file__).parent, most],
        env={
            **os.environ,
            "SCAN_REGISTRY_LIBCUDA": "libcuda.so.1 (of which there is none)",
            "CUDA_VISIBLE_DEVICES": "",
            "NO_COLOR": "1",
            "TERM": "dumb",
        },
        cwd="/",
        check=True,
        input=json.dumps(given),
    )
    printed = iter(zip(calls, json.loads(result.stdout), strict=True))
    made = {}
    for name, folder in folders.items():
        parts = []
        for (width, _, call), text in islice(printed, len(PAGES[name]) * len(widths)):
            parts.append(f"$ scan-registry {call}    # {where(width)}\n\n{text}")
        made[name] = "\n".join(parts)
        for path, shown in (
            (folder / "cache", "~/.cache/scan-registry"),
            (folder, "…/scan_registry"),
        ):
            # The name of a temporary folder may be so long that it has a line of its own.
            text = made[name].replace(f"archives in\n{path}", f"archives in {path}")
            made[name] = text.replace(str(path), shown)
    return made


def recorded(run: Callable[[], object], width: int | None) -> str:
    """What a function prints on a terminal so wide, or into a pipe, which this process has meanwhile for its output."""
    if width is None:
        ours, theirs = os.pipe()
    else:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    content = b""

    def read() -> None:
        nonlocal content
        try:
            while part := os.read(ours, 1 << 16):
                content += part
        except OSError:  # how Linux says that nobody writes any more
            pass

    reader = Thread(target=read)
    reader.start()
    # Standard input is the terminal, too, or whatever it was.
    kept = [(number, os.dup(number)) for number in ((1, 2) if width is None else (0, 1, 2))]
    for number, _ in kept:
        os.dup2(theirs, number)
    os.close(theirs)
    try:
        with ExitStack() as stack:
            for number, redirected in ((1, redirect_stdout), (2, redirect_stderr)):
                stream = stack.enter_context(open(number, "w", encoding="utf-8", closefd=False))
                stack.enter_context(redirected(stream))
            run()
    finally:
        for number, other in kept:
            os.dup2(other, number)
            os.close(other)
        reader.join()
        os.close(ours)
    lines = content.decode("utf-8").replace("\r\n", "\n").split("\n")
    # Of a progress bar's line, what it ends with.
    return "\n".join(
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.rpartition("\r")[2]) for line in lines
    )


def alike(text: str) -> str:
    """The text without what another machine, or another day, prints otherwise: numbers and widths."""
    text = re.sub(
        r"\n {4,}", " ", text
    )  # where lines are folded follows from how long the numbers are
    text = re.sub(r"\d+(\.\d+)*(\+\w+)?(e[-+]?#)?", "#", re.sub(r"e[-+]\d+", "", text))
    text = re.sub(r"─+", "─", text)
    return re.sub(r"[ ]*\n", "\n", re.sub(r" +", " ", text))
