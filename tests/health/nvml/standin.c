// A stand-in for libnvidia-ml.so.1 that reads files, so that nvidia-ml-py and what is built on it run without a GPU.
//
// The files lie beside the library and are read at every call: GPUs are the folders 0, 1, ... until one is missing.
// In each: uuid, bus (of the PCI address), temperature, margin, utilization (percent), power (milliwatts), memory_used,
// reasons (of the clocks), sram_threshold, nvlink0 (0, 1),
// fabric ("STATE STATUS MASK"), field3 (by the number of the field), xid ("NUMBER CODE": new contents are an event),
// lost (there or not), hang (calls for this GPU do not return while it is there), error (what calls return, a number).
// `init` beside the folders: what nvmlInit returns. A value whose file is missing is not supported.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Result;
typedef struct {
    int index;
} Device;
enum { OK = 0, BAD_ARGUMENT = 2, NOT_SUPPORTED = 3, TIMED_OUT = 10, LOST = 15 };
enum { GPUS = 16, LINKS = 18, POLL_US = 2000, UNSIGNED = 1, UNSIGNED_64 = 3 };
#define XID_EVENT 8ULL

static Device devices[GPUS];

static const char *folder(void) {
    static char path[4096];
    if (!path[0]) {
        Dl_info info;
        if (!dladdr((void *)folder, &info)) return ".";
        snprintf(path, sizeof path, "%s", info.dli_fname);
        char *slash = strrchr(path, '/');
        if (slash) *slash = 0;
    }
    return path;
}

static int text(int gpu, const char *key, char *into, size_t size) {
    char path[4600];
    if (gpu < 0)
        snprintf(path, sizeof path, "%s/%s", folder(), key);
    else
        snprintf(path, sizeof path, "%s/%d/%s", folder(), gpu, key);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (!fgets(into, (int)size, file)) into[0] = 0;
    fclose(file);
    into[strcspn(into, "\n")] = 0;
    return 1;
}

static int number(int gpu, const char *key, unsigned long long *value) {
    char word[64];
    if (!text(gpu, key, word, sizeof word)) return 0;
    *value = strtoull(word, 0, 0);
    return 1;
}

static Result reach(Device *device) {
    char word[64];
    unsigned long long error = OK;
    if (!device) return BAD_ARGUMENT;
    while (text(device->index, "hang", word, sizeof word)) usleep(POLL_US);
    if (text(device->index, "lost", word, sizeof word)) return LOST;
    number(device->index, "error", &error);
    return (Result)error;
}

#define REACH(device)                       \
    do {                                    \
        Result reached = reach(device);     \
        if (reached != OK) return reached;  \
    } while (0)

static Result value(Device *device, const char *key, unsigned long long *into) {
    REACH(device);
    return number(device->index, key, into) ? OK : NOT_SUPPORTED;
}

Result nvmlInitWithFlags(unsigned flags) {
    unsigned long long result = OK;
    (void)flags;
    for (int i = 0; i < GPUS; i++) devices[i].index = i;
    number(-1, "init", &result);
    return (Result)result;
}

Result nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(Result result) {
    static char words[32];
    snprintf(words, sizeof words, "error %d of the stand-in", result);
    return words;
}

Result nvmlDeviceGetCount_v2(unsigned *count) {
    char path[4600];
    for (*count = 0; *count < GPUS; ++*count) {
        snprintf(path, sizeof path, "%s/%u", folder(), *count);
        if (access(path, F_OK)) break;
    }
    return OK;
}

Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    unsigned count;
    nvmlDeviceGetCount_v2(&count);
    if (index >= count) return BAD_ARGUMENT;
    *device = &devices[index];
    return reach(*device);
}

Result nvmlDeviceGetUUID(Device *device, char *into, unsigned size) {
    REACH(device);
    if (!text(device->index, "uuid", into, size)) snprintf(into, size, "GPU-stand-in-%d", device->index);
    return OK;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char address[32];
} PciInfo;

Result nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *info) {
    unsigned long long bus = 0x10 + device->index;
    REACH(device);
    number(device->index, "bus", &bus);
    memset(info, 0, sizeof *info);
    info->bus = (unsigned)bus;
    snprintf(info->address, sizeof info->address, "00000000:%02X:00.0", info->bus);
    return OK;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    unsigned type;
    Result result;
    unsigned long long value;
} FieldValue;

Result nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values) {
    REACH(device);
    for (int i = 0; i < count; i++) {
        char key[32];
        snprintf(key, sizeof key, "field%u", values[i].field);
        values[i].value = 0;
        values[i].type = UNSIGNED_64;
        int of_all_links = values[i].field < 201 || values[i].field > 222 || values[i].scope == 0xFFFFFFFFu;
        int found = of_all_links && number(device->index, key, &values[i].value);
        values[i].result = found ? OK : NOT_SUPPORTED;
    }
    return OK;
}

Result nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *celsius) {
    unsigned long long read;
    (void)sensor;
    Result result = value(device, "temperature", &read);
    if (result == OK) *celsius = (unsigned)read;
    return result;
}

typedef struct {
    unsigned gpu, memory;
} Utilization;

Result nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    unsigned long long read;
    Result result = value(device, "utilization", &read);
    if (result == OK) *rates = (Utilization){(unsigned)read, 0};
    return result;
}

Result nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
    unsigned long long read;
    Result result = value(device, "power", &read);
    if (result == OK) *milliwatts = (unsigned)read;
    return result;
}

typedef struct {
    unsigned long long total, free, used;
} Memory;

Result nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    unsigned long long read;
    Result result = value(device, "memory_used", &read);
    if (result == OK) *memory = (Memory){0, 0, read};
    return result;
}

typedef struct {
    unsigned version;
    int celsius;
} Margin;

Result nvmlDeviceGetMarginTemperature(Device *device, Margin *margin) {
    unsigned long long read;
    Result result = value(device, "margin", &read);
    if (result == OK) margin->celsius = (int)read;
    return result;
}

Result nvmlDeviceGetTemperatureThreshold(Device *device, unsigned kind, unsigned *celsius) {
    unsigned long long read;
    char key[32];
    snprintf(key, sizeof key, "threshold%u", kind);
    Result result = value(device, key, &read);
    if (result == OK) *celsius = (unsigned)read;
    return result;
}

Result nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    return value(device, "reasons", reasons);
}

typedef struct {
    unsigned version;
    unsigned long long counts[11];
    unsigned threshold_exceeded;
} SramErrors;

Result nvmlDeviceGetSramEccErrorStatus(Device *device, SramErrors *errors) {
    unsigned long long read;
    Result result = value(device, "sram_threshold", &read);
    if (result == OK) errors->threshold_exceeded = (unsigned)read;
    return result;
}

Result nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *active) {
    unsigned long long read;
    char key[32];
    if (link >= LINKS) return BAD_ARGUMENT;
    snprintf(key, sizeof key, "nvlink%u", link);
    Result result = value(device, key, &read);
    if (result == OK) *active = (unsigned)read;
    return result;
}

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    Result status;
    unsigned clique;
    unsigned char state;
    unsigned mask;
} FabricInfo;

Result nvmlDeviceGetGpuFabricInfoV(Device *device, FabricInfo *info) {
    char words[64];
    unsigned state, status, mask;
    REACH(device);
    if (!text(device->index, "fabric", words, sizeof words)) return NOT_SUPPORTED;
    if (sscanf(words, "%u %u %i", &state, &status, (int *)&mask) != 3) return BAD_ARGUMENT;
    info->state = (unsigned char)state;
    info->status = (Result)status;
    info->mask = mask;
    return OK;
}

typedef struct {
    unsigned long long wanted[GPUS];
    char seen[GPUS][64];
} EventSet;
typedef struct {
    Device *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} Event;

Result nvmlEventSetCreate(EventSet **set) {
    *set = calloc(1, sizeof(EventSet));
    return OK;
}

Result nvmlEventSetFree(EventSet *set) {
    free(set);
    return OK;
}

Result nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    REACH(device);
    set->wanted[device->index] |= types;
    return OK;
}

Result nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned within_ms) {
    for (unsigned long long waited_us = 0;; waited_us += POLL_US) {
        for (int i = 0; i < GPUS; i++) {
            char words[64] = "";
            unsigned long long code;
            if (!(set->wanted[i] & XID_EVENT) || !text(i, "xid", words, sizeof words)) continue;
            if (!strcmp(words, set->seen[i]) || sscanf(words, "%*u %llu", &code) != 1) continue;
            memcpy(set->seen[i], words, sizeof words);
            *event = (Event){&devices[i], XID_EVENT, code, ~0u, ~0u};
            return OK;
        }
        if (waited_us >= within_ms * 1000ULL) return TIMED_OUT;
        usleep(POLL_US);
    }
}
