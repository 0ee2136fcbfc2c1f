/* device.h - what --device names, and the backend behind it. */
#ifndef AFF_BACKEND_DEVICE_H
#define AFF_BACKEND_DEVICE_H
#include "affinity.h"
#include <stdbool.h>
#include <stdint.h>

typedef enum aff_rt_kind { AFF_RT_CUDA, AFF_RT_HIP, AFF_RT_EMU, AFF_RT_KINDS } aff_rt_kind;
typedef enum aff_device_choice { AFF_DEVICE_AUTO, AFF_DEVICE_CPU, AFF_DEVICE_RT } aff_device_choice;
typedef struct aff_device_spec {
    aff_device_choice choice;
    aff_rt_kind kind; /* the rest: AFF_DEVICE_RT only */
    int index;        /* cuda:I, hip:I; emulated: which of them */
    int count;        /* emulated devices */
    uint64_t bytes;   /* memory of each */
    bool amd;         /* emulated with the AMD fragment layout */
    /* Emulated, for tests: the launch that faults, counted from 1 (0: none); bytes that another program takes between
     * the plan, which asks what is free, and the first allocation. */
    uint64_t fault, taken;
} aff_device_spec;

/* auto | cpu | cuda[:I] | hip[:I] | emu[:[Nx]SIZE] | emu-amd[:[Nx]SIZE]; SIZE with K, M, G (powers of 1024), default
 * 1x1G; behind it ",fault=N" and ",taken=SIZE", for tests. */
aff_status aff__device_parse(aff_device_spec *out, const char *text, aff_error *err);
/* --gpus N (N >= 1): whether there are so many cards of the kind that spec names (auto: NVIDIA's, else AMD's), and whether this version can
 * use them: AFF_E_INVALID, AFF_E_UNSUPPORTED. */
aff_status aff__device_gpus(const aff_device_spec *spec, int64_t gpus, aff_error *err);

/* A device as displays and plans see it. */
typedef enum aff_device_use { AFF_USE_WEIGHTS, AFF_USE_EXPERTS, AFF_USE_STATE, AFF_USE_BUFFERS, AFF_USES } aff_device_use;
extern const char *const aff__device_use_names[AFF_USES]; /* "weights", "experts", "state", "buffers" */
typedef struct aff_device_view {
    char id[16], name[96], arch[32]; /* "cuda:0" */
    uint64_t memory, free;           /* bytes in all; free of them, by all programs */
    uint64_t use[AFF_USES];          /* bytes this program has there */
    int link_gen, link_width;        /* PCIe; 0: unknown */
    uint64_t link_rate;              /* bytes a second one way, 0: unknown */
    int records;                     /* passes recorded as graphs */
    uint64_t passes, repeated;       /* of few rows: run; of those, by a record */
} aff_device_view;

struct aff_backend;
/* The backend: of a device, or the CPU's (auto and cpu) with that many threads. */
aff_status aff__device_backend(struct aff_backend **out, const aff_device_spec *spec, aff_numerics num, int threads,
                               aff_error *err);
/* Whose results those are: states and caches move only between equals. "" for the CPU, else as "cuda sm_90"; emulated
 * "emu nv". */
aff_status aff__device_results(const aff_device_spec *spec, char out[64], aff_error *err);
#endif
