/* Everything of gated_scan that runs once per element, at one level of vector instructions. */
#include "cpu_convert.h"
#include "cpu_math.h"
#include "cpu_blocks.h"
#include "cpu_sums.h"
#include "gates.h"
/* One line for each kind, here and below. */
#include "kinds/hgrn.h"
#include "kinds/min_gru.h"
#include "kinds/min_lstm.h"
#include "kinds/rg_lru.h"

#define KIND(name, prepare)      \
    {#name,                      \
     LEVEL(INPUTS_##name),       \
     LEVEL(PARAMETERS_##name),   \
     LEVEL(forward_##name),      \
     LEVEL(backward_##name),     \
     prepare}

static const Kind LEVEL(kinds)[] = {
    KIND(hgrn, NULL),
    KIND(min_gru, NULL),
    KIND(min_lstm, NULL),
    KIND(rg_lru, LEVEL(prepare_rg_lru)),
};
#undef KIND

#include "tasks.h"

#undef Floats
#undef Ints
#undef LANES
#undef View
#undef Given
#undef Step
#undef Gradients
#undef Shares
