"""What commands know of an operator: its options, the problems that a call poses, what is timed and tuned.

A family of kernels that a public function calls has ``kernels/<family>/op/operator.py``, which defines ``OPERATOR``, beside the
function's own ``function.py``. Commands read that and name no family. Importing an operator's module imports no torch. What is drawn at random, and how far
results may be off, is a family's own, whether an operator calls it or not: ``kernels/<family>/cases.py``.
"""

from __future__ import annotations

import importlib
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from scan_registry import kernels
from scan_registry.base.frozen import dataclass
from scan_registry.base.suggestion import accepted_words
from scan_registry.dispatch.select import BACKENDS, Backend
from scan_registry.kernels.model import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from scan_registry.hardware.device import Device
    from scan_registry.ops.benchmark import Benchmark, Case

#: The field's words for dtypes, where space is short.
SHORT_DTYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float64": "fp64",
    "complex64": "c64",
}
#: For operators whose shape is batch, channels and time: what to say where ``--dim`` is given.
WITHOUT_DIM: Mapping[str, str] = MappingProxyType(
    {
        "dim": "--shape is always batch, channels, time; if channels have stride 1, as in a tensor of (batch, time, channels), "
        "say --channel-last"
    }
)
#: By what each may be called.
DTYPES = {word: name for name, short in SHORT_DTYPES.items() for word in (name, short)}
MOST_ELEMENTS = 2**60  # their bytes can still be counted
PASSES = ("forward", "backward")


class Option:
    """An option of a command, as argparse declares it."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings

    @property
    def dest(self) -> str:
        """Under which name its value is found."""
        return self.names[0].lstrip("-").replace("-", "_")

    @property
    def default(self) -> Any:
        """Its value where it is left out."""
        flag = self.settings.get("action") == "store_true"
        return self.settings.get("default", False if flag else None)


#: Of operators of sequences (batch, channels, time).
CHANNEL_LAST = Option(
    "--channel-last", action="store_true", help="channels have stride 1, and time has not"
)


class KernelCall(Protocol):
    """One kernel's part in an operator's call: inputs that are copied first, and the problems that it may pose."""

    @property
    def copied(self) -> tuple[str, ...]: ...

    def alternatives(self, backend: Any) -> tuple[tuple[Problem, Backend], ...]: ...

    @property
    def after_fused(self) -> bool | None:
        """Whether it follows a kernel that solves ``fused`` alone, or one that does not; None if it does in either case."""

    def fused(self) -> Any:
        """The problem of a kernel that does what a later one does, too; None if there can be none."""


class Unfused:
    """What parts in calls have in common in families in which no kernel does what another one does, too."""

    @property
    def after_fused(self) -> bool | None:
        return None

    def fused(self) -> Any:
        return None


AnyProblem = TypeVar("AnyProblem", bound=Problem)
#: By what each is called.
Calls = TypeVar("Calls", bound=Mapping[str, KernelCall])


@dataclass(frozen=True)
class SingleCall(Unfused, Generic[AnyProblem]):
    """A part in a call that poses one problem, and the names of the inputs that are copied first."""

    problem: AnyProblem
    copied: tuple[str, ...] = ()

    def alternatives(self, backend: Backend) -> tuple[tuple[AnyProblem, Backend], ...]:
        """The problem alone."""
        return ((self.problem, backend),)


def describes(
    function: Callable[..., Any],
) -> Callable[[Callable[[Any], Calls]], Callable[..., Calls]]:
    """A decorator of what describes calls of a function: it takes what the function takes, and gets it as one object with a
    field for each argument."""
    bind = signature(function).bind

    def decorate(describe: Callable[[Any], Calls]) -> Callable[..., Calls]:
        @wraps(describe)
        def described(*args: Any, **kwargs: Any) -> Calls:
            bound = bind(*args, **kwargs)
            bound.apply_defaults()
            return describe(SimpleNamespace(**bound.arguments))

        return described

    return decorate


class ParsedCall(NamedTuple):
    """Arguments of the function, of tensors on meta, and the options that a document names."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    record: dict[str, Any]


class Operator(Protocol):
    """One public function and its family of kernels, which have one name.

    shape         what ``--shape`` means, in words
    options       of ``explain``, beside dtype, shape and backend
    others        further public functions whose calls are calls of the operator, by name, each with the options of ``explain``
                  that it stands for
    instead       what to say where ``explain`` gets an option that other operators have, by its name in the parsed arguments
    kinds         values of ``--kind`` that no public function is named after
    backends      that the function accepts
    tuned_shapes  cases without their dtype, the most important first, to tune in all of ``tuned_dtypes``; none
                  where the kernels are never tuned
    tuned_cases   others, whose dtypes are rarer
    order         its place where commands list operators; of equal ones by name. ``bench`` alone times the first
    """

    name: str
    shape: str
    options: tuple[Option, ...] = ()
    others: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    instead: Mapping[str, str] = MappingProxyType({})
    kinds: tuple[str, ...] = ()
    backends: tuple[str, ...] = BACKENDS
    tuned_shapes: tuple[str, ...] = ()
    tuned_dtypes: tuple[str, ...] = ()
    tuned_cases: tuple[str, ...] = ()
    order: int = 1

    @property
    def function(self) -> Callable[..., Any]:
        """What users call."""
        function: Callable[..., Any] = getattr(self._module, self.name)
        return function

    @property
    def benchmark(self) -> Benchmark:
        """What ``bench`` times; its cases are what ``tune`` takes, too. Calls of the function never import its module."""
        benchmark: Benchmark = importlib.import_module(
            f"{kernels.__name__}.{self.name}.op.bench"
        ).BENCHMARK
        return benchmark

    def describe(self, *args: Any, **kwargs: Any) -> Mapping[str, KernelCall]:
        """The kernels' parts in a call of the function, by what each is called; those of derivatives only where
        a tensor requires one. Nothing is computed; it raises what the call would."""
        calls: Mapping[str, KernelCall] = self._module.describe(*args, **kwargs)
        return calls

    def call_of(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of ``function`` for a call of one of the ``others``."""
        missing = f"{name} is no other function of {self.name}"
        raise NotImplementedError(missing)

    def on_gpu(self, call: KernelCall, gpu: Device) -> KernelCall:
        """A part of a described call as it is on this GPU, where the tensors are not."""
        return call

    def family_of(self, call: KernelCall) -> str:
        """The family of kernels that a part of a call is for: the operator's own, unless it calls another operator."""
        return self.name

    def stand_in(self, call: KernelCall) -> tuple[str, KernelCall] | None:
        """Where no kernel of the family fits a GPU: the family whose kernel runs, beside torch's operators, and the call of that
        kernel. None if plain torch does all."""
        other: tuple[str, KernelCall] | None = getattr(call, "stand_in", None)
        return other

    def parse(self, dtype: str, shape: tuple[int, ...], options: Namespace) -> ParsedCall:
        """The call that ``explain``'s options describe; ``ValueError`` if they cannot be meant."""

    def run_on_cpu(self, problem: Any, tensors: Mapping[str, Tensor | None]) -> None:
        """Do on the CPU what a kernel does, on its tensors and by what runs in a call there, unless the kernel says why nothing
        does: see ``Kernel.not_on_cpu``."""

    def posed(self, case: Any, direction: str) -> tuple[Problem, ...]:
        """The problems of kernels that one pass of a case may pose, the one to prefer first. A kernel is tuned
        for the first that it solves."""
        return ()

    def tensors(self, case: Any, problem: Any, device: Any) -> dict[str, Tensor | None]:
        """New ones to time a kernel on, by the names of its pointers; those that are not there are null."""
        return {}

    def outputs(self, case: Any, problem: Any) -> tuple[str, ...]:
        """Names of what the kernel writes, among those."""
        return ()

    def partial_sums(self, problem: Any) -> Mapping[str, int]:
        """Of outputs that count as their sum over the first dimension, since variants cut it in pieces of their own: the name,
        and how many terms there are in all."""
        return {}

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"{kernels.__name__}.{self.name}.op.function")


def operators() -> dict[str, Operator]:
    """All operators by name."""
    names = kernels.operators()
    modules = (importlib.import_module(f"{kernels.__name__}.{name}.op.operator") for name in names)
    ordered = sorted((module.OPERATOR for module in modules), key=lambda op: (op.order, op.name))
    return {operator.name: operator for operator in ordered}


def called_by(function: Any) -> tuple[Operator, str]:
    """The operator that calls of a public function are calls of, and the function's name; ``TypeError`` if there is none."""
    known = operators()
    for operator in known.values():
        if operator.function is function:
            return operator, operator.name
        for name in operator.others:
            if getattr(importlib.import_module(kernels.public()[name]), name) is function:
                return operator, name
    accepted = ", ".join([*known, *(name for op in known.values() for name in op.others)])
    if isinstance(getattr(function, "forward", None), MethodType):
        raise TypeError(_about_module(function, next(iter(known)), accepted))
    if isinstance(function, str):
        names = {name for operator in known.values() for name in (operator.name, *operator.others)}
        instead = function if function in names else next(iter(known))
        raise TypeError(
            f"explain takes a function, not its name, {function!r}; pass the function, scan_registry.{instead}"
        )
    from scan_registry.ops.checks import described  # with torch, which this module does not import

    own = getattr(function, "__name__", None)
    what = f"the function {own}" if own else described(function)
    raise TypeError(f"{what} cannot be explained; accepted are {accepted}")


def _about_module(module: Any, usual: str, accepted: str) -> str:
    """Why a module cannot be explained, and what can: modules of this package name the operators that they call."""
    name, called = type(module).__name__, getattr(module, "operators", ())
    text = f"{name} is a module, and explain takes a function and the arguments of its call"
    if isinstance(called, tuple) and called:
        which = "this" if len(called) == 1 else "these"
        return f"{text}. {name} calls {' and '.join(called)}; explain {which}, such as explain(scan_registry.{called[0]}, …)"
    return f"{text}, such as explain(scan_registry.{usual}, …); accepted are {accepted}"


def operator_of(case: Case) -> Operator:
    """The one that a case is of."""
    return operators()[case.family]


def known(name: str, value: str, accepted: Sequence[str]) -> str:
    """The value of an option that takes one of several words; ``ValueError`` for anything else."""
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}; {accepted_words(value, accepted)}")
    return value


def parse_shape(option: str, text: str) -> tuple[int, ...]:
    """``8,1536,4096``; ``ValueError`` for anything else."""
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and len(size) < 100 for size in sizes):
        raise ValueError(f"{option} is {text!r}; accepted are sizes such as 8,1536,4096")
    shape = tuple(map(int, sizes))
    if math.prod(max(size, 1) for size in shape) > MOST_ELEMENTS:
        raise ValueError(f"{option} is {text!r}; accepted are at most 2**60 elements")
    return shape


def sequence_sizes(operator: Operator, shape: tuple[int, ...], args: Namespace) -> tuple[int, ...]:
    """Batch, channels and time of an operator that takes these; ``ValueError`` for another ``--shape``."""
    if len(shape) != 3:
        raise ValueError(
            f"--shape is {args.shape!r}; {operator.name} takes {operator.shape}, such as 8,2048,2048"
        )
    return shape


def described_sequence(shape: tuple[int, ...], dtype: str, args: Namespace) -> Tensor:
    """A tensor (batch, channels, time) that is nowhere, of whose dimensions ``--channel-last`` says which is contiguous."""
    if not args.channel_last:
        return described_tensor(shape, dtype)
    batch, channels, time = shape
    return described_tensor((batch, time, channels), dtype).transpose(1, 2)


def described_tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
    """A tensor that is nowhere, contiguous and aligned, with derivatives asked for."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=True)
