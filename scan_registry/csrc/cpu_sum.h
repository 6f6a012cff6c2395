/* Sums of what tasks leave: (outer, count, inner) to (outer, inner), of the type. */
#include "cpu_threads.h"

typedef struct {
    const float *from;
    char *to; /* null: nobody wants it */
    int type;
    int64_t outer, count, inner;
} Sum;

/* A sum, and where tasks find the room that they leave it in. */
typedef struct {
    Sum sum;
    float **at;
} Gradient;

/* Elements that are worth threads, and those of a task. */
enum { SUM_WORK = 65536, SUMMED = 512 };

/* Run tasks, and sum up what they leave; -1 if there is no memory for it. add runs a task of a
 * sum. */
static int run_and_sum(Work *work, const Gradient *gradients, int count,
                       void (*add)(const void *problem, int64_t task, char *scratch)) {
    int status = 0;
    for (int i = 0; i < count; i++) {
        const Sum *sum = &gradients[i].sum;
        *gradients[i].at = malloc((size_t)(sum->outer * sum->count * sum->inner) * sizeof(float));
        if (!*gradients[i].at) status = -1;
    }
    const int64_t threads = work->threads;
    if (!status) status = run_all(work);
    for (int i = 0; i < count; i++) {
        Sum sum = gradients[i].sum;
        sum.from = *gradients[i].at;
        if (!status && sum.to) {
            Work adding = {.problem = &sum, .run = add};
            adding.tasks = sum.outer * ceil_div(sum.inner, SUMMED);
            adding.threads = sum.inner * sum.outer * sum.count < SUM_WORK ? 1 : threads;
            status = run_all(&adding);
        }
        free(*gradients[i].at);
    }
    return status;
}
