// Contiguous channels in rows that start at any address, backward: what the pass over a thread's rows computes.
#pragma once
#include "scalar_columns.cuh"

// The gradients of a thread's rows, which take the place of gates and of states_grad in shared memory.
struct Finishing {
    const Inputs& inputs;
    const Ends& ends;
    const State* initial_state;
    const bool for_gates;
    State h, initial = State(0), sum = State(0);
    int last = 0;  // the scan's last row, counted from the end of a part, or 0

    __device__ void begin(unsigned scan, bool is_first, bool is_last) {
        if (is_first) h = ends.enter(scan);
        last = is_last;
        if (is_last) initial = ends.read(initial_state, scan);
    }
    template <int N>
    __device__ void rows(Cursor& cursor, int left) {
        const RowsAhead<N> rows(cursor);
        State gates[N], grads[N], earlier[N] = {};
        inputs.read(rows, gates, grads);
        if (for_gates) rows.read(2, earlier, 1);
#pragma unroll
        for (int k = 0; k < N; k++) {
            const State before = chosen(left - k == last, initial, earlier[k]);
            const auto to = BackwardStep::gradients(gates[k], grads[k], before, h);
            h = to.earlier, sum = sum + to.gate;
            element(0, rows.at[k]) = Element::narrow(to.gate), element(1, rows.at[k]) = Element::narrow(to.token);
        }
    }
    __device__ void end(unsigned scan) const { ends.leave(scan, h); }
};
