"""Wheels as values: read, changed, and written with the same bytes for the same content.

A wheel is a zip file whose ``<name>-<version>.dist-info/RECORD`` states a digest of every other file.
Writing one makes RECORD anew, so that files, a version or a tag can be replaced without care.
"""

from __future__ import annotations

import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

_NO_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can state
_PLAIN_FILE = 0o100644
_PROGRAM = 0o100755


@dataclass(frozen=True)
class Wheel:
    """What a wheel installs and says.

    name, version, tag  as its file's name spells them: ``scan_registry``, ``0.1.0``, ``py3-none-any``
    files               by their path in the wheel, in order; those of the dist-info folder are apart
    information         the files of the dist-info folder, by their path in it, without RECORD
    programs            the paths in ``files`` that are executable
    """

    name: str
    version: str
    tag: str
    files: Mapping[str, bytes]
    information: Mapping[str, bytes]
    programs: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """``ValueError`` if the name is not a wheel's, or the file lacks what the name promises."""
        parts = path.name.removesuffix(".whl").split("-")
        if len(parts) != 5 or path.suffix != ".whl":
            raise ValueError(
                f"{path.name} is not named <name>-<version>-<python>-<abi>-<platform>.whl"
            )
        name, version, *tags = parts
        files, information, programs = {}, {}, set()
        folder = f"{name}-{version}.dist-info/"
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.is_dir():
                    continue
                content = archive.read(entry)
                if entry.filename.startswith(folder):
                    information[entry.filename.removeprefix(folder)] = content
                else:
                    files[entry.filename] = content
                    if entry.external_attr >> 16 & 0o111:
                        programs.add(entry.filename)
        for needed in ("METADATA", "WHEEL", "RECORD"):
            if needed not in information:
                raise ValueError(f"{path.name} has no {folder}{needed}")
        del information["RECORD"]
        return cls(name, version, "-".join(tags), files, information, frozenset(programs))

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}-{self.tag}.whl"

    def with_files(self, files: Mapping[str, bytes]) -> Wheel:
        """The same with more files, or other content for those that it has."""
        return replace(self, files={**self.files, **files})

    def with_information(self, files: Mapping[str, bytes]) -> Wheel:
        """The same with more files in its dist-info folder, or other content."""
        return replace(self, information={**self.information, **files})

    def without(self, folder: str) -> Wheel:
        """The same without the files under a folder."""
        kept = {
            name: text for name, text in self.files.items() if not name.startswith(f"{folder}/")
        }
        return replace(self, files=kept)

    def with_version(self, version: str) -> Wheel:
        """The same under another version, in its metadata, too."""
        old, new = f"\nVersion: {self.version}\n".encode(), f"\nVersion: {version}\n".encode()
        metadata = self.information["METADATA"]
        if metadata.count(old) != 1:
            raise ValueError(f"{self.file_name}: its metadata does not state {self.version} once")
        changed = replace(self, version=version)
        return changed.with_information({"METADATA": metadata.replace(old, new)})

    def write(self, folder: Path) -> Path:
        """Write the wheel, RECORD last, and return its path. The same content gives the same bytes."""
        information = f"{self.name}-{self.version}.dist-info"
        inner = {f"{information}/{name}": text for name, text in self.information.items()}
        files = {**self.files, **inner}
        record = [f"{name},sha256={_encoded(text)},{len(text)}\n" for name, text in files.items()]
        files[f"{information}/RECORD"] = "".join([*record, f"{information}/RECORD,,\n"]).encode()
        path = folder / self.file_name
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                entry = zipfile.ZipInfo(name, _NO_TIME)
                mode = _PROGRAM if name in self.programs else _PLAIN_FILE
                entry.create_system, entry.external_attr = 3, mode << 16
                archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
        return path


def _encoded(content: bytes) -> str:
    return urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
