"""The kinds of gated scan in Triton. For each kind, one function computes gate and token of a step, and one the gradients of
the inputs and parameters.

A kind is this pair of functions, and a branch in ``gate_and_token`` and in ``gradients``. Both functions get ``x``, the inputs
in float32, and ``p``, the channel parameters, in the order of ``kinds.py``; and the ``option`` of the kind's line in that file.
The second function also gets the gradients of gate and token. It repeats terms of the first one, which the compiler merges.

Exponents are never positive, so intermediate values do not overflow.
"""

# ruff: noqa: RET505 (Triton compiles what follows a return, unless it is the other branch)

import triton
import triton.language as tl

# The most that the slope of RG-LRU's square root counts in backward passes, and RG-LRU's factor c, as in ``kinds.py``.
MOST_SLOPE = tl.constexpr(1000.0)
RG_LRU_SCALE = tl.constexpr(8.0)
# The greatest argument of softplus. 8 times this is finite; infinity times 0 would be NaN.
MOST_SOFTPLUS = tl.constexpr(1e30)


# --- Functions of one number --------------------------------------------------------------------


@triton.jit
def sigmoids(x):
    """sigmoid(x) and sigmoid(-x), each with all its digits. The larger one is computed as 1 minus the smaller, since a gate's
    rounding error near 1 adds up from step to step."""
    small = tl.exp(-tl.abs(x))
    smaller = small / (1 + small)
    larger = 1 - smaller
    return tl.where(x >= 0, larger, smaller), tl.where(x >= 0, smaller, larger)


@triton.jit
def log1p_of(e):
    """log(1 + e) for 0 <= e <= 1: e times a polynomial, with an error of 3e-8."""
    p = 0.005253457929939032
    p = p * e - 0.02958850748836994
    p = p * e + 0.07836166769266129
    p = p * e - 0.13674770295619965
    p = p * e + 0.19111430644989014
    p = p * e - 0.24844369292259216
    p = p * e + 0.33319270610809326
    p = p * e - 0.49999502301216125
    return (p * e + 1.0) * e


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p_of(tl.exp(-tl.abs(x)))


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - log1p_of(tl.exp(-tl.abs(x)))


@triton.jit
def decayed(x):
    """exp(x) and 1 - exp(x)**2, for x <= 0. Near 0 both come from a series, so that small differences from 1 keep their digits;
    there the GPU's own exp has an error of a few units in the last place."""
    p = 1 / 362880
    p = p * x + 1 / 40320
    p = p * x + 1 / 5040
    p = p * x + 1 / 720
    p = p * x + 1 / 120
    p = p * x + 1 / 24
    p = p * x + 1 / 6
    p = p * x + 1 / 2
    near, lost, far = x > -0.5, -x * (p * x + 1), tl.exp(x)
    return tl.where(near, 1 - lost, far), tl.where(near, lost * (2 - lost), 1 - far * far)


@triton.jit
def positive(x):
    """g(x) = x + 1/2 for x >= 0, else sigmoid(x)."""
    return tl.where(x >= 0, x + 0.5, sigmoids(x)[0])


@triton.jit
def positive_slope(x):
    below, above = sigmoids(x)
    return tl.where(x >= 0, 1.0, below * above)


# --- Kinds --------------------------------------------------------------------------------------


@triton.jit
def linear(x, p, reset, option):
    return x[0], x[1]


@triton.jit
def linear_gradients(x, p, reset, option, gate_grad, token_grad):
    return (gate_grad, token_grad), ()


@triton.jit
def min_gru(x, p, reset, option):
    taken, kept = sigmoids(x[0])
    return kept, taken * tl.where(option, x[1], positive(x[1]))


@triton.jit
def min_gru_gradients(x, p, reset, option, gate_grad, token_grad):
    taken, kept = sigmoids(x[0])
    hidden = tl.where(option, x[1], positive(x[1]))
    slope = tl.where(option, 1.0, positive_slope(x[1]))
    for_gate = (token_grad * hidden - gate_grad) * (kept * taken)
    return (for_gate, token_grad * taken * slope), ()


@triton.jit
def min_lstm(x, p, reset, option):
    kept, taken = sigmoids(log_sigmoid(x[0]) - log_sigmoid(x[1]))
    return kept, taken * tl.where(option, x[2], positive(x[2]))


@triton.jit
def min_lstm_gradients(x, p, reset, option, gate_grad, token_grad):
    kept, taken = sigmoids(log_sigmoid(x[0]) - log_sigmoid(x[1]))
    hidden = tl.where(option, x[2], positive(x[2]))
    slope = tl.where(option, 1.0, positive_slope(x[2]))
    for_both = (gate_grad - token_grad * hidden) * (kept * taken)
    for_forget = for_both * sigmoids(x[0])[1]
    for_input = -for_both * sigmoids(x[1])[1]
    return (for_forget, for_input, token_grad * taken * slope), ()


@triton.jit
def rg_lru_decay(a_param):
    """8 * softplus(a_param), limited to finite values. NaN stays NaN."""
    return RG_LRU_SCALE * softplus(tl.where(a_param > MOST_SOFTPLUS, MOST_SOFTPLUS, a_param))


@triton.jit
def rg_lru(x, p, reset, option):
    # At a reset the recurrence gate has no effect, even if it is NaN.
    log_gate = -sigmoids(tl.where(reset, 0.0, x[1]))[0] * rg_lru_decay(p[0])
    gate, square = decayed(log_gate)
    scale = tl.where(reset, 1.0, tl.sqrt(square))
    return gate, scale * (sigmoids(x[2])[0] * x[0])


@triton.jit
def rg_lru_gradients(x, p, reset, option, gate_grad, token_grad):
    recurrent, not_recurrent = sigmoids(tl.where(reset, 0.0, x[1]))
    taken, not_taken = sigmoids(x[2])
    log_gate = -recurrent * rg_lru_decay(p[0])
    gate, square = decayed(log_gate)
    root = tl.sqrt(square)
    scale = tl.where(reset, 1.0, root)
    for_scaled = token_grad * scale
    for_x = for_scaled * taken
    # The scale is sqrt(1 - gate * gate).
    slope = tl.minimum(0.5 / root, MOST_SLOPE)
    for_square = tl.where(reset, 0.0, token_grad * (taken * x[0]) * slope)
    for_log_gate = gate * (gate_grad - 2 * gate * for_square)
    for_recurrent = for_log_gate * log_gate * not_recurrent
    for_parameter = -RG_LRU_SCALE * for_log_gate * recurrent * sigmoids(p[0])[0]
    return (for_x, for_recurrent, for_x * not_taken * x[0]), (for_parameter,)


@triton.jit
def hgrn(x, p, reset, option):
    # The gate is b + (1 - b) * sigmoid(f), so 1 minus the gate is (1 - b) * sigmoid(-f), which loses no digits. Where the gate
    # is close to 1, it is computed as 1 minus that, since a rounding error of the gate acts at every step.
    forget, not_forget = sigmoids(x[1])
    taken = (1 - p[0]) * not_forget
    gate = tl.where(x[1] >= 0, 1 - taken, p[0] + (1 - p[0]) * forget)
    return gate, taken * (x[0] * sigmoids(x[0])[0])


@triton.jit
def hgrn_gradients(x, p, reset, option, gate_grad, token_grad):
    forget, not_forget = sigmoids(x[1])
    below, above = sigmoids(x[0])
    silu = x[0] * below
    for_bound = not_forget * (gate_grad - token_grad * silu)
    for_x = token_grad * ((1 - p[0]) * not_forget) * (below + silu * above)
    return (for_x, (1 - p[0]) * forget * for_bound), (for_bound,)


# --- All kinds ----------------------------------------------------------------------------------


@triton.jit
def gate_and_token(x, p, reset, option, KIND: tl.constexpr):
    if KIND == "linear":
        return linear(x, p, reset, option)
    elif KIND == "min_gru":
        return min_gru(x, p, reset, option)
    elif KIND == "min_lstm":
        return min_lstm(x, p, reset, option)
    elif KIND == "rg_lru":
        return rg_lru(x, p, reset, option)
    else:
        tl.static_assert(KIND == "hgrn")
        return hgrn(x, p, reset, option)


@triton.jit
def gradients(x, p, reset, option, gate_grad, token_grad, KIND: tl.constexpr):
    """The gradients of the inputs, and those of the parameters. ``gate_grad`` is 0 at a reset."""
    if KIND == "linear":
        return linear_gradients(x, p, reset, option, gate_grad, token_grad)
    elif KIND == "min_gru":
        return min_gru_gradients(x, p, reset, option, gate_grad, token_grad)
    elif KIND == "min_lstm":
        return min_lstm_gradients(x, p, reset, option, gate_grad, token_grad)
    elif KIND == "rg_lru":
        return rg_lru_gradients(x, p, reset, option, gate_grad, token_grad)
    else:
        tl.static_assert(KIND == "hgrn")
        return hgrn_gradients(x, p, reset, option, gate_grad, token_grad)
