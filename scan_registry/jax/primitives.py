"""Operators as primitives of JAX: how they are traced, lowered, batched and differentiated.

A family of kernels describes its operator as an ``Operator``. That gives three primitives: the operator; its tangent, which
is linear in the tangents and composed of JAX's operators; and its adjoint, which the tangent is transposed to and which the
backward kernels compute. So every mode of differentiation is there, of any order: the first reverse-mode derivative runs the
backward kernels, and what else is asked for is composed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from scan_registry.jax import packing
from scan_registry.jax.ffi import PLATFORMS, Outline, outline_of

#: Arrays, or None in the place of one that is missing.
Arrays = Sequence[Any]


#: JAX's own, which have no types for mypy.
_primitive: Any = type(lax.add_p)  # jax.extend.core, which has it too, imports Pallas, for 60 ms
_zero: Any = ad.Zero
_undefined: Any = ad.is_undefined_primal

#: How an operand or a result takes a further dimension: in front; in front, or of size 1 there if all share the operand; as
#: a part of its first dimension; not at all, as all share the operand.
FULL, BROADCAST, FOLD, SHARED = "full", "broadcast", "fold", "shared"


def compute_dtype(array: Any) -> str:
    """What kernels and operators compute states in, of arrays of the dtype of ``array``."""
    return "float64" if array.dtype == "float64" else "float32"


def softplus(x: Any) -> Any:
    """As kernels have it: the identity above 20."""
    return jnp.where(x > 20, x, jax.nn.softplus(jnp.minimum(x, 20)))


class Derivative(NamedTuple):
    """Of a tangent or an adjoint: the operator's own options, the outlines of what it returns, and of an adjoint the places
    of the operands whose gradients are wanted."""

    options: Any
    outlines: tuple[Outline, ...]
    wanted: tuple[int, ...] | None = None


class Pullback(NamedTuple):
    """What gradients are computed from. A cotangent that is None is zero; the gradients of the operands at the places ``wanted``
    are wanted. Results are None where an operator that is linear in those operands is transposed."""

    operands: Arrays
    results: Arrays
    cotangents: Arrays
    wanted: Sequence[int]

    def cotangents_like(self, array: Any) -> tuple[Any, Any]:
        """The cotangents of a first result that is like ``array``, and of the final state, which may be None."""
        first, final = (*self.cotangents, None)[:2]
        return jnp.zeros_like(array) if first is None else first, final


class Operator(Protocol):
    """What a family says of its operator. ``options`` is hashable, and its own.

    name      of the operator
    outlines  of the results, by name; None where there is none
    run       the results, on a platform that has kernels; None if none runs there, and JAX's operators may
    composed  the results, composed of JAX's operators; differentiable
    saved     which operands, and which results, derivatives need
    tangent   the tangents of the results; a tangent that is None is zero
    adjoint   the gradients that a pullback wants, composed of JAX's operators
    run_adjoint  the same by the backward kernels, as ``run``
    roles, result_roles  how operands and results take a further dimension of ``vmap``
    bounds    the place of ``cu_seqlens`` among the operands, and how many steps time has; None if there is no such operand.
              From the operands, and for derivatives also from the saved results, and the tangents or cotangents
    """

    name: str
    roles: tuple[str, ...]
    result_roles: tuple[str, ...]

    def outlines(self, operands: Arrays, options: Any) -> Mapping[str, Outline | None]: ...
    def run(self, platform: str, operands: Arrays, options: Any) -> list[Any] | None: ...
    def composed(self, operands: Arrays, options: Any) -> list[Any]: ...

    def shapes(self, operands: Arrays, options: Any) -> list[Outline]:
        """Outlines of the results that are there."""
        outlines = self.outlines(operands, options).values()
        return [outline for outline in outlines if outline is not None]

    def bounds(self, groups: Sequence[Arrays], options: Any) -> tuple[int, int] | None:
        return None

    def saved(self, operands: Arrays, results: Arrays) -> tuple[Arrays, Arrays]:
        return operands, results

    def recorded(self, options: Any) -> Any:
        """The options of a call that is differentiated. It may have results beside those of ``options``, for the derivatives."""
        return options

    def folds(self, operands: Arrays) -> bool:
        """Whether a further dimension may become a part of the first one."""
        return True

    def tangent(
        self, operands: Arrays, results: Arrays, tangents: Arrays, options: Any
    ) -> list[Any]:
        active = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def of_active(*values: Any) -> list[Any]:
            return self.composed(_with(operands, active, values), options)

        # Of an operand that all share and its tangent, one alone may have the further dimension of vmap.
        pairs = [jnp.broadcast_arrays(operands[i], tangents[i]) for i in active]
        primals, dots = zip(*pairs, strict=True)
        return list(jax.jvp(of_active, primals, dots)[1])

    def adjoint(self, of: Pullback, options: Any) -> list[Any]:
        def of_wanted(*values: Any) -> list[Any]:
            return self.composed(_with(of.operands, of.wanted, values), options)

        outputs, pull = jax.vjp(of_wanted, *(of.operands[i] for i in of.wanted))
        pairs = zip(outputs, of.cotangents, strict=True)
        return list(pull([jnp.zeros_like(o) if c is None else c for o, c in pairs]))

    def run_adjoint(self, platform: str, of: Pullback, options: Any) -> list[Any] | None:
        return None


def _with(operands: Arrays, places: Sequence[int], values: Sequence[Any]) -> Arrays:
    """The operands, with ``values`` in those places."""
    changed = dict(zip(places, values, strict=True))
    return [changed.get(i, operand) for i, operand in enumerate(operands)]


def define(operator: Operator) -> Callable[[Arrays, Any], list[Any]]:
    """A function of operands and options that calls the operator."""

    def pullback(groups: Any, of: Derivative, platform: str | None = None) -> Pullback:
        operands = _defined(operator, groups, of.options, platform)
        return Pullback(operands, groups[1], groups[2], of.wanted or ())

    def run(platform: str, groups: Any, options: Any) -> list[Any] | None:
        return operator.run(platform, _defined(operator, groups, options, platform), options)

    adjoint = _Primitive(
        f"{operator.name}_adjoint",
        lambda groups, options: list(options.outlines),
        lambda platform, groups, of: operator.run_adjoint(
            platform, pullback(groups, of, platform), of.options
        ),
        lambda groups, of: operator.adjoint(pullback(groups, of), of.options),
    )
    tangent = _Primitive(
        f"{operator.name}_tangent",
        lambda groups, of: list(of.outlines),
        lambda platform, groups, of: None,
        lambda groups, of: operator.tangent(
            _defined(operator, groups, of.options), groups[1], groups[2], of.options
        ),
    )
    forward = _Primitive(
        operator.name,
        lambda groups, options: operator.shapes(groups[0], options),
        run,
        lambda groups, options: operator.composed(_defined(operator, groups, options), options),
    )
    ad.primitive_jvps[forward.primitive] = partial(_forward_jvp, operator, forward, tangent)
    ad.primitive_transposes[tangent.primitive] = partial(_transpose, adjoint)
    ad.primitive_transposes[forward.primitive] = partial(_transpose_forward, adjoint)
    for one in (forward, tangent, adjoint):
        batching.primitive_batchers[one.primitive] = partial(_batch, operator, one)
    for one in (tangent, adjoint):
        ad.primitive_jvps[one.primitive] = partial(_composed_jvp, one)
    return lambda operands, options: forward((operands,), options)


def _defined(
    operator: Operator, groups: Sequence[Arrays], options: Any, platform: str | None = None
) -> Arrays:
    """The operands, with ``cu_seqlens`` that no kernel or operator takes for places outside an array. The C code for CPUs gets
    them as they are, and refuses those."""
    operands, bounds = groups[0], operator.bounds(groups, options)
    if platform == "cpu" or bounds is None or operands[bounds[0]] is None:
        return operands
    place, steps = bounds
    return _with(operands, [place], [packing.confined(operands[place], steps)])


class _Primitive:
    """A primitive whose operands come in groups, some of them None."""

    def __init__(
        self,
        name: str,
        outlines: Callable[[Any, Any], list[Outline]],
        run: Callable[[str, Any, Any], list[Any] | None],
        composed: Callable[[Any, Any], list[Any]],
    ) -> None:
        self._outlines, self._run, self.composed = outlines, run, composed
        self.primitive: Any = _primitive(f"scan_registry.{name}")
        self.primitive.multiple_results = True
        self.primitive.def_impl(lambda *arrays, **static: self._compiled(**static)(*arrays))
        self.primitive.def_abstract_eval(self._abstract)
        for platform in (None, *PLATFORMS):
            lowered = mlir.lower_fun(partial(self.on, platform), multiple_results=True)
            _register_lowering(self.primitive, lowered, platform)

    def __call__(self, groups: Sequence[Arrays], options: Any) -> list[Any]:
        present = tuple(tuple(array is not None for array in group) for group in groups)
        arrays = [array for group in groups for array in group if array is not None]
        return list(self.primitive.bind(*_alike(arrays), present=present, options=options))

    def on(self, platform: str | None, *arrays: Any, present: Any, options: Any) -> list[Any]:
        """The results on a platform, or on any."""
        groups = grouped(arrays, present)
        results = None if platform is None else self._run(platform, groups, options)
        return self.composed(groups, options) if results is None else results

    @cache  # noqa: B019  # primitives live as long as the process
    def _compiled(self, **static: Any) -> Callable[..., Any]:
        compiled: Callable[..., Any] = jax.jit(partial(self.primitive.bind, **static))
        return compiled

    def _abstract(self, *avals: Any, present: Any, options: Any) -> list[Any]:
        outlines = self._outlines(grouped(avals, present), options)
        if jax.sharding.get_abstract_mesh().empty:
            return [jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in outlines]

        def like_all(*arrays: Any) -> list[Any]:
            """Results that vary over the axes of a mesh over which the arrays do."""
            one: Any = sum(lax.full_like(array, 0, shape=(), dtype="float32") for array in arrays)
            return [jnp.broadcast_to(one.astype(dtype), shape) for shape, dtype in outlines]

        return list(jax.make_jaxpr(like_all)(*avals).out_avals)


def grouped(arrays: Arrays, present: Sequence[Sequence[bool]]) -> list[list[Any]]:
    """The arrays in groups, with None where there is none."""
    left = iter(arrays)
    return [[next(left) if there else None for there in group] for group in present]


def _register_lowering(primitive: Any, rule: Any, platform: str | None) -> None:
    try:
        mlir.register_lowering(primitive, rule, platform=platform)
    except NotImplementedError:
        if platform == "cpu":
            raise  # else this JAX has no such platform


def _varying(array: Any) -> frozenset[Any]:
    """The axes of a mesh over which an array in ``shard_map`` varies."""
    aval = jax.typeof(array)
    axes = getattr(aval, "mat", None)  # since 0.10
    varying = getattr(aval, "vma", frozenset()) if axes is None else axes.varying
    return frozenset(varying)


def _alike(arrays: Arrays) -> Arrays:
    """The arrays, all varying over the same axes of a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return arrays
    union = frozenset[Any]().union(*map(_varying, arrays))
    alike = []
    for array in arrays:
        missing = tuple(union - _varying(array))
        alike.append(lax.pcast(array, missing, to="varying") if missing else array)
    return alike


# --- Derivatives ------------------------------------------------------------------------------


def _forward_jvp(
    operator: Operator,
    forward: _Primitive,
    tangent: _Primitive,
    primals: Any,
    tangents: Any,
    *,
    present: Any,
    options: Any,
) -> Any:
    (operands,) = grouped(primals, present)
    (dots,) = grouped([_nonzero(dot) for dot in tangents], present)
    if all(dot is None for dot in dots):
        results = forward((operands,), options)
        return results, [_zero(jax.typeof(r).to_tangent_aval()) for r in results]
    every = forward((operands,), operator.recorded(options))
    kept = operator.saved(operands, every)
    results = every[: len(operator.shapes(operands, options))]
    of = Derivative(options, tuple(map(outline_of, results)))
    return results, tangent((*kept, dots), of)


def _nonzero(tangent: Any) -> Any:
    """The tangent; None for one that is zero, or that an integer has."""
    zero = type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0
    return None if zero else tangent


def _composed_jvp(
    of: _Primitive, primals: Any, tangents: Any, *, present: Any, options: Any
) -> Any:
    """Of a tangent or an adjoint: a second derivative."""
    active = [i for i, dot in enumerate(tangents) if _nonzero(dot) is not None]

    def of_active(*values: Any) -> list[Any]:
        return of.composed(grouped(_with(primals, active, values), present), options)

    dots = tuple(tangents[i] for i in active)
    _, out = jax.jvp(of_active, tuple(primals[i] for i in active), dots)
    return of.primitive.bind(*primals, present=present, options=options), list(out)


def _transpose(
    adjoint: _Primitive, cotangents: Any, *arrays: Any, present: Any, options: Any
) -> list[Any]:
    """Of a tangent: it is linear in the tangents, which are wanted where they are undefined."""
    operands, results, dots = grouped(arrays, present)
    known = [None if type(c) is ad.Zero else c for c in cotangents]
    wanted = tuple(i for i, dot in enumerate(dots) if _undefined(dot))
    outlines = tuple(outline_of(dots[i].aval) for i in wanted)
    of = Derivative(options.options, outlines, wanted)
    gradients = iter(adjoint((operands, results, known), of))
    return [next(gradients) if _undefined(array) else None for array in arrays]


def _transpose_forward(
    adjoint: _Primitive, cotangents: Any, *arrays: Any, present: Any, options: Any
) -> list[Any]:
    """Of an operator in a tangent that is linear in those of its operands that are undefined: their gradients need neither these
    operands nor the results, and has zeros in the place of these operands."""
    (operands,) = grouped(arrays, present)
    known = [_zeros(c.aval) if type(c) is ad.Zero else c for c in cotangents]
    wanted = tuple(i for i, operand in enumerate(operands) if _undefined(operand))
    outlines = tuple(outline_of(operands[i].aval) for i in wanted)
    defined = [_zeros(o.aval) if i in wanted else o for i, o in enumerate(operands)]
    of = Derivative(options, outlines, wanted)
    gradients = iter(adjoint((defined, [None] * len(known), known), of))
    return [next(gradients) if _undefined(array) else None for array in arrays]


def _zeros(aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype)


# --- Batching ---------------------------------------------------------------------------------


def _batch(
    operator: Operator, of: _Primitive, arrays: Any, dims: Any, *, present: Any, options: Any
) -> Any:
    """One call with a further dimension where that has the right results, or else one call after the other."""
    size = next(a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None)
    derivative = options if isinstance(options, Derivative) else None
    wanted = None if derivative is None else derivative.wanted
    roles = _roles(operator, present, wanted is not None)
    of_results = operator.result_roles if wanted is None else [operator.roles[i] for i in wanted]
    mapped = [role for d, role in zip(dims, roles, strict=True) if d is not None]
    shared = SHARED in (mapped if wanted is None else [*mapped, *of_results])
    if shared or not operator.folds(grouped(arrays, present)[0]):
        return _one_by_one(of, arrays, dims, present, options)
    if wanted is not None:
        roles = [FULL if role == BROADCAST else role for role in roles]
    batched = [_further(*own, size) for own in zip(arrays, dims, roles, strict=True)]
    if derivative is not None:
        pairs = zip(derivative.outlines, of_results, strict=False)
        further = tuple(_further_outline(*outline, size, role) for outline, role in pairs)
        options = derivative._replace(outlines=further)
    results = of(grouped(batched, present), options)
    apart = [_apart(*own, size) for own in zip(results, of_results, strict=False)]
    return apart, [0] * len(apart)


def _apart(result: Any, role: str, size: int) -> Any:
    """A result with the further dimension in front, whatever its role."""
    if role != FOLD:
        return result
    return result.reshape(size, result.shape[0] // size, *result.shape[1:])


def _roles(operator: Operator, present: Any, adjoint: bool) -> list[str]:
    """Those of all arrays of a primitive: operands, results, and tangents or, of an adjoint, cotangents."""
    inner = operator.result_roles if adjoint else operator.roles
    groups = zip((operator.roles, operator.result_roles, inner), present, strict=False)
    return [
        role for group, there in groups for role, here in zip(group, there, strict=False) if here
    ]


def _further(array: Any, d: int | None, role: str, size: int) -> Any:
    """An array with the further dimension in its role; ``d`` is where it has it, or None."""
    if role == SHARED:
        return array
    front = array[None] if d is None else jnp.moveaxis(array, d, 0)
    if role == BROADCAST:
        return front
    whole = jnp.broadcast_to(front, (size, *front.shape[1:]))
    return whole.reshape(size * whole.shape[1], *whole.shape[2:]) if role == FOLD else whole


def _further_outline(shape: tuple[int, ...], dtype: str, size: int, role: str) -> Outline:
    return (size * shape[0], *shape[1:]) if role == FOLD else (size, *shape), dtype


def _one_by_one(of: _Primitive, arrays: Any, dims: Any, present: Any, options: Any) -> Any:
    mapped = {i: jnp.moveaxis(arrays[i], d, 0) for i, d in enumerate(dims) if d is not None}

    def one(values: Any) -> list[Any]:
        every = _with(arrays, [*mapped], values)
        return of(grouped(every, present), options)

    results = lax.map(one, [*mapped.values()])
    return results, [0] * len(results)
