"""What tests of the loader are given: see ``loading``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loading import BEST, RIG, Make, Rig

from scan_registry.artifact.archive import Binary
from scan_registry.hardware.target import Target
from scan_registry.kernels.linear_scan.spec import FAMILY
from scan_registry.kernels.model import Variant


@pytest.fixture
def rig(stub_driver: Any) -> Rig:
    folder = stub_driver.folder
    package = folder / "acme_kernels"
    (package / "archives").mkdir(parents=True)
    (package / "__init__.py").touch()
    information = folder / "acme_kernels-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n", encoding="utf-8"
    )
    (information / "entry_points.txt").write_text(
        "[scan_registry.archives]\nacme = acme_kernels\n", encoding="utf-8"
    )
    (folder / "rig.py").write_text(RIG, encoding="utf-8")
    created = Rig(stub_driver, package)
    created.denies()
    return created


@pytest.fixture
def synthetic(rig: Rig, a_binary: Make) -> Callable[..., tuple[Binary, bytes]]:
    """A binary of which there is as much as the stub looks at."""

    def make(target: str, variant: Variant = BEST, **changes: Any) -> tuple[Binary, bytes]:
        made_for, entry = Target.parse(target), f"{variant.family}_{variant.kernel}"
        # Each variant's bytes are its own, as they would be.
        names = (entry, f"v{FAMILY.variants().index(variant)}", *changes.pop("names", ()))
        if made_for.is_ptx:
            version = changes.pop("ptx", "8.0")
            content = rig.stub.ptx(f"sm_{made_for.number}", names, version)
        else:
            content = rig.stub.cubin(str(made_for), names, 8 if made_for.number >= 100 else 7)
        return a_binary(variant, made_for, content, **changes)

    return make
