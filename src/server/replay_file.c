/* A record, little-endian: u32 size of what follows the checksum | u64 XXH3-64 of that | u32 flags (1: thinking) |
 * u32 calls | u32 ids | u32 reasoning bytes | u32 text bytes | for each call u32 bytes of id, name, arguments |
 * reasoning, text, the calls' strings in that order | ids u32. */
#include "base/mem.h"
#include "server/replay.h"
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { HEAD = 12, FIXED = 20, PER_CALL = 12, MAX_CALLS = 65536 };

static uint64_t get(const char *p, int n)
{
    uint64_t v = 0;
    for (int i = 0; i < n; i++) v |= (uint64_t)(uint8_t)p[i] << 8 * i;
    return v;
}

static aff_status put(aff_buf *b, uint64_t v, int n, aff_error *err)
{
    char c[8];
    for (int i = 0; i < n; i++) c[i] = (char)(v >> 8 * i);
    return aff__buf_put(b, c, (size_t)n, err);
}

static aff_status body(aff_buf *b, const aff_turn *t, aff_error *err)
{
    const uint64_t fixed[] = {t->thinking, t->n_calls, t->n_ids, t->n_reasoning, t->n_text};
    for (int i = 0; i < 5; i++) AFF_TRY(put(b, fixed[i], 4, err));
    for (size_t i = 0; i < t->n_calls; i++) {
        AFF_TRY(put(b, t->call[i].n_id, 4, err));
        AFF_TRY(put(b, t->call[i].n_name, 4, err));
        AFF_TRY(put(b, t->call[i].n_arguments, 4, err));
    }
    AFF_TRY(aff__buf_put(b, t->reasoning, t->n_reasoning, err));
    AFF_TRY(aff__buf_put(b, t->text, t->n_text, err));
    for (size_t i = 0; i < t->n_calls; i++) {
        AFF_TRY(aff__buf_put(b, t->call[i].id, t->call[i].n_id, err));
        AFF_TRY(aff__buf_put(b, t->call[i].name, t->call[i].n_name, err));
        AFF_TRY(aff__buf_put(b, t->call[i].arguments, t->call[i].n_arguments, err));
    }
    for (size_t i = 0; i < t->n_ids; i++) AFF_TRY(put(b, t->ids[i], 4, err));
    return AFF_OK;
}

aff_status aff__turn_write(aff_buf *out, const aff_turn *t, aff_error *err)
{
    aff_buf b = {0};
    aff_status s =
        t->n_calls > MAX_CALLS ? aff__fail(err, AFF_E_LIMIT, "turn: %zu calls", t->n_calls) : body(&b, t, err);
    if (s == AFF_OK && b.n > UINT32_MAX) s = aff__fail(err, AFF_E_LIMIT, "turn: %zu bytes", b.n);
    if (s == AFF_OK) s = put(out, b.n, 4, err);
    if (s == AFF_OK) s = put(out, XXH3_64bits(b.s, b.n), 8, err);
    if (s == AFF_OK) s = aff__buf_put(out, b.s, b.n, err);
    aff__buf_free(&b);
    return s;
}

void aff__turn_free(aff_turn *t)
{
    free((void *)(uintptr_t)t->call);
    free((void *)(uintptr_t)t->ids);
    *t = (aff_turn){0};
}

/* The next `size` bytes of a record; NULL: it has not so many. */
static const char *take(const char **p, size_t *left, size_t size)
{
    const char *at = *p;
    if (size > *left) return NULL;
    *p += size;
    *left -= size;
    return at;
}

static bool read_body(aff_turn *t, const char *p, size_t left)
{
    const char *head = take(&p, &left, FIXED), *table;
    if (!head) return false;
    const uint64_t n_calls = get(head + 4, 4), n_ids = get(head + 8, 4);
    aff_turn_call *call = NULL;
    uint32_t *ids = NULL;
    if (get(head, 4) > 1 || n_calls > MAX_CALLS || n_ids > left / 4 || !(table = take(&p, &left, PER_CALL * n_calls)))
        return false;
    *t = (aff_turn){.thinking = get(head, 4) & 1, .n_reasoning = get(head + 12, 4), .n_text = get(head + 16, 4)};
    if (!(t->reasoning = take(&p, &left, t->n_reasoning)) || !(t->text = take(&p, &left, t->n_text))) return false;
    if (aff__calloc(&call, n_calls, sizeof *call, "turn", NULL) != AFF_OK) return false;
    t->call = call;
    for (; t->n_calls < n_calls; t->n_calls++, table += PER_CALL) {
        aff_turn_call c = {.n_id = get(table, 4), .n_name = get(table + 4, 4), .n_arguments = get(table + 8, 4)};
        if (!(c.id = take(&p, &left, c.n_id)) || !(c.name = take(&p, &left, c.n_name)) ||
            !(c.arguments = take(&p, &left, c.n_arguments)))
            return false;
        call[t->n_calls] = c;
    }
    if (left != 4 * n_ids || aff__calloc(&ids, n_ids, sizeof *ids, "turn", NULL) != AFF_OK) return false;
    t->ids = ids;
    for (; t->n_ids < n_ids; t->n_ids++) ids[t->n_ids] = (uint32_t)get(p + 4 * t->n_ids, 4);
    return true;
}

bool aff__turn_read(aff_turn *t, const char *bytes, size_t n, size_t *at)
{
    *t = (aff_turn){0};
    if (n < *at || n - *at < HEAD) return false;
    const char *p = bytes + *at;
    const uint64_t size = get(p, 4);
    if (size > n - *at - HEAD || get(p + 4, 8) != XXH3_64bits(p + HEAD, (size_t)size)) return false;
    if (!read_body(t, p + HEAD, (size_t)size)) {
        aff__turn_free(t);
        return false;
    }
    *at += HEAD + (size_t)size;
    return true;
}
