/* A stand-in for libcuda.so.1 that plays any devices and any failures, so that tests need no GPU.
 *
 * STUB_CUDA_CONFIG names a file that is read at the first call; without one there is no device.
 * Its lines, with every key in this order, and ` match=…` only where it is wanted:
 *     driver 12.9
 *     device capability=9.0 sms=132 shared=232448 registers=65536 threads=1024 name=Imaginary H200
 *     fail cuModuleLoadData status=2 after=0 times=1 device=0 match=text
 * A failure counts the calls it is about: on its device unless that is -1, with the text in their
 * image or as their entry. It lets `after` of them pass and fails the next `times`; 0 means all.
 *
 * STUB_CUDA_LOG names a file that gets a line for every call but the queries:
 *     cuModuleLoadData process=7 thread=0 device=0 image=sm_90a bytes=4608 status=0
 * In both, calls go without the _v2 of their symbols, and cuModuleLoadDataEx as cuModuleLoadData.
 */
#define _GNU_SOURCE /* memmem */
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "errors.h"
#include "images.h"

enum { MAX_DEVICES = 16, MAX_FAILURES = 64, MAX_DEPTH = 64, MAX_TEXT = 128 };
enum { MAX_GRID_X = 0x7fffffff, MAX_GRID_YZ = 65535, MAX_BLOCK_XY = 1024, MAX_BLOCK_Z = 64 };
enum { STATIC_SHARED_LIMIT = 48 * 1024, MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
/* Its address is also the handle of its primary context, the only context it has. */
typedef struct {
    int ordinal, capability, sms, shared, registers, threads; /* capability 9.0 is 90 */
    bool retained;
    char name[MAX_TEXT];
} Device;

typedef struct {
    char call[MAX_TEXT], match[MAX_TEXT];
    int status, after, times, device, seen;
} Failure;

typedef struct Module { /* stays allocated when unloaded, so that later use is an error, no crash */
    struct Module *next;
    Device *device;
    bool unloaded;
    size_t size;
    char image[];
} Module;

typedef struct Function {
    struct Function *next;
    const Module *module;
    int shared_limit;
    char entry[];
} Function;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* held through every call */
static struct {
    const char *name;
    int ordinal;
} call; /* the one that holds the mutex */
static bool configured;
static pid_t initialized; /* the process that was, 0 if none */
static int release = 130; /* CUDA version that is supported; 12.9 is 129 */
static int log_file = -1, device_count, failure_count, thread_count;
static Device devices[MAX_DEVICES];
static Failure failures[MAX_FAILURES];
static Module *modules;
static Function *functions;
static _Thread_local Device *stack[MAX_DEPTH];
static _Thread_local int depth, thread = -1, capture_mode;

/* --- Configuration ---------------------------------------------------------------------------- */

/* The scan sets of `%[` leave room for the zero byte in MAX_TEXT. */
static bool read_line(const char *line) {
    int major, minor = 0;
    if (sscanf(line, "driver %d.%d", &major, &minor) == 2) {
        release = 10 * major + minor;
        return true;
    }
    if (device_count == MAX_DEVICES || failure_count == MAX_FAILURES) return false;
    Device *device = &devices[device_count];
    Failure *failure = &failures[failure_count];
    if (sscanf(line,
               "device capability=%d.%d sms=%d shared=%d registers=%d threads=%d name=%127[^\n]",
               &major, &minor, &device->sms, &device->shared, &device->registers,
               &device->threads, device->name) == 7) {
        device->capability = 10 * major + minor;
        device->ordinal = device_count++;
        return true;
    }
    const int fields = sscanf(
        line, "fail %127s status=%d after=%d times=%d device=%d match=%127[^\n]", failure->call,
        &failure->status, &failure->after, &failure->times, &failure->device, failure->match);
    failure_count += fields >= 5;
    return fields >= 5;
}

/* A test with a bad configuration must not pass. */
_Noreturn static void give_up(const char *path, const char *what) {
    fprintf(stderr, "stub CUDA driver: %s: %s\n", path, what);
    abort();
}

static void configure(void) {
    const char *path = getenv("STUB_CUDA_CONFIG"), *log_path = getenv("STUB_CUDA_LOG");
    char line[1024];
    FILE *file = path ? fopen(path, "r") : NULL;
    if (path && !file) give_up(path, "cannot be read");
    while (file && fgets(line, sizeof line, file))
        if (!read_line(line)) give_up(path, line);
    if (file) fclose(file);
    if (log_path) log_file = open(log_path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    configured = true;
}

/* --- What every call does: begin, decide, end ------------------------------------------------- */

static void begin(const char *name) {
    pthread_mutex_lock(&mutex);
    if (!configured) configure();
    if (thread < 0) thread = thread_count++;
    call.name = name;
    call.ordinal = -1;
}

static bool concerns(const Failure *failure, const char *subject, size_t size) {
    const char *match = failure->match;
    if (strcmp(failure->call, call.name)) return false;
    if (failure->device >= 0 && failure->device != call.ordinal) return false;
    if (!*match) return true;
    return subject && (size ? memmem(subject, size, match, strlen(match)) != NULL
                            : !strcmp(subject, match));
}

/* The status of the call, on `device` if that is not null, about `subject`: an image of `size`
 * bytes, or an entry if that is 0. A failure that is asked for goes before `natural`. */
static int decide(const Device *device, const char *subject, size_t size, int natural) {
    if (device) call.ordinal = device->ordinal;
    for (Failure *failure = failures; failure < failures + failure_count; failure++) {
        if (!concerns(failure, subject, size)) continue;
        const int earlier = failure->seen++ - failure->after;
        if (earlier >= 0 && (!failure->times || earlier < failure->times)) return failure->status;
    }
    const bool early = !strcmp(call.name, "cuInit") || !strcmp(call.name, "cuDriverGetVersion");
    if (initialized && initialized != getpid()) return NOT_INITIALIZED; /* a forked child */
    return initialized || early ? natural : NOT_INITIALIZED;
}

static int end_query(int status) {
    pthread_mutex_unlock(&mutex);
    return status;
}

/* Logs the call, in one write, so that the lines of several processes stay whole. */
__attribute__((format(printf, 2, 3))) static int end(int status, const char *format, ...) {
    char details[512], line[768];
    va_list values;
    va_start(values, format);
    vsnprintf(details, sizeof details, format, values);
    va_end(values);
    const int length =
        snprintf(line, sizeof line, "%s process=%d thread=%d device=%d%s status=%d\n", call.name,
                 (int)getpid(), thread, call.ordinal, details, status);
    if (log_file >= 0 && write(log_file, line, (size_t)length) != length) abort();
    return end_query(status);
}

/* --- Devices ---------------------------------------------------------------------------------- */

int cuInit(unsigned flags) {
    begin("cuInit");
    const int natural = flags ? INVALID_VALUE : device_count ? SUCCESS : NO_DEVICE;
    const int status = decide(NULL, NULL, 0, natural);
    if (!status) initialized = getpid();
    return end(status, "%s", "");
}

int cuDriverGetVersion(int *version) {
    begin("cuDriverGetVersion");
    *version = release / 10 * 1000 + release % 10 * 10;
    return end_query(decide(NULL, NULL, 0, SUCCESS));
}

static Device *device_at(int ordinal) {
    return ordinal >= 0 && ordinal < device_count ? &devices[ordinal] : NULL;
}

int cuDeviceGetCount(int *count) {
    begin("cuDeviceGetCount");
    *count = device_count;
    return end_query(decide(NULL, NULL, 0, SUCCESS));
}

static int decide_query(const char *name, int ordinal) {
    begin(name);
    const Device *device = device_at(ordinal);
    return decide(device, NULL, 0, device ? SUCCESS : INVALID_DEVICE);
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return end_query(decide_query("cuDeviceGet", ordinal));
}

int cuDeviceGetName(char *name, int length, int device) {
    const int status = decide_query("cuDeviceGetName", device);
    if (!status) snprintf(name, (size_t)length, "%s", devices[device].name);
    return end_query(status);
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    const int status = decide_query("cuDeviceGetAttribute", device);
    if (status) return end_query(status);
    const Device *played = &devices[device];
    *value = attribute == 1    ? played->threads
             : attribute == 12 ? played->registers
             : attribute == 16 ? played->sms
             : attribute == 75 ? played->capability / 10
             : attribute == 76 ? played->capability % 10
             : attribute == 97 ? played->shared
                               : 0;
    return end_query(SUCCESS);
}

static int describe(int status, const char **text, bool words) {
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == status) *text = words ? errors[i].words : errors[i].name;
    return *text ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorName(int status, const char **name) { return describe(status, name, false); }

int cuGetErrorString(int status, const char **words) { return describe(status, words, true); }

/* --- Contexts --------------------------------------------------------------------------------- */

static Device *current(void) { return depth ? stack[depth - 1] : NULL; }

static Device *context_of(const void *handle) {
    Device *device = devices;
    while (device < devices + device_count && device != handle) device++;
    return device < devices + device_count && device->retained ? device : NULL;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    begin("cuDevicePrimaryCtxRetain");
    Device *played = device_at(device);
    const int status = decide(played, NULL, 0, played ? SUCCESS : INVALID_DEVICE);
    if (!status) played->retained = true;
    if (!status) *context = played;
    return end(status, "%s", "");
}

int cuCtxGetCurrent(void **context) {
    begin("cuCtxGetCurrent");
    const int status = decide(current(), NULL, 0, SUCCESS);
    if (!status) *context = current();
    return end_query(status);
}

int cuCtxPushCurrent_v2(void *context) {
    begin("cuCtxPushCurrent");
    Device *device = context_of(context);
    const bool possible = device && depth < MAX_DEPTH;
    const int status = decide(device, NULL, 0, possible ? SUCCESS : INVALID_CONTEXT);
    if (!status) stack[depth++] = device;
    return end(status, "%s", "");
}

int cuCtxPopCurrent_v2(void **context) {
    begin("cuCtxPopCurrent");
    const int status = decide(current(), NULL, 0, depth ? SUCCESS : INVALID_CONTEXT);
    if (!status && context) *context = current();
    if (!status) depth--;
    return end(status, "%s", "");
}

int cuCtxSetCurrent(void *context) { /* replaces the top of the stack; null takes it off */
    begin("cuCtxSetCurrent");
    Device *device = context_of(context);
    const int status = decide(device, NULL, 0, device || !context ? SUCCESS : INVALID_CONTEXT);
    if (!status && depth) depth--;
    if (!status && device) stack[depth++] = device;
    return end(status, "%s", "");
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    begin("cuThreadExchangeStreamCaptureMode");
    const int wanted = *mode, valid = wanted >= 0 && wanted <= 2;
    const int status = decide(current(), NULL, 0, valid ? SUCCESS : INVALID_VALUE);
    if (!status) *mode = capture_mode;
    if (!status) capture_mode = wanted;
    return end(status, " mode=%d", wanted);
}

/* --- Modules ---------------------------------------------------------------------------------- */

int cuModuleLoadData(void **handle, const void *image) {
    begin("cuModuleLoadData");
    Device *device = current();
    char label[MAX_LABEL] = "unknown";
    const size_t size = size_of(image);
    const int natural = device ? judge(image, device->capability, release, label) : INVALID_CONTEXT;
    const int status = decide(device, image, size, natural);
    Module *module = status ? NULL : malloc(sizeof *module + size);
    if (module) {
        *module = (Module){modules, device, false, size};
        memcpy(module->image, image, size);
        *handle = modules = module;
    }
    return end(status, " image=%s bytes=%zu", label, size);
}

int cuModuleLoadDataEx(void **handle, const void *image, unsigned count, const int *options,
                       void **values) {
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(handle, image);
}

static Module *module_of(const void *handle) {
    Module *module = modules;
    while (module && module != handle) module = module->next;
    return module && !module->unloaded ? module : NULL;
}

int cuModuleUnload(void *handle) {
    begin("cuModuleUnload");
    Module *module = module_of(handle);
    const Device *device = module ? module->device : NULL;
    const int status = decide(device, NULL, 0, module ? SUCCESS : INVALID_HANDLE);
    if (!status && module) module->unloaded = true;
    return end(status, "%s", "");
}

/* --- Functions -------------------------------------------------------------------------------- */

int cuModuleGetFunction(void **handle, void *module_handle, const char *entry) {
    begin("cuModuleGetFunction");
    const Module *module = module_of(module_handle);
    const size_t length = strlen(entry) + 1;
    const bool found = module && memmem(module->image, module->size, entry, length - 1);
    const int status = decide(module ? module->device : NULL, entry, 0,
                              !module ? INVALID_HANDLE : found ? SUCCESS : NOT_FOUND);
    Function *function = status ? NULL : malloc(sizeof *function + length);
    if (function) {
        *function = (Function){functions, module, STATIC_SHARED_LIMIT};
        memcpy(function->entry, entry, length);
        *handle = functions = function;
    }
    return end(status, " entry=%s", entry);
}

static Function *function_of(const void *handle) {
    Function *function = functions;
    while (function && function != handle) function = function->next;
    return function && !function->module->unloaded ? function : NULL;
}

int cuFuncSetAttribute(void *handle, int attribute, int value) {
    begin("cuFuncSetAttribute");
    Function *function = function_of(handle);
    const Device *device = function ? function->module->device : NULL;
    const char *entry = function ? function->entry : "";
    const bool shared = attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES;
    const bool fits = function && (!shared || (value >= 0 && value <= device->shared));
    const int natural = !function ? INVALID_HANDLE : fits ? SUCCESS : INVALID_VALUE;
    const int status = decide(device, entry, 0, natural);
    if (!status && function && shared) function->shared_limit = value;
    return end(status, " entry=%s attribute=%d value=%d", entry, attribute, value);
}

static int judge_launch(const Function *function, const unsigned grid[3], const unsigned block[3],
                        unsigned shared) {
    if (!current()) return INVALID_CONTEXT;
    if (!function || function->module->device != current()) return INVALID_HANDLE;
    for (int i = 0; i < 3; i++) {
        if (!grid[i] || grid[i] > (i ? MAX_GRID_YZ : MAX_GRID_X)) return INVALID_VALUE;
        if (!block[i] || block[i] > (i == 2 ? MAX_BLOCK_Z : MAX_BLOCK_XY)) return INVALID_VALUE;
    }
    const unsigned threads = block[0] * block[1] * block[2];
    const bool fits = threads <= (unsigned)current()->threads;
    return fits && shared <= (unsigned)function->shared_limit ? SUCCESS : INVALID_VALUE;
}

int cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    begin("cuLaunchKernel");
    (void)parameters, (void)extra;
    const Function *function = function_of(handle);
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    const char *entry = function ? function->entry : "";
    const int status = decide(current(), entry, 0, judge_launch(function, grid, block, shared));
    return end(status, " entry=%s grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%llu", entry,
               grid_x, grid_y, grid_z, block_x, block_y, block_z, shared,
               (unsigned long long)(uintptr_t)stream);
}

int cuMemsetD8Async(uint64_t pointer, unsigned char value, size_t bytes, void *stream) {
    begin("cuMemsetD8Async");
    const int natural = !current() ? INVALID_CONTEXT : pointer ? SUCCESS : INVALID_VALUE;
    const int status = decide(current(), NULL, 0, natural);
    return end(status, " pointer=%llu value=%u bytes=%zu stream=%llu", (unsigned long long)pointer,
               value, bytes, (unsigned long long)(uintptr_t)stream);
}
