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
as it is; of sLSTM i as it is, f as log σ(f), and z and o after theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from scan_registry.kernels.rnn.problem import SIZES, Clips, Function

Tensors = Sequence[Tensor]
#: The most that k's logarithm can be: only where n is 0 is it above 0, and there it must stay finite.
_MOST_LOG = 60.0


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


def _lstm_back(cache: Tensors, before: Tensors, after: Tensors, grads: Tensors) -> StepBack:
    (i, f, z, o), bent = cache, after[1].tanh()
    dh, dc = grads
    dc = dc + dh * o * (1 - bent * bent)
    gates = (
        dc * z * i * (1 - i),
        dc * before[1] * f * (1 - f),
        dc * i * (1 - z * z),
        dh * bent * o * (1 - o),
    )
    return StepBack(gates, (torch.zeros_like(dh), dc * f))


def _gru(gates: Tensors, before: Tensors) -> Step:
    g, r, z, n = gates[0], gates[1].sigmoid(), gates[2].sigmoid(), gates[3].tanh()
    return Step((z * before[0] + (1 - z) * n,), (r, z, n, g))


def _gru_back(cache: Tensors, before: Tensors, after: Tensors, grads: Tensors) -> StepBack:
    r, z, n, g = cache
    (dh,) = grads
    dn = dh * (1 - z) * (1 - n * n)
    gates = (dn * r, dn * g * r * (1 - r), dh * (before[0] - n) * z * (1 - z), dn)
    return StepBack(gates, (dh * z,))


def _elman(gates: Tensors, before: Tensors) -> Step:
    return Step((gates[0].tanh(),), ())


def _elman_back(cache: Tensors, before: Tensors, after: Tensors, grads: Tensors) -> StepBack:
    (dh,), (h,) = grads, after
    return StepBack((dh * (1 - h * h),), (torch.zeros_like(dh),))


def _stabilised(i: Tensor, log_f: Tensor, before: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """m', whether i decides it, and the factors e and k."""
    _, _, n, m = before
    by_input = (n == 0) | (i > log_f + m)
    new_m = torch.where(by_input, i, log_f + m)
    e, k = (i - new_m).exp(), (log_f + m - new_m).clamp_max(_MOST_LOG).exp()
    return new_m, by_input, e, k


def _slstm(gates: Tensors, before: Tensors) -> Step:
    i, log_f, z, o = gates[0], logsigmoid(gates[1]), gates[2].tanh(), gates[3].sigmoid()
    m, _, e, k = _stabilised(i, log_f, before)
    c, n = k * before[1] + e * z, (k * before[2] + e).clamp_min(1)
    return Step((o * c / n, c, n, m), (i, log_f, z, o))


def _slstm_back(cache: Tensors, before: Tensors, after: Tensors, grads: Tensors) -> StepBack:
    i, log_f, z, o = cache
    _, by_input, e, k = _stabilised(i, log_f, before)
    _, old_c, old_n, _ = before
    _, c, n, _ = after
    dh, dc, dn, dm = grads
    dc, dn = dc + dh * o / n, dn - dh * o * c / (n * n)
    dn = torch.where(k * old_n + e >= 1, dn, 0)  # the floor passes nothing on
    d_log_e, d_log_k = (dc * z + dn) * e, (dc * old_c + dn * old_n) * k
    dm = dm - d_log_e - d_log_k
    d_log_k = d_log_k + torch.where(by_input, 0, dm)
    gates = (
        d_log_e + torch.where(by_input, dm, 0),
        d_log_k * (1 - log_f.exp()),
        dc * e * (1 - z * z),
        dh * c / n * o * (1 - o),
    )
    return StepBack(gates, (torch.zeros_like(dh), dc * k, dn * k, d_log_k))


_STEP: dict[Function, Callable[[Tensors, Tensors], Step]] = {
    "lstm": _lstm,
    "gru": _gru,
    "elman": _elman,
    "slstm": _slstm,
}
_STEP_BACK: dict[Function, Callable[[Tensors, Tensors, Tensors, Tensors], StepBack]] = {
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
    function: Function, cache: Tensors, before: Tensors, after: Tensors, grads: Tensors
) -> StepBack:
    """The gradients of one step, of those of the states after it; (B, N, D) each."""
    return _STEP_BACK[function](cache, before, after, grads)


# --- All steps --------------------------------------------------------------------------------


def forward(
    function: Function,
    inputs: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    initial: Tensor | None = None,
    clips: Clips = Clips(),  # noqa: B008
) -> tuple[Tensor, Tensor]:
    """States (states, B, T, N, D) and cache (B, T, cache, N, D), in the dtype of ``inputs``."""
    sizes, compute = SIZES[function], compute_dtype(inputs.dtype)
    batch, time, _, heads, dim = inputs.shape
    x, b = inputs.to(compute), bias.to(compute)
    weight = _by_previous(recurrent.to(compute))
    states = x.new_empty(len(sizes.states), batch, time, heads, dim)
    cache = x.new_empty(batch, time, len(sizes.cache), heads, dim)
    now = _initial(initial, states).unbind(0)
    for t in range(time):
        terms = torch.matmul(now[0].transpose(0, 1), weight)
        terms = terms.view(heads, batch, sizes.recurrent, dim).permute(1, 2, 0, 3)
        made = step(function, x[:, t], terms, b, now, clips.forward)
        now = tuple(made.states)
        for out, value in zip(states[:, :, t], now, strict=True):
            out.copy_(value)
        for k, value in enumerate(made.cache):
            cache[:, t, k].copy_(value)
    return states.to(inputs.dtype), cache.to(inputs.dtype)


def backward(
    function: Function,
    recurrent: Tensor,
    states: Tensor,
    initial: Tensor | None,
    cache: Tensor,
    states_grad: Tensor,
    final_grad: Tensor | None = None,
    clips: Clips = Clips(),  # noqa: B008
) -> tuple[Tensor, Tensor]:
    """gates_grad (B, T, bias, N, D) and initial_grad (states, B, N, D), in the dtype of ``states``.

    ``states_grad`` is that of all states, or of h alone, (1, B, T, N, D).
    """
    sizes, dtype = SIZES[function], states.dtype
    compute = compute_dtype(dtype)
    _, batch, time, heads, dim = states.shape
    known, kept, given = states.to(compute), cache.to(compute), states_grad.to(compute)
    start = _initial(initial, known)
    weight = recurrent.to(compute).permute(1, 0, 2, 3).reshape(heads, -1, dim)
    gates_grad = known.new_empty(batch, time, sizes.bias, heads, dim)
    grads = [*_initial(final_grad, known).clone().unbind(0)]
    for t in reversed(range(time)):
        for k, grad in enumerate(given[:, :, t]):
            grads[k] = grads[k] + grad
        before = known[:, :, t - 1] if t > 0 else start
        made = step_back(
            function, kept[:, t].unbind(1), before.unbind(0), known[:, :, t].unbind(0), grads
        )
        torch.stack(tuple(made.gates), 1, out=gates_grad[:, t])
        grads = [*made.states]
        if not clips.recurrent_cut:
            through = gates_grad[:, t, : sizes.recurrent].permute(2, 0, 1, 3)
            by_r = torch.matmul(through.reshape(heads, batch, -1), weight).transpose(0, 1)
            grads[0] = grads[0] + by_r.clamp(-clips.recurrent, clips.recurrent)
    return gates_grad.to(dtype), torch.stack(grads).to(dtype)


def parameter_grads(
    function: Function, gates_grad: Tensor, states: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``inputs``, a view of ``gates_grad``; of ``recurrent``, in its dtype; and of
    ``bias``, in the dtype of the computation."""
    sizes = SIZES[function]
    batch, time, gates, heads, dim = gates_grad.shape
    before = states.new_empty(heads, batch, time, dim)
    before[:, :, 1:] = states[0, :, :-1].permute(2, 0, 1, 3)
    before[:, :, 0] = 0 if initial is None else initial[0].transpose(0, 1)
    through = gates_grad[:, :, : sizes.recurrent].permute(3, 2, 4, 0, 1)
    recurrent = torch.matmul(
        through.reshape(heads, sizes.recurrent * dim, batch * time),
        before.view(heads, batch * time, dim),
    )
    recurrent = recurrent.view(heads, sizes.recurrent, dim, dim).transpose(0, 1)
    bias = gates_grad.sum((0, 1), dtype=compute_dtype(gates_grad.dtype))
    return gates_grad[:, :, gates - sizes.inputs :], recurrent, bias


def _by_previous(recurrent: Tensor) -> Tensor:
    """R as (N, previous, gate and new)."""
    gates, heads, dim, _ = recurrent.shape
    return recurrent.permute(1, 3, 0, 2).reshape(heads, dim, gates * dim)


def _initial(given: Tensor | None, states: Tensor) -> Tensor:
    """A state for each, (states, B, N, D): what is given, or zeros."""
    if given is None:
        count, batch, _, heads, dim = states.shape
        return states.new_zeros(count, batch, heads, dim)
    return given.to(states.dtype)
