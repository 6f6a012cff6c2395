"""Wheel variants (PEP 825 and 850, drafts): one wheel per GPU architecture, which installers that know
variants choose by the GPU they find, and the default wheel beside them for every other installer.

Each holds its architecture's archive and the PTX: what an installer takes for a fit need not be one,
such as machine code for 8.0 on the Tegra system 8.7. variantlib makes them. It states the schema of an
earlier draft, which uv no longer reads, so that of PEP 850 is put in its place.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from scan_registry.hardware.target import Target
from scan_registry.packaging.wheel import Wheel

METADATA = "variant.json"
STATED = "https://variants-schema.wheelnext.dev/v0.2.0.json"
SCHEMA = "https://variants-schema.wheelnext.dev/peps/850/v0.2.0.json"

#: The plug-in that detects the GPU: NVIDIA's, which uv has built in.
PROVIDER = """\
[variant.default-priorities]
namespace = ["nvidia"]

[variant.providers.nvidia]
requires = ["nvidia-variant-provider"]
plugin-api = "nvidia_variant_provider.plugin:NvidiaVariantPlugin"
"""


def write(default: Wheel, by_target: Mapping[Target, Wheel], folder: Path) -> list[Path]:
    """Write the default wheel, one variant for each target, and the index's file about them."""
    paths = [default.write(folder)]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for target, wheel in by_target.items():
            paths.append(_write_one(target, wheel, Path(place), folder))
    _variantlib("generate-index-json", "--directory", folder)
    index = folder / f"{default.name}-{default.version}-variants.json"
    index.write_text(
        index.read_text(encoding="utf-8").replace(STATED, SCHEMA) + "\n", encoding="utf-8"
    )
    return [*paths, index]


def _write_one(target: Target, wheel: Wheel, place: Path, folder: Path) -> Path:
    """Write a variant into ``folder``. variantlib makes one in ``place`` of the metadata alone, for which
    it does not have to pack the archives."""
    project = place / "pyproject.toml"
    project.write_text(PROVIDER, encoding="utf-8")
    plain = replace(wheel, files={}).write(place)
    _variantlib(
        "make-variant",
        *("--file", plain, "--output-directory", place),
        *("--pyproject-toml", project, "--skip-plugin-validation"),
        *("--property", f"nvidia :: sm_arch :: {target.number}_real"),
        *("--variant-label", target.label),
    )
    name = plain.name.replace(".whl", f"-{target.label}.whl")
    content = Wheel.read((place / name).rename(plain)).information[METADATA]
    text = content.replace(STATED.encode(), SCHEMA.encode())
    return wheel.with_information({METADATA: text}).write(place).rename(folder / name)


def _variantlib(*words: str | Path) -> None:
    command = [str(Path(sys.executable).with_name("variantlib")), *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
