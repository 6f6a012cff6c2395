"""Archives that are installed to be verified, and what the command says of them."""

from __future__ import annotations

import json
import os
import struct
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from processes import captured

from scan_registry.artifact.archive import Archive, Binary, digest
from scan_registry.catalog import providers
from scan_registry.catalog.providers import Provider
from scan_registry.cli import main
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY

Capture = pytest.CaptureFixture[str]
Entry = tuple[Binary, bytes]
Install = Callable[..., Archive]
FIRST, SECOND = (v for v in FAMILY.variants()[:2])
SM103, PTX80 = Target((10, 3)), Target((8, 0), "compute")


def run(capsys: Capture, *words: str, status: int = 0) -> str:
    assert main(["verify", *words]) == status
    return capsys.readouterr().out


def valid(text: str) -> dict[str, Any]:
    """The document, after a look into its schema."""
    found: dict[str, Any] = json.loads(text)
    schema = json.loads(
        files("scan_registry").joinpath("schemas", "verify.json").read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator(schema).validate(found)
    return found


def document(capsys: Capture, *words: str, status: int = 0) -> dict[str, Any]:
    return valid(run(capsys, *words, "--json", status=status))


def altered(entry: Entry, content: bytes | None = None, /, **changes: Any) -> Entry:
    """A binary whose digest is right, whatever else was changed."""
    binary, before = entry
    after = before if content is None else content
    return replace(binary, size=len(after), sha256=digest(after), **changes), after


def other_arch(content: bytes) -> bytes:
    """A cubin that says it is for sm_90."""
    flags = bytearray(content)
    (before,) = struct.unpack_from("<I", flags, 48)
    abi8 = flags[8] >= 8
    after = before & ~0xFF00 | 90 << 8 if abi8 else before & ~0xFF | 90
    struct.pack_into("<I", flags, 48, after)
    return bytes(flags)


def record(site: Path) -> None:
    """Write RECORD for what is there."""
    lines = []
    for path in sorted(site.rglob("*")):
        if path.is_file():
            encoded = urlsafe_b64encode(sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            name = path.relative_to(site).as_posix()
            lines.append(f"{name},sha256={encoded},{path.stat().st_size}\n")
    (information,) = site.glob("*.dist-info")
    (information / "RECORD").write_text("".join(lines), encoding="utf-8")


def shell(site: Path, *words: str, status: int = 0, **environment: str) -> str:
    """The program in a process of its own, with the provider installed: forks need one."""
    result = captured(
        [sys.executable, "-m", "scan_registry", "verify", "--arch", "sm103", *words],
        env={**os.environ, "PYTHONPATH": str(site), "SCAN_REGISTRY_JOBS": "2", **environment},
        cwd="/",
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout


def read_provider(site: Path) -> Provider:
    return providers.read("verified", "1.2.3", site / "archives_that_are_verified")
