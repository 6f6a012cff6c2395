"""linear_scan in Triton over contiguous channels. What it computes is said in ``triton_kernels.py``.

A program owns a column of CHANNELS channels of one sequence, and walks it tile by tile:

               channels ->
      order    | group 0: STEPS rows |  A group composes the maps of its rows, learns from all groups
        |      | group 1: STEPS rows |  which state enters them, and walks them again. The next
        v      | …           GROUPS  |  STAGES - 1 tiles are on their way to shared memory meanwhile.

A tile has the shape (STEPS, GROUPS * CHANNELS), so that the compiler puts groups side by side over
lanes and warps, VECTOR channels to a lane, and all rows of a group in the same threads: there, a scan
is a chain of multiply-adds. Only the composed maps change threads, once a tile.

Aligned variants (ALIGNED 1) take it that channels have stride 1 and come in whole vectors, that there
is one outer index and nothing packed. The others take nothing for granted, and have VECTOR 1.
"""

# ruff: noqa: RET505 (Triton compiles what follows a return, unless it is the other branch)

import triton
import triton.language as tl

from scan_registry.kernels.linear_scan.triton_tiles import (
    at,
    compose,
    compose_compensated,
    compose_complex,
    conjugate,
    divided,
    exactly_applied,
    load,
    multiply,
    multiply_add,
    ones_like,
    own_sequence,
    select,
    store,
    up_to,
    value,
    walked,
    whole,
    zeros_like,
)


@triton.jit
def own_columns(
    batch, channels,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Outer and batch index of this program's column, the channels of its lanes and their mask, and
    the groups of those: (1, GROUPS * CHANNELS)."""
    pair, column = divided(tl.program_id(0), tl.cdiv(channels, CHANNELS))
    lane = tl.arange(0, GROUPS * CHANNELS)[None, :]
    c = tl.multiple_of(column * CHANNELS + lane % CHANNELS, (1, VECTOR))
    if ALIGNED:
        return (0, pair, c), c < channels, lane // CHANNELS
    else:
        o, b = divided(pair, batch)
        return (o, b, c), c < channels, lane // CHANNELS


@triton.jit
def lines_of(
    pointer, where, strides, CHANNELS: tl.constexpr, VECTOR: tl.constexpr, COMPLEX: tl.constexpr
):
    """The lines of a tensor at (outer, batch, channels). The compiler is told that channels are
    contiguous, so that it puts them side by side; how many it then takes at once follows from what
    divides their numbers, and that is VECTOR."""
    o, b, c = where
    beside = tl.max_contiguous(tl.multiple_of(c * strides[2], (1, VECTOR)), (1, CHANNELS))
    first = whole(pointer, COMPLEX) + o * strides[0] + b * strides[1] + beside
    return first, strides[3], pointer.to(tl.int64) != 0


@triton.jit
def tile_at(line, start, group, row, STEPS: tl.constexpr):
    """Pointers to a tile's elements from step ``start`` on. What rows add is alike in all threads."""
    return (line[0] + (start + group * STEPS) * line[1]) + row * line[1]


@triton.jit
def component_of_row(a, which):
    kind: tl.constexpr = tl.int64 if a.dtype == tl.float64 else tl.int32
    bits = tl.where(which, a.to(kind, bitcast=True), 0)
    return tl.sum(bits, 0, keep_dims=True).to(a.dtype, bitcast=True)


@triton.jit
def of_row(a, which):
    """The row where ``which`` holds. It costs nothing where a thread has all rows: of a sum of integers,
    unlike one of floats, the compiler leaves out the zeros."""
    if len(a) == 2:
        return component_of_row(a[0], which), component_of_row(a[1], which)
    else:
        return (component_of_row(a[0], which),)


@triton.jit
def component_of_all(a, GROUPS: tl.constexpr):
    channels: tl.constexpr = a.shape[1] // GROUPS
    apart = tl.expand_dims(a.reshape([GROUPS, channels]), 1)
    return tl.broadcast_to(apart, (GROUPS, GROUPS, channels)).reshape([GROUPS, GROUPS * channels])


@triton.jit
def of_all(a, GROUPS: tl.constexpr):
    """What each group has, told to all: (1, GROUPS * channels) to (GROUPS, GROUPS * channels). A thread
    gets all rows, since the layout of its operand is lost to the compiler where a dimension is added."""
    if len(a) == 2:
        return component_of_all(a[0], GROUPS), component_of_all(a[1], GROUPS)
    else:
        return (component_of_all(a[0], GROUPS),)


@triton.jit
def then_apply(first_scale, first_shift, second_scale, second_shift):
    return first_scale * second_scale, tl.fma(second_scale, first_shift, second_shift)


@triton.jit
def then_apply_complex(
    first_scale, first_scale_i, first_shift, first_shift_i,
    second_scale, second_scale_i, second_shift, second_shift_i,
):  # fmt: skip
    second = second_scale, second_scale_i
    scale = multiply((first_scale, first_scale_i), second)
    shift = multiply_add(second, (first_shift, first_shift_i), (second_shift, second_shift_i))
    return scale[0], scale[1], shift[0], shift[1]


@triton.jit
def composed(scale, shift, last, bits: tl.constexpr):
    """Each group's rows as one affine map: scale, its error term, shift."""
    error_term = zeros_like(scale)
    if len(scale) == 2:
        maps = (scale[0], scale[1], error_term[0], error_term[1], shift[0], shift[1])
        s, s_i, r, r_i, h, h_i = tl.associative_scan(maps, 0, compose_complex)
        scale, error_term, shift = (s, s_i), (r, r_i), (h, h_i)
    elif bits < 32:
        s, h = tl.associative_scan((scale[0], shift[0]), 0, compose)
        scale, shift = (s,), (h,)
    else:
        s, r, h = tl.associative_scan((scale[0], error_term[0], shift[0]), 0, compose_compensated)
        scale, error_term, shift = (s,), (r,), (h,)
    return of_row(scale, last), of_row(error_term, last), of_row(shift, last)


@triton.jit
def walk_rows(scale, shift, x, first):
    """The states of rows that ``x`` enters."""
    shift = select(first, multiply_add(scale, x, shift), shift)
    if len(scale) == 2:
        maps = (scale[0], scale[1], shift[0], shift[1])
        _, _, real, imaginary = tl.associative_scan(maps, 0, then_apply_complex)
        return real, imaginary
    else:
        _, states = tl.associative_scan((scale[0], shift[0]), 0, then_apply)
        return (states,)


@triton.jit
def scan_groups(
    scale, shift, x, x_error, row, group,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """The states of a tile that ``x`` enters, the state that leaves it, and its error term. ``bits`` are
    those of an element in which states are stored."""
    own_scale, own_error, own_shift = composed(scale, shift, row == STEPS - 1, bits)
    scales, shifts = of_all(own_scale, GROUPS), of_all(own_shift, GROUPS)
    if bits >= 32:
        error_terms = of_all(own_error, GROUPS)
    entering, number = x, tl.arange(0, GROUPS)[:, None]
    for g in tl.static_range(GROUPS):
        if g > 0:
            entering = select(group == g, x, entering)
        s, h = of_row(scales, number == g), of_row(shifts, number == g)
        if bits < 32:
            x = multiply_add(s, x, h)
        else:
            x, x_error = exactly_applied(s, of_row(error_terms, number == g), h, x, x_error)
    return walk_rows(scale, shift, entering, row == 0), x, x_error


@triton.jit
def walk_forward(
    gates, tokens, states, x, lines, group, steps,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Scan ``steps`` of the ``lines`` that the mask admits from state ``x``; returns the last state."""
    bits: tl.constexpr = states[0].dtype.element_ty.primitive_bitwidth
    TIMES: tl.constexpr = STEPS * GROUPS
    row = tl.arange(0, STEPS)[:, None]
    place, error_term, left = group * STEPS + row, zeros_like(x), steps
    for start in tl.range(0, steps, TIMES, num_stages=stages):
        coming = place < tl.where(lines, up_to(steps - start, TIMES), 0)
        gate = load(tile_at(gates, start, group, row, STEPS), coming, 0)
        token = load(tile_at(tokens, start, group, row, STEPS), coming, 0)
        # Not ``coming``, which would have to be kept for every tile that is on its way.
        here = place < up_to(left, TIMES)
        left -= TIMES
        scale = value(gate)
        scale = select(here, scale, ones_like(scale))
        tile, x, error_term = scan_groups(
            scale, value(token), x, error_term, row, group, STEPS, GROUPS, bits
        )
        store(tile_at(states, start, group, row, STEPS), tile, here & lines)
    return x


@triton.jit
def forward(
    gates, tokens, initial_state, states, final_state, offsets, lines, group,
    sequences, time, flags,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, stages: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    reverse = flags % 2 == 1
    s, begin, end = own_sequence(offsets, sequences, time, ALIGNED)
    lines = lines & (begin < end)
    x = value(load(at(initial_state, s), lines & initial_state[2], 0))
    first, direction = tl.where(reverse, end - 1, begin), tl.where(reverse, -1, 1)
    x = walk_forward(
        walked(gates, first, direction),
        walked(tokens, first, direction),
        walked(states, first, direction),
        x, lines, group, end - begin, STEPS, GROUPS, stages,
    )  # fmt: skip
    store(at(final_state, s), x, lines & final_state[2] & (group == 0))


@triton.jit
def walk_backward(
    gates, states, states_grad, gates_grad, tokens_grad, adjoint, lines, group, steps,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """The scan of ``walk_forward`` over tokens_grad, the states' adjoint, against the direction of
    the recurrence; returns the adjoint at its first step, whose gate's gradient is left out."""
    bits: tl.constexpr = states_grad[0].dtype.element_ty.primitive_bitwidth
    TIMES: tl.constexpr = STEPS * GROUPS
    row = tl.arange(0, STEPS)[:, None]
    place, error_term, left = group * STEPS + row, zeros_like(adjoint), steps
    for start in tl.range(0, steps, TIMES, num_stages=stages):
        coming = place < tl.where(lines, up_to(steps - start, TIMES), 0)
        has_later = coming & ((place > 0) | (start > 0))
        has_earlier = place < tl.where(lines & gates_grad[2], up_to(steps - 1 - start, TIMES), 0)
        later_gate = load(tile_at(gates, start - 1, group, row, STEPS), has_later, 0)
        grad = load(tile_at(states_grad, start, group, row, STEPS), coming, 0)
        x = value(load(tile_at(states, start + 1, group, row, STEPS), has_earlier, 0))

        here = place < up_to(left, TIMES)
        scale = conjugate(value(later_gate))
        scale = select(here & ((place > 0) | (left < steps)), scale, ones_like(scale))
        tile, adjoint, error_term = scan_groups(
            scale, value(grad), adjoint, error_term, row, group, STEPS, GROUPS, bits
        )  # fmt: skip
        has_earlier = place < tl.where(lines & gates_grad[2], up_to(left - 1, TIMES), 0)
        left -= TIMES
        for_gates = multiply(tile, conjugate(x))
        store(tile_at(gates_grad, start, group, row, STEPS), for_gates, has_earlier)
        store(tile_at(tokens_grad, start, group, row, STEPS), tile, here & lines & tokens_grad[2])
    return adjoint


@triton.jit
def backward(
    gates, states, states_grad, initial_state, final_state_grad,
    gates_grad, tokens_grad, initial_state_grad, offsets, lines, group, sequences, time, flags,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, stages: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    reverse = flags % 2 == 1
    s, begin, end = own_sequence(offsets, sequences, time, ALIGNED)
    lines = lines & (begin < end)
    adjoint = value(load(at(final_state_grad, s), lines & final_state_grad[2], 0))
    first, direction = tl.where(reverse, begin, end - 1), tl.where(reverse, 1, -1)
    adjoint = walk_backward(
        walked(gates, first, direction),
        walked(states, first, direction),
        walked(states_grad, first, direction),
        walked(gates_grad, first, direction),
        walked(tokens_grad, first, direction),
        adjoint, lines, group, end - begin, STEPS, GROUPS, stages,
    )  # fmt: skip
    last, own = tl.where(reverse, end - 1, begin), lines & (group == 0)
    initial = value(load(at(initial_state, s), own & initial_state[2], 0))
    store(at(gates_grad, last), multiply(adjoint, conjugate(initial)), own & gates_grad[2])
    first_gate = value(load(at(gates, last), own, 0))
    grad = multiply(conjugate(first_gate), adjoint)
    store(at(initial_state_grad, s), grad, own & initial_state_grad[2])


@triton.jit
def channel_last_forward(
    gates, tokens, initial_state, states, final_state, offsets, workspace,
    outer, batch, channels, time, sequences,
    gates_outer, gates_batch, gates_channel, gates_time,
    tokens_outer, tokens_batch, tokens_channel, tokens_time,
    states_outer, states_batch, states_channel, states_time,
    state_outer, state_batch, state_channel, state_time, flags,
    CHANNELS: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr, ALIGNED: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    where, lines, group = own_columns(batch, channels, CHANNELS, GROUPS, VECTOR, ALIGNED)
    gates_strides = (gates_outer, gates_batch, 1 if ALIGNED else gates_channel, gates_time)
    tokens_strides = (tokens_outer, tokens_batch, 1 if ALIGNED else tokens_channel, tokens_time)
    states_strides = (states_outer, states_batch, 1 if ALIGNED else states_channel, states_time)
    state_strides = (state_outer, state_batch, state_channel, state_time)
    forward(
        lines_of(gates, where, gates_strides, CHANNELS, VECTOR, COMPLEX),
        lines_of(tokens, where, tokens_strides, CHANNELS, VECTOR, COMPLEX),
        lines_of(initial_state, where, state_strides, CHANNELS, 1, COMPLEX),
        lines_of(states, where, states_strides, CHANNELS, VECTOR, COMPLEX),
        lines_of(final_state, where, state_strides, CHANNELS, 1, COMPLEX),
        offsets, lines, group, sequences, time, flags, STEPS, GROUPS, STAGES, ALIGNED,
    )  # fmt: skip


@triton.jit
def channel_last_backward(
    gates, states, states_grad, initial_state, final_state_grad,
    gates_grad, tokens_grad, initial_state_grad, offsets, workspace,
    outer, batch, channels, time, sequences,
    gates_outer, gates_batch, gates_channel, gates_time,
    states_outer, states_batch, states_channel, states_time,
    states_grad_outer, states_grad_batch, states_grad_channel, states_grad_time,
    grads_outer, grads_batch, grads_channel, grads_time,
    state_outer, state_batch, state_channel, state_time, flags,
    CHANNELS: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr, ALIGNED: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    where, lines, group = own_columns(batch, channels, CHANNELS, GROUPS, VECTOR, ALIGNED)
    gates_strides = (gates_outer, gates_batch, 1 if ALIGNED else gates_channel, gates_time)
    states_strides = (states_outer, states_batch, 1 if ALIGNED else states_channel, states_time)
    states_grad_strides = (
        states_grad_outer, states_grad_batch, 1 if ALIGNED else states_grad_channel, states_grad_time,
    )  # fmt: skip
    grads_strides = (grads_outer, grads_batch, 1 if ALIGNED else grads_channel, grads_time)
    state_strides = (state_outer, state_batch, state_channel, state_time)
    backward(
        lines_of(gates, where, gates_strides, CHANNELS, VECTOR, COMPLEX),
        lines_of(states, where, states_strides, CHANNELS, VECTOR, COMPLEX),
        lines_of(states_grad, where, states_grad_strides, CHANNELS, VECTOR, COMPLEX),
        lines_of(initial_state, where, state_strides, CHANNELS, 1, COMPLEX),
        lines_of(final_state_grad, where, state_strides, CHANNELS, 1, COMPLEX),
        lines_of(gates_grad, where, grads_strides, CHANNELS, VECTOR, COMPLEX),
        lines_of(tokens_grad, where, grads_strides, CHANNELS, VECTOR, COMPLEX),
        lines_of(initial_state_grad, where, state_strides, CHANNELS, 1, COMPLEX),
        offsets, lines, group, sequences, time, flags, STEPS, GROUPS, STAGES, ALIGNED,
    )  # fmt: skip
