/* A container from memory: every byte that an engine would touch must be there.
 *
 * The expert pool starts at 2 MiB, so an input is a compressed image: u32 length of the file, u32 length of the front,
 * the front (laid at 0), the rest (laid at 2 MiB); zeros between. */
#include "format/container.h"
#include <stdlib.h>
#include <string.h>

static volatile uint64_t sink;

static uint64_t touch(const uint8_t *p, uint64_t n)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++) sum += p[i];
    return sum;
}

static uint64_t touch_matrix(const uint8_t *base, const aff_matdesc *m)
{
    if (!aff__dtype_info(m->quant)) abort();
    return touch(base + m->data_off, m->data_size) + touch(base + m->scale_off, m->scale_size) +
           touch(base + m->rscale_off, m->rscale_size);
}

static void walk(const aff_container *c)
{
    const char *text;
    size_t n;
    uint64_t sum = 0;
    aff__container_meta(c, &text, &n);
    sum += touch((const uint8_t *)text, n);
    aff__container_provenance(c, &text, &n);
    sum += touch((const uint8_t *)text, n);
    for (uint64_t i = 0; i < aff__container_tensors(c); i++) {
        const aff_ctensor *t = aff__container_tensor(c, i);
        if (aff__container_find(c, t->name) != t) abort();
        sum += touch_matrix(t->blob, &t->m);
    }
    const float *profile = aff__container_profile(c);
    for (uint32_t l = 0; l < aff__container_layers(c); l++) {
        const aff_clayer *y = aff__container_layer(c, l);
        for (uint32_t e = 0; e < y->n_experts; e++) {
            const uint8_t *r = aff__container_expert(c, l, e);
            if (profile) sum += (uint64_t)(*profile++ > 0);
            if (e > 4 && e + 4 < y->n_experts) continue; /* the ends tell */
            sum += touch_matrix(r, &y->gate) + touch_matrix(r, &y->up) + touch_matrix(r, &y->down) + r[y->stride - 1];
        }
    }
    sink = sum;
    aff_error err = {0};
    aff__container_verify(c, NULL, NULL, &err);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { POOL = 2 << 20 };
    if (size < 8) return 0;
    uint32_t length, front;
    memcpy(&length, data, 4);
    memcpy(&front, data + 4, 4);
    data += 8, size -= 8;
    length %= 3 << 20;
    if (front > size) front = (uint32_t)size;
    uint8_t *file = calloc(length ? length : 1, 1); /* exact, so that a read past the end shows */
    if (!file) return 0;
    memcpy(file, data, front < length ? front : length);
    size -= front;
    if (length > POOL) memcpy(file + POOL, data + front, size < length - POOL ? size : length - POOL);
    if (length >= 120 && memcmp(file + 112, "\0\0\0\0\0\0\0\0", 8) == 0)
        memcpy(file + 112, &length, 4); /* spare the fuzzer the guess */
    aff_container *c;
    aff_error err = {0};
    if (aff__container_open_memory(&c, file, length, "fuzz", &err) == AFF_OK) {
        walk(c);
        aff__container_close(c);
    }
    free(file);
    return 0;
}
