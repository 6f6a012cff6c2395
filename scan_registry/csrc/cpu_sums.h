/* Sums of what tasks have left, in an order of their own, at one level of vector instructions.
 * cpu_sum.h and cpu_blocks.h come before. */

TARGET static void LEVEL(sum_task)(const void *problem, int64_t task, char *scratch) {
    const Sum *const sum = problem;
    const int64_t of_outer = ceil_div(sum->inner, SUMMED);
    const int64_t outer = task / of_outer, first = task % of_outer * SUMMED;
    const int64_t n = smaller(SUMMED, sum->inner - first);
    const float *from = sum->from + outer * sum->count * sum->inner + first;
    double total[SUMMED] = {0};
    float row[SUMMED];
    (void)scratch;
    for (int64_t i = 0; i < sum->count; i++, from += sum->inner)
        for (int64_t k = 0; k < n; k++) total[k] += (double)from[k];
    for (int64_t k = 0; k < n; k++) row[k] = (float)total[k];
    LEVEL(narrow)(sum->type, sum->to + (outer * sum->inner + first) * types[sum->type].bytes, row,
                  n);
}
