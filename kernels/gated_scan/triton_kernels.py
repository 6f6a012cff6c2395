"""gated_scan in Triton over contiguous time: the CUDA kernels' parameters. ``triton_columns.py`` has contiguous channels.

Tiles, lines and the ways to walk them are those of linear_scan's ``triton_kernels.py``. Here a tile's gates and tokens
follow from the inputs, as ``triton_kinds.py`` says, and backward its gradients are turned into those of the inputs:

    forward    h[t]       = gate[t] * h[t-1] + token[t]
    backward   adjoint[t] = states_grad[t] + gate[t+1] * adjoint[t+1]
               which is the token's gradient, and that of the gate is adjoint[t] * h[t-1]

Inputs are read once in each direction, and so are states and their gradients. A program owns whole rows, so that each
sequence gives one partial sum of the gradients of channel parameters.

Aligned variants (ALIGNED 1) take it that time has stride 1 and that nothing is packed, and run in one direction only
(REVERSE 1: from the last step to the first). The others take nothing for granted.
"""

import triton
import triton.language as tl

from scan_registry.kernels.gated_scan.triton_kinds import gate_and_token, gradients
from scan_registry.kernels.gated_scan.triton_scans import (
    applied,
    carried,
    scan_adjoints,
    scan_maps,
    through_gate,
)
from scan_registry.kernels.linear_scan.triton_tiles import (
    at,
    flipped_chunk,
    line,
    near,
    own_rows,
    own_sequence,
    reverse_chunks,
    tile_steps,
    up_to,
    walked,
)

# --- Tiles --------------------------------------------------------------------------------------


@triton.jit
def take(line, base, place, mask, CHUNK: tl.constexpr):
    """A tile in the order of the walk, in float32; 0 where there is nothing to read."""
    loaded = tl.load(near(line, base, place), mask=mask, other=0.0)
    return reverse_chunks(loaded, CHUNK).to(tl.float32)


@triton.jit
def put(line, base, place, a, mask, CHUNK: tl.constexpr):
    stored = reverse_chunks(a, CHUNK).to(line[0].dtype.element_ty)
    tl.store(near(line, base, place), stored, mask=mask & line[2])


@triton.jit
def is_reset(line, base, place, mask, CHUNK: tl.constexpr):
    """Whether states start anew; nowhere if nothing is given."""
    loaded = tl.load(near(line, base, place), mask=mask & line[2], other=0)
    return reverse_chunks(loaded, CHUNK) != 0


@triton.jit
def steps_of(order, TIMES: tl.constexpr, CHUNK: tl.constexpr):
    """From the tile's base to the step of each value in the order of the walk. Places are those in memory."""
    return order if CHUNK == 0 else TIMES - 1 - order


@triton.jit
def of_last(a, order, TIMES: tl.constexpr):
    """The value of a tile's last step."""
    return tl.sum(tl.where(order == TIMES - 1, a, 0.0), 1, keep_dims=True)


@triton.jit
def channel_parameters(parameters, c, channels, mask, COUNT: tl.constexpr):
    return [
        tl.load(parameters + n * channels + c, mask=mask, other=0.0) for n in (0, 1, 2, 3)[:COUNT]
    ]


@triton.jit
def all_walked(lines, first, direction):
    return [walked(each, first, direction) for each in lines]


# --- The kernels' bodies ------------------------------------------------------------------------


@triton.jit
def walk_forward(
    inputs, p, reset, states, x, lines, steps, option,
    TIMES: tl.constexpr, CHUNK: tl.constexpr, stages: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Scan the ``lines`` that the mask admits from state ``x``; returns the state after them."""
    bits: tl.constexpr = states[0].dtype.element_ty.primitive_bitwidth
    x_error = tl.zeros_like(x)
    for start in tl.range(0, steps, TIMES, num_stages=stages):
        base, place, order = tile_steps(start, steps, TIMES, CHUNK)
        inside = lines & (place < up_to(steps - base, TIMES))
        present = lines & (steps_of(order, TIMES, CHUNK) < up_to(steps - base, TIMES))
        anew = is_reset(reset, base, place, inside, CHUNK)
        given = [take(each, base, place, inside, CHUNK) for each in inputs]
        gate, token = gate_and_token(given, p, anew, option, KIND)
        gate = tl.where(present, tl.where(anew, 0.0, gate), 1.0)
        token = tl.where(present, token, 0.0)
        if bits < 32:
            entered = applied(gate, gate, token, x, bits)
            token = tl.where(order == 0, entered, token)
            _, _, tile = scan_maps(gate, token, 1, bits)
            x = of_last(tile, order, TIMES)
        else:
            scale, error, shift = scan_maps(gate, token, 1, bits)
            tile = applied(scale, error, shift, x, bits)
            scale, error = of_last(scale, order, TIMES), of_last(error, order, TIMES)
            x, x_error = carried(scale, error, of_last(shift, order, TIMES), x, x_error, bits)
        put(states, base, place, tile, inside, CHUNK)
    return x


@triton.jit
def forward(
    inputs, p, reset, initial_state, states, final_state, offsets, lines, sequences, time, flags,
    TIMES: tl.constexpr, stages: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = flipped_chunk(states[0].dtype, ALIGNED)
    reverse, option = flags % 2 == 1, flags // 2 % 2 == 1
    s, begin, end = own_sequence(offsets, sequences, time, ALIGNED)
    lines = lines & (begin < end)
    x = tl.load(at(initial_state, s), mask=lines & initial_state[2], other=0.0)
    if CHUNK > 0:
        x = walk_forward(
            inputs, p, reset, states, x, lines, end, option,
            TIMES, CHUNK * REVERSE, stages, KIND,
        )  # fmt: skip
    else:
        first, direction = tl.where(reverse, end - 1, begin), tl.where(reverse, -1, 1)
        x = walk_forward(
            all_walked(inputs, first, direction), p, walked(reset, first, direction),
            walked(states, first, direction), x, lines, end - begin, option,
            TIMES, 0, stages, KIND,
        )  # fmt: skip
    tl.store(at(final_state, s), x, mask=lines & final_state[2])


@triton.jit
def walk_backward(
    inputs, p, reset, states, states_grad, grads, initial, h, lines, steps, option,
    TIMES: tl.constexpr, CHUNK: tl.constexpr, stages: tl.constexpr, KIND: tl.constexpr,
    PARAMETERS: tl.constexpr,
):  # fmt: skip
    """The scan of ``walk_forward`` over adjoints, against the direction of the recurrence. ``initial`` is the state
    before its first step, and ``h`` the gradient that reaches the last state. Returns the gradient that reaches
    ``initial``, and those of the parameters by the step's place in its tile."""
    bits: tl.constexpr = states_grad[0].dtype.element_ty.primitive_bitwidth
    h_error = tl.zeros_like(h)
    sums = [tl.zeros((h.shape[0], TIMES), tl.float32) for n in (0, 1, 2, 3)[:PARAMETERS]]
    for start in tl.range(0, steps, TIMES, num_stages=stages):
        base, place, order = tile_steps(start, steps, TIMES, CHUNK)
        inside = lines & (place < up_to(steps - base, TIMES))
        step = steps_of(order, TIMES, CHUNK)
        present = lines & (step < up_to(steps - base, TIMES))
        # Of all steps, where in or next to this tile: the lowest, or -1, and the highest, or TIMES.
        lowest, highest = tl.where(base > 0, -1, 0), up_to(steps - 1 - base, TIMES)
        if CHUNK == 0:
            earlier, has_earlier, is_first = base + 1, lines & (place < highest), step == highest
        else:
            earlier, has_earlier, is_first = base - 1, inside & (place > lowest), step == lowest
        x = take(states, earlier, place, has_earlier, CHUNK)
        x = tl.where(is_first, initial, x)
        anew = is_reset(reset, base, place, inside, CHUNK)
        given = [take(each, base, place, inside, CHUNK) for each in inputs]
        gate, _ = gate_and_token(given, p, anew, option, KIND)
        gate = tl.where(present, tl.where(anew, 0.0, gate), 1.0)
        grad = take(states_grad, base, place, inside, CHUNK)

        if bits < 32:
            grad = tl.where(order == 0, grad + h, grad)
            _, _, adjoint = scan_adjoints(gate, grad, 1, bits)
            _, _, after = through_gate(gate, gate, gate, adjoint, bits)
            h = of_last(after, order, TIMES)
        else:
            scale, error, shift = scan_adjoints(gate, grad, 1, bits)
            adjoint = applied(scale, error, shift, h, bits)
            scale, error, shift = through_gate(gate, scale, error, shift, bits)
            scale, error = of_last(scale, order, TIMES), of_last(error, order, TIMES)
            h, h_error = carried(scale, error, of_last(shift, order, TIMES), h, h_error, bits)
        gate_grad = tl.where(anew, 0.0, adjoint * x)
        of_inputs, of_parameters = gradients(given, p, anew, option, gate_grad, adjoint, KIND)
        for n in tl.static_range(len(grads)):
            put(grads[n], base, place, of_inputs[n], inside, CHUNK)
        sums = [
            sums[n] + tl.where(present, of_parameters[n], 0.0) for n in (0, 1, 2, 3)[:PARAMETERS]
        ]
    return h, sums


@triton.jit
def backward(
    inputs, p, reset, states, states_grad, initial_state, final_state_grad,
    grads, initial_state_grad, offsets, lines, sequences, time, flags,
    TIMES: tl.constexpr, stages: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr,
    KIND: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Returns partial sums of the gradients of the parameters."""
    CHUNK: tl.constexpr = flipped_chunk(states[0].dtype, ALIGNED)
    reverse, option = flags % 2 == 1, flags // 2 % 2 == 1
    s, begin, end = own_sequence(offsets, sequences, time, ALIGNED)
    lines = lines & (begin < end)
    initial = tl.load(at(initial_state, s), mask=lines & initial_state[2], other=0.0)
    h = tl.load(at(final_state_grad, s), mask=lines & final_state_grad[2], other=0.0)
    if CHUNK > 0:
        h, sums = walk_backward(
            inputs, p, reset, states, states_grad, grads, initial, h, lines, end, option,
            TIMES, CHUNK * (1 - REVERSE), stages, KIND, PARAMETERS,
        )  # fmt: skip
    else:
        first, direction = tl.where(reverse, begin, end - 1), tl.where(reverse, 1, -1)
        h, sums = walk_backward(
            all_walked(inputs, first, direction), p, walked(reset, first, direction),
            walked(states, first, direction), walked(states_grad, first, direction),
            all_walked(grads, first, direction), initial, h, lines, end - begin, option,
            TIMES, 0, stages, KIND, PARAMETERS,
        )  # fmt: skip
    tl.store(at(initial_state_grad, s), h, mask=lines & initial_state_grad[2])
    return [tl.sum(each, 1, keep_dims=True) for each in sums]


# --- The entry points ---------------------------------------------------------------------------
#
# workspace is reserved, as in the CUDA kernels, and null.


@triton.jit
def time_last_forward(
    input0, input1, input2, input3, parameters, reset, initial_state, states, final_state,
    offsets, workspace,
    batch, channels, time, sequences,
    inputs_batch, inputs_channel, inputs_time, states_batch, states_channel, states_time,
    state_batch, state_channel, state_time, reset_batch, flags,
    ROWS: tl.constexpr, TIMES: tl.constexpr, STAGES: tl.constexpr,
    ALIGNED: tl.constexpr, REVERSE: tl.constexpr,
    KIND: tl.constexpr, INPUTS: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    where, lines = own_rows(1, batch, channels, ROWS, 1)
    inputs_strides = (0, inputs_batch, inputs_channel, 1 if ALIGNED else inputs_time)
    states_strides = (0, states_batch, states_channel, 1 if ALIGNED else states_time)
    state_strides = (0, state_batch, state_channel, state_time)
    inputs = [
        line(each, where, inputs_strides, 0) for each in (input0, input1, input2, input3)[:INPUTS]
    ]
    p = channel_parameters(parameters, where[2], channels, lines, PARAMETERS)
    resets = line(reset, where, (0, reset_batch, 0, 1), 0)
    initial = line(initial_state, where, state_strides, 0)
    out = line(states, where, states_strides, 0)
    final = line(final_state, where, state_strides, 0)
    forward(
        inputs, p, resets, initial, out, final, offsets, lines, sequences, time, flags,
        TIMES, STAGES, ALIGNED, REVERSE, KIND,
    )  # fmt: skip


@triton.jit
def time_last_backward(
    input0, input1, input2, input3, parameters, reset, states, states_grad,
    initial_state, final_state_grad, input0_grad, input1_grad, input2_grad, input3_grad,
    parameters_grad, initial_state_grad, offsets, workspace,
    batch, channels, time, sequences,
    inputs_batch, inputs_channel, inputs_time, states_batch, states_channel, states_time,
    states_grad_batch, states_grad_channel, states_grad_time,
    grads_batch, grads_channel, grads_time,
    state_batch, state_channel, state_time, reset_batch, parts, flags,
    ROWS: tl.constexpr, TIMES: tl.constexpr, STAGES: tl.constexpr,
    ALIGNED: tl.constexpr, REVERSE: tl.constexpr,
    KIND: tl.constexpr, INPUTS: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    where, lines = own_rows(1, batch, channels, ROWS, 1)
    inputs_strides = (0, inputs_batch, inputs_channel, 1 if ALIGNED else inputs_time)
    states_strides = (0, states_batch, states_channel, 1 if ALIGNED else states_time)
    adjoint_strides = (
        0, states_grad_batch, states_grad_channel, 1 if ALIGNED else states_grad_time,
    )  # fmt: skip
    grads_strides = (0, grads_batch, grads_channel, 1 if ALIGNED else grads_time)
    state_strides = (0, state_batch, state_channel, state_time)
    inputs = [
        line(each, where, inputs_strides, 0) for each in (input0, input1, input2, input3)[:INPUTS]
    ]
    grads = [
        line(each, where, grads_strides, 0)
        for each in (input0_grad, input1_grad, input2_grad, input3_grad)[:INPUTS]
    ]
    p = channel_parameters(parameters, where[2], channels, lines, PARAMETERS)
    resets = line(reset, where, (0, reset_batch, 0, 1), 0)
    x = line(states, where, states_strides, 0)
    x_grad = line(states_grad, where, adjoint_strides, 0)
    initial = line(initial_state, where, state_strides, 0)
    final_grad = line(final_state_grad, where, state_strides, 0)
    initial_grad = line(initial_state_grad, where, state_strides, 0)
    sums = backward(
        inputs, p, resets, x, x_grad, initial, final_grad, grads, initial_grad,
        offsets, lines, sequences, time, flags,
        TIMES, STAGES, ALIGNED, REVERSE, KIND, PARAMETERS,
    )  # fmt: skip
    put_sums(parameters_grad, sums, where[1], where[2], channels, sequences, lines, ALIGNED)


@triton.jit
def put_sums(
    parameters_grad, sums, b, c, channels, sequences, mask, ALIGNED: tl.constexpr
):  # fmt: skip
    """One partial sum for each sequence of each batch, also of sequences without a step."""
    part, mask = b, mask & (parameters_grad.to(tl.int64) != 0)
    if ALIGNED == 0:
        s = tl.program_id(1) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)
        part, mask = b * tl.maximum(sequences, 1) + s, mask & (s < tl.maximum(sequences, 1))
    for n in tl.static_range(len(sums)):
        place = (part * len(sums) + n) * channels + c
        tl.store(parameters_grad + place, sums[n], mask=mask)
