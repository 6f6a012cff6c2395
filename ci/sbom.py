"""The bill of materials that each released wheel carries: CycloneDX 1.6, in ``sboms/`` (PEP 770).

It holds no time and no random number, so that the same wheel has the same bill.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from scan_registry.artifact.archive import Archive, digest
from scan_registry.packaging.wheel import Wheel

PATH = "sboms/scan-registry.cdx.json"
LICENCE = "Apache-2.0"


def bill(wheel: Wheel, archives: Iterable[Archive]) -> bytes:
    """The bill of a wheel with these archives: each is a part, and its compilers made it."""
    listed = list(archives)
    compilers = sorted({binary.compiler for archive in listed for binary in archive.binaries})
    name = wheel.name.replace("_", "-")
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component("library", name, wheel.version)},
        "components": [_archive(archive) for archive in listed],
        "formulation": [
            {
                "bom-ref": "toolchain",
                "components": [
                    {"type": "application", "name": tool, "version": version}
                    for tool, _, version in (text.partition(" ") for text in compilers)
                ],
            }
        ],
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def _component(kind: str, name: str, version: str) -> dict[str, Any]:
    return {
        "type": kind,
        "bom-ref": f"{name}@{version}",
        "name": name,
        "version": version,
        "licenses": [{"license": {"id": LICENCE}}],
        "purl": f"pkg:pypi/{name}@{version}",
    }


def _archive(archive: Archive) -> dict[str, Any]:
    manifest = archive.manifest
    facts = {
        "arch": str(archive.arch),
        "version": manifest.get("version"),
        "commit": manifest.get("commit"),
        "dirty": manifest.get("dirty"),
        "binaries": len(archive.binaries),
    }
    return {
        "type": "file",
        "bom-ref": archive.path.name,
        "name": archive.path.name,
        "licenses": [{"license": {"id": LICENCE}}],
        "hashes": [{"alg": "SHA-256", "content": digest(archive.path.read_bytes())}],
        "properties": [
            {"name": f"scan-registry:{name}", "value": str(value)} for name, value in facts.items()
        ],
    }
