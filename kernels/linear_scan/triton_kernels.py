"""linear_scan in Triton: the kernels that the CUDA sources have, with the same parameters.

One step of the recurrence is an affine map of the state, x -> scale * x + shift, and composing maps
is associative. A program owns a few lines (rows where time is contiguous, channels where channels
are) and walks them tile by tile, in float32. It lets the state that enters a tile into the tile's
first map, scans the tile, writes it, and takes the last state along to the next tile.

    forward    x[t]           = gates[t] * x[t-1] + tokens[t]
    backward   tokens_grad[t] = gates[t+1] * tokens_grad[t+1] + states_grad[t]
               gates_grad[t]  = tokens_grad[t] * x[t-1]
               and the initial state's gradient is gates[0] * tokens_grad[0]

Forward reads two elements and writes one: 12 bytes per element in float32, 6 in bfloat16 and
float16. Backward reads three and writes two: 20 bytes and 10; it reads gates and states directly at
t+1 and t-1, so that no value has to change threads.

    time_last        time ->                    channel_last    channels ->
    row 0            | tile 0 | tile 1 | …      tile 0, time    | CHANNELS |
    …                |        |        |        |               |  TIMES   |
    row ROWS-1       | TIMES  | TIMES  | …      v  tile 1 …     |          |

Backward is the same walk from the last tile to the first. Triton scans a tile in reverse at the
price of five shuffles for each value that goes in or comes out, so a tile is put into reverse order
as it is read: its 16-byte chunks by their addresses, and the elements of a chunk by a flip, which
costs nothing where one thread holds the chunk (and up to three shuffles where it is not aligned).

Steps outside a line read as the identity map, gate 1 and token 0, and so hand the state on.
"""

import triton
import triton.language as tl

# Tiles that a program has in hand: one that it computes, the others on their way to shared memory.
# Backward carries three inputs, which reach as far with fewer tiles. Over contiguous time it loads
# directly, since asynchronous copies cannot move single 16-bit elements, which is what t-1 and t+1
# come as; with a program per row, there are enough of them to hide each other's waiting.
FORWARD_STAGES = tl.constexpr(3)
BACKWARD_STAGES = tl.constexpr(2)
UNALIGNED_STAGES = tl.constexpr(1)


@triton.jit
def then(first_scale, first_shift, second_scale, second_shift):
    return first_scale * second_scale, second_scale * first_shift + second_shift


@triton.jit
def scan(scale, shift, x, order, TIMES: tl.constexpr, axis: tl.constexpr):
    """The states after each map of a tile that ``x`` enters, and the last of them."""
    shift = tl.where(order == 0, scale * x + shift, shift)
    _, states = tl.associative_scan((scale, shift), axis, then)
    return states, tl.sum(tl.where(order == TIMES - 1, states, 0.0), axis, keep_dims=True)


@triton.jit
def at(line, t):
    """Pointers to time ``t`` of a line, given as its pointers to time 0 and its stride of time."""
    return line[0] + t * line[1]


@triton.jit
def reverse_chunks(tile, CHUNK: tl.constexpr):
    """Every CHUNK neighbours along the last dimension in reverse order."""
    if CHUNK == 1:
        return tile
    chunks = tile.reshape([tile.shape[0], tile.shape[1] // CHUNK, CHUNK])
    return chunks.flip(2).reshape(tile.shape)


@triton.jit
def load_or_zero(tensor, index, mask):
    """Elements of an optional tensor in float32: zero where it is null."""
    given = tensor.to(tl.int64) != 0
    return tl.load(tensor + index, mask=mask & given, other=0.0).to(tl.float32)


@triton.jit
def store_if_given(tensor, index, mask, values):
    given = tensor.to(tl.int64) != 0
    tl.store(tensor + index, values.to(tensor.dtype.element_ty), mask=mask & given)


@triton.jit
def own_rows(batch, channels, ROWS: tl.constexpr):
    """Batch, channel and mask of this program's rows: (ROWS, 1)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    b = row // channels
    return b, row - b * channels, b < batch


@triton.jit
def own_channels(channels, CHANNELS: tl.constexpr):
    """Batch, channel and mask of this program's channels: (1, CHANNELS), except for the batch."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(channels, CHANNELS)
    b = program // across
    c = (program - b * across) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return b, c, c < channels


@triton.jit
def walk_forward(
    gates, tokens, states, x, lines, time,
    TIMES: tl.constexpr, axis: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Scan the ``lines`` that the mask admits from state ``x``; returns the state after them."""
    order = tl.expand_dims(tl.arange(0, TIMES), 1 - axis)
    for start in tl.range(0, time, TIMES, num_stages=stages):
        t = start + order
        inside = lines & (t < time)
        gate = tl.load(at(gates, t), mask=inside, other=1.0).to(tl.float32)
        token = tl.load(at(tokens, t), mask=inside, other=0.0).to(tl.float32)
        tile, x = scan(gate, token, x, order, TIMES, axis)
        tl.store(at(states, t), tile.to(states[0].dtype.element_ty), mask=inside)
    return x


@triton.jit
def walk_backward(
    gates, states, states_grad, gates_grad, tokens_grad, initial, adjoint, lines, time,
    TIMES: tl.constexpr, axis: tl.constexpr, CHUNK: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """The scan of ``walk_forward`` over tokens_grad, the states' adjoint, from the last time to the
    first. ``initial`` is the state before the first; returns the adjoint of the first."""
    order = tl.expand_dims(tl.arange(0, TIMES), 1 - axis)
    reversed_order = (TIMES // CHUNK - 1 - order // CHUNK) * CHUNK + order % CHUNK
    last_start = (time - 1) // TIMES * TIMES
    for walked in tl.range(0, time, TIMES, num_stages=stages):
        t = last_start - walked + reversed_order
        inside = lines & (t < time)
        later_gate = tl.load(at(gates, t + 1), mask=lines & (t + 1 < time), other=1.0)
        grad = tl.load(at(states_grad, t), mask=inside, other=0.0)
        earlier = tl.load(at(states, t - 1), mask=inside & (t > 0), other=0.0).to(tl.float32)

        scale = reverse_chunks(later_gate, CHUNK).to(tl.float32)
        shift = reverse_chunks(grad, CHUNK).to(tl.float32)
        tile, adjoint = scan(scale, shift, adjoint, order, TIMES, axis)
        for_tokens = reverse_chunks(tile, CHUNK)
        for_gates = for_tokens * tl.where(t == 0, initial, earlier)
        dtype = gates_grad[0].dtype.element_ty
        tl.store(at(gates_grad, t), for_gates.to(dtype), mask=inside)
        tl.store(at(tokens_grad, t), for_tokens.to(dtype), mask=inside)
    return adjoint


# The entry points. The (batch, channels) tensors are contiguous and may be null. The stride of the
# contiguous dimension is 1 whatever its parameter says, so that the compiler knows it. offsets,
# workspace and flags are reserved, as in the CUDA kernels: null and 0.


@triton.jit
def time_last_forward(
    gates, tokens, initial_state, states, final_state, offsets, workspace,
    batch, channels, time,
    gates_batch, gates_channel, gates_time,
    tokens_batch, tokens_channel, tokens_time,
    states_batch, states_channel, states_time, flags,
    ROWS: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    b, c, lines = own_rows(batch, channels, ROWS)
    x = walk_forward(
        (gates + b * gates_batch + c * gates_channel, 1),
        (tokens + b * tokens_batch + c * tokens_channel, 1),
        (states + b * states_batch + c * states_channel, 1),
        load_or_zero(initial_state, b * channels + c, lines),
        lines, time, TIMES, 1, FORWARD_STAGES,
    )  # fmt: skip
    store_if_given(final_state, b * channels + c, lines, x)


@triton.jit
def channel_last_forward(
    gates, tokens, initial_state, states, final_state, offsets, workspace,
    batch, channels, time,
    gates_batch, gates_channel, gates_time,
    tokens_batch, tokens_channel, tokens_time,
    states_batch, states_channel, states_time, flags,
    CHANNELS: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    b, c, lines = own_channels(channels, CHANNELS)
    x = walk_forward(
        (gates + b * gates_batch + c, gates_time),
        (tokens + b * tokens_batch + c, tokens_time),
        (states + b * states_batch + c, states_time),
        load_or_zero(initial_state, b * channels + c, lines),
        lines, time, TIMES, 0, FORWARD_STAGES,
    )  # fmt: skip
    store_if_given(final_state, b * channels + c, lines, x)


@triton.jit
def time_last_backward(
    gates, states, states_grad, initial_state, final_state_grad,
    gates_grad, tokens_grad, initial_state_grad, offsets, workspace,
    batch, channels, time,
    gates_batch, gates_channel, gates_time,
    states_batch, states_channel, states_time,
    states_grad_batch, states_grad_channel, states_grad_time,
    grads_batch, grads_channel, grads_time, flags,
    ROWS: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    b, c, lines = own_rows(batch, channels, ROWS)
    gates += b * gates_batch + c * gates_channel
    adjoint = walk_backward(
        (gates, 1),
        (states + b * states_batch + c * states_channel, 1),
        (states_grad + b * states_grad_batch + c * states_grad_channel, 1),
        (gates_grad + b * grads_batch + c * grads_channel, 1),
        (tokens_grad + b * grads_batch + c * grads_channel, 1),
        load_or_zero(initial_state, b * channels + c, lines),
        load_or_zero(final_state_grad, b * channels + c, lines),
        lines, time, TIMES, 1, 128 // gates_grad.dtype.element_ty.primitive_bitwidth,
        UNALIGNED_STAGES,
    )  # fmt: skip
    first_gate = tl.load(gates, mask=lines, other=0.0).to(tl.float32)
    store_if_given(initial_state_grad, b * channels + c, lines, first_gate * adjoint)


@triton.jit
def channel_last_backward(
    gates, states, states_grad, initial_state, final_state_grad,
    gates_grad, tokens_grad, initial_state_grad, offsets, workspace,
    batch, channels, time,
    gates_batch, gates_channel, gates_time,
    states_batch, states_channel, states_time,
    states_grad_batch, states_grad_channel, states_grad_time,
    grads_batch, grads_channel, grads_time, flags,
    CHANNELS: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    b, c, lines = own_channels(channels, CHANNELS)
    gates += b * gates_batch + c
    adjoint = walk_backward(
        (gates, gates_time),
        (states + b * states_batch + c, states_time),
        (states_grad + b * states_grad_batch + c, states_grad_time),
        (gates_grad + b * grads_batch + c, grads_time),
        (tokens_grad + b * grads_batch + c, grads_time),
        load_or_zero(initial_state, b * channels + c, lines),
        load_or_zero(final_state_grad, b * channels + c, lines),
        lines, time, TIMES, 0, 1, BACKWARD_STAGES,
    )  # fmt: skip
    first_gate = tl.load(gates, mask=lines, other=0.0).to(tl.float32)
    store_if_given(initial_state_grad, b * channels + c, lines, first_gate * adjoint)
