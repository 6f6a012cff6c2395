"""The benchmark of ``scale``: cases, and the bytes that they move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from scan_registry.dispatch.select import Backend
from scan_registry.ops.benchmark import Benchmark, Call, CaseText, ParsedCase

if TYPE_CHECKING:
    import torch

USUAL = ("vector:1000000:float32", "vector:100000000:float32")
ON_CPU = ("vector:1000000:float32",)


@dataclass(frozen=True)
class Case(ParsedCase):
    """A product to time: ``vector:1000:float32``."""

    family: ClassVar[str] = "scale"
    expected: ClassVar[str] = "vector:size:float32"

    size: int
    dtype: str

    @classmethod
    def of(cls, parts: CaseText) -> Case | None:
        word, (size,), dtype, _ = parts
        return cls(size, dtype) if (word, dtype) == ("vector", "float32") and size > 0 else None

    @property
    def text(self) -> CaseText:
        return CaseText("vector", (self.size,), self.dtype, {})

    @property
    def time(self) -> int:
        return self.size

    @property
    def group(self) -> str:
        return "vector"

    @property
    def cells(self) -> tuple[str, ...]:
        return self.group, self.sizes, self.dtype

    def moves(self, direction: str) -> tuple[int, int]:
        """How many tensors a pass reads and writes."""
        return 1, 1

    def traffic(self, direction: str) -> int:
        """The bytes of these."""
        return 8 * self.size

    def to_json(self) -> dict[str, Any]:
        return {"size": self.size, "dtype": self.dtype}


class ScaleBenchmark(Benchmark):
    """Vectors, forward."""

    case_type, usual = Case, (USUAL, ON_CPU)
    subject = "products"
    description = "Times products of a vector and a number."
    case_help = "vector:size:float32; may repeat"
    columns = ("what", "size", "dtype")
    passes = ("forward",)

    def call(self, case: Case, direction: str, backend: Backend, device: torch.device) -> Call:
        import torch

        from scan_registry.kernels.scale.op.function import scale

        x = torch.rand(case.size, device=device)
        return lambda: scale(x, backend=backend)


BENCHMARK = ScaleBenchmark()
