"""Hold recurrent networks against the float64 reference, through the public function.

    python tools/check_rnn.py [--json FILE] [--seed N] [--budget SECONDS]
    python tools/check_rnn.py --device cpu --dim 16 --dim 64      plain torch, and few sizes

Sizes are heads of 16, 32, 64, 128, 256, 512, 768, 1024 and 2048 units; 1, 3 and 12 heads; batches of 1, 2, 7,
16 and 65; 1, 2, 3, 257 and 1024 steps. Of these 675

    units and steps    go in all pairs, 45, each with one batch, in turn
    heads              1, 3 and 12 go with each of those, up to 2²⁵ states (batch · steps · heads · units):
                       7 networks are left out, all of 257 or 1024 steps

so that every two values of different dimensions meet in some network, as a test proves. Each such network is
drawn and computed for every cell (lstm, gru, elman, slstm), dtype and backend. ``reference``, plain
torch, is slow: of more than 3 steps it gets those of 64 units and one head alone. What a backend does not
take, such as heads that are too wide for ``cuda_fused``, is counted, and the most units that it did take
are in the table; ``cuda_alternating`` and ``reference`` have to take everything. Nothing may be compiled.

Inputs, initial states, and gradients of all states and of the last ones are new random numbers, by a seed
that is printed; for float32 with all their bits, for both narrow dtypes the same numbers, that are exact in
either. Of sLSTM in narrow dtypes, and over more than 3 steps, h alone has gradients: those of m go to i or
to f, and where both are nearly alike rounding decides which. What is compared are all states, each by itself, the last ones, and the gradients of Wx, R,
b and the initial states: the error is ‖out − ref‖ / ‖ref‖. The exit status is 1 if one is over its limit
(1e-5 in float32, 5e-3 in float16, 2e-2 in bfloat16), if something was not taken that had to be, or if
``--budget`` did not suffice.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from records import write_records
from rich.console import Console
from rich.table import Table
from torch import Tensor

import scan_registry
from scan_registry import NoKernelError
from scan_registry.kernels.cases import relative_error
from scan_registry.kernels.rnn import reference
from scan_registry.kernels.rnn.cases import TOLERANCE
from scan_registry.kernels.rnn.problem import SIZES, Function

DIMS = (16, 32, 64, 128, 256, 512, 768, 1024, 2048)
HEADS = (1, 3, 12)
BATCHES = (1, 2, 7, 16, 65)
TIMES = (1, 2, 3, 257, 1024)
BACKENDS = ("cuda_fused", "cuda_alternating", "triton", "reference")
#: These take heads of any size.
UNBOUNDED = ("cuda_alternating", "reference")
LARGEST = 1 << 25  # batch · steps · heads · units
SHORT, PLAIN_DIM = 3, 64  # what plain torch gets: few steps; else heads of so many units


@dataclass(frozen=True)
class Group:
    """Networks that differ in the number of heads alone: they are drawn, and solved, as one."""

    batch: int
    time: int
    dim: int
    heads: tuple[int, ...]

    def __str__(self) -> str:
        heads = ", ".join(map(str, self.heads))
        return f"batch {self.batch}, {self.time} steps, {heads} heads of {self.dim} units"


def groups() -> list[Group]:
    """All of the docstring, short ones first."""
    found = []
    for j, steps in enumerate(TIMES):
        for i, dim in enumerate(DIMS):
            batch = BATCHES[(i + 2 * j + 2) % len(BATCHES)]
            heads = tuple(n for n in HEADS if n == 1 or batch * steps * n * dim <= LARGEST)
            found.append(Group(batch, steps, dim, heads))
    return found


# --- What is to come out ----------------------------------------------------------------------

#: The dimension of heads.
_HEADS_AT = {"Wx": 3, "R": 1, "b": 1, "start": 3, "states": 3, "last": 3}
#: Each of their states counts by itself.
_BY_STATE = ("start", "states", "last")
_ARGUMENTS = ("Wx", "R", "b", "start")

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """Arguments of ``rnn``, gradients of its results, and what it is to make of both, in float64: under an
    argument's name its gradient."""

    arguments: Tensors
    grads: Tensors
    expected: Tensors

    def part(self, first: int, count: int) -> Problem:
        """Some of the heads."""
        all_of = (self.arguments, self.grads, self.expected)
        return Problem(
            *({n: t.narrow(_HEADS_AT[n], first, count) for n, t in each.items()} for each in all_of)
        )


def drawn(
    function: Function, group: Group, device: torch.device, *, narrow: bool
) -> tuple[Tensors, Tensors]:
    """New arguments and gradients with the heads of all of a group's networks; where ``narrow``, such as
    bfloat16 and float16 both hold exactly."""
    sizes, (batch, steps) = SIZES[function], (group.batch, group.time)
    states, unit = len(sizes.states), (sum(group.heads), group.dim)

    def new(*shape: int, by: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device) * by

    start = new(states, batch, 1, *unit)
    if function == "slstm":
        start[2] = start[2].abs() + 1
        # As networks start, where i decides whatever m is; with a large one, what reaches the c and n before
        # would be more than float16 holds.
        start[1:3, ..., ::3], start[3, ..., ::3] = 0, -16
    arguments = {
        "Wx": new(batch, steps, sizes.inputs, *unit),
        "R": new(sizes.recurrent, *unit, group.dim, by=group.dim**-0.5),
        "b": new(sizes.bias, *unit),
        "start": start,
    }
    grads = {"states": new(states, batch, steps, *unit), "last": new(states, batch, 1, *unit)}
    if function == "slstm" and (narrow or group.time > SHORT):
        for grad in grads.values():
            grad[1:] = 0
    if narrow:
        for tensor in (*arguments.values(), *grads.values()):
            tensor.copy_(tensor.bfloat16().half())
    return arguments, grads


def solved(function: Function, arguments: Tensors, grads: Tensors) -> Problem:
    """With what the reference makes of it in float64."""
    wide = {name: tensor.double() for name, tensor in arguments.items()}
    given = {name: tensor.double() for name, tensor in grads.items()}
    recurrent, start = wide["R"], wide["start"].squeeze(2)
    states, cache = reference.forward(function, wide["Wx"], recurrent, wide["b"], start)
    gates_grad, start_grad = reference.backward(
        function, recurrent, states, start, cache, given["states"], given["last"].squeeze(2)
    )
    of_parameters = reference.parameter_grads(function, gates_grad, states, start)
    found = dict(zip(_ARGUMENTS, (*of_parameters, start_grad.unsqueeze(2)), strict=True))
    return Problem(wide, given, {"states": states, "last": states[:, :, -1:], **found})


def problems(
    function: Function, group: Group, dtypes: Sequence[str], device: torch.device
) -> Iterator[tuple[str, Problem]]:
    """Each network of a group in each dtype."""
    kinds = list(dict.fromkeys(dtype != "float32" for dtype in dtypes))
    sets = [drawn(function, group, device, narrow=narrow) for narrow in kinds]
    joined = [
        {name: torch.cat([each[name] for each in some], _HEADS_AT[name]) for name in some[0]}
        for some in zip(*sets, strict=True)
    ]
    whole, first = solved(function, *joined), 0
    del sets, joined
    for narrow in kinds:
        for heads in group.heads:
            for dtype in dtypes:
                if (dtype != "float32") == narrow:
                    yield dtype, whole.part(first, heads)
            first += heads


def worst_error(
    function: Function, problem: Problem, dtype: str, backend: Any
) -> tuple[float, str]:
    """The largest relative error of the results of ``rnn``, and the name of the result that has it."""
    there = getattr(torch, dtype)
    inputs = [t.to(there).contiguous().requires_grad_() for t in problem.arguments.values()]
    results = scan_registry.rnn(*inputs, function=function, backend=backend)
    given = [grad.to(there).contiguous() for grad in problem.grads.values()]
    made = dict(zip(problem.grads, results, strict=True))
    made |= dict(zip(_ARGUMENTS, torch.autograd.grad(results, inputs, given), strict=True))
    worst = (0.0, "")
    for name, out in made.items():
        expected, called = problem.expected[name], name
        if name in _ARGUMENTS:
            called = f"gradient of {name}"
        if name in _BY_STATE:
            for state, *pair in zip(SIZES[function].states, out, expected, strict=True):
                worst = max(worst, (relative_error(*pair), f"{called}, {state}"))
        else:
            worst = max(worst, (relative_error(out, expected), called))
    return worst


# --- The sweep --------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of a cell on a backend in a dtype.

    taken    networks that it computed
    refused  those that it does not take
    units    the most of a head that it took
    errors   the worst by the number of steps
    at       where the worst of all was
    """

    function: str
    backend: str
    dtype: str
    taken: int = 0
    refused: int = 0
    units: int = 0
    errors: dict[int, float] = field(default_factory=dict)
    at: str = ""

    @property
    def error(self) -> float:
        return max(self.errors.values(), default=0.0)

    def add(self, group: Group, heads: int, error: float, what: str) -> None:
        if error >= self.error:
            self.at = f"{what}: {heads} × {group.dim}, batch {group.batch}, {group.time} steps"
        self.taken, self.units = self.taken + 1, max(self.units, group.dim)
        self.errors[group.time] = max(self.errors.get(group.time, 0.0), error)

    def defects(self) -> Iterator[str]:
        """The failures."""
        name, limit = f"{self.function} {self.backend} {self.dtype}", TOLERANCE[self.dtype]
        if not self.error <= limit:
            yield f"{name}: error {self.error:.1e} > {limit:.0e}, {self.at}"
        if not self.taken:
            yield f"{name}: took nothing"
        if self.refused and self.backend in UNBOUNDED:
            yield f"{name}: did not take {self.refused} networks"


def is_posed(backend: str, group: Group, heads: int) -> bool:
    """Plain torch is slow."""
    return backend != "reference" or group.time <= SHORT or (heads == 1 and group.dim == PLAIN_DIM)


def sweep(
    chosen: Sequence[Group], tallies: Sequence[Tally], device: torch.device, until: float
) -> int:
    """Add to the tallies, which say what is computed; the number of groups that time was too short for."""
    functions = list(dict.fromkeys(tally.function for tally in tallies))
    dtypes = list(dict.fromkeys(tally.dtype for tally in tallies))
    work = [(group, function) for group in chosen for function in functions]
    began = time.monotonic()
    for number, (group, function) in enumerate(work):
        now = time.monotonic()
        if now > until:
            return len(work) - number
        print(f"{now - began:5.0f} s: {function}, {group}", file=sys.stderr, flush=True)
        for dtype, problem in problems(function, group, dtypes, device):  # type: ignore[arg-type]
            heads = problem.arguments["R"].shape[1]
            for tally in tallies:
                if (tally.function, tally.dtype) != (function, dtype):
                    continue
                if not is_posed(tally.backend, group, heads):
                    continue
                try:
                    found = worst_error(function, problem, dtype, tally.backend)  # type: ignore[arg-type]
                except NoKernelError:
                    tally.refused += 1
                else:
                    tally.add(group, heads, *found)
    return 0


def show(tallies: Sequence[Tally], times: Sequence[int], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    for column in ("function", "backend", "dtype"):
        table.add_column(column, no_wrap=True)
    headings = [f"{steps} steps" if steps > 1 else "1 step" for steps in times]
    for column in ("networks", "not taken", "units", *headings, "limit"):
        table.add_column(column, justify="right")
    for tally in tallies:
        limit = TOLERANCE[tally.dtype]
        cells = [
            f"{tally.errors[t]:.1e}" + ("" if tally.errors[t] <= limit else " !")
            if t in tally.errors
            else "–"
            for t in times
        ]
        counts = map(str, (tally.taken, tally.refused, tally.units))
        table.add_row(tally.function, tally.backend, tally.dtype, *counts, *cells, f"{limit:.0e}")
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="default: cuda:0")
    parser.add_argument("--seed", type=int, help="default: another in every run")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin nothing after that")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    parser.add_argument("--function", action="append", choices=SIZES, help="may repeat")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="may repeat")
    parser.add_argument("--dtype", action="append", choices=TOLERANCE, help="may repeat")
    parser.add_argument("--dim", action="append", type=int, choices=DIMS, help="may repeat")
    parser.add_argument("--time", action="append", type=int, choices=TIMES, help="may repeat")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: check_rnn needs a GPU or --device cpu; torch finds none", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    seed = secrets.randbits(32) if options.seed is None else options.seed
    torch.manual_seed(seed)
    print(f"seed {seed}", flush=True)
    backends = options.backend or (BACKENDS if device.type == "cuda" else ("reference",))
    tallies = [
        Tally(function, backend, dtype)
        for function in options.function or SIZES
        for backend in backends
        for dtype in options.dtype or TOLERANCE
    ]
    times = options.time or TIMES
    chosen = [g for g in groups() if g.dim in (options.dim or DIMS) and g.time in times]
    began = time.monotonic()
    until = began + (options.budget or float("inf"))
    with scan_registry.require("ptx"):
        left = sweep(chosen, tallies, device, until)
    seconds = time.monotonic() - began
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    show(tallies, times, f"{where}: worst ‖out − ref‖ / ‖ref‖, seed {seed}, {seconds:.0f} s")
    defects = [defect for tally in tallies for defect in tally.defects()]
    if left:
        defects.append(f"the budget was too short for {left} groups of networks of a function")
    for defect in defects:
        print(f"error: {defect}", file=sys.stderr)
    if options.json:
        record = {
            "device": where,
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "scan_registry": scan_registry.__version__,
            "seed": seed,
            "seconds": round(seconds, 1),
            "left": left,
            "limits": TOLERANCE,
            "groups": [asdict(group) for group in chosen],
            "results": [asdict(tally) for tally in tallies],
        }
        write_records(options.json, record)
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
