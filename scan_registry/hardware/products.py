"""GPUs by the names that they are sold under. The command line and the documentation read this table."""

from __future__ import annotations

import re
from collections.abc import Iterator

from scan_registry.base.frozen import dataclass
from scan_registry.hardware.target import Capability


@dataclass(frozen=True)
class Product:
    """A GPU on sale. ``sm_count`` has the SMs of the whole GPU. ``also`` has further names of the GPU, or of systems with
    it."""

    name: str
    capability: Capability
    sm_count: int
    also: tuple[str, ...] = ()


#: Oldest first. GPUs before 8.0 are listed so that the message about them can say that they are too old.
PRODUCTS: tuple[Product, ...] = (
    Product("P100", (6, 0), 56),
    Product("V100", (7, 0), 80),
    Product("T4", (7, 5), 40),
    Product("RTX 2080", (7, 5), 46),
    Product("RTX 2080 Ti", (7, 5), 68),
    Product("A100", (8, 0), 108),
    Product("A800", (8, 0), 108),
    Product("A30", (8, 0), 56),
    Product("A2", (8, 6), 10),
    Product("A10", (8, 6), 72),
    Product("A10G", (8, 6), 80),
    Product("A40", (8, 6), 84),
    Product("RTX A6000", (8, 6), 84, ("A6000",)),
    Product("RTX A5000", (8, 6), 64, ("A5000",)),
    Product("RTX A4000", (8, 6), 48, ("A4000",)),
    Product("RTX 3060", (8, 6), 28),
    Product("RTX 3060 Ti", (8, 6), 38),
    Product("RTX 3070", (8, 6), 46),
    Product("RTX 3070 Ti", (8, 6), 48),
    Product("RTX 3080", (8, 6), 68),
    Product("RTX 3080 Ti", (8, 6), 80),
    Product("RTX 3090", (8, 6), 82),
    Product("RTX 3090 Ti", (8, 6), 84),
    Product("Orin", (8, 7), 16, ("Jetson AGX Orin 64GB",)),
    Product("Orin NX", (8, 7), 8),
    Product("Orin Nano", (8, 7), 8),
    Product("L4", (8, 9), 58),
    Product("L20", (8, 9), 92),
    Product("L40", (8, 9), 142),
    Product("L40S", (8, 9), 142),
    Product("RTX 6000 Ada", (8, 9), 142),
    Product("RTX 5000 Ada", (8, 9), 100),
    Product("RTX 4000 Ada", (8, 9), 48),
    Product("RTX 4060", (8, 9), 24),
    Product("RTX 4060 Ti", (8, 9), 34),
    Product("RTX 4070", (8, 9), 46),
    Product("RTX 4070 SUPER", (8, 9), 56),
    Product("RTX 4070 Ti", (8, 9), 60),
    Product("RTX 4070 Ti SUPER", (8, 9), 66),
    Product("RTX 4080", (8, 9), 76),
    Product("RTX 4080 SUPER", (8, 9), 80),
    Product("RTX 4090", (8, 9), 128),
    Product("RTX 4090 D", (8, 9), 114),
    Product("H100", (9, 0), 132),
    Product("H100 PCIe", (9, 0), 114),
    Product("H20", (9, 0), 78),
    Product("H200", (9, 0), 132),
    Product("H800", (9, 0), 132),
    Product("GH200", (9, 0), 132, ("Grace Hopper",)),
    Product("B200", (10, 0), 148),
    Product("GB200", (10, 0), 152, ("Grace Blackwell",)),
    Product("B300", (10, 3), 148),
    Product("GB300", (10, 3), 152, ("DGX Station",)),
    Product("Thor", (11, 0), 20, ("Jetson T5000",)),
    Product("RTX 5060", (12, 0), 30),
    Product("RTX 5060 Ti", (12, 0), 36),
    Product("RTX 5070", (12, 0), 48),
    Product("RTX 5070 Ti", (12, 0), 70),
    Product("RTX 5080", (12, 0), 84),
    Product("RTX 5090", (12, 0), 170),
    Product("RTX PRO 4000", (12, 0), 70),
    Product("RTX PRO 4500", (12, 0), 82),
    Product("RTX PRO 5000", (12, 0), 110),
    Product("RTX PRO 6000", (12, 0), 188),
    Product("GB10", (12, 1), 48, ("DGX Spark",)),
)

#: Words that the vendor and drivers put around names, and that do not tell GPUs apart.
_AROUND = re.compile(
    "nvidia|geforce|tesla|quadro|jetson|agx|dgx|gpu|tensor|core|graphics|generation|blackwell|max|q|"
    "workstation|server|edition"
)
_MEMORY = re.compile(r"\d+gb|hbm\d\w?")
_FORM = re.compile(r"sxm\d?|pcie|nvl\d*")


def named(text: str) -> Product | None:
    """The GPU of this name, in any case, with or without the words that vendor and drivers put around it.

    Words for memory and form factor are first kept and then left out, as "H100 PCIe" has fewer SMs than "H100".
    """
    words = [
        word for word in re.split(r"[\s_-]+", text.strip().lower()) if not _AROUND.fullmatch(word)
    ]
    known = {key: product for product in PRODUCTS for key in _keys(product)}
    for left_out in ((), (_MEMORY,), (_MEMORY, _FORM)):
        kept = [word for word in words if not any(pattern.fullmatch(word) for pattern in left_out)]
        if product := known.get("".join(kept)):
            return product
    return None


def _keys(product: Product) -> Iterator[str]:
    """The product's names as ``named`` looks them up. A name in the RTX series counts without "RTX", too."""
    for name in (product.name, *product.also):
        words = [word for word in name.lower().split() if not _AROUND.fullmatch(word)]
        yield "".join(words)
        if words[0] == "rtx":
            yield "".join(words[1:])


def names() -> list[str]:
    """Every name, for suggestions."""
    return [name for product in PRODUCTS for name in (product.name, *product.also)]
