"""Builds the C extensions. A family's code for CPUs is every C file of ``kernels/<family>/cpu``."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parents[1]
FAMILIES = "scan_registry.ops._cpu"


class BuildExtensions(build_ext):  # type: ignore[misc]  # setuptools has no types
    """setuptools' command, with the families' sources, and all headers as dependencies."""

    def finalize_options(self) -> None:
        super().finalize_options()
        headers = _files("scan_registry/csrc/*.h", "kernels/*/cpu/*.h", "kernels/*/cpu/*/*.h")
        for extension in self.extensions:
            extension.depends = [*extension.depends, *headers]
            if extension.name == FAMILIES:
                sources = [*extension.sources, *_files("kernels/*/cpu/*.c")]
                extension.sources = list(dict.fromkeys(sources))

    def build_extension(self, extension: Any) -> None:
        """Compile as many sources at a time as there are cores; setuptools compiles one after the other."""
        one_by_one = self.compiler.compile

        def side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                objects = pool.map(lambda source: one_by_one([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = side_by_side
        try:
            super().build_extension(extension)
        finally:
            self.compiler.compile = one_by_one


def _files(*patterns: str) -> list[str]:
    """Relative to the root, which is the current folder while setuptools builds."""
    return [
        str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))
    ]
