"""From the tensors of a gated scan to the problem that a kernel solves: facts about torch's tensors for ``calls``. Arguments are
as ``normalised`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from scan_registry.kernels.gated_scan.kinds import KINDS
from scan_registry.kernels.gated_scan.op import calls as of_facts
from scan_registry.kernels.gated_scan.op.arguments import COMPILED, Arguments, Options
from scan_registry.kernels.gated_scan.op.calls import KernelCall
from scan_registry.kernels.gated_scan.problem import Direction
from scan_registry.kernels.linear_scan.op import stretches as resets
from scan_registry.kernels.linear_scan.op.arguments import Options as LinearOptions
from scan_registry.kernels.linear_scan.op.layout import KernelCall as LinearKernelCall
from scan_registry.kernels.linear_scan.op.problems import make_kernel_call, sequences_of
from scan_registry.kernels.linear_scan.reference import compute_dtype
from scan_registry.ops.facts import facts_of
from scan_registry.ops.launching import addresses_of
from scan_registry.ops.strides import as_new


def has_kernels(arguments: Arguments, options: Options) -> bool:
    """Whether this family has kernels for it. ``linear_scan`` has those for kind ``linear`` without resets. None is in
    Triton."""
    first = arguments.inputs[0]
    if options.backend == "triton" or is_linear(arguments, options):
        return False
    return first.dtype in COMPILED and first.numel() > 0


def is_linear(arguments: Arguments, options: Options) -> bool:
    """Whether ``linear_scan`` computes it: kind ``linear`` without resets."""
    return options.kind == "linear" and arguments.reset is None


def make_call(
    direction: Direction,
    arguments: Arguments,
    options: Options,
    addresses: int,
    others: Mapping[str, Tensor] | None = None,
) -> KernelCall:
    """The kernel call for one pass. ``others`` are the other tensors of a backward pass: ``states`` and ``states_grad``.
    ``addresses`` is ``addresses_of`` all tensors."""
    reset = arguments.reset
    return of_facts.make_call(
        direction,
        KINDS[options.kind],
        [*map(facts_of, arguments.inputs)],
        {name: facts_of(tensor) for name, tensor in (others or {}).items()},
        None if reset is None else facts_of(reset),
        as_new(arguments.inputs[0]).stride(),
        sequences_of(arguments.cu_seqlens),
        options.dim,
        options.reverse,
        addresses,
    )


def reset_is_dense(reset: Tensor | None) -> bool:
    """Whether successive time steps are successive bytes."""
    return reset is None or of_facts.reset_is_dense(facts_of(reset))


def describe(arguments: Arguments, options: Options, differentiated: bool) -> dict[str, KernelCall]:
    """The kernel calls by direction; ``backward`` only if ``differentiated``. Nothing is computed."""
    first, cu_seqlens = arguments.inputs[0], arguments.cu_seqlens
    if first.numel() == 0:
        return {}
    addresses = addresses_of(aligned_reset(arguments).flat)
    model = torch.empty_like(first, device="meta")
    calls: dict[Direction, KernelCall] = {
        "forward": make_call("forward", arguments, options, addresses)
    }
    if differentiated:
        others = {"states": model, "states_grad": model}
        calls["backward"] = make_call("backward", arguments, options, addresses, others)
    gates, how = model.to(compute_dtype(first.dtype)), LinearOptions(*options[1:])
    if arguments.reset is not None:
        gates, _, cu_seqlens, how = resets.stretches(gates, how)
    has_states = how.final or (arguments.reset is None and arguments.initial_state is not None)
    same = gates, cu_seqlens, how, has_states
    return {
        direction: replace(call, stand_in=("linear_scan", _scan(direction, *same)))
        for direction, call in calls.items()
    }


def _scan(
    direction: Direction,
    gates: Tensor,
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    has_states: bool,
) -> LinearKernelCall:
    """The call of ``linear_scan`` for gates, and tokens and states like them."""
    names = ("tokens",) if direction == "forward" else ("states", "states_grad")
    others = dict.fromkeys(names, gates)
    how = cu_seqlens, options.dim, options.reverse, has_states
    return make_kernel_call(direction, gates, others, *how)


def aligned_reset(arguments: Arguments) -> Arguments:
    """The arguments with a ``reset`` that starts on 16 bytes. ``reset`` is small, so it is copied rather than let its address
    rule out aligned access to all tensors."""
    reset = arguments.reset
    if reset is None or reset.data_ptr() & 15 == 0:
        return arguments
    return arguments._replace(reset=reset.clone())
