/* What was planned for calls on the fast path: a table from all that a plan depends on to the plan. */
#pragma once
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST_WORDS = 256, BUCKETS = 1024, MOST_PLANS = 4096 }; /* past that many, all go: as in ops/launching.py */

typedef struct {
    size_t count;
    int64_t words[MOST_WORDS];
} Key;

typedef struct Planned {
    struct Planned *next; /* in its bucket */
    PyObject *plan, *choice; /* what was required */
    size_t count;
    int64_t words[];
} Planned;

typedef struct {
    size_t count;
    Planned *buckets[BUCKETS];
} Plans;

static Planned **bucket_of(Plans *plans, const Key *key) {
    const uint64_t odd = 0x9e3779b97f4a7c15;
    uint64_t hash = 0; /* a sum, for products that need not wait for each other */
    for (size_t i = 0; i < key->count; i++) hash += (uint64_t)key->words[i] * (odd * (2 * i + 1));
    return &plans->buckets[(hash ^ hash >> 32) % BUCKETS];
}

static Planned *find_planned(Plans *plans, const Key *key) {
    Planned *found = *bucket_of(plans, key);
    while (found && (found->count != key->count ||
                     memcmp(found->words, key->words, key->count * sizeof *key->words)))
        found = found->next;
    return found;
}

/* What is released may run Python, which may plan anew: by then the table is empty. */
static void forget_plans(Plans *plans) {
    Planned *going = NULL;
    for (int i = 0; i < BUCKETS; i++)
        while (plans->buckets[i]) {
            Planned *each = plans->buckets[i];
            plans->buckets[i] = each->next;
            each->next = going;
            going = each;
        }
    plans->count = 0;
    while (going) {
        Planned *each = going;
        going = each->next;
        Py_DECREF(each->plan);
        Py_DECREF(each->choice);
        PyMem_Free(each);
    }
}

static Planned *keep_planned(Plans *plans, const Key *key, PyObject *plan, PyObject *choice) {
    const size_t bytes = key->count * sizeof *key->words;
    Planned *kept = PyMem_Malloc(sizeof *kept + bytes);
    if (!kept) {
        PyErr_NoMemory();
        return NULL;
    }
    if (plans->count >= MOST_PLANS) forget_plans(plans);
    Planned **bucket = bucket_of(plans, key);
    kept->plan = Py_NewRef(plan);
    kept->choice = Py_NewRef(choice);
    kept->count = key->count;
    memcpy(kept->words, key->words, bytes);
    kept->next = *bucket;
    *bucket = kept;
    plans->count++;
    return kept;
}
