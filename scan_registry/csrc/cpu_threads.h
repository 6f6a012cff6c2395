/* The threads that run the tasks of one call, for which they live. */
#ifndef CPU_THREADS_H
#define CPU_THREADS_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "cpu_types.h"

/* Chunks of tasks per thread, to even out their load; and what scratch memory is aligned to. */
enum { CHUNKS = 16, MOST_THREADS = 1024, LINE = 64 };

typedef struct {
    const void *problem;
    void (*run)(const void *problem, int64_t task, char *scratch);
    int64_t threads, tasks, scratch_bytes; /* of each thread */
    int64_t chunk; /* neighbouring tasks, which share pages, are taken so many at a time */
    char *scratch; /* each thread's, one after the other */
    atomic_int_least64_t started, next;
} Work;

static void *work_on(void *argument) {
    Work *work = argument;
    char *scratch = work->scratch + atomic_fetch_add(&work->started, 1) * work->scratch_bytes;
    for (;;) {
        const int64_t first = atomic_fetch_add(&work->next, work->chunk);
        if (first >= work->tasks) return NULL;
        for (int64_t i = first; i < smaller(first + work->chunk, work->tasks); i++)
            work->run(work->problem, i, scratch);
    }
}

/* The caller works too, and alone if no thread can be had. Signals are for the other threads. */
static void share_out(Work *work) {
    pthread_t started[MOST_THREADS];
    int64_t count = 0;
    if (work->threads > 1) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (count < work->threads - 1 &&
               !pthread_create(&started[count], NULL, work_on, work))
            count++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    work_on(work);
    while (count > 0) pthread_join(started[--count], NULL);
}

/* Run all tasks; -1, and nothing has been written, if there is no memory for it. */
static int run_all(Work *work) {
    work->threads = smaller(work->threads, work->tasks);
    work->chunk = ceil_div(work->tasks, CHUNKS * work->threads);
    work->scratch_bytes = ceil_div(work->scratch_bytes, LINE) * LINE;
    /* Lanes that fill up a block compute with what lies there: with zeros, which are quick. */
    char *memory = calloc(1, (size_t)(work->scratch_bytes * work->threads + LINE));
    if (!memory) return -1;
    work->scratch = offset(memory, 1, LINE - (int64_t)((uintptr_t)memory % LINE));
    share_out(work);
    free(memory);
    return 0;
}

/* What the next so many floats of scratch memory are for. */
UNUSED static float *take(char **scratch, int64_t floats) {
    float *taken = (float *)*scratch;
    *scratch += ceil_div(floats * 4, LINE) * LINE;
    return taken;
}

#endif
