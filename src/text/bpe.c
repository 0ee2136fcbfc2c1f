#include "text/bpe.h"
#include "base/mem.h"
#include "base/rng.h"
#include <stdlib.h>
#include <string.h>

static uint32_t home_slot(const aff_merges *m, uint32_t left, uint32_t right)
{
    return (uint32_t)aff__mix64((uint64_t)left << 32 | right) & m->mask;
}

aff_status aff__merges_init(aff_merges *m, uint32_t n, aff_error *err)
{
    uint32_t slots = 16;
    while (slots / 2 < n) slots *= 2;
    AFF_TRY(aff__calloc(&m->slot, slots, sizeof *m->slot, "merge table", err));
    memset(m->slot, 0xFF, slots * sizeof *m->slot);
    m->mask = slots - 1;
    return AFF_OK;
}

void aff__merges_free(aff_merges *m)
{
    free(m->slot);
    *m = (aff_merges){0};
}

void aff__merges_add(aff_merges *m, uint32_t left, uint32_t right, uint32_t result)
{
    uint32_t i = home_slot(m, left, right);
    while (m->slot[i].result != AFF_NO_ID) i = (i + 1) & m->mask;
    m->slot[i] = (aff_merge){left, right, result};
}

uint32_t aff__merges_find(const aff_merges *m, uint32_t left, uint32_t right)
{
    uint32_t i = home_slot(m, left, right);
    for (;; i = (i + 1) & m->mask) {
        const aff_merge *s = &m->slot[i];
        if ((s->left == left && s->right == right) || s->result == AFF_NO_ID) return s->result;
    }
}

/* Short pieces, nearly all of them: look through all pairs for the lowest rule. */
enum { SHORT = 40 };

static aff_status encode_short(const aff_merges *m, const uint32_t byte_id[256], const uint8_t *s, size_t n,
                               aff_ids *out, aff_error *err)
{
    uint32_t id[SHORT], rule[SHORT]; /* rule[i]: of the pair (i, i + 1) */
    for (size_t i = 0; i < n; i++) id[i] = byte_id[s[i]];
    for (size_t i = 0; i + 1 < n; i++) rule[i] = aff__merges_find(m, id[i], id[i + 1]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rule[i] < rule[best]) best = i;
        if (rule[best] == AFF_NO_ID) break;
        id[best] = rule[best];
        n--;
        memmove(id + best + 1, id + best + 2, (n - best - 1) * sizeof *id);
        memmove(rule + best, rule + best + 1, (n - best - 1) * sizeof *rule);
        if (best > 0) rule[best - 1] = aff__merges_find(m, id[best - 1], id[best]);
        if (best + 1 < n) rule[best] = aff__merges_find(m, id[best], id[best + 1]);
    }
    for (size_t i = 0; i < n; i++) AFF_TRY(aff__ids_push(out, id[i], err));
    return AFF_OK;
}

/* Long pieces: a linked list of symbols and a heap of (rule, position of the left symbol), in that order of priority.
 * An entry whose symbol has meanwhile another rule is stale and skipped. It cannot come back to life: each merge makes
 * a symbol longer, so the rule of a position never returns to an earlier one. */
typedef struct aff_bpe_symbol {
    uint32_t id, rule; /* rule of the pair with the next symbol, AFF_NO_ID if none or if this symbol is merged away */
    uint32_t prev, next;
} aff_bpe_symbol;

static void sift_down(uint64_t *h, size_t n, size_t i)
{
    uint64_t v = h[i];
    for (size_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && h[c + 1] < h[c]) c++;
        if (v <= h[c]) break;
        h[i] = h[c];
    }
    h[i] = v;
}

static void heap_push(aff_bpe *b, uint64_t v)
{
    uint64_t *h = b->heap;
    size_t i = b->n_heap++;
    for (; i > 0 && v < h[(i - 1) / 2]; i = (i - 1) / 2) h[i] = h[(i - 1) / 2];
    h[i] = v;
}

static uint64_t heap_pop(aff_bpe *b)
{
    uint64_t top = b->heap[0];
    b->heap[0] = b->heap[--b->n_heap];
    if (b->n_heap) sift_down(b->heap, b->n_heap, 0);
    return top;
}

static aff_status reserve(aff_bpe *b, size_t n, aff_error *err)
{
    if (n <= b->cap) return AFF_OK;
    AFF_TRY(aff__realloc(&b->symbol, n, sizeof *b->symbol, "symbols of a long piece", err));
    /* Each rule applied takes one entry out and puts at most two in, so there are never 2 n. */
    AFF_TRY(aff__realloc(&b->heap, n, 2 * sizeof *b->heap, "heap of a long piece", err));
    b->cap = n;
    return AFF_OK;
}

/* Looks the rule of symbol i up anew. */
static void renew(aff_bpe *b, const aff_merges *m, uint32_t i)
{
    aff_bpe_symbol *a = &b->symbol[i];
    a->rule = a->next == AFF_NO_ID ? AFF_NO_ID : aff__merges_find(m, a->id, b->symbol[a->next].id);
    if (a->rule != AFF_NO_ID) heap_push(b, (uint64_t)a->rule << 32 | i);
}

/* Leaves the tokens of s[0..n) in the list of symbols, each at the place where it begins in s. */
static aff_status merge_all(aff_bpe *b, const aff_merges *m, const uint32_t byte_id[256], const uint8_t *s, size_t n,
                            aff_error *err)
{
    AFF_TRY(reserve(b, n, err));
    aff_bpe_symbol *sym = b->symbol;
    uint32_t last = (uint32_t)n - 1;
    for (uint32_t i = 0; i <= last; i++)
        sym[i] = (aff_bpe_symbol){byte_id[s[i]], AFF_NO_ID, i - 1, i == last ? AFF_NO_ID : i + 1};
    b->n_heap = 0;
    for (uint32_t i = 0; i < last; i++) {
        sym[i].rule = aff__merges_find(m, sym[i].id, sym[i + 1].id);
        if (sym[i].rule != AFF_NO_ID) b->heap[b->n_heap++] = (uint64_t)sym[i].rule << 32 | i;
    }
    for (size_t i = b->n_heap / 2; i-- > 0;) sift_down(b->heap, b->n_heap, i);
    while (b->n_heap) {
        uint64_t top = heap_pop(b);
        uint32_t i = (uint32_t)top, rule = (uint32_t)(top >> 32);
        if (sym[i].rule != rule) continue;
        uint32_t gone = sym[i].next;
        sym[i].id = rule;
        sym[i].next = sym[gone].next;
        sym[gone].rule = AFF_NO_ID;
        if (sym[i].next != AFF_NO_ID) sym[sym[i].next].prev = i;
        renew(b, m, i);
        if (i > 0) renew(b, m, sym[i].prev);
    }
    return AFF_OK;
}

/* Appends the tokens that begin before `end`; *next: where the one after them begins, AFF_NO_ID if there is none. */
static aff_status put_tokens(const aff_bpe *b, uint32_t end, aff_ids *out, uint32_t *next, aff_error *err)
{
    uint32_t i = 0;
    for (; i != AFF_NO_ID && i < end; i = b->symbol[i].next) AFF_TRY(aff__ids_push(out, b->symbol[i].id, err));
    *next = i;
    return AFF_OK;
}

/* Very long pieces in chunks that fit the cache. A list of tokens is the encoding of its text if and only if each two
 * neighbours are that of theirs: before the first merge across a border between two tokens, what happens inside these
 * two depends on nothing else, so it would be the first one of them alone too. So a chunk's tokens may be kept up to
 * some border of them, and the next chunk begin there, if its first token is the one that stood there before: then that
 * pair of neighbours is one of the first chunk's. The tokens at a chunk's end, which more text may change, are left to
 * the next. *same: whether that held everywhere. */
enum { CHUNK = 2048, MARGIN = 256 };

static aff_status encode_chunks(aff_bpe *b, const aff_merges *m, const uint32_t byte_id[256], const uint8_t *s,
                                size_t n, aff_ids *out, bool *same, aff_error *err)
{
    uint32_t first = AFF_NO_ID, next; /* the token that must come at the beginning of s */
    for (*same = true;;) {
        const bool last = n <= CHUNK;
        AFF_TRY(merge_all(b, m, byte_id, s, last ? n : CHUNK, err));
        *same = first == AFF_NO_ID || b->symbol[0].id == first;
        if (!*same) return AFF_OK;
        AFF_TRY(put_tokens(b, last ? AFF_NO_ID : CHUNK - MARGIN, out, &next, err));
        if (last) return AFF_OK;
        *same = next != AFF_NO_ID;
        if (!*same) return AFF_OK;
        first = b->symbol[next].id;
        s += next;
        n -= next;
    }
}

aff_status aff__bpe_encode(aff_bpe *b, const aff_merges *m, const uint32_t byte_id[256], const uint8_t *s, size_t n,
                           aff_ids *out, aff_error *err)
{
    const size_t before = out->n;
    uint32_t next;
    bool same;
    if (n <= SHORT) return encode_short(m, byte_id, s, n, out, err);
    if (n >= UINT32_MAX)
        return aff__fail(err, AFF_E_LIMIT, "text: one word of %zu bytes; expected fewer than %u", n, UINT32_MAX);
    if (n > CHUNK) {
        AFF_TRY(encode_chunks(b, m, byte_id, s, n, out, &same, err));
        if (same) return AFF_OK;
        out->n = before;
    }
    AFF_TRY(merge_all(b, m, byte_id, s, n, err));
    return put_tokens(b, AFF_NO_ID, out, &next, err);
}

void aff__bpe_free(aff_bpe *b)
{
    free(b->symbol);
    free(b->heap);
    *b = (aff_bpe){0};
}
