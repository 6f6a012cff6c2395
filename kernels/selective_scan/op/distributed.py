"""``selective_scan`` of a sequence whose time is cut between the ranks of a group.

Forward each rank scans its part twice. The first scan starts from zero and makes the part's summary: the product of the gates,
and the last state. The second scan starts from the state before the part. Both scans work on chunks of the part at once
(``distributed_chunks``), unless sequences are packed.

Backward nothing is read twice on a GPU, unless sequences are packed. The kernel ``adjoint``, which the backward pass of few
channels runs in any case, tells what the gradient of the state before a part is, for any gradient of the state after it. Ranks
exchange that, and the kernel ``backward`` goes on from the right gradients.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from scan_registry.dispatch import policy
from scan_registry.dispatch.select import Backend
from scan_registry.distributed import group as groups
from scan_registry.distributed import parts, reduce
from scan_registry.distributed.group import Members, untraced
from scan_registry.distributed.headers import Terms
from scan_registry.distributed.opening import check_local
from scan_registry.distributed.reduce import Call, Tensors
from scan_registry.kernels.selective_scan import reference
from scan_registry.kernels.selective_scan.op import distributed_chunks as chunks
from scan_registry.kernels.selective_scan.op import plans
from scan_registry.kernels.selective_scan.op.arguments import Arguments, Options, normalised
from scan_registry.kernels.selective_scan.op.autograd import first_derivative
from scan_registry.kernels.selective_scan.op.distributed_chunks import Summary
from scan_registry.kernels.selective_scan.op.function import selective_scan as scan_of_one
from scan_registry.ops.call import unobserved
from scan_registry.ops.checks import as_bool

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from scan_registry.distributed.group import Group
    from scan_registry.kernels.selective_scan.op.function import SelectiveScanOptions


__all__ = ["selective_scan"]

#: The tensors of a call in their order here.
_NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


# fmt: off
@overload
def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    initial_state: Tensor | None = None, *,
    return_final_state: Literal[False] = False,
    group: Group = None, **options: Unpack[SelectiveScanOptions],
) -> Tensor: ...
@overload
def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    initial_state: Tensor | None = None, *,
    return_final_state: Literal[True],
    group: Group = None, **options: Unpack[SelectiveScanOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    initial_state: Tensor | None = None, *,
    return_final_state: bool,
    group: Group = None, **options: Unpack[SelectiveScanOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
# fmt: on


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    initial_state: Tensor | None = None, *, group: Group = None, cu_seqlens: Tensor | None = None,
    return_final_state: bool = False, backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The output of a selective scan along a time dimension that is cut between the ranks of a group.

    The formula is that of ``scan_registry.selective_scan``. Each rank holds a contiguous part of time, in rank order. A part
    may have any length, including 0. The rules for ranks, gradients and errors are those of
    ``scan_registry.distributed.linear_scan``. Forward, each rank scans its part twice, the first time for a summary that the
    ranks exchange. Backward, a summary costs little on a GPU, and as much as the pass itself elsewhere.

    Args:
        u: this rank's part, as for ``scan_registry.selective_scan``.
        delta: this rank's part, like ``u``.
        A: the same on every rank, as are ``D``, ``delta_bias``, and ``B`` and ``C`` if they do not change with time. The sum
            of the ranks' gradients is the gradient of such a tensor.
        B, C: this rank's part, as for ``scan_registry.selective_scan``.
        D, delta_bias, delta_softplus: as for ``scan_registry.selective_scan``.
        z: this rank's part, like ``u``, or None for no gate.
        initial_state: the state before the whole sequence, (batch, Dm, N), or before each packed one, (batch, sequences, Dm,
            N). Every rank passes the same values, or every rank None; the values are not compared. The gradient is nonzero
            only on the rank at which a sequence's scan starts.
        group, cu_seqlens: as for ``scan_registry.distributed.linear_scan``.
        return_final_state: also return the state after the last step, or that of each packed sequence.
        backend: as for ``scan_registry.selective_scan``.

    Returns:
        This rank's output, in the dtype of ``u``, and if asked for the final state, which is the same on every rank.
        Differentiable once, in all floating-point and complex tensors.

    Raises:
        TypeError, ValueError, NoKernelError: as for ``scan_registry.selective_scan``.
        TypeError, ValueError, RuntimeError: for the group and for other ranks, as for ``scan_registry.distributed.linear_scan``.
        RuntimeError: a second derivative is asked for.
    """
    tensors = u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens
    return call(tensors, (delta_softplus, return_final_state, backend), group)  # type: ignore[no-any-return]


@untraced
def call(every: tuple[Any, ...], options: tuple[Any, ...], group: Any) -> Any:
    """As ``selective_scan``, with tensors and options as ``call_sharded`` takes them."""
    tensors, cu_seqlens = every[:-1], every[-1]
    softplus, final, backend = options
    members = groups.resolve(group)
    named = dict(zip(_NAMES, tensors, strict=True))
    check_local(members, "selective_scan", **named, cu_seqlens=cu_seqlens)
    if members.size == 1:
        one: Any = scan_of_one
        named |= {"cu_seqlens": cu_seqlens, "return_final_state": final, "backend": backend}
        return one(**named, delta_softplus=softplus)
    prepare = partial(_prepared, members, tensors, cu_seqlens, *options)
    name = "selective_scan"
    out, final_state = reduce.scan(members, name, tensors, cu_seqlens, options, prepare, _converted)
    return out if final_state is None else (out, final_state)


# --- Arguments --------------------------------------------------------------------------------


def _converted(tensors: tuple[Any, ...]) -> Tensors:
    """The tensors as ``normalised`` converts them, if no dtype changes."""
    u, delta, A, B, C, *others = tensors
    projections = [t.unsqueeze(1) if t.dim() == 3 else t for t in (B, C)]
    return (u, delta, A, *projections, *others)


def _prepared(
    members: Members,
    every: tuple[Any, ...],
    cu_seqlens: Any,
    softplus: Any,
    final: Any,
    backend: Any,
) -> Call:
    """The checked arguments, with the terms that ranks compare."""
    as_bool("return_final_state", final)
    bounds = parts.host_bounds(cu_seqlens)
    local = parts.local_bounds(bounds, every[0], 2)
    arguments = normalised(*(*every, local, softplus, backend))._replace(cu_seqlens=None)
    terms, tensors = _terms(arguments, softplus, bounds, final), arguments.differentiable
    u, A = arguments.u, arguments.A
    state = u.shape[0], *A.shape

    def run(part: parts.Part, cut: Tensor | None, required: Any) -> Run:
        return Run(
            *(members, terms, Options(softplus, backend), tuple(u.shape), u.dtype, u.device),
            *(state, -3, reference.state_dtype(u.dtype, A.dtype), bool(final), False),
            *(bounds, part, cut, required),
        )

    pairs = zip(every, tensors, strict=True)
    reusable = all(other is None or one.dtype == other.dtype for one, other in pairs)
    return Call(tensors, bounds, terms, False, run, reusable)


def _terms(
    arguments: Arguments, softplus: Any, bounds: tuple[int, ...] | None, final: Any
) -> Terms:
    """What ranks compare."""
    u, tensors = arguments.u, arguments.differentiable
    shapes = {"u": (*u.shape[:2], "T"), "A": tuple(arguments.A.shape)}
    for name in "BC":
        projection = getattr(arguments, name)
        # Without time, which is the last of four dimensions.
        shapes[name] = tuple(projection.shape)[: projection.dim() // 4 * 3 or 2]
    names = [name for name in ("D", "z", "delta_bias") if getattr(arguments, name) is not None]
    own = (
        *((name, f"({', '.join(map(str, shape))})") for name, shape in shapes.items()),
        ("dtype", str(u.dtype).removeprefix("torch.")),
        ("of A", str(arguments.A.dtype).removeprefix("torch.")),
        ("on", u.device.type),
        ("with", " ".join(names) or None),
        ("delta_softplus", bool(softplus)),
    )
    return parts.terms_of("selective_scan", own, u.shape[2], tensors, bounds, bool(final))


# --- Passes -----------------------------------------------------------------------------------


class Run(reduce.Run):
    """``tensors`` are those of ``_NAMES``. The backward pass needs all of them, the states that the chunks started from, and the
    kernel's checkpoints."""

    options: Options

    def summary(self, tensors: Any, row: Tensor) -> Summary:
        arguments = _steps(Arguments._make((*tensors, None)), self.part.tail)
        count = 1 if self.bounds is not None else chunks.chunk_count(arguments)
        arguments = chunks.chunks_of(arguments._replace(D=None, z=None, initial_state=None), count)
        last = plans.forward(arguments, self.options, False).last
        products = _decays(summed_sizes(arguments, self.options), arguments.A)
        summary = Summary(*(x.unflatten(0, (-1, count)) for x in (products, last)))
        summary.write(row)
        return summary

    def scan(
        self, tensors: Any, entered: Tensor | None, summary: Summary | None, wants: int
    ) -> tuple[Tensor, Tensor | None, Tensors]:
        count = 1 if summary is None else summary.totals.shape[1]
        if summary is not None and count > 1:
            entered = summary.before(entered)
        arguments = Arguments._make((*tensors[:-1], entered, self.bounds))
        outputs = plans.forward(chunks.chunks_of(arguments, count), self.options, bool(wants))
        out = chunks.joined(outputs.out, count)
        if count > 1:  # No view: users could not change a view that a function returns in place.
            out = out.detach()
        return out, outputs.last, (*tensors, entered, outputs.checkpoints)

    def _chunks(self, saved: Any, out_grad: Tensor) -> tuple[int, Arguments, Tensor]:
        """The number of chunks, the arguments of the second scan of all, and the gradients of their outputs."""
        *tensors, _, entered, _ = saved
        batch = tensors[0].shape[0]
        count = 1 if entered is None or not batch else entered.shape[0] // batch
        arguments = chunks.chunks_of(Arguments._make((*tensors, entered, self.bounds)), count)
        return count, arguments, chunks.chunked(out_grad, count)

    def backward_summary(
        self, saved: Any, out_grad: Tensor, row: Tensor
    ) -> tuple[Summary, plans.Adjoints | None] | None:
        """The result is of the chunks, and what the kernel ``adjoint`` has computed; None if sequences are packed."""
        (count, arguments, out_grad), checkpoints = self._chunks(saved, out_grad), saved[-1]
        if self.bounds is not None:
            arguments = _steps(arguments._replace(initial_state=None), self.part.head)
            out_grad, checkpoints = _cut(out_grad, self.part.head), checkpoints.new_empty(0)
        with policy.as_required(self.required):
            adjoints = plans.adjoint(arguments, out_grad, self.options)
            if adjoints is None:
                before = _gradient_before(arguments, checkpoints, out_grad, self.options)
                products = _decays(summed_sizes(arguments, self.options), arguments.A.conj())
            else:
                decays = _decays(adjoints.sizes, arguments.A)
                before = Summary(decays, adjoints.gradients, True).after(None)[-1]
                products = _decays(adjoints.sizes.sum(1), arguments.A)
        products, before = (x.unflatten(0, (-1, count)) for x in (products, before))
        summary = Summary(products, before, True)
        summary.write(row)
        return (summary, adjoints) if self.bounds is None else None

    def gradients(
        self,
        saved: Any,
        out_grad: Tensor,
        behind: Tensor | None,
        summary: tuple[Summary, plans.Adjoints | None] | None,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        count, arguments, out_grad = self._chunks(saved, out_grad)
        of_chunks, adjoints = summary or (None, None)
        if of_chunks is not None and count > 1:
            behind = of_chunks.before(behind)
        exists = tuple(
            w and t is not None for w, t in zip(wanted, arguments.differentiable, strict=True)
        )
        with policy.as_required(self.required):
            tensors = arguments, saved[-1], out_grad, behind
            if unobserved(*arguments, out_grad, behind):
                grads = plans.backward(*tensors, self.options, exists, adjoints)
            else:
                grads = first_derivative(*tensors, self.options, exists)
        pairs = zip(chunks.whole_gradients(grads, count), saved[:-2], strict=True)
        return tuple(x if x is None or t is None else x.to(t.dtype) for x, t in pairs)


def _steps(arguments: Arguments, steps: parts.Steps | None) -> Arguments:
    """The arguments of a range of steps, of one sequence; all steps for None."""
    u, delta, A, B, C, D, z, bias, initial_state, _ = arguments
    if steps is None:
        return arguments._replace(cu_seqlens=None)
    begin, end = steps
    pairs = (
        (2 * begin, 2 * end) if A.is_complex() else steps
    )  # complex numbers are pairs along time
    B, C = (_cut(x, pairs) if x.dim() == 4 else x for x in (B, C))
    u, delta, z = (_cut(x, steps) for x in (u, delta, z))
    return Arguments(u, delta, A, B, C, D, z, bias, initial_state, None)


def _cut(x: Any, steps: parts.Steps | None) -> Any:
    return x if x is None or steps is None else x.narrow(-1, steps[0], steps[1] - steps[0])


def _decays(sizes: Tensor, A: Tensor) -> Tensor:
    """The products of the gates of steps whose sizes add up to ``sizes``, (…, channels)."""
    return torch.exp(sizes.unsqueeze(-1) * A)


def _gradient_before(
    arguments: Arguments, checkpoints: Tensor, out_grad: Tensor, options: Options
) -> Tensor:
    """The gradient of the state before the steps, where no kernel makes it alone: by a whole backward pass."""
    if arguments.initial_state is None:
        wide = reference.state_dtype(arguments.u.dtype, arguments.A.dtype)
        shape = plans.state_shape(arguments)
        zeros = torch.zeros(shape, dtype=wide, device=arguments.A.device)
        arguments = arguments._replace(initial_state=zeros)
    wanted = (False,) * 8 + (True,)
    gradient = first_derivative(arguments, checkpoints, out_grad, None, options, wanted)[8]
    assert gradient is not None
    return gradient


def summed_sizes(arguments: Arguments, options: Options) -> Tensor:
    """The sums of the step sizes, (batch, channels), in the computation's dtype. With softplus a kernel adds them up on a GPU,
    unless no kernel takes the arguments."""
    delta, bias = arguments.delta, arguments.delta_bias
    if not options.softplus:
        compute = reference.compute_dtype(delta.dtype)
        total: Tensor = delta.sum(-1, dtype=compute)
        return total if bias is None else total + delta.shape[-1] * bias.to(compute)
    by_kernel = plans.sizes(arguments, options)
    return reference.step_sizes(delta, bias, True).sum(-1) if by_kernel is None else by_kernel
