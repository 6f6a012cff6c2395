"""What the Triton kernels of linear_scan are made of: values, scans of tiles, lines of tensors.

In memory a complex number is read and written as one integer of 64 bits. In hand, a value is a
tuple of tensors, (real,) or (real, imaginary), in the type that the recurrence is computed in.
"""

# ruff: noqa: RET505 (Triton compiles what follows a return, unless it is the other branch)

import triton
import triton.language as tl

# The complex number 1 as it lies in memory.
COMPLEX_ONE = tl.constexpr(0x3F800000)


# --- Values -----------------------------------------------------------------------------------


@triton.jit
def whole(pointer, COMPLEX: tl.constexpr):
    """A pointer to whole elements, from one to real numbers."""
    if COMPLEX:
        return pointer.to(tl.pointer_type(tl.int64), bitcast=True)
    else:
        return pointer


@triton.jit
def load(pointers, mask, absent: tl.constexpr):
    """Elements as they lie in memory; 0 or 1, as ``absent`` says, where there is none."""
    if pointers.dtype.element_ty == tl.int64:
        return tl.load(pointers, mask=mask, other=COMPLEX_ONE if absent else 0)
    else:
        return tl.load(pointers, mask=mask, other=1.0 if absent else 0.0)


@triton.jit
def value(loaded):
    """What was loaded, in the type that the recurrence is computed in."""
    if loaded.dtype == tl.int64:
        real = loaded.to(tl.int32).to(tl.float32, bitcast=True)
        return real, (loaded >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif loaded.dtype == tl.float64:
        return (loaded,)
    else:
        return (loaded.to(tl.float32),)


@triton.jit
def store(pointers, a, mask):
    if len(a) == 2:
        real = a[0].to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        imaginary = a[1].to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(pointers, imaginary | real, mask=mask)
    else:
        tl.store(pointers, a[0].to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def multiply(a, b):
    if len(a) == 2:
        return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]
    else:
        return (a[0] * b[0],)


@triton.jit
def add(a, b):
    if len(a) == 2:
        return a[0] + b[0], a[1] + b[1]
    else:
        return (a[0] + b[0],)


@triton.jit
def conjugate(a):
    if len(a) == 2:
        return a[0], -a[1]
    else:
        return a


@triton.jit
def select(condition, a, b):
    if len(a) == 2:
        return tl.where(condition, a[0], b[0]), tl.where(condition, a[1], b[1])
    else:
        return (tl.where(condition, a[0], b[0]),)


@triton.jit
def total(a, axis: tl.constexpr):
    """The sum along ``axis``, which stays, with size 1."""
    if len(a) == 2:
        return tl.sum(a[0], axis, keep_dims=True), tl.sum(a[1], axis, keep_dims=True)
    else:
        return (tl.sum(a[0], axis, keep_dims=True),)


@triton.jit
def zeros_like(a):
    if len(a) == 2:
        return tl.zeros_like(a[0]), tl.zeros_like(a[1])
    else:
        return (tl.zeros_like(a[0]),)


@triton.jit
def ones_like(a):
    if len(a) == 2:
        return tl.full(a[0].shape, 1.0, a[0].dtype), tl.zeros_like(a[1])
    else:
        return (tl.full(a[0].shape, 1.0, a[0].dtype),)


@triton.jit
def reverse_chunks(tile, CHUNK: tl.constexpr):
    """Every CHUNK neighbours along the last dimension in reverse order; as it is if CHUNK is 0."""
    if CHUNK <= 1:
        return tile
    else:
        chunks = tile.reshape([tile.shape[0], tile.shape[1] // CHUNK, CHUNK])
        return chunks.flip(2).reshape(tile.shape)


@triton.jit
def reverse_value_chunks(a, CHUNK: tl.constexpr):
    if len(a) == 2:
        return reverse_chunks(a[0], CHUNK), reverse_chunks(a[1], CHUNK)
    else:
        return (reverse_chunks(a[0], CHUNK),)


@triton.jit
def spread(a, like):
    """Values of size 1 along some dimensions in the shape of ``like``."""
    if len(a) == 2:
        return tl.broadcast_to(a[0], like.shape), tl.broadcast_to(a[1], like.shape)
    else:
        return (tl.broadcast_to(a[0], like.shape),)


@triton.jit
def of_last(a, order, TIMES: tl.constexpr):
    """The values of a tile's last step."""
    return total(select(order == TIMES - 1, a, zeros_like(a)), 1)


# --- The scan ---------------------------------------------------------------------------------


# A run's scale is a product of many gates, and where they are all alike, so are its rounding errors,
# which then add up in proportion to the length of the run: an error term keeps them. So it does for the
# state that goes from tile to tile: where gates are close to one, what is lost there stays lost.
# States in 16 bits are too coarse for any of that to show, and do without.


@triton.jit
def compose(first_scale, first_shift, second_scale, second_shift):
    return first_scale * second_scale, second_scale * first_shift + second_shift


@triton.jit
def exact_product(a, b):
    """a * b and its rounding error."""
    product = a * b
    return product, tl.fma(a, b, -product)


@triton.jit
def exact_sum(a, b):
    """a + b and its rounding error."""
    both = a + b
    back = both - a
    return both, (a - (both - back)) + (b - back)


@triton.jit
def compose_compensated(
    first_scale, first_error, first_shift, second_scale, second_error, second_shift
):
    scale, error = exact_product(first_scale, second_scale)
    error_term = tl.fma(first_error, second_scale, tl.fma(first_scale, second_error, error))
    small = tl.fma(second_error, first_shift, second_shift)
    return scale, error_term, tl.fma(second_scale, first_shift, small)


@triton.jit
def exact_multiply(a, b):
    """a * b and its rounding error."""
    if len(a) == 2:
        straight, error = exact_product(a[0], b[0])
        crossed, crossed_error = exact_product(-a[1], b[1])
        real, sum_error = exact_sum(straight, crossed)
        straight_i, error_i = exact_product(a[0], b[1])
        crossed_i, crossed_error_i = exact_product(a[1], b[0])
        imaginary, sum_error_i = exact_sum(straight_i, crossed_i)
        errors = error + crossed_error + sum_error, error_i + crossed_error_i + sum_error_i
        return (real, imaginary), errors
    else:
        product, error = exact_product(a[0], b[0])
        return (product,), (error,)


@triton.jit
def exact_add(a, b):
    """a + b and its rounding error."""
    if len(a) == 2:
        real, error = exact_sum(a[0], b[0])
        imaginary, error_i = exact_sum(a[1], b[1])
        return (real, imaginary), (error, error_i)
    else:
        both, error = exact_sum(a[0], b[0])
        return (both,), (error,)


@triton.jit
def compose_complex(
    first_scale, first_scale_i, first_error, first_error_i, first_shift, first_shift_i,
    second_scale, second_scale_i, second_error, second_error_i, second_shift, second_shift_i,
):  # fmt: skip
    first, second = (first_scale, first_scale_i), (second_scale, second_scale_i)
    scale, error = exact_multiply(first, second)
    error_term = add(multiply((first_error, first_error_i), second),
               multiply(first, (second_error, second_error_i)))  # fmt: skip
    error_term = add(error_term, error)
    small = multiply((second_error, second_error_i), (first_shift, first_shift_i))
    shift = add(multiply(second, (first_shift, first_shift_i)),
                add(small, (second_shift, second_shift_i)))  # fmt: skip
    return scale[0], scale[1], error_term[0], error_term[1], shift[0], shift[1]


@triton.jit
def multiply_add(a, b, c):
    if len(a) == 2:
        return add(multiply(a, b), c)
    else:
        return (tl.fma(a[0], b[0], c[0]),)


@triton.jit
def exactly_applied(scale, error_term, shift, x, x_error):
    """(scale + error_term) * (x + x_error) + shift, and its rounding error."""
    product, error = exact_multiply(scale, x)
    both, sum_error = exact_add(product, shift)
    small = add(multiply(error_term, x), multiply(scale, x_error))
    return exact_add(both, add(small, add(error, sum_error)))


@triton.jit
def scan(scale, shift, x, x_error, order, TIMES: tl.constexpr, bits: tl.constexpr):
    """The states after each map of a tile that ``x`` enters, the last of them, and its error term. ``bits``
    are those of an element in which states are stored."""
    if bits < 32:
        shift = select(order == 0, add(multiply(scale, x), shift), shift)
        _, states = tl.associative_scan((scale[0], shift[0]), 1, compose)
        return (states,), of_last((states,), order, TIMES), x_error
    else:
        error_term = zeros_like(scale)
        if len(x) == 2:
            maps = (scale[0], scale[1], error_term[0], error_term[1], shift[0], shift[1])
            s, s_i, r, r_i, h, h_i = tl.associative_scan(maps, 1, compose_complex)
            scale, error_term, shift = (s, s_i), (r, r_i), (h, h_i)
        else:
            maps = (scale[0], error_term[0], shift[0])
            s, r, h = tl.associative_scan(maps, 1, compose_compensated)
            scale, error_term, shift = (s,), (r,), (h,)
        last_scale = of_last(scale, order, TIMES)
        last_error = of_last(error_term, order, TIMES)
        last_shift = of_last(shift, order, TIMES)
        last, last_error = exactly_applied(last_scale, last_error, last_shift, x, x_error)
        x = spread(x, s)
        return multiply_add(scale, x, multiply_add(error_term, x, shift)), last, last_error


# --- Lines ------------------------------------------------------------------------------------
#
# A line of a tensor is a tuple: pointers to its first step, the stride between its steps, whether
# the tensor is given or null. A state has a line too; its steps are the sequences.


@triton.jit
def line(pointer, where, strides, COMPLEX: tl.constexpr):
    """The lines of a tensor at (outer, batch, channel)."""
    o, b, c = where
    first = whole(pointer, COMPLEX) + o * strides[0] + b * strides[1] + c * strides[2]
    return first, strides[3], pointer.to(tl.int64) != 0


@triton.jit
def at(line, t):
    return line[0] + t * line[1]


@triton.jit
def near(line, base, place):
    """Pointers to a tile's steps, base + place."""
    return at(line, base) + place * line[1]


@triton.jit
def walked(line, first, direction):
    """A line as walked from step ``first``, upwards (1) or downwards (-1)."""
    return at(line, first), direction * line[1], line[2]


@triton.jit
def divided(a, b):
    """Quotient and remainder of program numbers. There are fewer than 2**31 programs, and a division in
    64 bits takes a hundred instructions."""
    a, b = a.to(tl.int32), b.to(tl.int32)
    quotient = a // b
    return quotient.to(tl.int64), (a - quotient * b).to(tl.int64)


@triton.jit
def own_rows(outer, batch, channels, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """(outer, batch, channel) of this program's rows, and their mask: (ROWS, 1)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    if ROWS == 1:
        b, c = divided(row, channels)
    else:
        b = row // channels
        c = row - b * channels
    if ALIGNED:
        return (0, b, c), b < batch
    else:
        if ROWS == 1:
            o, b = divided(b, batch)
        else:
            o = b // batch
            b -= o * batch
        return (o, b, c), o < outer


@triton.jit
def own_sequence(offsets, sequences, time, ALIGNED: tl.constexpr):
    """This program's sequence, its first step and its end, both within ``time`` whatever the
    offsets are; (0, 0, time) if nothing is packed."""
    if ALIGNED:
        return 0, 0, time
    else:
        s = tl.program_id(1) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)
        begin = tl.load(offsets + s, mask=s < sequences, other=0)
        end = tl.load(offsets + s + 1, mask=s < sequences, other=tl.where(sequences > 0, 0, time))
        begin = tl.minimum(tl.maximum(begin, 0), time)
        return s, begin, tl.minimum(tl.maximum(end, 0), time)


@triton.constexpr_function
def flipped_chunk(pointer, aligned):
    """Elements in 16 bytes where they are to be read at once also downwards in time; else 0."""
    return 128 // pointer.element_ty.primitive_bitwidth if aligned else 0


@triton.jit
def up_to(steps, TIMES: tl.constexpr):
    """``steps``, or TIMES if there are more, in 32 bits."""
    return tl.minimum(steps, TIMES).to(tl.int32)


@triton.jit
def tile_steps(start, steps, TIMES: tl.constexpr, CHUNK: tl.constexpr):
    """Base, places, order: element ``order`` of a tile is that of step base + place.

    The walk is upwards if CHUNK is 0; else downwards, with each chunk upwards. Places and order
    have 32 bits.
    """
    order = tl.arange(0, TIMES)[None, :]
    if CHUNK == 0:
        return start, order, order
    else:
        down = (TIMES // CHUNK - 1 - order // CHUNK) * CHUNK + order % CHUNK
        return (steps - 1) // TIMES * TIMES - start, down, order


@triton.jit
def sequence_of(offsets, t, sequences):
    """The packed sequence that step ``t`` is in; 0 if none is packed."""
    s = tl.zeros_like(t)
    # The last of those that begin at or before t: of the ``left`` ones from s on.
    left = sequences
    while left > 1:
        middle = s + left // 2
        s = tl.where(tl.load(offsets + middle) <= t, middle, s)
        left -= left // 2
    return s


@triton.jit
def step_before(offsets, t, sequences, time, reverse):
    """The step that the recurrence comes from to ``t``, the sequence of ``t``, and whether ``t`` is
    where that begins."""
    s = sequence_of(offsets, t, sequences)
    packed = (sequences > 0) & (t < time)
    begin = tl.load(offsets + s, mask=packed, other=0)
    end = tl.load(offsets + s + 1, mask=packed, other=time)
    before = tl.where(reverse, t + 1, t - 1)
    is_first = tl.where(reverse, before == end, t == begin)
    return before, s, is_first | (before < 0) | (before >= time)
