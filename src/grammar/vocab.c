#define _GNU_SOURCE /* memmem */
#include "grammar/vocab.h"
#include "base/mem.h"
#include "text/utf8.h"
#include <stdlib.h>
#include <string.h>

enum { MARK = 0xFF, LONGEST = 4096 };
static const char spelling[] = AFF_VOCAB_MARKER;

typedef struct entry {
    const uint8_t *s;
    size_t n;
    int32_t id;
    int chars; /* of a plain token, else 0 */
} entry;

static int by_bytes(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    const int c = memcmp(x->s, y->s, x->n < y->n ? x->n : y->n);
    if (c) return c;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* `open` has room for a node index at every depth. */
static aff_status build_trie(aff_trie *t, entry *e, size_t n, uint32_t *open, aff_error *err)
{
    uint64_t cap = 1;
    size_t depth = 0;
    qsort(e, n, sizeof *e, by_bytes);
    for (size_t i = 0; i < n; i++) cap += e[i].n;
    AFF_TRY(aff__calloc(&t->node, cap, sizeof *t->node, "vocabulary", err));
    for (size_t i = 0; i < n; i++) {
        size_t same = 0;
        while (i && same < e[i].n && same < e[i - 1].n && e[i].s[same] == e[i - 1].s[same]) same++;
        if (same == e[i].n) same--; /* the same bytes again */
        for (; depth > same; depth--) t->node[open[depth]].skip = t->n;
        for (; depth < e[i].n; t->n++) {
            t->node[t->n] = (aff_trie_node){.token = -1, .byte = e[i].s[depth], .depth = (uint16_t)(depth + 1)};
            open[++depth] = t->n;
        }
        t->node[t->n - 1].token = e[i].id;
        for (size_t d = e[i].n; d > 0 && t->node[open[d]].reach < e[i].n && t->node[open[d]].reach < 255; d--)
            t->node[open[d]].reach = e[i].n < 255 ? (uint8_t)e[i].n : 255;
    }
    for (; depth > 0; depth--) t->node[open[depth]].skip = t->n;
    return AFF_OK;
}

bool aff__text_plain(aff_text_kind kind, uint8_t c)
{
    if (c >= 0x80) return true;
    if (kind == AFF_TEXT_JSON) return c >= 0x20 && c != '"' && c != '\\';
    return (c >= 0x20 && c != '<') || c == '\t' || c == '\n' || c == '\r';
}

/* Characters of a plain token, 0: it is none. */
static int plain_chars(aff_text_kind kind, const uint8_t *s, size_t n)
{
    int chars = 0;
    if (!n || aff__utf8_valid_prefix(s, n) != n) return 0;
    for (size_t i = 0; i < n; i++) {
        if (!aff__text_plain(kind, s[i])) return 0;
        chars += (s[i] & 0xC0) != 0x80;
    }
    return chars;
}

static aff_status sort_kind(aff_vocab *v, aff_text_kind kind, entry *all, size_t n, entry *work, uint32_t *open,
                            aff_error *err)
{
    size_t rest = 0;
    int most = 0;
    for (size_t i = 0; i < n; i++) {
        all[i].chars = plain_chars(kind, all[i].s, all[i].n);
        if (all[i].chars > most) most = all[i].chars;
        if (!all[i].chars) work[rest++] = all[i];
    }
    v->most[kind] = most;
    AFF_TRY(aff__calloc(&v->plain[kind], (uint64_t)most + 1, sizeof *v->plain[kind], "vocabulary", err));
    for (int k = 0; k <= most; k++) {
        AFF_TRY(aff__calloc(&v->plain[kind][k], (uint64_t)v->words, sizeof(uint64_t), "vocabulary", err));
        if (k) memcpy(v->plain[kind][k], v->plain[kind][k - 1], (size_t)v->words * sizeof(uint64_t));
        for (size_t i = 0; k && i < n; i++)
            if (all[i].chars == k) v->plain[kind][k][all[i].id >> 6] |= 1ull << (all[i].id & 63);
    }
    return build_trie(&v->rest[kind], work, rest, open, err);
}

static aff_status copy_bytes(aff_vocab *v, const aff_vocab_token *token, int32_t marker, aff_error *err)
{
    uint64_t total = 0;
    for (int i = 0; i < v->n; i++) {
        if (token[i].n > LONGEST)
            return aff__fail(err, AFF_E_LIMIT, "vocabulary: token %d: expected at most %d bytes, got %zu", i, LONGEST,
                             token[i].n);
        total += token[i].n;
    }
    if (total >= UINT32_MAX)
        return aff__fail(err, AFF_E_LIMIT, "vocabulary: %llu bytes of tokens", (unsigned long long)total);
    AFF_TRY(aff__calloc(&v->bytes, total + 1, 1, "vocabulary", err));
    AFF_TRY(aff__calloc(&v->offset, (uint64_t)v->n + 1, sizeof *v->offset, "vocabulary", err));
    uint32_t at = 0;
    for (int i = 0; i < v->n; i++) {
        v->offset[i] = at;
        if (i == marker) {
            v->bytes[at++] = MARK;
            continue;
        }
        for (size_t k = 0; k < token[i].n; k++) {
            const uint8_t c = (uint8_t)token[i].s[k];
            v->bytes[at++] = c == MARK ? MARK - 1 : c; /* neither is part of any text */
        }
        if (token[i].n && !token[i].control &&
            (memmem(token[i].s, token[i].n, spelling, sizeof spelling - 1) ||
             memmem(token[i].s, token[i].n, "</think>", 8)))
            v->spelled = true;
    }
    v->offset[v->n] = at;
    return AFF_OK;
}

static aff_status fill(aff_vocab *v, const aff_vocab_token *token, int32_t marker, entry *e, entry *work,
                       uint32_t *open, aff_error *err)
{
    bool seen[256] = {false};
    size_t n = 0;
    AFF_TRY(copy_bytes(v, token, marker, err));
    AFF_TRY(aff__calloc(&v->control, (uint64_t)v->words, sizeof *v->control, "vocabulary", err));
    for (int i = 0; i < v->n; i++) {
        size_t len;
        const uint8_t *s = aff__vocab_bytes(v, i, &len);
        if (!len || i == v->eos) continue;
        if (len > v->longest) v->longest = len;
        if (token[i].control && i != marker) {
            v->control[i >> 6] |= 1ull << (i & 63);
            continue;
        }
        if (token[i].n == 1) seen[(uint8_t)*token[i].s] = true;
        e[n++] = (entry){s, len, i, 0};
    }
    for (int c = 0; c < 256; c++)
        if (!seen[c])
            return aff__fail(err, AFF_E_FORMAT, "vocabulary: expected a token for every byte, byte 0x%02x has none",
                             (unsigned)c);
    for (int k = 0; k < AFF_TEXT_KINDS; k++) AFF_TRY(sort_kind(v, (aff_text_kind)k, e, n, work, open, err));
    AFF_TRY(build_trie(&v->all, e, n, open, err));
    for (int b = 0; b < 256; b++) v->first[b] = v->all.n;
    for (uint32_t i = 0; i < v->all.n; i = v->all.node[i].skip)
        if (v->first[v->all.node[i].byte] == v->all.n) v->first[v->all.node[i].byte] = i;
    return AFF_OK;
}

aff_status aff__vocab_create(aff_vocab **out, const aff_vocab_token *token, int n, int32_t eos, int32_t marker,
                             aff_error *err)
{
    aff_vocab *v = NULL;
    entry *e = NULL, *work = NULL;
    uint32_t *open = NULL;
    *out = NULL;
    AFF_TRY(aff__calloc(&v, 1, sizeof *v, "vocabulary", err));
    *v = (aff_vocab){.n = n, .words = (n + 63) / 64, .eos = eos, .marked = marker >= 0};
    aff_status s = aff__calloc(&e, (uint64_t)n, sizeof *e, "vocabulary", err);
    if (s == AFF_OK) s = aff__calloc(&work, (uint64_t)n, sizeof *work, "vocabulary", err);
    if (s == AFF_OK) s = aff__calloc(&open, LONGEST + 2, sizeof *open, "vocabulary", err);
    if (s == AFF_OK) s = fill(v, token, marker, e, work, open, err);
    free(e);
    free(work);
    free(open);
    if (s != AFF_OK) {
        aff__vocab_free(v);
        return s;
    }
    *out = v;
    return AFF_OK;
}

aff_status aff__vocab_of(aff_vocab **out, const aff_tokenizer *tok, int32_t eos, aff_error *err)
{
    const int n = (int)aff__tokenizer_size(tok);
    aff_vocab_token *t = NULL;
    char name[256];
    *out = NULL;
    AFF_TRY(aff__calloc(&t, (uint64_t)n, sizeof *t, "vocabulary", err));
    for (int i = 0; i < n; i++) {
        t[i].s = aff__tokenizer_bytes(tok, (uint32_t)i, &t[i].n);
        t[i].control = aff__tokenizer_is_special(tok, (uint32_t)i);
        if (t[i].control || t[i].n >= sizeof name || memchr(t[i].s, 0, t[i].n)) continue;
        memcpy(name, t[i].s, t[i].n);
        name[t[i].n] = 0;
        t[i].control = aff__tokenizer_find(tok, name) == i;
    }
    const aff_status s = aff__vocab_create(out, t, n, eos, (int32_t)aff__tokenizer_find(tok, spelling), err);
    free(t);
    return s;
}

void aff__vocab_free(aff_vocab *v)
{
    if (!v) return;
    for (int k = 0; k < AFF_TEXT_KINDS; k++) {
        for (int i = 0; v->plain[k] && i <= v->most[k]; i++) free(v->plain[k][i]);
        free(v->plain[k]);
        free(v->rest[k].node);
    }
    free(v->all.node);
    free(v->bytes);
    free(v->offset);
    free(v->control);
    free(v);
}
