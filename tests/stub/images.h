/* What a driver says of an image before it is a module: how long it is, and whether a device can have it.
 *
 * `release` is the CUDA version that the driver supports, 12.9 as 129; capability 9.0 is 90. `label`, of
 * MAX_LABEL bytes, becomes what the image is for, such as sm_90a. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "errors.h"

enum { MAX_LABEL = 128, EM_CUDA = 190 };

static bool is_elf(const char *image) { return !strncmp(image, "\177ELF", 4); }

static size_t field(const char *image, size_t at, size_t bytes) {
    uint64_t value = 0;
    memcpy(&value, image + at, bytes); /* cubins and their hosts are little-endian */
    return (size_t)value;
}

/* Nobody says how long an image is: text ends with a zero byte, an ELF file with one of its two
 * tables. */
static size_t size_of(const char *image) {
    if (!is_elf(image)) return strlen(image);
    const size_t segments = field(image, 32, 8) + field(image, 54, 2) * field(image, 56, 2);
    const size_t sections = field(image, 40, 8) + field(image, 58, 2) * field(image, 60, 2);
    return segments > sections ? segments : sections;
}

static int judge_elf(const char *image, int capability, int release, char *label) {
    const size_t abi = field(image, 8, 1), flags = field(image, 48, 4);
    const int arch = (int)((abi >= 8 ? flags >> 8 : flags) & 0xff);
    const bool specific = flags & (abi >= 8 ? 0x8 : 0x800);
    if (field(image, 18, 2) != EM_CUDA) return INVALID_IMAGE;
    snprintf(label, MAX_LABEL, "sm_%d%s", arch, specific ? "a" : "");
    /* ABI 8 came with Blackwell in CUDA 12.8; earlier architectures got it in 13.0. */
    if (abi > 8 || (abi == 8 && release < (arch < 100 ? 130 : 128))) return INVALID_IMAGE;
    if (specific) return arch == capability ? SUCCESS : NO_BINARY_FOR_GPU;
    return arch / 10 == capability / 10 && arch <= capability ? SUCCESS : NO_BINARY_FOR_GPU;
}

static int judge_ptx(const char *image, int capability, int release, char *label) {
    int major, minor, arch;
    char suffix = '\0';
    const char *version = strstr(image, ".version"), *target = strstr(image, ".target");
    if (!version || sscanf(version, ".version %d.%d", &major, &minor) != 2) return INVALID_PTX;
    if (!target || sscanf(target, ".target sm_%d%c", &arch, &suffix) < 1) return INVALID_PTX;
    snprintf(label, MAX_LABEL, "compute_%d%s", arch, suffix == 'a' ? "a" : "");
    /* PTX 8.5 is of CUDA 12.5, 8.6 of 12.7, 9.0 of 13.0. */
    const int skipped = major == 8 && minor >= 6;
    if (10 * (major + 4) + minor + skipped > release) return UNSUPPORTED_PTX_VERSION;
    return arch == capability || (arch < capability && suffix != 'a') ? SUCCESS : INVALID_PTX;
}

static int judge(const char *image, int capability, int release, char *label) {
    if (is_elf(image)) return judge_elf(image, capability, release, label);
    const bool ptx = !strncmp(image, "//", 2) || !strncmp(image, ".version", 8);
    return ptx ? judge_ptx(image, capability, release, label) : INVALID_IMAGE;
}
