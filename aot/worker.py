"""Compile one variant in a process of its own.

Triton takes its settings from the environment and keeps its results in a folder, both of which are
the whole process's; a compile beside a user's own kernels would disturb them. NVRTC has no such
state and needs no worker. The result comes back through a pipe: a line of JSON, then the bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from scan_registry.aot.compile import compile_variant
from scan_registry.aot.toolchain import CompileError, MissingCompilerError
from scan_registry.artifact.archive import Binary, digest
from scan_registry.base.package import FOLDER, NAME
from scan_registry.hardware.target import Target
from scan_registry.kernels.model import Variant

_START = f"from {FOLDER}.aot.worker import main; main()"
_FAILED = 3


def compile_apart(variant: Variant, target: Target) -> tuple[Binary, bytes]:
    """``compile_variant`` in a fresh interpreter; ``CompileError`` also if that does not come back."""
    if not sys.executable:
        raise MissingCompilerError(
            f"{variant} compiles in a process of its own, and sys.executable names no Python"
        )
    # The same packages as here, and nothing that happens to lie in the current folder. The fresh interpreter does not know
    # this copy of the package by another name than its folder's.
    places = sys.path if NAME == FOLDER else [str(Path(__file__).parents[2]), *sys.path]
    path = os.pathsep.join(filter(None, map(_absolute, filter(None, places))))
    try:
        result = subprocess.run(
            [sys.executable, "-c", _START, str(variant), str(target)],
            env={**os.environ, "PYTHONPATH": path},
            cwd=os.sep,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise CompileError(f"{variant} for {target}: {sys.executable}: {error}") from error
    if result.returncode == _FAILED:
        raise CompileError(result.stderr.decode(errors="replace").strip())
    if result.returncode:
        raise CompileError(
            f"{variant} for {target}: the compiler's process ended with {result.returncode}\n"
            f"{result.stderr.decode(errors='replace').strip()}"
        )
    record, _, content = result.stdout.partition(b"\n")
    try:
        binary = Binary.from_json(json.loads(record))
    except (ValueError, RecursionError) as error:
        raise CompileError(
            f"{variant} for {target}: {sys.executable} sent no binary: {error}"
        ) from error
    if digest(content) != binary.sha256:
        raise CompileError(f"{variant} for {target}: the compiler's process sent damaged bytes")
    return binary, content


def _absolute(entry: str) -> str:
    """Nothing if it is relative to a folder that is gone."""
    try:
        return os.path.abspath(entry)
    except FileNotFoundError:
        return ""


def main() -> None:
    """What the process does: ``argv`` is a variant and a target."""
    # Compilers print; only the result may go where the result is read.
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        binary, content = compile_variant(Variant.parse(sys.argv[1]), Target.parse(sys.argv[2]))
    except CompileError as error:
        print(error, file=sys.stderr)
        sys.exit(_FAILED)
    with os.fdopen(out, "wb") as pipe:
        pipe.write(json.dumps(binary.to_json()).encode() + b"\n" + content)
