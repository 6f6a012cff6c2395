// Time contiguous, aligned: what the forward and the backward kernel share.
//
// The build pins LANES (threads that share a row), PIECES (of 16 bytes, per thread), ROWS (warps of a CTA),
// PREFIX_LEAD (where they share rows), STAGES and BLOCKS (per SM). A tile is
//
//                 time in the order of the scan ->
//     row 0       | lane 0: PIECES pieces | lane 1 | …  LANES |
//     row 1       | lane LANES: …
//     …           SIDE = 32 / LANES rows
//
// The next STAGES - 1 tiles are being copied to shared memory meanwhile; lookback.cuh says which.
//
// MISALIGNED: rows need not start or end on 16-byte boundaries, but lie at the same offset to them in all tensors. A scan
// then starts `skip` elements before its row, on a 16-byte boundary, or on a 128-byte line if the row is long. What its
// pieces hold of other rows is replaced by the identity, and not written.
//
// VARLEN: rows may be misaligned or not. A column has several of them, one after the other, and is cut; or each warp has a column to
// itself, and nothing is cut. The state before a sequence vanishes by a gate of zero at its first step,
// which a warp writes over the tile's own gate in shared memory. So a tile is scanned as any other, at no cost for its other steps.
// Zero times a number that is not finite is not zero: a lane whose result is not finite, or that needs a sequence's own states,
// scans its elements once more, with a `Cursor`.
//
// ONE_GATE: rows are cut, and each has one gate for all time steps, which stays in registers. So tiles without gates are copied, and
// more of them fit.
//
// Each warp has tiles and states of its own, and waits for no other warp while it scans.
#pragma once
enum : bool { CUT = PREFIX_LEAD > 0 };
enum : int {
    TILE_WARPS = ROWS,
    LOOKBACK_WARPS = CUT ? PREFIX_LEAD + 1 : 0,
    THREADS = 32 * (TILE_WARPS + LOOKBACK_WARPS),
};
#include "../common/state.cuh"
enum : int { VECTOR = 16 / sizeof(Storage) };
#include "../common/ring.cuh"
#include "../common/lookback.cuh"
#include "../linear_scan/copy_hint.cuh"
#include "../linear_scan/sequences.cuh"

enum : int {
    SIDE = 32 / LANES,
    ITEMS = PIECES * VECTOR,  // of a lane
    TIMES = LANES * ITEMS,  // that a tile covers
    LINE = 128 / sizeof(Storage),  // of the caches
    LONG = 16 * LINE,  // for a row
    SUM_STEPS = 64 * VECTOR,  // time steps for which there is room for a sum (problem.py)
};
#if VARLEN
#include "../linear_scan/packed_tiles.cuh"
#endif
#if ONE_GATE
enum : int { GATES = 0 };  // tiles of gates in a stage
#else
enum : int { GATES = 1 };
#endif
static_assert(WARPS == 1 && (!CUT || LANES == 32) && (CUT || (!VARLEN && GATES)));

struct Position;

// Strides between rows. Where a warp has several rows side by side, one stride leads from each to the
// next, whatever their batch, but to gates of which each row has one.
struct Strides {
    i64 by_batch, by_channel;

    __device__ i64 offset(const Position& at, unsigned row) const;
};

// What is scanned: rows of `time` elements, batches × channels of them, whose strides are those of any tensor.
struct Scans {
    unsigned channels;
    i64 rows, time;
    Strides strides;
    int most_skipped;
#if VARLEN
    unsigned together, tiles;  // rows of a column, and tiles of a row
    unsigned rows_per_tile;    // 2³¹ / tiles, rounded up: level * rows_per_tile >> 31 is level / tiles. 0 if a column has one row
    bool has_one_batch;
#endif
    Grid grid;

    __device__ Scans(i64 batches, i64 channels, i64 time, Strides strides, i64 flags = 0)
        : channels(unsigned(channels)),
          rows(batches * channels),
          time(time),
          strides(strides),
#if VARLEN
          most_skipped(are_aligned(batches) ? 0 : time < LONG ? VECTOR - 1 : LINE - 1),
          together(unsigned(flags >> 10)),
          tiles(unsigned((time + most_skipped + TIMES - 1) / TIMES)),
          rows_per_tile(together > 1 ? (1u << 31) / tiles + 1 : 0),
          has_one_batch(batches == 1),
          grid{unsigned((rows + together - 1) / together), together * tiles, unsigned(flags >> 2) & 0xff} {}
#else
          most_skipped(!MISALIGNED ? 0 : time < LONG ? VECTOR - 1 : LINE - 1),
          grid{unsigned((rows + SIDE - 1) / SIDE),
               unsigned((time + most_skipped + TIMES - 1) / TIMES)} {}
#endif

#if VARLEN
    // The row of a tile. A tile past the end of its column counts as one of the column's last row, past that row's last step, so it
    // reads and writes nothing.
    __device__ unsigned row_of(const Tile& tile) const {
        const unsigned begin = tile.column * together, row = begin + unsigned(u64(tile.level) * rows_per_tile >> 31);
        const unsigned end = begin + together < unsigned(rows) ? begin + together : unsigned(rows);
        return row < end ? row : end - 1;
    }
    // Of a tile's row.
    __device__ i64 first_of(const Tile& tile, unsigned row) const {
        return i64(tile.level - (row - tile.column * together) * tiles) * TIMES;
    }
    __device__ unsigned batch_of(unsigned row) const { return has_one_batch ? 0 : row / channels; }
    // Whether all rows start and end on 16-byte boundaries. Where sequences are packed, this is known only here.
    __device__ bool are_aligned(i64 batches) const {
        const i64 by_batch = batches > 1 ? strides.by_batch : 0, by_channel = channels > 1 ? strides.by_channel : 0;
        return (time | by_batch | by_channel) % VECTOR == 0;
    }
    __device__ bool are_aligned() const { return most_skipped == 0; }
#else
    static __device__ constexpr bool are_aligned() { return !MISALIGNED; }
#endif
    // Elements between the start of a walk and its row.
    template <bool TURNED>
    __device__ int skip(const Position& at, unsigned row) const {
        if (are_aligned()) return 0;
        const int offset = int(strides.offset(at, row));
        return (TURNED ? -(offset + int(time)) : offset) & most_skipped;
    }
    // Order of the first of a tile's elements, and of this lane's, within their row.
    template <bool TURNED>
    __device__ i64 order(const Position& at) const;
    template <bool TURNED>
    __device__ i64 own_order(const Position& at) const;
};

struct Position {
    int lane = threadIdx.x % 32;
    unsigned first_row;       // of the warp's SIDE rows
    i64 first;                // order of the warp's first element in each of them, from where walks start
    unsigned batch, channel;  // of its only row

#if VARLEN
    __device__ Position(const Tile& tile, const Scans& scans)
        : first_row(scans.row_of(tile)),
          first(scans.first_of(tile, first_row)),
          batch(scans.batch_of(first_row)),
          channel(first_row - batch * scans.channels) {}
#else
    __device__ Position(const Tile& tile, const Scans& scans)
        : first_row(tile.column * SIDE),
          first(i64(tile.level) * TIMES),
          batch(first_row / scans.channels),
          channel(first_row - batch * scans.channels) {}
#endif
    __device__ unsigned row() const { return first_row + lane / LANES; }  // this lane's own
    __device__ bool ends_row() const { return lane % LANES == LANES - 1; }
};

template <bool TURNED>
__device__ i64 Scans::order(const Position& at) const {
    return at.first - skip<TURNED>(at, at.row());
}
template <bool TURNED>
__device__ i64 Scans::own_order(const Position& at) const {
    return order<TURNED>(at) + at.lane % LANES * ITEMS;
}
__device__ inline i64 Strides::offset(const Position& at, unsigned row) const {
    return SIDE > 1 ? row * by_channel : at.batch * by_batch + at.channel * by_channel;
}

// A piece in the order of a walk. TURNED says that memory has it in the opposite order.
template <bool TURNED>
struct Piece {
    Chunk<Element, VECTOR> chunk;

    __device__ Storage bits(int i) const { return chunk.bits(TURNED ? VECTOR - 1 - i : i); }
    __device__ State get(int i) const { return Element::widen(bits(i)); }
    __device__ void set(const State (&x)[VECTOR]) {
        State in_memory[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) in_memory[i] = x[TURNED ? VECTOR - 1 - i : i];
        chunk.set(in_memory);
    }
};

// Rows of a tensor.
struct Rows {
    Storage* first;
    Strides strides;

    __device__ Rows(const Storage* first, i64 by_batch, i64 by_channel)
        : first(const_cast<Storage*>(first)), strides{by_batch, by_channel} {}

    // This lane's row.
    __device__ const Storage* row(const Position& at) const { return first + strides.offset(at, at.row()); }
    // Where the piece is whose first element has that order.
    template <bool TURNED>
    __device__ Storage* at(const Scans& scans, const Position& at, unsigned row, i64 order) const {
        return first + strides.offset(at, row) + (TURNED ? scans.time - order - VECTOR : order);
    }
};

// The piece that a lane copies in turn `i`, and its row and order.
template <bool TURNED>
struct Turn {
    int piece;
    unsigned row;
    i64 order;
    bool inside;  // some of it

    __device__ Turn(int i, const Position& at, const Scans& scans)
        : piece(i * 32 + at.lane),
          row(at.first_row + piece / (LANES * PIECES)),
          order(at.first + piece % (LANES * PIECES) * VECTOR - scans.skip<TURNED>(at, row)),
          inside(order < scans.time && (!MISALIGNED || order > -VECTOR) && row < scans.rows) {}
};

// Copy a piece; of a misaligned row nothing past its end, which may be that of the tensor.
template <bool TURNED>
__device__ void copy_piece(uint4* to, const Storage* from, i64 order, const Scans& scans, bool wanted) {
    if constexpr (MISALIGNED) {
        const i64 left = TURNED ? order + VECTOR : scans.time - order;
        const int bytes = int(left < VECTOR ? left : VECTOR) * int(sizeof(Storage));
        if (!scans.are_aligned()) return copy_async_first(to, from, bytes, wanted);
    }
    copy_async(to, from, wanted);
}

// Calls turn(i) for all pieces of a lane. Where it is known only here that rows are misaligned, code for these is short.
template <class OfTurn>
__device__ void each_turn(const Scans& scans, const OfTurn& turn) {
    if (VARLEN && !scans.are_aligned()) {
#pragma unroll 1
        for (int i = 0; i < PIECES; i++) turn(i);
    } else {
#pragma unroll
        for (int i = 0; i < PIECES; i++) turn(i);
    }
}
// `outside` gives for a row what elements before and after it read as.
template <bool TURNED, class Ring, class Outside>
__device__ void copy_in(const Ring& ring, int input, const Rows& rows,
                        const Position& at, const Scans& scans, Outside outside) {
    each_turn(scans, [&](int i) {
        const Turn<TURNED> turn(i, at, scans);
        uint4* const place = ring.place(input, turn.piece);
        const Storage* const from = rows.at<TURNED>(scans, at, turn.row, turn.order);
        copy_piece<TURNED>(place, from, turn.order, scans, turn.inside);
        if (!turn.inside) *place = piece_of(outside(turn.row));
    });
}

// Fill a tile with gates of which a row has one for all time steps, so that none is read but these. Batches may share them.
template <bool TURNED, class Ring>
__device__ void fill_in(const Ring& ring, int input, const Rows& gates, const Position& at, const Scans& scans,
                        Storage outside) {
    Storage gate = 0;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const Turn<TURNED> turn(i, at, scans);
        if ((SIDE > 1 || i == 0) && turn.row < scans.rows) {
            const unsigned batch = SIDE > 1 ? turn.row / scans.channels : at.batch;
            gate = gates.first[batch * gates.strides.by_batch + (turn.row - batch * scans.channels) * gates.strides.by_channel];
        }
        *ring.place(input, turn.piece) = piece_of(turn.inside ? gate : outside);
    }
}

// The gates of a lane's pieces. One for all leaves states as they are past the row's end.
template <bool TURNED, class Ring>
struct Gates {
    const Position& at;
#if ONE_GATE
    struct Piece {
        State gate;
        __device__ State get(int) const { return gate; }
    };
    const i64 left;
    const State gate;

    __device__ Gates(const Ring&, const Rows& gates, const Position& at, const Scans& scans)
        : at(at),
          left(scans.time - scans.own_order<TURNED>(at)),
          gate(Element::widen(gates.first[gates.strides.offset(at, at.first_row)])) {}
    __device__ Piece piece(int p) const { return {p * VECTOR < left ? gate : State(1)}; }
#else
    const Ring& ring;

    __device__ Gates(const Ring& ring, const Rows&, const Position& at, const Scans&) : at(at), ring(ring) {}
    __device__ Piece<TURNED> piece(int p) const { return {read_piece(ring.place(0, at.lane * PIECES + p))}; }
#endif
};

// The elements of a piece that are the row's own.
struct Own {
    int begin, end;

    __device__ Own(i64 order, i64 time)
        : begin(order < 0 ? -int(order) : 0),
          end(time - order < VECTOR ? int(time - order) : VECTOR) {}
    __device__ bool all() const { return begin == 0 && end == VECTOR; }
    __device__ bool has(int i) const { return begin <= i && i < end; }
};

// Let what this lane's pieces hold of other rows read as `outside`.
template <bool TURNED, class Ring>
__device__ void mend(const Ring& ring, int input, const Position& at,
                     const Scans& scans, Storage outside) {
    const i64 first = at.first + at.lane % LANES * ITEMS - scans.skip<TURNED>(at, at.row());
#pragma unroll 1
    for (int p = 0; p < PIECES; p++) {
        const i64 order = first + p * VECTOR;
        const Own own(order, scans.time);
        if (order >= scans.time || order <= -VECTOR || own.all()) continue;
        uint4* const place = ring.place(input, at.lane * PIECES + p);
        Chunk<Element, VECTOR> chunk = read_piece(place);
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            if (!own.has(i)) chunk.put(TURNED ? VECTOR - 1 - i : i, outside);
        *place = words_of(chunk);
    }
}

// The first two inputs. Where it is known only here that rows are misaligned, code for these is short.
template <bool TURNED, class Ring>
__device__ void mend_both(const Ring& ring, const Position& at, const Scans& scans, Storage first, Storage second) {
#if VARLEN
    if (scans.are_aligned()) return;
#pragma unroll 1
    for (int input = 0; input < 2; input++) mend<TURNED>(ring, input, at, scans, input == 0 ? first : second);
#else
    mend<TURNED>(ring, 0, at, scans, first);
    mend<TURNED>(ring, 1, at, scans, second);
#endif
}

// Before pieces are copied out, by other lanes than have put them there; a lane's only one it copies itself, from
// registers.
__device__ inline void meet_copiers() {
    if (PIECES > 1) __syncwarp();
}
template <bool TURNED, class Ring>
__device__ void copy_out(const Ring& ring, int input, const Rows& rows,
                         const Position& at, const Scans& scans) {
    each_turn(scans, [&](int i) {
        const Turn<TURNED> turn(i, at, scans);
        if (!turn.inside) return;
        Storage* const to = rows.at<TURNED>(scans, at, turn.row, turn.order);
        const uint4* const place = ring.place(input, turn.piece);
        const Own own(turn.order, scans.time);
        if (scans.are_aligned() || own.all()) {
            store_global(to, *place);
        } else {
#pragma unroll 1
            for (int e = own.begin; e < own.end; e++) {
                const int k = TURNED ? VECTOR - 1 - e : e;
                to[k] = reinterpret_cast<const Storage*>(place)[k];
            }
        }
    });
}

// Element k of a tile of one row, in the order of the scan.
template <bool TURNED, class Ring>
__device__ Storage& element(const Ring& ring, int input, int k) {
    uint4* const place = ring.place(input, k / VECTOR);
    return reinterpret_cast<Storage*>(place)[TURNED ? VECTOR - 1 - k % VECTOR : k % VECTOR];
}

// States of rows × sequences, before or after the scan of each; null where there are none.
struct States {
    State* first;
    Strides strides;
    i64 by_sequence;

    // Those of a row's first sequence.
    __device__ State* of_row(const Scans& scans, const Position& at, unsigned row) const {
        return first && row < scans.rows ? first + strides.offset(at, row) : nullptr;
    }
    // Of a sequence of this lane's row.
    __device__ State* of_sequence(const Scans& scans, const Position& at, i64 index) const {
        State* const own = of_row(scans, at, at.row());
        return own ? own + index * by_sequence : nullptr;
    }
};
__device__ inline State read(const State* from) { return from ? *from : State(0); }
__device__ inline void write(State* to, State x) {
    if (to) *to = x;
}

// The state that enters a lane's elements.
struct RowTilePrefix {
#if VARLEN
    bool marked;                            // whether packed sequences start or end in the tile
#endif
    RunningPrefix carried[1] = {State(0)};  // before the tile, of this lane's row
    State sum = State(0);                   // of what is summed over the row so far; not where rows are cut
    Affine composed, tile[1];         // before this lane, and of all of its row's

    // `lane_map` composes this lane's elements.
    __device__ void scan(Affine lane_map, const Position& at) {
        composed = exclusive_scan<1, LANES>(lane_map, at.lane);
        tile[0] = from_lane(lane_map, at.lane | (LANES - 1));
    }
    // `before` and `after` are null, or this row's states before and after the walk; where rows are cut, the state is
    // there, and look-back warps write the last.
    __device__ State enter(const Tile& here, const Position& at, unsigned levels, const State* before, State* after) {
        if (CUT) return composed(carried[0].x);
        if (here.level == 0) carried[0] = before ? *before : State(0);
        const State entering = carried[0].x;
        carried[0] = tile[0](carried[0]);
        if (here.level + 1 == levels && at.ends_row() && after) *after = carried[0].x;
        return composed(entering);
    }
};

template <class Work>
__device__ void walk(const Schedule& schedule, const Work& work, void* workspace) {
    if constexpr (CUT) schedule.walk(work, workspace);
    else schedule.run(work, blockIdx.x * ROWS + threadIdx.x / 32, gridDim.x * ROWS);
}
// What look-back warps do is the same for both directions.
template <template <bool> class Work, class Of>
__device__ void run(const Of& of, const Scans& scans, bool turned, void* workspace) {
    const Schedule schedule{scans.grid};
    if constexpr (CUT) {
        if (schedule.initializes<Work<false>>(workspace)) return;
        if (schedule.is_lookback()) {
            if (scans.grid.is_cut()) schedule.combine(Work<false>{of, scans}, workspace);
            return;
        }
    }
#if VARLEN
    Nearby::begin();
#endif
    if (turned) walk(schedule, Work<true>{of, scans}, workspace);
    else walk(schedule, Work<false>{of, scans}, workspace);
}
