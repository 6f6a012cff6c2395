"""linear_scan in Triton: the kernels that the CUDA sources have, with the same parameters. Here are those
over contiguous time, and the reductions; those over contiguous channels are in ``triton_columns.py``.

One step of the recurrence is an affine map of the state, x -> scale * x + shift, and composing maps
is associative. A program owns a few rows of one sequence and walks them tile by tile. It lets the
state that enters a tile into the tile's first map, scans the tile, writes it, and takes the last
state along to the next tile.

    forward    x[t]           = gates[t] * x[t-1] + tokens[t]
    backward   tokens_grad[t] = conj(gates[t+1]) * tokens_grad[t+1] + states_grad[t]
               gates_grad[t]  = tokens_grad[t] * conj(x[t-1])
               and the initial state's gradient is conj(gates[0]) * tokens_grad[0]
    reduction  gates_grad summed over the dimensions along which gates are broadcast

Forward reads two elements and writes one: 12 bytes per element in float32, 6 in bfloat16 and
float16. Backward reads three and writes two: 20 bytes and 10; it reads gates and states directly at
t+1 and t-1, so that no value has to change threads.

    row 0            | tile 0 | tile 1 | …    time ->
    …                |        |        |
    row ROWS-1       | TIMES  | TIMES  | …

Walking from the last step to the first is walking with the strides of time negated, except where
that would keep 16 bytes from being read at once: in aligned variants. Triton scans a tile in reverse
at the price of five shuffles for each value that goes in or comes out, so such a tile is put into
reverse order as it is read: its 16-byte chunks by their addresses, and the elements of a chunk by a
flip, which costs nothing as one thread holds the chunk.

Steps outside a line read as the identity map, gate 1 and token 0, and so hand the state on. Each
packed sequence is walked by a program of its own, so that none can touch another: programs lie along
x for lines, and along y and then z for sequences.

Aligned variants (ALIGNED 1) take it that time has stride 1, that there is one outer index and nothing
packed, and run in one direction only (REVERSE 1: from the last step to the first). The others take
nothing for granted.
"""

import triton
import triton.language as tl

from scan_registry.kernels.linear_scan.triton_tiles import (
    add,
    at,
    conjugate,
    flipped_chunk,
    line,
    load,
    multiply,
    near,
    own_rows,
    own_sequence,
    reverse_chunks,
    reverse_value_chunks,
    scan,
    select,
    spread,
    step_before,
    store,
    tile_steps,
    total,
    up_to,
    value,
    walked,
    zeros_like,
)

# Lines that a reduction has in hand.
PART = tl.constexpr(16)


# --- The kernels' bodies ----------------------------------------------------------------------


@triton.jit
def walk_forward(
    gates, tokens, states, x, lines, steps,
    TIMES: tl.constexpr, CHUNK: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Scan the ``lines`` that the mask admits from state ``x``; returns the state after them."""
    bits: tl.constexpr = states[0].dtype.element_ty.primitive_bitwidth
    error_term = zeros_like(x)
    for start in tl.range(0, steps, TIMES, num_stages=stages):
        base, place, order = tile_steps(start, steps, TIMES, CHUNK)
        inside = lines & (place < up_to(steps - base, TIMES))
        gate = reverse_chunks(load(near(gates, base, place), inside, 1), CHUNK)
        token = reverse_chunks(load(near(tokens, base, place), inside, 0), CHUNK)
        tile, x, error_term = scan(value(gate), value(token), x, error_term, order, TIMES, bits)
        store(near(states, base, place), reverse_value_chunks(tile, CHUNK), inside)
    return x


@triton.jit
def forward(
    gates, tokens, initial_state, states, final_state, offsets, lines, sequences, time, flags,
    TIMES: tl.constexpr, stages: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = flipped_chunk(gates[0].dtype, ALIGNED)
    reverse = flags % 2 == 1
    s, begin, end = own_sequence(offsets, sequences, time, ALIGNED)
    lines = lines & (begin < end)
    x = value(load(at(initial_state, s), lines & initial_state[2], 0))
    if CHUNK > 0:
        x = walk_forward(
            gates, tokens, states, x, lines, end, TIMES, CHUNK * REVERSE, stages
        )  # fmt: skip
    else:
        first, direction = tl.where(reverse, end - 1, begin), tl.where(reverse, -1, 1)
        x = walk_forward(
            walked(gates, first, direction),
            walked(tokens, first, direction),
            walked(states, first, direction),
            x, lines, end - begin, TIMES, 0, stages,
        )  # fmt: skip
    store(at(final_state, s), x, lines & final_state[2])


@triton.jit
def walk_backward(
    gates, states, states_grad, gates_grad, tokens_grad, initial, adjoint, lines, steps,
    TIMES: tl.constexpr, CHUNK: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """The scan of ``walk_forward`` over tokens_grad, the states' adjoint, against the direction of
    the recurrence. ``initial`` is the state before its first step; returns the adjoint there."""
    bits: tl.constexpr = states_grad[0].dtype.element_ty.primitive_bitwidth
    error_term = zeros_like(adjoint)
    for start in tl.range(0, steps, TIMES, num_stages=stages):
        base, place, order = tile_steps(start, steps, TIMES, CHUNK)
        inside = lines & (place < up_to(steps - base, TIMES))
        # Of all steps, where in or next to this tile: the lowest, or -1, and the highest, or TIMES.
        lowest, highest = tl.where(base > 0, -1, 0), up_to(steps - 1 - base, TIMES)
        has_lower, has_higher = inside & (place > lowest), lines & (place < highest)
        if CHUNK == 0:
            later, has_later, earlier, has_earlier = base - 1, has_lower, base + 1, has_higher
            is_first = place == highest
        else:
            later, has_later, earlier, has_earlier = base + 1, has_higher, base - 1, has_lower
            is_first = place == lowest
        later_gate = reverse_chunks(load(near(gates, later, place), has_later, 1), CHUNK)
        grad = reverse_chunks(load(near(states_grad, base, place), inside, 0), CHUNK)
        x = value(load(near(states, earlier, place), has_earlier & gates_grad[2], 0))

        scale = conjugate(value(later_gate))
        tile, adjoint, error_term = scan(
            scale, value(grad), adjoint, error_term, order, TIMES, bits
        )
        for_tokens = reverse_value_chunks(tile, CHUNK)
        for_gates = multiply(for_tokens, conjugate(select(is_first, initial, x)))
        store(near(gates_grad, base, place), for_gates, inside & gates_grad[2])
        store(near(tokens_grad, base, place), for_tokens, inside & tokens_grad[2])
    return adjoint


@triton.jit
def backward(
    gates, states, states_grad, initial_state, final_state_grad,
    gates_grad, tokens_grad, initial_state_grad, offsets, lines, sequences, time, flags,
    TIMES: tl.constexpr, stages: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = flipped_chunk(gates[0].dtype, ALIGNED)
    reverse = flags % 2 == 1
    s, begin, end = own_sequence(offsets, sequences, time, ALIGNED)
    lines = lines & (begin < end)
    initial = value(load(at(initial_state, s), lines & initial_state[2], 0))
    adjoint = value(load(at(final_state_grad, s), lines & final_state_grad[2], 0))
    if CHUNK > 0:
        adjoint = walk_backward(
            gates, states, states_grad, gates_grad, tokens_grad,
            initial, adjoint, lines, end, TIMES, CHUNK * (1 - REVERSE), stages,
        )  # fmt: skip
    else:
        first, direction = tl.where(reverse, begin, end - 1), tl.where(reverse, 1, -1)
        adjoint = walk_backward(
            walked(gates, first, direction),
            walked(states, first, direction),
            walked(states_grad, first, direction),
            walked(gates_grad, first, direction),
            walked(tokens_grad, first, direction),
            initial, adjoint, lines, end - begin, TIMES, 0, stages,
        )  # fmt: skip
    first_gate = value(load(at(gates, tl.where(reverse, end - 1, begin)), lines, 0))
    grad = multiply(conjugate(first_gate), adjoint)
    store(at(initial_state_grad, s), grad, lines & initial_state_grad[2])


@triton.jit
def sum_pairs(
    tokens_grad, states, initial_state, strides, c, t, inside, before, s, is_first,
    o, b, pair, after_pairs, summed_batch, dtype: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Sum of tokens_grad[t] * conj(x[t-1]) over (outer, batch) pairs, for a tile of (c, t)."""
    tokens_grad_strides, states_strides, state_strides = strides
    zeros = tl.zeros(inside.shape, dtype)
    sums = (zeros, zeros) if COMPLEX else (zeros,)
    for i in tl.range(pair, after_pairs):
        where = (o + i // summed_batch, b + i % summed_batch, c)
        grad = line(tokens_grad, where, tokens_grad_strides, COMPLEX)
        x = line(states, where, states_strides, COMPLEX)
        initial = line(initial_state, where, state_strides, COMPLEX)
        x_before = select(
            is_first,
            value(load(at(initial, s), inside & is_first & initial[2], 0)),
            value(load(at(x, before), inside & (is_first == 0), 0)),
        )
        product = multiply(value(load(at(grad, t), inside, 0)), conjugate(x_before))
        sums = add(sums, product)
    return sums


@triton.jit
def write_sums(out, t, sums, inside, sums_unit):
    """Write a tile of sums; or those along the unit dimension, where that begins."""
    if sums_unit:
        sums = spread(total(sums, 1), sums[0])
        inside = inside & (tl.arange(0, inside.shape[1])[None, :] == 0)
    store(at(out, t), sums, inside)


@triton.jit
def reduction(
    tokens_grad, states, initial_state, gates_grad, offsets, sizes, sequences,
    tokens_grad_strides, states_strides, gates_grad_strides, state_strides, groups, flags,
    UNIT: tl.constexpr, OTHER: tl.constexpr, axis: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Partial sums of gates_grad: of one tile of channels and times, and of one group of the
    (outer, batch) pairs that are summed. A tile is taken PART lines at a time; its dimensions are
    (other, unit), and ``axis`` is that of time."""
    outer, batch, channels, time = sizes
    sums_outer = (outer > 1) & (gates_grad_strides[0] == 0)
    sums_batch = (batch > 1) & (gates_grad_strides[1] == 0)
    sums_channels = (channels > 1) & (gates_grad_strides[2] == 0)
    sums_time = (time > 1) & (gates_grad_strides[3] == 0)
    summed_batch, kept_batch = tl.where(sums_batch, batch, 1), tl.where(sums_batch, 1, batch)
    pairs = summed_batch * tl.where(sums_outer, outer, 1)

    CHANNELS: tl.constexpr = OTHER if axis == 1 else UNIT
    TIMES: tl.constexpr = UNIT if axis == 1 else OTHER
    tiles_c, tiles_t = tl.cdiv(channels, CHANNELS), tl.cdiv(time, TIMES)
    block = tl.program_id(0).to(tl.int64)
    tile_t, tile_c = block % tiles_t, block // tiles_t % tiles_c
    group, kept = block // tiles_t // tiles_c % groups, block // tiles_t // tiles_c // groups
    o, b = kept // kept_batch, kept % kept_batch

    # Pieces by group, tile of channels and tile of times, each in the layout of gates_grad.
    piece, size = group, kept_batch * tl.where(sums_outer, 1, outer)
    piece = tl.where(sums_channels, piece * tiles_c + tile_c, piece)
    piece = tl.where(sums_time, piece * tiles_t + tile_t, piece)
    size = size * tl.where(sums_channels, 1, channels) * tl.where(sums_time, 1, time)
    gates_grad += piece * size * (2 if COMPLEX else 1)

    dtype: tl.constexpr = gates_grad.dtype.element_ty
    zeros = tl.zeros((1, UNIT), dtype)
    unit_sums = (zeros, zeros) if COMPLEX else (zeros,)
    unit = tl.arange(0, UNIT)[None, :]
    for part in tl.range(0, OTHER, PART):
        other = part + tl.arange(0, PART)[:, None]
        c = tile_c * CHANNELS + (other if axis == 1 else unit)
        t = tile_t * TIMES + (unit if axis == 1 else other)
        inside = (c < channels) & (t < time)
        before, s, is_first = step_before(offsets, t, sequences, time, flags % 2 == 1)
        sums = sum_pairs(
            tokens_grad, states, initial_state,
            (tokens_grad_strides, states_strides, state_strides),
            c, t, inside, before, s, is_first, o, b,
            group * pairs // groups, (group + 1) * pairs // groups, summed_batch, dtype, COMPLEX,
        )  # fmt: skip
        if sums_channels if axis == 1 else sums_time:
            unit_sums = add(unit_sums, total(sums, 0))
        else:
            out = line(gates_grad, (o, b, c), gates_grad_strides, COMPLEX)
            write_sums(out, t, sums, inside, sums_time if axis == 1 else sums_channels)
    if axis == 1:
        if sums_channels:
            out = line(gates_grad, (o, b, 0), gates_grad_strides, COMPLEX)
            t = tile_t * UNIT + unit
            write_sums(out, t, unit_sums, t < time, sums_time)
    elif sums_time:
        c = tile_c * UNIT + unit
        out = line(gates_grad, (o, b, c), gates_grad_strides, COMPLEX)
        write_sums(out, 0, unit_sums, c < channels, sums_channels)


# --- The entry points -------------------------------------------------------------------------
#
# workspace is reserved, as in the CUDA kernels, and null.


@triton.jit
def time_last_forward(
    gates, tokens, initial_state, states, final_state, offsets, workspace,
    outer, batch, channels, time, sequences,
    gates_outer, gates_batch, gates_channel, gates_time,
    tokens_outer, tokens_batch, tokens_channel, tokens_time,
    states_outer, states_batch, states_channel, states_time,
    state_outer, state_batch, state_channel, state_time, flags,
    ROWS: tl.constexpr, TIMES: tl.constexpr, STAGES: tl.constexpr,
    ALIGNED: tl.constexpr, REVERSE: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    where, lines = own_rows(outer, batch, channels, ROWS, ALIGNED)
    gates_strides = (gates_outer, gates_batch, gates_channel, 1 if ALIGNED else gates_time)
    tokens_strides = (tokens_outer, tokens_batch, tokens_channel, 1 if ALIGNED else tokens_time)
    states_strides = (states_outer, states_batch, states_channel, 1 if ALIGNED else states_time)
    state_strides = (state_outer, state_batch, state_channel, state_time)
    forward(
        line(gates, where, gates_strides, COMPLEX),
        line(tokens, where, tokens_strides, COMPLEX),
        line(initial_state, where, state_strides, COMPLEX),
        line(states, where, states_strides, COMPLEX),
        line(final_state, where, state_strides, COMPLEX),
        offsets, lines, sequences, time, flags, TIMES, STAGES, ALIGNED, REVERSE,
    )  # fmt: skip


@triton.jit
def time_last_backward(
    gates, states, states_grad, initial_state, final_state_grad,
    gates_grad, tokens_grad, initial_state_grad, offsets, workspace,
    outer, batch, channels, time, sequences,
    gates_outer, gates_batch, gates_channel, gates_time,
    states_outer, states_batch, states_channel, states_time,
    states_grad_outer, states_grad_batch, states_grad_channel, states_grad_time,
    grads_outer, grads_batch, grads_channel, grads_time,
    state_outer, state_batch, state_channel, state_time, flags,
    ROWS: tl.constexpr, TIMES: tl.constexpr, STAGES: tl.constexpr,
    ALIGNED: tl.constexpr, REVERSE: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    where, lines = own_rows(outer, batch, channels, ROWS, ALIGNED)
    gates_strides = (gates_outer, gates_batch, gates_channel, 1 if ALIGNED else gates_time)
    states_strides = (states_outer, states_batch, states_channel, 1 if ALIGNED else states_time)
    states_grad_strides = (
        states_grad_outer, states_grad_batch, states_grad_channel, 1 if ALIGNED else states_grad_time,
    )  # fmt: skip
    grads_strides = (grads_outer, grads_batch, grads_channel, 1 if ALIGNED else grads_time)
    state_strides = (state_outer, state_batch, state_channel, state_time)
    backward(
        line(gates, where, gates_strides, COMPLEX),
        line(states, where, states_strides, COMPLEX),
        line(states_grad, where, states_grad_strides, COMPLEX),
        line(initial_state, where, state_strides, COMPLEX),
        line(final_state_grad, where, state_strides, COMPLEX),
        line(gates_grad, where, grads_strides, COMPLEX),
        line(tokens_grad, where, grads_strides, COMPLEX),
        line(initial_state_grad, where, state_strides, COMPLEX),
        offsets, lines, sequences, time, flags, TIMES, STAGES, ALIGNED, REVERSE,
    )  # fmt: skip


@triton.jit
def time_last_reduction(
    tokens_grad, states, initial_state, gates_grad, offsets,
    outer, batch, channels, time, sequences,
    tokens_grad_outer, tokens_grad_batch, tokens_grad_channel, tokens_grad_time,
    states_outer, states_batch, states_channel, states_time,
    gates_grad_outer, gates_grad_batch, gates_grad_channel, gates_grad_time,
    state_outer, state_batch, state_channel, state_time, groups, flags,
    UNIT: tl.constexpr, OTHER: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    reduction(
        tokens_grad, states, initial_state, gates_grad, offsets,
        (outer, batch, channels, time), sequences,
        (tokens_grad_outer, tokens_grad_batch, tokens_grad_channel, tokens_grad_time),
        (states_outer, states_batch, states_channel, states_time),
        (gates_grad_outer, gates_grad_batch, gates_grad_channel, gates_grad_time),
        (state_outer, state_batch, state_channel, state_time),
        groups, flags, UNIT, OTHER, 1, COMPLEX,
    )  # fmt: skip


@triton.jit
def channel_last_reduction(
    tokens_grad, states, initial_state, gates_grad, offsets,
    outer, batch, channels, time, sequences,
    tokens_grad_outer, tokens_grad_batch, tokens_grad_channel, tokens_grad_time,
    states_outer, states_batch, states_channel, states_time,
    gates_grad_outer, gates_grad_batch, gates_grad_channel, gates_grad_time,
    state_outer, state_batch, state_channel, state_time, groups, flags,
    UNIT: tl.constexpr, OTHER: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    reduction(
        tokens_grad, states, initial_state, gates_grad, offsets,
        (outer, batch, channels, time), sequences,
        (tokens_grad_outer, tokens_grad_batch, tokens_grad_channel, tokens_grad_time),
        (states_outer, states_batch, states_channel, states_time),
        (gates_grad_outer, gates_grad_batch, gates_grad_channel, gates_grad_time),
        (state_outer, state_batch, state_channel, state_time),
        groups, flags, UNIT, OTHER, 0, COMPLEX,
    )  # fmt: skip
