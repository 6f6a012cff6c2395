"""What commands print, on terminals of two widths and into a pipe, as the documentation shows it.

The machine is an imaginary one, so that the pages are the same wherever they are made: no GPU, archives
whose binaries are made up, and the compilers that wheels are built with.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

#: Runs a command on the imaginary machine, whose archives are in the folder that comes first.
_PROGRAM = """
import sys
from pathlib import Path

from scan_registry.catalog import providers
from scan_registry.cli import main
from scan_registry.dispatch.fit import Toolchain
from scan_registry.runtime import jit
from scan_registry.version import __version__

here = providers.Provider("scan-registry", __version__, Path(sys.argv[1]), "", {})
providers.installed = lambda: ((here,), ())
found = {"cuda": Toolchain("nvrtc 12.9.86", (12, 9)), "triton": Toolchain("triton 3.6.0", (12, 9))}
jit.toolchains = lambda: found
sys.exit(main(sys.argv[2:]))
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


def page(calls: tuple[str, ...], folder: Path) -> str:
    """The text of a page, with the machine's own paths replaced."""
    parts = []
    for call in calls:
        for width in WIDTHS:
            where = "in a pipe" if width is None else f"on a terminal of {width} columns"
            parts.append(f"$ scan-registry {call}    # {where}\n\n{printed(call, width, folder)}")
    text = "\n".join(parts)
    for path, shown in ((folder / "cache", "~/.cache/scan-registry"), (folder, "…/scan_registry")):
        text = text.replace(str(path), shown)
    return text


def printed(call: str, width: int | None, folder: Path) -> str:
    """What a call prints on a terminal so wide, or into a pipe."""
    words = [sys.executable, "-c", _PROGRAM, str(folder), *call.split()]
    environment = {
        **os.environ,
        "SCAN_REGISTRY_CACHE": str(folder / "cache"),
        "SCAN_REGISTRY_LIBCUDA": "libcuda.so.1 (of which there is none)",
        "CUDA_VISIBLE_DEVICES": "",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": str(width or 80),  # for argparse, which asks nothing else
    }
    if width is None:
        result = subprocess.run(
            words,
            env=environment,
            cwd="/",
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        return result.stdout
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    with subprocess.Popen(
        words, env=environment, cwd="/", stdin=theirs, stdout=theirs, stderr=theirs
    ):
        os.close(theirs)
        content = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # how Linux says that nobody writes any more
                break
            if not part:
                break
            content += part
    os.close(ours)
    lines = content.decode("utf-8").replace("\r\n", "\n").split("\n")
    # Of a progress bar's line, what it ends with.
    return "\n".join(
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.rpartition("\r")[2]) for line in lines
    )


def alike(text: str) -> str:
    """The text without what another machine, or another day, prints otherwise: numbers and widths."""
    text = re.sub(r"\d+(\.\d+)*(\+\w+)?(e[-+]?#)?", "#", re.sub(r"e[-+]\d+", "", text))
    text = re.sub(r"─+", "─", text)
    return re.sub(r"[ ]*\n", "\n", re.sub(r" +", " ", text))
