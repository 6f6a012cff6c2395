"""Recurrent networks in plain torch: what the kernels are tested against, and run when none fits.

One step after the other, forwards and then backwards, each formula written out; narrow dtypes are
computed in float32, others in themselves. Shapes and names are those of ``problem.py``. With σ for the
logistic function and p for the pre-activation of a gate (p = Wx + R·h + b, but for GRU's):

    lstm    c' = σ(f)·c + σ(i)·tanh(z);  h' = σ(o)·tanh(c')
    gru     g = R·h + b;  n without R;  h' = σ(z)·h + (1 − σ(z))·tanh(n + σ(r)·g)
    elman   h' = tanh(p)
    slstm   m' = max(i, log σ(f) + m), or i where n is 0;  with e = exp(i − m') and
            k = exp(log σ(f) + m − m'):  c' = k·c + e·tanh(z);  n' = max(k·n + e, 1);
            h' = σ(o)·c'/n'

``cache`` holds what the gates are after their nonlinearities, in the order that ``Sizes`` names; GRU's g
as it is; of sLSTM first whichever of e and k is not 1, k where i decides m' and −e elsewhere, so that the
sign tells which; then log σ(f), and z and o after theirs. Narrow dtypes could not hold what the exponents
are made of: their errors would grow with every step that k goes through.

At the steps where ``reset`` (B, T) is True, the states start anew: from ``reset_states`` (states, B, N, D),
or from zeros. The states before such a step have no effect on it, even if they are not finite, and get no
gradient from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from scan_registry.base.symbols import time_before_batch
from scan_registry.kernels.rnn.problem import SIZES, Clips, Function

Tensors = Sequence[Tensor]
#: The most that k's logarithm can be: only where n is 0 is it above 0, and there it must stay finite.
_MOST_LOG = 60.0
_UNCLIPPED = Clips()


class Step(NamedTuple):
    """What a step makes: the states after it, and its cache; each of its parts is (B, N, D)."""

    states: Tensors
    cache: Tensors


class StepBack(NamedTuple):
    """Gradients: of the pre-activations, and of the states before the step without what passes R."""

    gates: Tensors
    states: Tensors


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: float32 for the narrow floats."""
    return dtype if dtype == torch.float64 else torch.float32


# --- One step, without R ----------------------------------------------------------------------


def _lstm(gates: Tensors, before: Tensors) -> Step:
    i, f, z, o = gates[0].sigmoid(), gates[1].sigmoid(), gates[2].tanh(), gates[3].sigmoid()
    c = f * before[1] + i * z
    return Step((o * c.tanh(), c), (i, f, z, o))


def _lstm_back(
    cache: Tensors, before: Tensors, after: Tensors, grads: Tensors, extra: Tensors
) -> StepBack:
    (i, f, z, o), bent = cache, after[1].tanh()
    dh, dc = grads
    dc = dc + dh * o * (1 - bent * bent)
    gates = (
        (dc * z + extra[0]) * i * (1 - i),
        (dc * before[1] + extra[1]) * f * (1 - f),
        (dc * i + extra[2]) * (1 - z * z),
        (dh * bent + extra[3]) * o * (1 - o),
    )
    return StepBack(gates, (torch.zeros_like(dh), dc * f))


def _gru(gates: Tensors, before: Tensors) -> Step:
    g, r, z, n = gates[0], gates[1].sigmoid(), gates[2].sigmoid(), gates[3].tanh()
    return Step((z * before[0] + (1 - z) * n,), (r, z, n, g))


def _gru_back(
    cache: Tensors, before: Tensors, after: Tensors, grads: Tensors, extra: Tensors
) -> StepBack:
    r, z, n, g = cache
    (dh,) = grads
    dn = (dh * (1 - z) + extra[2]) * (1 - n * n)
    gates = (
        dn * r + extra[3],
        (dn * g + extra[0]) * r * (1 - r),
        (dh * (before[0] - n) + extra[1]) * z * (1 - z),
        dn,
    )
    return StepBack(gates, (dh * z,))


def _elman(gates: Tensors, before: Tensors) -> Step:
    return Step((gates[0].tanh(),), ())


def _elman_back(
    cache: Tensors, before: Tensors, after: Tensors, grads: Tensors, extra: Tensors
) -> StepBack:
    (dh,), (h,) = grads, after
    return StepBack((dh * (1 - h * h),), (torch.zeros_like(dh),))


def _slstm(gates: Tensors, before: Tensors) -> Step:
    i, log_f, z, o = gates[0], logsigmoid(gates[1]), gates[2].tanh(), gates[3].sigmoid()
    _, c, n, m = before
    by_input = (n == 0) | (i > log_f + m)
    m = torch.where(by_input, i, log_f + m)
    e, k = (i - m).exp(), (log_f + before[3] - m).clamp_max(_MOST_LOG).exp()
    c, n = k * c + e * z, (k * n + e).clamp_min(1)
    return Step((o * c / n, c, n, m), (torch.where(by_input, k, -e), log_f, z, o))


def _slstm_back(
    cache: Tensors, before: Tensors, after: Tensors, grads: Tensors, extra: Tensors
) -> StepBack:
    lesser, log_f, z, o = cache
    by_input = ~lesser.signbit()
    e, k = torch.where(by_input, 1, -lesser), torch.where(by_input, lesser, 1)
    _, old_c, old_n, _ = before
    _, c, n, _ = after
    dh, dc, dn, dm = grads
    # What m's gradient is beside those of c and n, which come with it: h depends on them by c/n alone, so
    # for a loss of h this is 0. Their sums would not cancel where c and n are as rounded as in memory.
    dm = dm - dc * c - dn * n
    dc, to_n = dc + dh * o / n, dn - dh * o * c / (n * n)
    floored = k * old_n + e < 1  # the floor passes nothing on
    dn, dm = torch.where(floored, 0, to_n), dm + torch.where(floored, to_n, 0)
    # Differences of c/n as they follow from the step: those of rounded states are wrong by what c/n is rounded.
    usual = ~floored & (old_c.abs() < 2 * old_n)
    old_y = old_c / torch.where(usual, old_n, 1)
    change = dc * (z - old_y) / torch.where(usual, k * old_n + e, 1)
    own = dc * c / n + dn
    old = own - e * change
    d_log_e = torch.where(usual, own + k * old_n * change, dc * z + dn) * e
    d_log_k = torch.where(usual, old * old_n, dc * old_c + dn * old_n) * k
    old_dn = torch.where(usual, old - dc * old_y, dn) * k
    apart = extra[0] * lesser.abs()
    d_log_k = d_log_k + torch.where(by_input, 0, dm) + apart
    gates = (
        d_log_e + torch.where(by_input, dm, 0) - apart,
        (d_log_k + extra[1]) * (1 - log_f.exp()),
        (dc * e + extra[2]) * (1 - z * z),
        (dh * c / n + extra[3]) * o * (1 - o),
    )
    return StepBack(gates, (torch.zeros_like(dh), dc * k, old_dn, d_log_k))


_STEP: dict[Function, Callable[[Tensors, Tensors], Step]] = {
    "lstm": _lstm,
    "gru": _gru,
    "elman": _elman,
    "slstm": _slstm,
}
_STEP_BACK: dict[Function, Callable[[Tensors, Tensors, Tensors, Tensors, Tensors], StepBack]] = {
    "lstm": _lstm_back,
    "gru": _gru_back,
    "elman": _elman_back,
    "slstm": _slstm_back,
}


def step(
    function: Function,
    inputs: Tensor,
    terms: Tensor,
    bias: Tensor,
    before: Tensors,
    clip: float = Clips.forward,
) -> Step:
    """One step: ``inputs`` (B, inputs, N, D), ``terms`` = R·h (B, recurrent, N, D), both in the dtype of
    the computation; ``before`` the states before it, (B, N, D) each."""
    x, r, b = inputs.unbind(1), terms.unbind(1), bias.unbind(0)
    if function == "gru":
        g = r[0] + b[0]
        reset, update = (x[k] + r[k + 1] + b[k + 1] for k in (0, 1))
        gates = [g, reset, update, x[2] + b[3] + reset.sigmoid() * g]
    else:
        gates = [x_k + r_k + b_k for x_k, r_k, b_k in zip(x, r, b, strict=True)]
    (h, *others), cache = _STEP[function](gates, before)
    return Step((h.clamp(-clip, clip), *others), cache)


def step_back(
    function: Function,
    cache: Tensors,
    before: Tensors,
    after: Tensors,
    grads: Tensors,
    cache_grads: Tensors | None = None,
) -> StepBack:
    """The gradients of one step, of those of the states after it, and of its cache where that was used
    for something else than this; (B, N, D) each."""
    nothing = [grads[0].new_zeros(())] * len(cache)
    return _STEP_BACK[function](cache, before, after, grads, cache_grads or nothing)


# --- All steps --------------------------------------------------------------------------------


def forward(
    function: Function, inputs: Tensor, recurrent: Tensor, bias: Tensor,
    initial: Tensor | None = None, clips: Clips = _UNCLIPPED, reset: Tensor | None = None,
    reset_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """States (states, B, T, N, D) and cache (B, T, cache, N, D), in the dtype of ``inputs``; torch can
    differentiate it, once or more, in both modes. There must be a step."""
    sizes, compute = SIZES[function], compute_dtype(inputs.dtype)
    batch, time, _, heads, dim = inputs.shape
    x, b = inputs.to(compute), bias.to(compute)
    weight = previous_first(recurrent.to(compute))
    now: Tensors = _initial(initial, x, len(sizes.states)).unbind(0)
    anew = None if reset is None else _anew(reset_states, x, len(sizes.states))
    states, cache = [], []
    for t in range(time):
        if reset is not None and anew is not None:
            now = torch.where(_of_units(reset[:, t]), anew, torch.stack(tuple(now))).unbind(0)
        terms = torch.matmul(now[0].transpose(0, 1), weight)
        terms = terms.view(heads, batch, sizes.recurrent, dim).permute(1, 2, 0, 3)
        now, kept = step(function, x[:, t], terms, b, now, clips.forward)
        states.append(torch.stack(tuple(now)).to(inputs.dtype))
        if kept:
            cache.append(torch.stack(tuple(kept), 1).to(inputs.dtype))
    empty = inputs.new_empty(batch, time, 0, heads, dim)
    return torch.stack(states, 2), torch.stack(cache, 1) if cache else empty


def backward(
    function: Function, recurrent: Tensor, states: Tensor, initial: Tensor | None, cache: Tensor,
    states_grad: Tensor, final_grad: Tensor | None = None, clips: Clips = _UNCLIPPED,
    cache_grad: Tensor | None = None, reset: Tensor | None = None,
    reset_states: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """gates_grad (B, T, bias, N, D), initial_grad (states, B, N, D), and where there are ``reset_states``
    their gradient; in the dtype of ``states``.

    ``states_grad`` is that of all states, or of h alone, (1, B, T, N, D); ``cache_grad`` is that of a
    cache that was differentiated, as in second derivatives. torch can differentiate this, too.
    """
    sizes, dtype = SIZES[function], states.dtype
    compute = compute_dtype(dtype)
    _, batch, time, heads, dim = states.shape
    known, kept, by_step = states.to(compute), cache.to(compute), states_grad.to(compute)
    extra = None if cache_grad is None else cache_grad.to(compute)
    start = _initial(initial, known[0], len(sizes.states))
    earlier = start, *known.unbind(2)[:-1]
    weight = recurrent.to(compute).permute(1, 0, 2, 3).reshape(heads, -1, dim)
    gates: list[Tensor] = []
    grads = [*_initial(final_grad, known[0], len(sizes.states)).unbind(0)]
    anew = None if reset is None else _anew(reset_states, known[0], len(sizes.states))
    reset_grad = None if anew is None or reset_states is None else torch.zeros_like(start)
    for t in reversed(range(time)):
        for k, grad in enumerate(by_step[:, :, t]):
            grads[k] = grads[k] + grad
        before = earlier[t]
        if reset is not None and anew is not None:
            before = torch.where(_of_units(reset[:, t]), anew, before)
        gradients = step_back(
            function,
            kept[:, t].unbind(1),
            before.unbind(0),
            known[:, :, t].unbind(0),
            grads,
            None if extra is None else extra[:, t].unbind(1),
        )
        gates.append(torch.stack(tuple(gradients.gates), 1))
        grads = [*gradients.states]
        if not clips.recurrent_cut:
            through = gates[-1][:, : sizes.recurrent].permute(2, 0, 1, 3)
            by_r = torch.matmul(through.reshape(heads, batch, -1), weight).transpose(0, 1)
            grads[0] = grads[0] + by_r.clamp(-clips.recurrent, clips.recurrent)
        if reset is not None:
            begins, all_of_them = _of_units(reset[:, t]), torch.stack(grads)
            if reset_grad is not None:
                reset_grad = reset_grad + torch.where(begins, all_of_them, 0)
            grads = [*torch.where(begins, 0, all_of_them).unbind(0)]
    results = [torch.stack(gates[::-1], 1), torch.stack(grads)]
    results += [] if reset_grad is None else [reset_grad]
    return tuple(result.to(dtype) for result in results)


def parameter_grads(
    function: Function,
    gates_grad: Tensor,
    states: Tensor,
    initial: Tensor | None,
    wanted: tuple[bool, bool] = (True, True),
    reset: Tensor | None = None,
    reset_states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of ``inputs``, a view of ``gates_grad``; of ``recurrent``, in its dtype; and of
    ``bias``, in the dtype of the computation: these two if they are wanted."""
    sizes = SIZES[function]
    recurrent = bias = None
    if wanted[0]:
        first = _initial(initial, states[0], 1)[0]
        before = torch.cat([first.unsqueeze(1), states[0]], 1).narrow(1, 0, gates_grad.shape[1])
        if reset is not None:
            anew = _anew(reset_states, states[0], 1)[0].unsqueeze(1)
            before = torch.where(_of_units(reset), anew, before)
        recurrent = _by_head(gates_grad.narrow(2, 0, sizes.recurrent), before)
    if wanted[1]:
        bias = gates_grad.sum((0, 1), dtype=compute_dtype(gates_grad.dtype))
    return gates_grad.narrow(2, sizes.bias - sizes.inputs, sizes.inputs), recurrent, bias


def _by_head(through: Tensor, before: Tensor) -> Tensor:
    """Of (B, T, gates, N, D) and (B, T, N, P), the sums over B and T of their products: (gates, N, D, P).
    Products of matrices, of which those with gates are read as they lie."""
    batch, time, gates, heads, dim = through.shape
    if time_before_batch(through):
        through, before = through.transpose(0, 1), before.transpose(0, 1)
    rows = batch * time
    if heads == 1:
        left = through.reshape(rows, gates * dim).transpose(0, 1)
        return torch.mm(left, before.reshape(rows, dim)).reshape(gates, 1, dim, dim)
    # All products at once, with h repeated for each gate: those of one gate would leave most of a GPU idle.
    left = through.reshape(rows, gates * heads, dim).permute(1, 2, 0)
    repeated = before.unsqueeze(2).expand(-1, -1, gates, -1, -1)
    right = repeated.reshape(rows, gates * heads, dim).transpose(0, 1)
    return torch.bmm(left, right).reshape(gates, heads, dim, dim)


def previous_first(recurrent: Tensor) -> Tensor:
    """R as (N, previous, gate and new)."""
    gates, heads, dim, _ = recurrent.shape
    return recurrent.permute(1, 3, 0, 2).reshape(heads, dim, gates * dim)


def _of_units(reset: Tensor) -> Tensor:
    """``reset``, shaped to broadcast over heads and units."""
    return reset.unsqueeze(-1).unsqueeze(-1)


def _anew(states: Tensor | None, like: Tensor, count: int) -> Tensor:
    """The first ``count`` of the states that a reset starts from: those given, (count, B, N, D), or zeros."""
    if states is None:
        return like.new_zeros(count, 1, 1, 1)
    return states[:count].to(like.dtype)


def _initial(states: Tensor | None, like: Tensor, count: int) -> Tensor:
    """The first ``count`` states, (count, B, N, D): those given, or zeros. ``like`` is (B, …, N, D)."""
    if states is None:
        return like.new_zeros(count, like.shape[0], *like.shape[-2:])
    return states[:count].to(like.dtype)
