"""gated_scan in Triton over contiguous channels. What it computes is said in ``triton_kernels.py``.

Columns of channels, groups of rows and how they are laid out are those of linear_scan's ``triton_columns.py``: a program
owns CHANNELS channels of one sequence and walks them tile by tile. A group composes the maps of its STEPS rows, learns
from all groups which state enters them, and walks them again. All rows of a group are in the same threads.

    order   | group 0: STEPS rows |   channels ->
      |     | group 1: STEPS rows |
      v     | …           GROUPS  |

Aligned variants (ALIGNED 1) take it that channels have stride 1 and come in whole vectors, and that nothing is packed.
The others take nothing for granted, and have VECTOR 1.
"""

import triton
import triton.language as tl

from scan_registry.kernels.gated_scan.triton_kernels import (
    all_walked,
    channel_parameters,
    put_sums,
)
from scan_registry.kernels.gated_scan.triton_kinds import gate_and_token, gradients
from scan_registry.kernels.gated_scan.triton_scans import (
    adjoints_of_steps,
    applied,
    carried,
    scan_adjoints,
    scan_maps,
    states_of_steps,
    through_gate,
)
from scan_registry.kernels.linear_scan.triton_columns import (
    component_of_all,
    component_of_row,
    lines_of,
    own_columns,
    tile_at,
)
from scan_registry.kernels.linear_scan.triton_tiles import at, own_sequence, up_to, walked

# --- Tiles --------------------------------------------------------------------------------------


@triton.jit
def take(line, start, group, row, mask, STEPS: tl.constexpr):
    """A tile as it lies in memory; 0 where there is nothing to read."""
    return tl.load(tile_at(line, start, group, row, STEPS), mask=mask, other=0)


@triton.jit
def resets_of(reset, where, reset_batch, CHANNELS: tl.constexpr):
    """The bytes of a batch, alike for all its channels. The compiler is told that they are contiguous along channels, so
    that it lays them out as it does other tiles; it still takes them one by one, as it knows nothing of their address."""
    beside = tl.max_contiguous(where[2] >> 62, (1, CHANNELS))  # 0
    return reset + where[1] * reset_batch + beside, 1, reset.to(tl.int64) != 0


@triton.jit
def put(line, start, group, row, a, mask, STEPS: tl.constexpr):
    pointers = tile_at(line, start, group, row, STEPS)
    tl.store(pointers, a.to(line[0].dtype.element_ty), mask=mask & line[2])


@triton.jit
def through_groups(
    scale, error_term, shift, x, x_error, row, group,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """From the maps up to each row: what enters each group, and what leaves the last one, with its error term."""
    is_last = row == STEPS - 1
    scales = component_of_all(component_of_row(scale, is_last), GROUPS)
    shifts = component_of_all(component_of_row(shift, is_last), GROUPS)
    errors = shifts
    if bits >= 32:
        errors = component_of_all(component_of_row(error_term, is_last), GROUPS)
    entering, number = x, tl.arange(0, GROUPS)[:, None]
    for g in tl.static_range(GROUPS):
        if g > 0:
            entering = tl.where(group == g, x, entering)
        s, h = component_of_row(scales, number == g), component_of_row(shifts, number == g)
        e = component_of_row(errors, number == g)
        x, x_error = carried(s, e, h, x, x_error, bits)
    return entering, x, x_error


# --- The kernels' bodies ------------------------------------------------------------------------


@triton.jit
def walk_forward(
    inputs, p, reset, states, x, lines, group, steps, option,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, stages: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Scan ``steps`` of the ``lines`` that the mask admits from state ``x``; returns the last state."""
    bits: tl.constexpr = states[0].dtype.element_ty.primitive_bitwidth
    TIMES: tl.constexpr = STEPS * GROUPS
    row = tl.arange(0, STEPS)[:, None]
    place, x_error, left = group * STEPS + row, tl.zeros_like(x), steps
    for start in tl.range(0, steps, TIMES, num_stages=stages):
        coming = place < tl.where(lines, up_to(steps - start, TIMES), 0)
        given = [take(each, start, group, row, coming, STEPS) for each in inputs]
        anew = take(reset, start, group, row, coming & reset[2], STEPS) != 0
        # Not ``coming``, which would have to be kept for every tile that is on its way.
        here = place < up_to(left, TIMES)
        left -= TIMES
        given = [each.to(tl.float32) for each in given]
        gate, token = gate_and_token(given, p, anew, option, KIND)
        gate = tl.where(here, tl.where(anew, 0.0, gate), 1.0)
        token = tl.where(here, token, 0.0)
        scale, error, shift = scan_maps(gate, token, 0, bits)
        entering, x, x_error = through_groups(
            scale, error, shift, x, x_error, row, group, STEPS, GROUPS, bits
        )
        entered = applied(gate, gate, token, entering, 16)
        tile = states_of_steps(gate, tl.where(row == 0, entered, token), 0)
        put(states, start, group, row, tile, here & lines, STEPS)
    return x


@triton.jit
def forward(
    inputs, p, reset, initial_state, states, final_state, offsets, lines, group,
    sequences, time, flags,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, stages: tl.constexpr, ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    reverse, option = flags % 2 == 1, flags // 2 % 2 == 1
    s, begin, end = own_sequence(offsets, sequences, time, ALIGNED)
    lines = lines & (begin < end)
    x = tl.load(at(initial_state, s), mask=lines & initial_state[2], other=0.0)
    first, direction = tl.where(reverse, end - 1, begin), tl.where(reverse, -1, 1)
    x = walk_forward(
        all_walked(inputs, first, direction), p, walked(reset, first, direction),
        walked(states, first, direction), x, lines, group, end - begin, option,
        STEPS, GROUPS, stages, KIND,
    )  # fmt: skip
    tl.store(at(final_state, s), x, mask=lines & final_state[2] & (group == 0))


@triton.jit
def walk_backward(
    inputs, p, reset, states, states_grad, grads, initial, h, lines, group, steps, option,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, stages: tl.constexpr, KIND: tl.constexpr,
    PARAMETERS: tl.constexpr,
):  # fmt: skip
    """The scan of ``walk_forward`` over adjoints, against the direction of the recurrence. ``initial`` is the state
    before its first step, and ``h`` the gradient that reaches the last state. Returns the gradient that reaches
    ``initial``, and those of the parameters by groups."""
    bits: tl.constexpr = states_grad[0].dtype.element_ty.primitive_bitwidth
    TIMES: tl.constexpr = STEPS * GROUPS
    row = tl.arange(0, STEPS)[:, None]
    place, h_error, left = group * STEPS + row, tl.zeros_like(h), steps
    sums = [tl.zeros(h.shape, tl.float32) for n in (0, 1, 2, 3)[:PARAMETERS]]
    for start in tl.range(0, steps, TIMES, num_stages=stages):
        coming = place < tl.where(lines, up_to(steps - start, TIMES), 0)
        has_earlier = place < tl.where(lines, up_to(steps - 1 - start, TIMES), 0)
        given = [take(each, start, group, row, coming, STEPS) for each in inputs]
        anew = take(reset, start, group, row, coming & reset[2], STEPS) != 0
        grad = take(states_grad, start, group, row, coming, STEPS).to(tl.float32)
        x = take(states, start + 1, group, row, has_earlier, STEPS).to(tl.float32)

        here = place < up_to(left, TIMES)
        x = tl.where(place == up_to(left - 1, TIMES), initial, x)
        left -= TIMES
        given = [each.to(tl.float32) for each in given]
        gate, _ = gate_and_token(given, p, anew, option, KIND)
        gate = tl.where(here, tl.where(anew, 0.0, gate), 1.0)
        scale, error, shift = scan_adjoints(gate, grad, 0, bits)
        scale, error, shift = through_gate(gate, scale, error, shift, bits)
        entering, h, h_error = through_groups(
            scale, error, shift, h, h_error, row, group, STEPS, GROUPS, bits
        )
        adjoint = adjoints_of_steps(gate, tl.where(row == 0, grad + entering, grad), 0)
        gate_grad = tl.where(anew, 0.0, adjoint * x)
        of_inputs, of_parameters = gradients(given, p, anew, option, gate_grad, adjoint, KIND)
        for n in tl.static_range(len(grads)):
            put(grads[n], start, group, row, of_inputs[n], here & lines, STEPS)
        sums = [
            sums[n] + tl.sum(tl.where(here, of_parameters[n], 0.0), 0, keep_dims=True)
            for n in (0, 1, 2, 3)[:PARAMETERS]
        ]
    return h, sums


@triton.jit
def backward(
    inputs, p, reset, states, states_grad, initial_state, final_state_grad,
    grads, initial_state_grad, offsets, lines, group, sequences, time, flags,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, stages: tl.constexpr, ALIGNED: tl.constexpr,
    KIND: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Returns partial sums of the gradients of the parameters, by channels."""
    reverse, option = flags % 2 == 1, flags // 2 % 2 == 1
    s, begin, end = own_sequence(offsets, sequences, time, ALIGNED)
    lines = lines & (begin < end)
    initial = tl.load(at(initial_state, s), mask=lines & initial_state[2], other=0.0)
    h = tl.load(at(final_state_grad, s), mask=lines & final_state_grad[2], other=0.0)
    first, direction = tl.where(reverse, begin, end - 1), tl.where(reverse, 1, -1)
    h, sums = walk_backward(
        all_walked(inputs, first, direction), p, walked(reset, first, direction),
        walked(states, first, direction), walked(states_grad, first, direction),
        all_walked(grads, first, direction), initial, h, lines, group, end - begin, option,
        STEPS, GROUPS, stages, KIND, PARAMETERS,
    )  # fmt: skip
    tl.store(at(initial_state_grad, s), h, mask=lines & initial_state_grad[2] & (group == 0))
    return [of_all_groups(each, GROUPS) for each in sums]


@triton.jit
def of_all_groups(a, GROUPS: tl.constexpr):
    """The sum over groups, for each of them."""
    return tl.sum(component_of_all(a, GROUPS), 0, keep_dims=True)


# --- The entry points ---------------------------------------------------------------------------


@triton.jit
def channel_last_forward(
    input0, input1, input2, input3, parameters, reset, initial_state, states, final_state,
    offsets, workspace,
    batch, channels, time, sequences,
    inputs_batch, inputs_channel, inputs_time, states_batch, states_channel, states_time,
    state_batch, state_channel, state_time, reset_batch, flags,
    CHANNELS: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr, ALIGNED: tl.constexpr,
    KIND: tl.constexpr, INPUTS: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    where, lines, group = own_columns(batch, channels, CHANNELS, GROUPS, VECTOR, 1)
    inputs_strides = (0, inputs_batch, 1 if ALIGNED else inputs_channel, inputs_time)
    states_strides = (0, states_batch, 1 if ALIGNED else states_channel, states_time)
    state_strides = (0, state_batch, state_channel, state_time)
    inputs = [
        lines_of(each, where, inputs_strides, CHANNELS, VECTOR, 0)
        for each in (input0, input1, input2, input3)[:INPUTS]
    ]
    p = channel_parameters(parameters, where[2], channels, lines, PARAMETERS)
    resets = resets_of(reset, where, reset_batch, CHANNELS)
    initial = lines_of(initial_state, where, state_strides, CHANNELS, 1, 0)
    out = lines_of(states, where, states_strides, CHANNELS, VECTOR, 0)
    final = lines_of(final_state, where, state_strides, CHANNELS, 1, 0)
    forward(
        inputs, p, resets, initial, out, final, offsets, lines, group,
        sequences, time, flags, STEPS, GROUPS, STAGES, ALIGNED, KIND,
    )  # fmt: skip


@triton.jit
def channel_last_backward(
    input0, input1, input2, input3, parameters, reset, states, states_grad,
    initial_state, final_state_grad, input0_grad, input1_grad, input2_grad, input3_grad,
    parameters_grad, initial_state_grad, offsets, workspace,
    batch, channels, time, sequences,
    inputs_batch, inputs_channel, inputs_time, states_batch, states_channel, states_time,
    states_grad_batch, states_grad_channel, states_grad_time,
    grads_batch, grads_channel, grads_time,
    state_batch, state_channel, state_time, reset_batch, parts, flags,
    CHANNELS: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr, VECTOR: tl.constexpr,
    STAGES: tl.constexpr, ALIGNED: tl.constexpr,
    KIND: tl.constexpr, INPUTS: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    where, lines, group = own_columns(batch, channels, CHANNELS, GROUPS, VECTOR, 1)
    inputs_strides = (0, inputs_batch, 1 if ALIGNED else inputs_channel, inputs_time)
    states_strides = (0, states_batch, 1 if ALIGNED else states_channel, states_time)
    adjoint_strides = (
        0, states_grad_batch, 1 if ALIGNED else states_grad_channel, states_grad_time,
    )  # fmt: skip
    grads_strides = (0, grads_batch, 1 if ALIGNED else grads_channel, grads_time)
    state_strides = (0, state_batch, state_channel, state_time)
    inputs = [
        lines_of(each, where, inputs_strides, CHANNELS, VECTOR, 0)
        for each in (input0, input1, input2, input3)[:INPUTS]
    ]
    grads = [
        lines_of(each, where, grads_strides, CHANNELS, VECTOR, 0)
        for each in (input0_grad, input1_grad, input2_grad, input3_grad)[:INPUTS]
    ]
    p = channel_parameters(parameters, where[2], channels, lines, PARAMETERS)
    resets = resets_of(reset, where, reset_batch, CHANNELS)
    x = lines_of(states, where, states_strides, CHANNELS, VECTOR, 0)
    x_grad = lines_of(states_grad, where, adjoint_strides, CHANNELS, VECTOR, 0)
    initial = lines_of(initial_state, where, state_strides, CHANNELS, 1, 0)
    final_grad = lines_of(final_state_grad, where, state_strides, CHANNELS, 1, 0)
    initial_grad = lines_of(initial_state_grad, where, state_strides, CHANNELS, 1, 0)
    sums = backward(
        inputs, p, resets, x, x_grad, initial, final_grad, grads, initial_grad,
        offsets, lines, group, sequences, time, flags,
        STEPS, GROUPS, STAGES, ALIGNED, KIND, PARAMETERS,
    )  # fmt: skip
    put_sums(
        parameters_grad,
        sums,
        where[1],
        where[2],
        channels,
        sequences,
        lines & (group == 0),
        ALIGNED,
    )
