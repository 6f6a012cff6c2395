"""The kinds of gated scan in Triton: of each, gate and token of a step, and what gradients follow from theirs.

A kind is a pair of functions, and a branch in ``gate_and_token`` and in ``gradients``. Both of a pair get ``x``, the
inputs of ``kinds.py`` in its order, in float32, and ``p``, the parameters of the channels; ``option`` is that of the
kind's line there. The second of a pair also gets the gradients of gate and token, and returns those of the inputs and
those of the parameters. What both compute is computed once, since the compiler finds equal terms.

No function overflows where the result does not: exponents are never positive.
"""

# ruff: noqa: RET505 (Triton compiles what follows a return, unless it is the other branch)

import triton
import triton.language as tl

# How steep a square root counts at most in backward passes, and the factor c of RG-LRU, as in ``kinds.py``.
MOST_SLOPE = tl.constexpr(1000.0)
RG_LRU_SCALE = tl.constexpr(8.0)
# The greatest argument of softplus: 8 times that is no infinity, which times 0 would be NaN.
MOST_SOFTPLUS = tl.constexpr(1e30)


# --- Functions of one number --------------------------------------------------------------------


@triton.jit
def sigmoids(x):
    """sigmoid(x) and sigmoid(-x), each to all its digits. Close to 1, a difference from 1 is the more exact, and what a gate
    lacks there adds up from step to step."""
    small = tl.exp(-tl.abs(x))
    smaller = small / (1 + small)
    larger = 1 - smaller
    return tl.where(x >= 0, larger, smaller), tl.where(x >= 0, smaller, larger)


@triton.jit
def log1p_of(e):
    """log(1 + e) for e up to 1: e times a polynomial, to 3e-8."""
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
    """exp(x) of what is at most 0, and 1 less its square: near 0 both of a series, lest small differences lose their digits;
    the GPU's own function is off by a few times what a number close to 1 can tell."""
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
    """x + 1/2 from 0 on, and sigmoid(x) below."""
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
    """8 * softplus(a_param), and finite; NaN of NaN."""
    return RG_LRU_SCALE * softplus(tl.where(a_param > MOST_SOFTPLUS, MOST_SOFTPLUS, a_param))


@triton.jit
def rg_lru(x, p, reset, option):
    # Where the state starts anew the recurrence gate does not matter, even if it is not a number.
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
    # scale is the root of 1 - gate * gate.
    slope = tl.minimum(0.5 / root, MOST_SLOPE)
    for_square = tl.where(reset, 0.0, token_grad * (taken * x[0]) * slope)
    for_log_gate = gate * (gate_grad - 2 * gate * for_square)
    for_recurrent = for_log_gate * log_gate * not_recurrent
    for_parameter = -RG_LRU_SCALE * for_log_gate * recurrent * sigmoids(p[0])[0]
    return (for_x, for_recurrent, for_x * not_taken * x[0]), (for_parameter,)


@triton.jit
def hgrn(x, p, reset, option):
    # The gate is b + (1 - b) * sigmoid(f), so 1 less the gate is (1 - b) * sigmoid(-f): no difference of numbers close to
    # 1, and what the gate is computed from where it is close to 1 itself, lest it be less by rounding at every step.
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
    """Those of the inputs and those of the parameters. The gate's is 0 where the state starts anew."""
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
