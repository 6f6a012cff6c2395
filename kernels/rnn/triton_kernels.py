"""Recurrent networks in Triton, for small heads: the CUDA kernels' parameters, and no exchange.

A program owns one head and BATCHES batches, from the first step to the last (backward: from the last to
the first), and keeps all of that head's R, at most UNITS × UNITS for each gate. Gradients of sLSTM's m
are carried as in ``cells.cuh``: without those of c and n, which come with them; and so are differences of c/n.

    programs  ->  (tiles of batches, heads), the heads fastest
"""

import triton
import triton.language as tl

MOST_LOG = tl.constexpr(60.0)


# --- Arithmetic -------------------------------------------------------------------------------


@triton.jit
def logistic(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def hyperbolic(x):
    """tanh: near 0 a series, lest small values lose their digits."""
    y = x * x
    inner = -17 / 315 + y * (62 / 2835 - y * (1382 / 155925))
    series = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * inner)))
    far = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(y < 0.1, series, tl.where(x < 0, -far, far))


@triton.jit
def log_logistic(x):
    return tl.minimum(x, 0.0) - tl.log(1 + tl.exp(-tl.abs(x)))


@triton.jit
def clipped(x, bits):
    """Within ± the float32 of these bits; NaN stays NaN."""
    limit = bits.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def given(pointer):
    """Whether it is not null."""
    return pointer.to(tl.int64) != 0


@triton.jit
def take(pointer, places, mask):
    return tl.load(pointer + places, mask, other=0).to(tl.float32)


@triton.jit
def put(pointer, places, x, mask):
    tl.store(pointer + places, x.to(pointer.dtype.element_ty), mask)


# --- What a program owns ----------------------------------------------------------------------


@triton.jit
def own(batch, heads, dim, UNITS: tl.constexpr, BATCHES: tl.constexpr):
    """Its head, its batches as a column, their units in (heads, dim) as a row, and which are there."""
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    batches = program // heads * BATCHES + tl.arange(0, BATCHES)[:, None]
    units = tl.arange(0, UNITS)[None, :]
    return head, batches, head * dim + units, (batches < batch) & (units < dim)


@triton.jit
def matrix(recurrent, gate, head, heads, dim, UNITS: tl.constexpr, BACKWARD: tl.constexpr):
    """R of one gate, with what is summed over along the rows: previous units, backward new ones."""
    rows, columns = tl.arange(0, UNITS)[:, None], tl.arange(0, UNITS)[None, :]
    first = recurrent + (gate * heads + head) * dim * dim
    places = rows * dim + columns if BACKWARD else columns * dim + rows
    return tl.load(first + places, (rows < dim) & (columns < dim), other=0)


@triton.jit
def matrices(
    recurrent, head, heads, dim,
    UNITS: tl.constexpr, BACKWARD: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    w0 = matrix(recurrent, 0, head, heads, dim, UNITS, BACKWARD)
    w1, w2, w3 = w0, w0, w0
    if GATES > 1:
        w1 = matrix(recurrent, 1, head, heads, dim, UNITS, BACKWARD)
        w2 = matrix(recurrent, 2, head, heads, dim, UNITS, BACKWARD)
    if GATES > 3:
        w3 = matrix(recurrent, 3, head, heads, dim, UNITS, BACKWARD)
    return w0, w1, w2, w3


@triton.jit
def multiply(x, w):
    return tl.dot(x.to(w.dtype), w, input_precision="tf32x3")


@triton.jit
def take_four(pointer, places, stride, mask, COUNT: tl.constexpr):
    """COUNT tiles that are ``stride`` apart, and zeros."""
    t0, t1, t2, t3 = [tl.zeros(places.shape, tl.float32)] * 4
    if COUNT > 0:
        t0 = take(pointer, places, mask)
    if COUNT > 1:
        t1 = take(pointer, places + stride, mask)
    if COUNT > 2:
        t2 = take(pointer, places + 2 * stride, mask)
    if COUNT > 3:
        t3 = take(pointer, places + 3 * stride, mask)
    return t0, t1, t2, t3


@triton.jit
def put_four(pointer, places, stride, t0, t1, t2, t3, mask, COUNT: tl.constexpr):
    if COUNT > 0:
        put(pointer, places, t0, mask)
    if COUNT > 1:
        put(pointer, places + stride, t1, mask)
    if COUNT > 2:
        put(pointer, places + 2 * stride, t2, mask)
    if COUNT > 3:
        put(pointer, places + 3 * stride, t3, mask)


# --- One step, without R ----------------------------------------------------------------------


@triton.jit
def step(r0, r1, r2, r3, x0, x1, x2, x3, b0, b1, b2, b3, h, c, n, m, FUNCTION: tl.constexpr):
    """The states after it, and what backward needs."""
    k0, k1, k2, k3 = r0, r0, r0, r0
    if FUNCTION == "elman":
        h = hyperbolic(r0 + x0 + b0)
    elif FUNCTION == "gru":
        k3 = r0 + b0
        k0, k1 = logistic(r1 + x0 + b1), logistic(r2 + x1 + b2)
        k2 = hyperbolic(x2 + b3 + k0 * k3)
        h = k1 * h + (1 - k1) * k2
    else:
        k2, k3 = hyperbolic(r2 + x2 + b2), logistic(r3 + x3 + b3)
        if FUNCTION == "lstm":
            k0, k1 = logistic(r0 + x0 + b0), logistic(r1 + x1 + b1)
            c = k1 * c + k0 * k2
            h = k3 * hyperbolic(c)
        else:
            i, k1 = r0 + x0 + b0, log_logistic(r1 + x1 + b1)
            decayed = k1 + m
            by_input = (n == 0) | (i > decayed)
            apart = tl.where(by_input, decayed - i, i - decayed)
            lesser = tl.exp(tl.where(apart > MOST_LOG, MOST_LOG, apart))
            e, k = tl.where(by_input, 1.0, lesser), tl.where(by_input, lesser, 1.0)
            k0 = tl.where(by_input, lesser, -lesser)
            c, n = k * c + e * k2, k * n + e
            n = tl.where(n < 1, 1.0, n)
            m = tl.where(by_input, i, decayed)
            h = k3 * (c / n)
    return h, c, n, m, k0, k1, k2, k3


@triton.jit
def step_back(
    k0, k1, k2, k3, before, old_n, after, n, dh, dc, dn, dm,
    FUNCTION: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The gradients of the gates, and of the states before without what goes through R; ``before`` and
    ``after`` are c, or h where there is none."""
    g0, g1, g2, g3 = dh, dh, dh, dh
    if FUNCTION == "elman":
        g0 = dh * (1 - after * after)
        dh = tl.zeros_like(dh)
    elif FUNCTION == "gru":
        g3 = dh * (1 - k1) * (1 - k2 * k2)
        g0, g1 = g3 * k0, g3 * k3 * k0 * (1 - k0)
        g2 = dh * (before - k2) * k1 * (1 - k1)
        dh = dh * k1
    elif FUNCTION == "lstm":
        bent = hyperbolic(after)
        dc += dh * k3 * (1 - bent * bent)
        g0, g1 = dc * k2 * k0 * (1 - k0), dc * before * k1 * (1 - k1)
        g2, g3 = dc * k0 * (1 - k2 * k2), dh * bent * k3 * (1 - k3)
        dh, dc = tl.zeros_like(dh), dc * k1
    else:
        n = tl.where(n == 0, 1.0, n)  # which it is of units that are not there
        by_input = k0.to(tl.int32, bitcast=True) >= 0
        e, k = tl.where(by_input, 1.0, -k0), tl.where(by_input, k0, 1.0)
        per_n = 1 / n
        share, y = dh * k3 * per_n, after * per_n
        dc += share
        to_n = dn - share * y
        kept_n = k * old_n
        floored = kept_n + e < 1
        dn = tl.where(floored, 0.0, to_n)
        dm += tl.where(floored, to_n, 0.0)
        to_e, to_k, of_n = dc * k2 + dn, dc * before + dn * old_n, dn
        if NARROW:
            usual = (floored == 0) & (tl.abs(before) < 2 * old_n)
            old_y = before * (1 / tl.where(usual, old_n, 1.0))
            apart = dc * (k2 - old_y) * per_n
            own = dc * y + dn
            old = own - e * apart
            to_e = tl.where(usual, own + kept_n * apart, to_e)
            to_k = tl.where(usual, old * old_n, to_k)
            of_n = tl.where(usual, old - dc * old_y, dn)
        g0 = to_e * e + tl.where(by_input, dm, 0.0)
        g1 = (to_k * k + tl.where(by_input, 0.0, dm)) * (1 - tl.exp(k1))
        g2, g3 = dc * e * (1 - k2 * k2), dh * y * k3 * (1 - k3)
        dh, dc, dn = tl.zeros_like(dh), dc * k, of_n * k
        dm = tl.where(by_input, 0.0, dm)
    return g0, g1, g2, g3, dh, dc, dn, dm


# --- All steps --------------------------------------------------------------------------------


@triton.jit
def sequence_forward(
    inputs, recurrent, bias, initial, states, cache, workspace,
    batch, time, heads, dim, forward_clip,
    inputs_batch, inputs_time, states_state, states_batch, states_time, cache_batch, cache_time,
    FUNCTION: tl.constexpr, GATES: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr,
    STATES: tl.constexpr, KEPT: tl.constexpr, UNITS: tl.constexpr, BATCHES: tl.constexpr,
):  # fmt: skip
    head, batches, units, there = own(batch, heads, dim, UNITS, BATCHES)
    block = heads * dim
    w0, w1, w2, w3 = matrices(recurrent, head, heads, dim, UNITS, False, GATES)
    row = tl.arange(0, UNITS)[None, :] < dim
    b0, b1, b2, b3 = take_four(bias, units, block, row, BIAS)
    starts = there & given(initial)
    h, c, n, m = take_four(initial, batches * block + units, batch * block, starts, STATES)
    keeps = there & given(cache)
    from_inputs, to_states = batches * inputs_batch + units, batches * states_batch + units
    to_cache = batches * cache_batch + units
    x0, x1, x2, x3 = take_four(inputs, from_inputs, block, there & (time > 0), INPUTS)
    for t in range(time):
        from_inputs += inputs_time
        more = there & (t + 1 < time)
        y0, y1, y2, y3 = take_four(inputs, from_inputs, block, more, INPUTS)
        r0 = multiply(h, w0)
        r1, r2, r3 = r0, r0, r0
        if GATES > 1:
            r1, r2 = multiply(h, w1), multiply(h, w2)
        if GATES > 3:
            r3 = multiply(h, w3)
        h, c, n, m, k0, k1, k2, k3 = step(
            r0, r1, r2, r3, x0, x1, x2, x3, b0, b1, b2, b3, h, c, n, m, FUNCTION
        )  # fmt: skip
        h = clipped(h, forward_clip)
        put_four(states, to_states, states_state, h, c, n, m, there, STATES)
        put_four(cache, to_cache, block, k0, k1, k2, k3, keeps, KEPT)
        to_states += states_time
        to_cache += cache_time
        x0, x1, x2, x3 = y0, y1, y2, y3


@triton.jit
def sequence_backward(
    recurrent, states, initial, cache, states_grad, final_grad, gates_grad, initial_grad, workspace,
    batch, time, heads, dim, graded, recurrent_clip,
    states_state, states_batch, states_time, cache_batch, cache_time,
    states_grad_state, states_grad_batch, states_grad_time, gates_grad_batch, gates_grad_time,
    FUNCTION: tl.constexpr, GATES: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr,
    STATES: tl.constexpr, KEPT: tl.constexpr, UNITS: tl.constexpr, BATCHES: tl.constexpr,
):  # fmt: skip
    FIRST: tl.constexpr = 1 if STATES > 1 else 0  # of the states that matter beside h
    TRACKED: tl.constexpr = 2 if STATES > 2 else 1
    NARROW: tl.constexpr = states.dtype.element_ty.primitive_bitwidth < 32
    head, batches, units, there = own(batch, heads, dim, UNITS, BATCHES)
    block = heads * dim
    of_state, in_state = batch * block, batches * block + units
    w0, w1, w2, w3 = matrices(recurrent, head, heads, dim, UNITS, True, GATES)
    last = time - 1
    at_states = batches * states_batch + units + last * states_time + FIRST * states_state
    at_cache = batches * cache_batch + units + last * cache_time
    at_grad = batches * states_grad_batch + units + last * states_grad_time
    at_gates = batches * gates_grad_batch + units + last * gates_grad_time
    starts, ends = there & given(initial), there & given(final_grad)
    after, n, _, _ = take_four(states, at_states, states_state, there & (time > 0), TRACKED)
    dh, dc, dn, dm = take_four(final_grad, in_state, of_state, ends, STATES)
    if STATES > 2:
        dm -= dc * after + dn * n
    for back in range(time):
        first = back == last
        at_states -= states_time
        before, old_n, _, _ = take_four(
            states, at_states, states_state, there & (back < last), TRACKED
        )
        start, start_n, _, _ = take_four(
            initial, in_state + FIRST * of_state, of_state, starts & first, TRACKED
        )
        before, old_n = before + start, old_n + start_n
        k0, k1, k2, k3 = take_four(cache, at_cache, block, there, KEPT)
        dh += take(states_grad, at_grad, there & (graded > 0))
        if STATES > 1:
            more = there & (graded > 1)
            of_c, of_n, of_m, _ = take_four(
                states_grad, at_grad + states_grad_state, states_grad_state, more, STATES - 1
            )
            dc += of_c
            if STATES > 2:
                dn += of_n
                dm += of_m - of_c * after - of_n * n
        g0, g1, g2, g3, dh, dc, dn, dm = step_back(
            k0, k1, k2, k3, before, old_n, after, n, dh, dc, dn, dm, FUNCTION, NARROW
        )  # fmt: skip
        put_four(gates_grad, at_gates, block, g0, g1, g2, g3, there, BIAS)
        terms = multiply(g0, w0)
        if GATES > 1:
            terms += multiply(g1, w1)
            terms += multiply(g2, w2)
        if GATES > 3:
            terms += multiply(g3, w3)
        dh += clipped(terms, recurrent_clip)
        after, n = before, old_n
        at_cache -= cache_time
        at_grad -= states_grad_time
        at_gates -= gates_grad_time
    if STATES > 2:
        dm += dc * after + dn * n
    put_four(initial_grad, in_state, of_state, dh, dc, dn, dm, there & given(initial_grad), STATES)
