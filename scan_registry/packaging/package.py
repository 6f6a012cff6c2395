"""Provider packages: archives and what pip and this package have to know of them, and no code.

    <folder>/pyproject.toml                            setuptools makes a wheel from it
    <folder>/scan_registry_<label>/__init__.py
    <folder>/scan_registry_<label>/provider.json       see ``providers``
    <folder>/scan_registry_<label>/archives/<arch>.scanreg

Releases are made of these (``scan-registry-sm90``), and so is what ``scan-registry cache export`` ships.
The same archives give the same bytes, in the folder and in the wheel alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scan_registry.artifact.archive import SUFFIX
from scan_registry.catalog.providers import CORE, GROUP, MANIFEST, SCHEMA, core_range
from scan_registry.hardware.target import Target
from scan_registry.packaging.wheel import Wheel

TAG = "py3-none-any"  # archives run on every Python; which GPU they are for is in the name


@dataclass(frozen=True)
class Package:
    """A provider package.

    label        what follows ``scan-registry-`` in its name
    version      its own
    made_with    the version of this package that compiled the archives
    archives     whole files
    metadata     more lines for the wheel's METADATA, such as its licence
    description  the text that package indexes show, in Markdown
    information  more files for the wheel's dist-info folder
    """

    label: str
    version: str
    made_with: str
    archives: Mapping[Target, bytes]
    metadata: tuple[str, ...] = ()
    description: str = ""
    information: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{CORE}-{self.label.replace('_', '-')}"

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def core(self) -> str:
        """The versions of this package that it goes with."""
        return core_range(self.made_with)

    @property
    def summary(self) -> str:
        return f"Kernels of {CORE} for {', '.join(target.label for target in self.archives)}"

    @property
    def files(self) -> dict[str, bytes]:
        """What it installs, by path."""
        manifest = {"schema": SCHEMA, "core": self.core, "denied": []}
        return {
            f"{self.module}/__init__.py": f'"""{self.summary}: archives, and no code."""\n'.encode(),
            f"{self.module}/{MANIFEST}": (json.dumps(manifest, indent=1) + "\n").encode(),
            **{
                f"{self.module}/archives/{target.label}{SUFFIX}": content
                for target, content in self.archives.items()
            },
        }

    def write(self, folder: Path) -> None:
        """Write the source folder."""
        project = self._filled(_PROJECT).encode()
        for name, content in {"pyproject.toml": project, **self.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def wheel(self) -> Wheel:
        metadata = self._filled(_METADATA) + "".join(f"{line}\n" for line in self.metadata)
        if self.description:
            metadata += f"Description-Content-Type: text/markdown\n\n{self.description}"
        information = {
            "METADATA": metadata.encode(),
            "WHEEL": self._filled(_WHEEL).encode(),
            "entry_points.txt": self._filled(_ENTRY_POINTS).encode(),
            **self.information,
        }
        return Wheel(self.module, self.version, TAG, self.files, information)

    def _filled(self, template: str) -> str:
        return template.format(
            name=self.name,
            version=self.version,
            summary=self.summary,
            requirement=CORE + self.core,
            maker=f"{CORE} {self.made_with}",
            group=GROUP,
            label=self.label,
            module=self.module,
            manifest=MANIFEST,
            metadata_version="2.4" if self.metadata else "2.1",
            tag=TAG,
        )


_PROJECT = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "{summary}"
requires-python = ">=3.10"
dependencies = ["{requirement}"]

[project.entry-points."{group}"]
{label} = "{module}"

[tool.setuptools]
packages = ["{module}"]
include-package-data = false

[tool.setuptools.package-data]
{module} = ["{manifest}", "archives/*.scanreg"]
"""

_METADATA = """\
Metadata-Version: {metadata_version}
Name: {name}
Version: {version}
Summary: {summary}
Requires-Python: >=3.10
Requires-Dist: {requirement}
"""

_WHEEL = """\
Wheel-Version: 1.0
Generator: {maker}
Root-Is-Purelib: true
Tag: {tag}
"""

_ENTRY_POINTS = """\
[{group}]
{label} = {module}
"""
