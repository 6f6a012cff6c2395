/* Everything of selective_scan that runs once per element, at one level of vector instructions. */
#include "forward.h"
#include "backward.h"
#include "cpu_sums.h"

#undef Floats
#undef Ints
#undef LANES
#undef View
#undef Projection
#undef Panels
#undef Together
