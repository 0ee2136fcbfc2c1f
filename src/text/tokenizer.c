/* Text to ids and back (spec text-and-serving 1.4-1.8). */
#include "text/tokenizer.h"
#include "base/mem.h"
#include "text/pretokenize.h"
#include "text/tokenizer_data.h"
#include "text/utf8.h"
#include <stdlib.h>
#include <string.h>

void aff__ids_free(aff_ids *ids)
{
    free(ids->id);
    *ids = (aff_ids){0};
}

aff_status aff__ids_push(aff_ids *ids, uint32_t id, aff_error *err)
{
    if (ids->n == ids->cap) {
        size_t cap = ids->cap ? ids->cap * 2 : 64;
        AFF_TRY(aff__realloc(&ids->id, cap, sizeof *ids->id, "token ids", err));
        ids->cap = cap;
    }
    ids->id[ids->n++] = id;
    return AFF_OK;
}

const char *aff__tokenizer_bytes(const aff_tokenizer *t, uint32_t id, size_t *n)
{
    *n = id < t->n ? t->offset[id + 1] - t->offset[id] : 0;
    return id < t->n ? t->bytes + t->offset[id] : "";
}

int64_t aff__tokenizer_size(const aff_tokenizer *t)
{
    return t->n;
}

bool aff__tokenizer_is_special(const aff_tokenizer *t, uint32_t id)
{
    return id < t->n && t->special[id];
}

/* The bound of the added tokens in [lo, hi), all of the same first `depth` bytes, by their byte at `depth`: the first
 * that is not below c. A token that ends there is below all. */
static uint32_t lower_bound(const aff_tokenizer *t, uint32_t lo, uint32_t hi, size_t depth, unsigned c)
{
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        size_t n;
        const char *s = aff__tokenizer_bytes(t, t->added[mid].id, &n);
        if (n <= depth || (uint8_t)s[depth] < c)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The longest added token of one pass that s[0..n) starts with: its length and *id, or 0. */
static size_t longest_added(const aff_tokenizer *t, bool normalized, const uint8_t *s, size_t n, uint32_t *id)
{
    size_t best = 0, len;
    uint32_t lo = t->added_first[s[0]], hi = t->added_first[s[0] + 1];
    for (size_t depth = 1; lo < hi; depth++) {
        const aff_added *a = &t->added[lo];
        aff__tokenizer_bytes(t, a->id, &len);
        if (len == depth && a->normalized == normalized) {
            best = depth;
            *id = a->id;
        }
        if (depth == n) break;
        lo = lower_bound(t, lo, hi, depth, s[depth]);
        hi = lower_bound(t, lo, hi, depth, s[depth] + 1u);
    }
    return best;
}

int64_t aff__tokenizer_find(const aff_tokenizer *t, const char *added_token)
{
    size_t n = strlen(added_token);
    uint32_t id = 0;
    for (int normalized = 0; n > 0 && normalized < 2; normalized++)
        if (longest_added(t, normalized, (const uint8_t *)added_token, n, &id) == n) return id;
    return -1;
}

/* One call's progress through a text: everything before `done` has its ids in `out`. */
typedef struct encoder {
    const aff_tokenizer *t;
    const uint8_t *s;
    size_t done;
    aff_bpe bpe;
    aff_ids *out;
    aff_error *err;
} encoder;

static aff_status encode_plain(encoder *e, size_t end)
{
    while (e->done < end) {
        const uint8_t *s = e->s + e->done;
        size_t n = aff__piece_end(s, end - e->done);
        AFF_TRY(aff__bpe_encode(&e->bpe, &e->t->merges, e->t->byte_id, s, n, e->out, e->err));
        e->done += n;
    }
    return AFF_OK;
}

/* Finds the added tokens of one pass in [i, end). The first pass hands the text between its finds to the second. */
static aff_status encode_added(encoder *e, bool normalized, size_t i, size_t end)
{
    size_t gap = i;
    while (i < end) {
        uint32_t id = 0;
        size_t n = longest_added(e->t, normalized, e->s + i, end - i, &id);
        if (n == 0) {
            i++;
            continue;
        }
        if (!normalized) AFF_TRY(encode_added(e, true, gap, i));
        AFF_TRY(encode_plain(e, i));
        AFF_TRY(aff__ids_push(e->out, id, e->err));
        gap = i += n;
        e->done = i;
    }
    return normalized ? AFF_OK : encode_added(e, true, gap, end);
}

/* Neighbouring segments of one kind are one stretch, so that a control token may be put together from template parts.
 */
static aff_status encode_stretches(encoder *e, const aff_segment *seg, const size_t *len, size_t n_seg)
{
    size_t at = 0;
    for (size_t i = 0; i < n_seg;) {
        size_t begin = at;
        bool added = seg[i].added;
        if (seg[i].ids) {
            AFF_TRY(encode_plain(e, at));
            for (size_t k = 0; k < seg[i].n_ids; k++) AFF_TRY(aff__ids_push(e->out, seg[i].ids[k], e->err));
            e->done = at += len[i++];
            continue;
        }
        for (; i < n_seg && !seg[i].ids && (seg[i].added == added || len[i] == 0); i++) at += len[i];
        if (added) AFF_TRY(encode_added(e, false, begin, at));
    }
    return encode_plain(e, at);
}

/* Bytes of s[0..n) with each invalid subpart as U+FFFD, written to out unless it is NULL. */
static size_t repair(const char *text, size_t n, char *out)
{
    const uint8_t *s = (const uint8_t *)text;
    size_t w = 0;
    for (size_t i = 0, len; i < n; i += len) {
        bool ok = (len = aff__utf8_valid_prefix(s + i, n - i)) > 0;
        if (!ok) (void)aff__utf8_first(s + i, n - i, &len);
        size_t put = ok ? len : 3;
        if (out) memcpy(out + w, ok ? text + i : AFF_UTF8_REPLACEMENT, put);
        w += put;
    }
    return w;
}

/* The repaired segments as one text; len[i] receives their lengths. Segments are repaired one by one: a character cut
 * in two by a border is two invalid parts. */
static aff_status join(const aff_segment *seg, size_t n_seg, size_t *len, char **text, aff_error *err)
{
    uint64_t total = 0;
    for (size_t i = 0; i < n_seg; i++) {
        if (seg[i].n > SIZE_MAX / 4) return aff__fail(err, AFF_E_LIMIT, "text: a segment of %zu bytes", seg[i].n);
        len[i] = repair(seg[i].text, seg[i].n, NULL);
        if (!aff__add_ok(total, len[i], &total)) return aff__fail(err, AFF_E_LIMIT, "text: longer than 2^64 bytes");
    }
    char *p = NULL;
    AFF_TRY(aff__realloc(&p, total, 1, "text to tokenize", err));
    *text = p;
    for (size_t i = 0; i < n_seg; i++) p += repair(seg[i].text, seg[i].n, p);
    return AFF_OK;
}

static aff_status run(encoder *e, const aff_segment *seg, const size_t *len, size_t n_seg)
{
    size_t before = e->out->n;
    aff_status s = encode_stretches(e, seg, len, n_seg);
    if (s != AFF_OK) e->out->n = before;
    aff__bpe_free(&e->bpe);
    return s;
}

aff_status aff__tokenizer_encode(const aff_tokenizer *t, const char *text, size_t n, bool added, aff_ids *out,
                                 aff_error *err)
{
    aff_segment one = {text, n, added};
    if (aff__utf8_valid_prefix((const uint8_t *)text, n) < n)
        return aff__tokenizer_encode_segments(t, &one, 1, out, err);
    encoder e = {.t = t, .s = (const uint8_t *)text, .out = out, .err = err};
    return run(&e, &one, &n, 1);
}

aff_status aff__tokenizer_encode_segments(const aff_tokenizer *t, const aff_segment *seg, size_t n_seg, aff_ids *out,
                                          aff_error *err)
{
    char *text = NULL;
    size_t *len = NULL;
    AFF_TRY(aff__realloc(&len, n_seg, sizeof *len, "segments", err));
    aff_status s = join(seg, n_seg, len, &text, err);
    if (s == AFF_OK) {
        encoder e = {.t = t, .s = (const uint8_t *)text, .out = out, .err = err};
        s = run(&e, seg, len, n_seg);
    }
    free(text);
    free(len);
    return s;
}

void aff__tokenizer_free(aff_tokenizer *t)
{
    if (!t) return;
    free(t->bytes);
    free(t->offset);
    free(t->special);
    free(t->added);
    aff__merges_free(&t->merges);
    free(t);
}
