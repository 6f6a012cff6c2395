"""The operator ``ssd_scan`` for JAX: how kernels are called, and the chunked form in JAX's operators where none runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scan_registry.base.strides import dense_strides
from scan_registry.dispatch.fit import Tier
from scan_registry.dispatch.select import Backend
from scan_registry.jax import packing
from scan_registry.jax.ffi import Outline, Selection, call_on_gpu, gpu, in_order, outline_of
from scan_registry.jax.primitives import (
    FOLD,
    SHARED,
    Arrays,
    Operator,
    Pullback,
    compute_dtype,
    define,
    softplus,
)
from scan_registry.kernels.ssd_scan.op import calls
from scan_registry.kernels.ssd_scan.problem import (
    CHUNK,
    DTYPES,
    STRIDED,
    Direction,
    SSDScanProblem,
)
from scan_registry.kernels.ssd_scan.spec import FAMILY


class Options(NamedTuple):
    """The arguments that are no arrays. ``lowest`` is the lowest tier that was allowed; ``training`` asks for what z gates."""

    softplus: bool
    limits: tuple[float, float]
    final: bool
    backend: Backend
    lowest: Tier
    training: bool = False


class Operands(NamedTuple):
    """Arrays as the operator takes them: B, C and z in the dtype of x; dt in that dtype, or as the others in that of the
    computation."""

    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    dt_bias: Any
    initial_state: Any


class _SSDScan(Operator):
    """Operands as ``Operands``. Results: the output, maybe the final state, and in training what z gates."""

    name = "ssd_scan"
    roles = (FOLD, FOLD, SHARED, FOLD, FOLD, SHARED, FOLD, SHARED, FOLD)
    result_roles = (FOLD, FOLD, FOLD)

    def outlines(self, operands: Arrays, options: Options) -> dict[str, Outline | None]:
        of = Operands(*operands)
        batch, _, heads, size = of.x.shape
        state = (batch, heads, size, of.B.shape[3]), compute_dtype(of.x)
        keeps = options.training and of.z is not None
        return {
            "out": outline_of(of.x),
            "final_state": state if options.final else None,
            "ungated": outline_of(of.x) if keeps else None,
        }

    def recorded(self, options: Options) -> Options:
        return options._replace(training=True)

    def saved(self, operands: Arrays, results: Arrays) -> tuple[Arrays, Arrays]:
        kept = None if Operands(*operands).z is None else results[-1]
        return operands, (*(None for _ in results[:-1]), kept)

    def composed(self, operands: Arrays, options: Options) -> list[Any]:
        of = Operands(*operands)
        y, final = _chunked(of, options)
        if of.D is not None:
            y = y + (of.D if of.D.ndim == 2 else of.D[:, None]) * of.x
        gated = y if of.z is None else y * jax.nn.silu(of.z.astype(y.dtype))
        results = {"out": gated.astype(of.x.dtype), "final_state": final}
        results["ungated"] = y.astype(of.x.dtype)
        outlines = self.outlines(of, options)
        return [results[name] for name, outline in outlines.items() if outline is not None]

    def run(self, platform: str, operands: Arrays, options: Options) -> list[Any] | None:
        of = Operands(*operands)
        if not _has_kernels(platform, of, options):
            return None
        outputs = self.outlines(of, options)
        written = _launch("forward", of, options, of._asdict(), outputs)
        return in_order(written, outputs)

    def run_adjoint(self, platform: str, pullback: Pullback, options: Options) -> list[Any] | None:
        of = Operands(*pullback.operands)
        if not _has_kernels(platform, of, options):
            return None
        out_grad, of_final = pullback.cotangents_like(of.x)
        inner = out_grad
        if of.z is not None:  # kernels take the gradient of what z gates
            inner = (out_grad * jax.nn.silu(of.z.astype("float32"))).astype(of.x.dtype)
        written = _launch_backward(of, options, inner, of_final, 8 in pullback.wanted)
        if written is None:
            return None

        of_heads = written["head_grads"].sum((1, 2))

        def of_D() -> Any:
            if of.D.ndim == 2:
                return (inner.astype("float32") * of.x).sum((0, 1))
            return of_heads[1]

        def of_z() -> Any:
            _, pull = jax.vjp(jax.nn.silu, of.z.astype("float32"))
            return pull(out_grad.astype("float32") * pullback.results[-1])[0]

        gradients = (
            lambda: written["x_grad"],
            lambda: written["dt_grad"],
            lambda: of_heads[0],
            lambda: written["B_grad"].sum(0),
            lambda: written["C_grad"].sum(0),
            of_D,
            of_z,
            lambda: of_heads[2],
            lambda: written["initial_grad"],
        )
        return [gradients[i]().astype(of[i].dtype) for i in pullback.wanted]


# --- By kernels -------------------------------------------------------------------------------


def _has_kernels(platform: str, of: Operands, options: Options) -> bool:
    if platform != "cuda" or options.backend == "reference" or of.x.size == 0:
        return False
    return str(of.x.dtype) in DTYPES


def problem_of(direction: Direction, of: Operands, options: Options) -> SSDScanProblem:
    """What one pass poses to a kernel. Arrays lie without gaps; a backward pass has no z."""
    arrays = {**of._asdict(), "grad": of.x}
    strides: list[int] = []
    for name in STRIDED[direction]:
        array = arrays[name]
        strides += (0, 0, 0) if array is None else dense_strides(array.shape)[:3]
    return calls.make_problem(
        direction,
        str(of.x.dtype),
        of.x.shape,
        of.B.shape,
        strides,
        softplus=options.softplus,
        limits=options.limits,
        has_z=of.z is not None,
        wide_dt=of.dt.dtype.itemsize > 2,
        wide_D=of.D is not None and of.D.ndim == 2,
        sequences=0,
        gpu=gpu(),
    )


def _launch(
    direction: Direction,
    of: Operands,
    options: Options,
    inputs: dict[str, Any],
    outputs: dict[str, Outline | None],
) -> dict[str, Any] | None:
    problem = problem_of(direction, of, options)
    selection = Selection(FAMILY, problem, options.backend, options.lowest)
    return call_on_gpu(selection, inputs, lambda scalars: outputs)


def _launch_backward(
    of: Operands, options: Options, out_grad: Any, final_grad: Any, initial: bool
) -> dict[str, Any] | None:
    """What the kernels of a backward pass write; ``initial``: whether the initial state's gradient is wanted."""
    of = of._replace(z=None)
    problem = problem_of("backward", of, options)
    p, dtype, wide = problem, str(of.x.dtype), "float32"
    slots: Outline = (p.batch, p.slots, p.heads, p.head_size, p.state_size), dtype
    inputs = {**of._asdict(), "out_grad": out_grad, "final_grad": final_grad}
    state = (p.batch, p.heads, p.head_size, p.state_size), wide
    states = _launch("states", of, options, inputs, {"states": slots})
    handed = {"adjoints": slots, "initial_grad": state if initial else None}
    adjoints = _launch("adjoint", of, options, inputs, handed)
    if states is None or adjoints is None:
        return None
    inputs |= {"states": states["states"], "adjoints": adjoints["adjoints"]}
    projection = (p.splits, *of.B.shape), wide if p.splits > 1 else dtype
    outputs: dict[str, Outline | None] = {
        "x_grad": outline_of(of.x),
        "dt_grad": (of.x.shape[:3], wide),
        "head_grads": ((3, p.batch, p.slots, p.heads), wide),
        "B_grad": projection,
        "C_grad": projection,
    }
    written = _launch("backward", of, options, inputs, outputs)
    return None if written is None else adjoints | written


# --- In JAX's operators -----------------------------------------------------------------------


def step_sizes(of: Operands, options: Options) -> Any:
    """δ (batch, time, heads)."""
    step = of.dt.astype(compute_dtype(of.x))
    if of.dt_bias is not None:
        step = step + of.dt_bias
    if options.softplus:
        step = softplus(step)
    return jnp.clip(step, *options.limits)


def _chunked(of: Operands, options: Options) -> tuple[Any, Any]:
    """s·C of all steps, and the final state. Within chunks by products of matrices; states are handed on from chunk to chunk."""
    wide, step = compute_dtype(of.x), step_sizes(of, options)
    batch, time, heads, size = of.x.shape
    count = -(-time // CHUNK)

    def in_chunks(array: Any) -> Any:
        """(batch, chunks, CHUNK, …), with zeros after the last step."""
        widths = [(0, 0), (0, count * CHUNK - time), *[(0, 0)] * (array.ndim - 2)]
        return jnp.pad(array, widths).reshape(batch, count, CHUNK, *array.shape[2:])

    def of_heads(array: Any) -> Any:
        return in_chunks(jnp.repeat(array.astype(wide), heads // array.shape[2], axis=2))

    step, B, C = in_chunks(step), of_heads(of.B), of_heads(of.C)
    tokens = step[..., None] * in_chunks(of.x.astype(wide))
    logs = jnp.cumsum(step * of.A, axis=2)  # of the gates' products from the chunk's begin on
    steps = jnp.arange(CHUNK)
    before = (steps[:, None] >= steps)[:, :, None]
    between = jnp.where(before, logs[:, :, :, None] - logs[:, :, None], -jnp.inf)
    scores = jnp.einsum("bkihn,bkjhn->bkijh", C, B) * jnp.exp(between)
    y = jnp.einsum("bkijh,bkjhp->bkihp", scores, tokens)
    to_end = jnp.exp(logs[:, :, -1:] - logs)
    added = jnp.einsum("bkjhn,bkjhp->bkhpn", B * to_end[..., None], tokens)
    gates = jnp.exp(logs[:, :, -1])[..., None, None]
    first = of.initial_state
    if first is None:
        first = jnp.zeros((batch, heads, size, of.B.shape[3]), wide)
    if count == 0:
        return y.reshape(batch, 0, heads, size), first
    added = added.at[:, 0].add(gates[:, 0] * first)
    _, after = lax.associative_scan(packing.compose, (gates, added), axis=1)
    entering = jnp.concatenate([first[:, None], after[:, :-1]], axis=1)
    y = y + jnp.einsum("bkihn,bkhpn->bkihp", C * jnp.exp(logs)[..., None], entering)
    return y.reshape(batch, count * CHUNK, heads, size)[:, :time], after[:, -1]


scan = define(_SSDScan())
