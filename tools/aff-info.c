/* aff-info - prints what is in a container and says whether it is sound. */
#define _GNU_SOURCE
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/rng.h"
#include "format/container.h"
#include "format/container_disk.h"
#include "format/json.h"
#include "quant/compare.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

static struct {
    bool experts, json, verify, hashes;
    const char *against, *draft;
    int64_t bench, topk;
} opt = {.topk = 6};

static const aff_option options[] = {
    {"experts", 'e', AFF_OPT_FLAG, &opt.experts, NULL,
     "also print where the nine planes of an expert record of layer 0 lie", "Output"},
    {"json", 'j', AFF_OPT_FLAG, &opt.json, NULL, "print one JSON object instead of text"},
    {"verify", 'v', AFF_OPT_FLAG, &opt.verify, NULL, "read the whole file and check every hash in it", "Checks"},
    {"against", 0, AFF_OPT_STR, &opt.against, "DIR",
     "compare config.json and every FP8 and FP4 tensor with this checkpoint, byte for byte"},
    {"draft", 0, AFF_OPT_STR, &opt.draft, "FILE", "check that this companion belongs to the container"},
    {"hashes", 0, AFF_OPT_FLAG, &opt.hashes, NULL,
     "print layer, expert and hash of every expert record, and name those that are the same"},
    {"bench", 0, AFF_OPT_INT, &opt.bench, "N",
     "read random experts of every layer, as N tokens would, and print how fast they come", "Speed", 1, 1000000},
    {"topk", 0, AFF_OPT_INT, &opt.topk, "K", "with --bench: experts of a layer a token reads [6]", NULL, 1, 65536},
    {0}};

static const aff_usage usage = {
    "aff-info",
    "FILE",
    "Prints the contents of a container (.aff) and checks it. Exit code 0: sound, 1: it cannot be opened or is "
    "damaged, 2: wrong usage.",
    options,
    1,
    1};

/* ---- figures ---- */

/* "1.25 GiB" in one of a few rotating buffers. */
static const char *human(uint64_t bytes)
{
    static char buf[4][32];
    static int k;
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double v = (double)bytes;
    int u = 0;
    char *b = buf[k = (k + 1) % 4];
    for (; v >= 1024 && u < 6; u++) v /= 1024;
    snprintf(b, sizeof buf[0], u ? "%.2f %s" : "%.0f %s", v, units[u]);
    return b;
}

static const char *dtype_name(uint32_t code)
{
    return aff__dtype_info(code)->name;
}
static uint64_t payload(const aff_matdesc *m)
{
    return m->data_size + m->scale_size + m->rscale_size;
}
static double weights_of(const aff_clayer *y)
{
    return 3.0 * (double)y->gate.rows * (double)y->gate.cols;
}

/* Bits per expert weight: as the records stand in the file, and without row scales and padding. */
static double bits_in_file(const aff_clayer *y)
{
    return 8.0 * (double)y->stride / weights_of(y);
}
static double bits_of_codes(const aff_clayer *y)
{
    const aff_matdesc *m[3] = {&y->gate, &y->up, &y->down};
    double bytes = 0;
    for (int i = 0; i < 3; i++) bytes += (double)(m[i]->data_size + m[i]->scale_size);
    return 8.0 * bytes / weights_of(y);
}

typedef struct totals {
    uint64_t experts, dense_bytes, dense_count[64], dense_size[64]; /* the last two by dtype code */
    double weights;                                                 /* dense and expert weights, codebook not counted */
} totals;

static totals count(const aff_container *c)
{
    totals t = {0};
    for (uint64_t i = 0; i < aff__container_tensors(c); i++) {
        const aff_ctensor *x = aff__container_tensor(c, i);
        t.dense_bytes += payload(&x->m);
        t.dense_count[x->m.quant & 63]++;
        t.dense_size[x->m.quant & 63] += payload(&x->m);
        if (strcmp(x->name, "__codebook") != 0) t.weights += (double)x->m.rows * (double)x->m.cols;
    }
    for (uint32_t l = 0; l < aff__container_layers(c); l++) {
        const aff_clayer *y = aff__container_layer(c, l);
        t.experts += y->n_experts;
        t.weights += y->n_experts * weights_of(y);
    }
    return t;
}

typedef struct book {
    bool present, pairs;
    unsigned entries, distinct, values, min_exp, max_exp; /* values: distinct E4M3 bytes */
    uint64_t hash;
} book;

static int by_u32(const void *a, const void *b)
{
    uint32_t x, y;
    memcpy(&x, a, 4);
    memcpy(&y, b, 4);
    return x < y ? -1 : x > y;
}

static book summarise_codebook(const aff_container *c)
{
    const aff_ctensor *t = aff__container_find(c, "__codebook");
    uint32_t quant = aff__container_layer(c, 0)->gate.quant, entry[2048];
    book b = {.min_exp = 15};
    if (!t || !aff__dtype_has_codebook(quant) || t->m.data_size > sizeof entry) return b;
    bool seen[256] = {false};
    const uint8_t *p = t->blob + t->m.data_off;
    b.present = true;
    b.pairs = quant == AFF_Q2P875;
    b.hash = XXH3_64bits(p, (size_t)t->m.data_size);
    b.entries = (unsigned)(t->m.data_size / 4);
    memcpy(entry, p, (size_t)t->m.data_size);
    qsort(entry, b.entries, 4, by_u32);
    for (unsigned i = 0; i < b.entries; i++) b.distinct += i == 0 || entry[i] != entry[i - 1];
    for (uint64_t i = 0; i < t->m.data_size && !b.pairs; i++) {
        unsigned e = p[i] >> 3 & 15;
        b.values += !seen[p[i]];
        seen[p[i]] = true;
        if (e < b.min_exp) b.min_exp = e;
        if (e > b.max_exp) b.max_exp = e;
    }
    return b;
}

static void profile_of_layer(const float *p, uint32_t n, double *max, double *mean)
{
    *max = n ? (double)p[0] : 0;
    *mean = 0;
    for (uint32_t e = 0; e < n; e++) {
        if ((double)p[e] > *max) *max = (double)p[e];
        *mean += (double)p[e] / n;
    }
}

/* The table's own hash: one number that stands for the content of the whole file. */
static uint64_t identity(const aff_container *c)
{
    const aff_cheader *h = aff__container_header(c);
    return aff__get64((const uint8_t *)aff__container_map(c) + h->hash_off + h->hash_size - 8);
}

/* ---- text ---- */

/* Text from the file, with nothing in it that a terminal would obey. */
static void print_plain(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        putchar((unsigned char)p[i] >= 0x20 && p[i] != 0x7F ? p[i] : p[i] == '\n' ? '\n' : ' ');
    if (n && p[n - 1] != '\n') putchar('\n');
}

static void print_head(const aff_container *c, const totals *t)
{
    const aff_cheader *h = aff__container_header(c);
    const char *text, *prov;
    size_t n, np;
    aff__container_meta(c, &text, &n);
    aff__container_provenance(c, &prov, &np);
    printf("file         %s\nversion      %" PRIu32 "\nsize         %s (%" PRIu64 " bytes)\n", aff__container_path(c),
           h->version, human(h->file_size), h->file_size);
    printf("flags        %s\n", h->flags & AFF_C_FLAG_PROFILE ? "profile" : "none");
    if (aff__container_has_hashes(c))
        printf("hashes       XXH3-64 of %" PRIu64 " tensors and %" PRIu64 " experts, identity %016" PRIx64 "\n",
               h->tensor_count, t->experts, identity(c));
    else
        printf("hashes       none (written by an earlier tool or in compatible form)\n");
    printf("metadata     %zu bytes\n", n);
    if (n < 2048) print_plain(text, n);
    if (np) {
        printf("provenance   %zu bytes\n", np);
        print_plain(prov, np < 65536 ? np : 65536);
    } else {
        printf("provenance   none\n");
    }
}

static void print_tensors(const aff_container *c, const totals *t)
{
    printf("\n%-40s %10s %10s  %-12s %14s %16s\n", "tensor", "rows", "cols", "dtype", "bytes", "offset");
    const uint8_t *base = aff__container_map(c);
    for (uint64_t i = 0; i < aff__container_tensors(c); i++) {
        const aff_ctensor *x = aff__container_tensor(c, i);
        printf("%-40s %10" PRIu64 " %10" PRIu64 "  %-12s %14" PRIu64 " %16" PRIu64 "\n", x->name, x->m.rows, x->m.cols,
               dtype_name(x->m.quant), payload(&x->m), (uint64_t)(x->blob - base) + x->m.data_off);
    }
    printf("%" PRIu64 " tensors, %s:", aff__container_tensors(c), human(t->dense_bytes));
    for (uint32_t d = 0; d < 64; d++)
        if (t->dense_count[d])
            printf(" %s %" PRIu64 " (%s)", dtype_name(d), t->dense_count[d], human(t->dense_size[d]));
    printf("\n");
}

static void print_planes(const aff_clayer *y)
{
    const aff_matdesc *m[3] = {&y->gate, &y->up, &y->down};
    static const char *const names[3] = {"gate", "up", "down"}, *const kinds[3] = {"codes", "scales", "row scales"};
    printf("\nplanes of a record of layer 0\n");
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < 3; i++) {
            uint64_t off = k == 0 ? m[i]->data_off : k == 1 ? m[i]->scale_off : m[i]->rscale_off;
            uint64_t size = k == 0 ? m[i]->data_size : k == 1 ? m[i]->scale_size : m[i]->rscale_size;
            printf("  %-4s %-10s at %12" PRIu64 "  %12" PRIu64 " bytes\n", names[i], kinds[k], off, size);
        }
}

static void print_experts(const aff_container *c, const totals *t)
{
    const aff_cheader *h = aff__container_header(c);
    const aff_clayer *first = aff__container_layer(c, 0);
    printf("\nexpert pool  %s at %" PRIu64 " (%s)\n", human(h->pool_size), h->pool_off,
           h->pool_off % AFF_C_POOL_ALIGN ? "UNALIGNED!" : "2MiB");
    printf("%5s %8s %12s %12s %-12s %-12s %12s %12s\n", "layer", "experts", "inter", "hidden", "gate/up", "down",
           "stride", "total");
    for (uint32_t l = 0; l < aff__container_layers(c); l++) {
        const aff_clayer *y = aff__container_layer(c, l);
        printf("%5" PRIu32 " %8" PRIu32 " %12" PRIu64 " %12" PRIu64 " %-12s %-12s %12" PRIu64 " %12s\n", l,
               y->n_experts, y->gate.rows, y->gate.cols, dtype_name(y->gate.quant), dtype_name(y->down.quant),
               y->stride, human(y->n_experts * y->stride));
    }
    printf("%" PRIu64 " experts in %" PRIu32 " layers, %.4f bits per weight (%.4f without row scales and padding)\n",
           t->experts, aff__container_layers(c), bits_in_file(first), bits_of_codes(first));
    printf("whole file: %.4g weights, %.4f bits per weight\n", t->weights, 8.0 * (double)h->file_size / t->weights);
    if (opt.experts) print_planes(first);
}

static void print_codebook(const aff_container *c)
{
    book b = summarise_codebook(c);
    if (!b.present)
        printf("\ncodebook     none (experts of type %s need none)\n",
               dtype_name(aff__container_layer(c, 0)->gate.quant));
    else if (b.pairs)
        printf("\ncodebook     %u values, %u distinct, XXH3 %016" PRIx64 "\n", b.entries, b.distinct, b.hash);
    else
        printf("\ncodebook     %u entries, %u distinct, of %u E4M3 values, exponent fields %u to %u, XXH3 %016" PRIx64
               "\n",
               b.entries, b.distinct, b.values, b.min_exp, b.max_exp, b.hash);
}

static void print_profile(const aff_container *c)
{
    const float *p = aff__container_profile(c);
    if (!p) return;
    printf("\nprofile\n");
    for (uint32_t l = 0; l < aff__container_layers(c) && l < 4; l++) {
        double max, mean;
        uint32_t n = aff__container_layer(c, l)->n_experts;
        profile_of_layer(p, n, &max, &mean);
        p += n;
        printf("  layer %" PRIu32 ": max %.6g, mean %.6g", l, max, mean);
        if (mean > 0) printf(", ratio %.2f", max / mean);
        printf("\n");
    }
}

/* ---- JSON ---- */

/* JSON text from the file as a value, as a string when it does not parse, null when it is not even UTF-8. */
static json_t *embedded(const char *text, size_t n)
{
    json_t *v;
    if (n == 0) return json_null();
    if (aff__json_parse(&v, text, n, "embedded", false, NULL) == AFF_OK) return v;
    v = json_stringn(text, n);
    return v ? v : json_null();
}

static json_t *hex(uint64_t v)
{
    char b[17];
    snprintf(b, sizeof b, "%016" PRIx64, v);
    return json_string(b);
}

static json_t *j64(uint64_t v)
{
    return json_integer((json_int_t)v);
}

static json_t *matrix_json(const aff_matdesc *m)
{
    return json_pack("{so so ss so so so so so so}", "rows", j64(m->rows), "cols", j64(m->cols), "dtype",
                     dtype_name(m->quant), "data_offset", j64(m->data_off), "data_bytes", j64(m->data_size),
                     "scale_offset", j64(m->scale_off), "scale_bytes", j64(m->scale_size), "row_scale_offset",
                     j64(m->rscale_off), "row_scale_bytes", j64(m->rscale_size));
}

static json_t *tensors_json(const aff_container *c)
{
    json_t *all = json_array();
    const uint8_t *base = aff__container_map(c);
    for (uint64_t i = 0; i < aff__container_tensors(c); i++) {
        const aff_ctensor *x = aff__container_tensor(c, i);
        json_t *t = matrix_json(&x->m);
        json_object_set_new(t, "name", json_string(x->name));
        json_object_set_new(t, "offset", j64((uint64_t)(x->blob - base)));
        json_array_append_new(all, t);
    }
    return all;
}

static json_t *layers_json(const aff_container *c)
{
    json_t *all = json_array();
    const float *p = aff__container_profile(c);
    for (uint32_t l = 0; l < aff__container_layers(c); l++) {
        const aff_clayer *y = aff__container_layer(c, l);
        json_t *t =
            json_pack("{so so so so}", "experts", j64(y->n_experts), "stride", j64(y->stride), "offset",
                      j64(aff__container_expert_offset(c, l, 0)), "bits_per_weight", json_real(bits_in_file(y)));
        if (opt.experts && l == 0) {
            json_object_set_new(t, "gate", matrix_json(&y->gate));
            json_object_set_new(t, "up", matrix_json(&y->up));
            json_object_set_new(t, "down", matrix_json(&y->down));
        } else {
            json_object_set_new(t, "inter", j64(y->gate.rows));
            json_object_set_new(t, "hidden", j64(y->gate.cols));
            json_object_set_new(t, "dtype", json_string(dtype_name(y->gate.quant)));
        }
        if (p) {
            double max, mean;
            profile_of_layer(p, y->n_experts, &max, &mean);
            json_object_set_new(t, "profile_max", json_real(max));
            json_object_set_new(t, "profile_mean", json_real(mean));
            p += y->n_experts;
        }
        json_array_append_new(all, t);
    }
    return all;
}

static json_t *codebook_json(const aff_container *c)
{
    book b = summarise_codebook(c);
    if (!b.present) return json_null();
    json_t *j = json_pack("{so so so}", "entries", j64(b.entries), "distinct", j64(b.distinct), "xxh3", hex(b.hash));
    if (!b.pairs) {
        json_object_set_new(j, "values", j64(b.values));
        json_object_set_new(j, "exponent_min", j64(b.min_exp));
        json_object_set_new(j, "exponent_max", j64(b.max_exp));
    }
    return j;
}

static json_t *container_json(const aff_container *c)
{
    const aff_cheader *h = aff__container_header(c);
    const char *meta, *prov;
    size_t nm, np;
    totals t = count(c);
    aff__container_meta(c, &meta, &nm);
    aff__container_provenance(c, &prov, &np);
    json_t *j = json_pack("{so so sb so}", "version", j64(h->version), "size", j64(h->file_size), "profile",
                          h->flags & AFF_C_FLAG_PROFILE, "identity",
                          aff__container_has_hashes(c) ? hex(identity(c)) : json_null());
    json_object_set_new(j, "metadata_bytes", j64(nm));
    json_object_set_new(j, "metadata", embedded(meta, nm));
    json_object_set_new(j, "provenance", embedded(prov, np));
    json_object_set_new(j, "tensors", tensors_json(c));
    json_object_set_new(j, "pool_offset", j64(h->pool_off));
    json_object_set_new(j, "pool_bytes", j64(h->pool_size));
    json_object_set_new(j, "layers", layers_json(c));
    json_object_set_new(j, "experts", j64(t.experts));
    json_object_set_new(j, "expert_bits_per_weight", json_real(bits_in_file(aff__container_layer(c, 0))));
    json_object_set_new(j, "bits_per_weight", json_real(8.0 * (double)h->file_size / t.weights));
    json_object_set_new(j, "codebook", codebook_json(c));
    return j;
}

/* ---- further checks ---- */

/* The hash of the earlier tools, FNV-1a with their basis (so that lists of them can be compared). */
static uint64_t record_hash(const uint8_t *p, uint64_t n)
{
    uint64_t h = 0x14650FB0739D0383u;
    for (uint64_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001B3u;
    return h;
}

typedef struct expert_hash {
    uint64_t hash;
    uint32_t layer, expert;
} expert_hash;

static int by_hash(const void *a, const void *b)
{
    const expert_hash *x = a, *y = b;
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->expert < y->expert ? -1 : x->expert > y->expert;
}

/* Prints every hash; two experts of the same bytes are an error that names them. */
static aff_status hash_experts(const aff_container *c, aff_error *err)
{
    uint64_t n = count(c).experts, k = 0;
    expert_hash *all;
    aff_status s = AFF_OK;
    AFF_TRY(aff__calloc(&all, n, sizeof *all, "hashes", err));
    for (uint32_t l = 0; l < aff__container_layers(c); l++) {
        const aff_clayer *y = aff__container_layer(c, l);
        for (uint32_t e = 0; e < y->n_experts; e++, k++) {
            all[k] = (expert_hash){record_hash(aff__container_expert(c, l, e), y->stride), l, e};
            if (!opt.json) printf("%" PRIu32 " %" PRIu32 " %016" PRIx64 "\n", l, e, all[k].hash);
        }
    }
    qsort(all, n, sizeof *all, by_hash);
    for (uint64_t i = 1; i < n && s == AFF_OK; i++)
        if (all[i].hash == all[i - 1].hash)
            s = aff__fail(err, AFF_E_FORMAT,
                          "%s: layer %" PRIu32 " expert %" PRIu32 " and layer %" PRIu32 " expert %" PRIu32
                          " are the same record",
                          aff__container_path(c), all[i - 1].layer, all[i - 1].expert, all[i].layer, all[i].expert);
    free(all);
    return s;
}

/* A companion shares the model's codebook and checkpoint. */
static aff_status check_draft(const aff_container *c, aff_error *err)
{
    aff_container *d;
    AFF_TRY(aff__container_open(&d, opt.draft, err));
    const aff_ctensor *a = aff__container_find(c, "__codebook"), *b = aff__container_find(d, "__codebook");
    static const char key[] = "checkpoint_xxh3";
    const char *text[2];
    size_t n[2];
    aff__container_provenance(c, &text[0], &n[0]);
    aff__container_provenance(d, &text[1], &n[1]);
    json_t *prov[2] = {embedded(text[0], n[0]), embedded(text[1], n[1])};
    const char *from[2] = {json_string_value(json_object_get(prov[0], key)),
                           json_string_value(json_object_get(prov[1], key))};
    aff_status s = AFF_OK;
    if (!aff__container_find(d, "mtp_main_proj"))
        s = aff__fail(err, AFF_E_FORMAT, "%s: is no draft: tensor 'mtp_main_proj' is missing", opt.draft);
    else if (!a != !b ||
             (a && (a->m.data_size != b->m.data_size || memcmp(a->blob, b->blob, (size_t)a->m.data_size) != 0)))
        s = aff__fail(err, AFF_E_FORMAT, "%s: its codebook is not that of %s: quantise it with --codebook %s",
                      opt.draft, aff__container_path(c), aff__container_path(c));
    else if (from[0] && from[1] && strcmp(from[0], from[1]) != 0)
        s = aff__fail(err, AFF_E_FORMAT, "%s: made from checkpoint %s, but %s from %s", opt.draft, from[1],
                      aff__container_path(c), from[0]);
    json_decref(prov[0]);
    json_decref(prov[1]);
    aff__container_close(d);
    return s;
}

/* ---- the program ---- */

static void show_progress(void *ctx, uint64_t done, uint64_t total)
{
    static int last = -1;
    int percent = (int)(100.0 * (double)done / (double)total);
    if (percent != last) fprintf(stderr, "\rverifying %3d %%", last = percent);
}

static aff_status check(const aff_container *c, aff_error *err)
{
    bool tty = isatty(STDERR_FILENO);
    aff_status s = aff__container_verify(c, tty ? show_progress : NULL, NULL, err);
    if (tty) fprintf(stderr, "\r               \r");
    return s;
}

static void print_text(const aff_container *c)
{
    totals t = count(c);
    print_head(c, &t);
    print_tensors(c, &t);
    print_experts(c, &t);
    print_codebook(c);
    print_profile(c);
}

/* Prints the verdict (and all of the JSON form); returns the exit code. */
static int conclude(const char *path, const aff_container *c, const char *sound, aff_status s, const aff_error *err)
{
    if (opt.json) {
        json_t *j = c ? container_json(c) : json_object();
        json_t *name = json_string(path), *msg = json_string(err->msg);
        json_object_set_new(j, "file", name ? name : json_null());
        json_object_set_new(j, "ok", json_boolean(s == AFF_OK));
        json_object_set_new(j, "verified", json_boolean(s == AFF_OK && opt.verify));
        if (s != AFF_OK) json_object_set_new(j, "error", msg ? msg : json_null());
        json_dumpf(j, stdout, JSON_INDENT(1));
        printf("\n");
        json_decref(j);
        if (s == AFF_OK) json_decref(msg);
    } else if (s == AFF_OK) {
        printf("\nverdict      ok: %s\n", sound);
    } else if (c && s == AFF_E_UNSUPPORTED) {
        printf("\nverdict      cannot be verified: %s\n", err->msg);
    } else if (c) {
        printf("\nverdict      BAD: %s\n", err->msg);
    }
    if (s != AFF_OK) fprintf(stderr, "error: %s\n", err->msg);
    return s == AFF_OK ? 0 : 1;
}

static aff_status open_it(aff_container **c, const char *path, aff_error *err)
{
    *c = NULL;
    if (aff__is_dir(path))
        return aff__fail(err, AFF_E_FORMAT,
                         "%s: a folder, not a container: aff-quantize makes a container of a checkpoint folder", path);
    return aff__container_open(c, path, err);
}

/* ---- speed of the mapping ---- */

/* One token's experts, a byte of every cache line. */
static uint64_t touch(const aff_container *c, uint64_t *rng, uint64_t *bytes)
{
    uint64_t sum = 0;
    for (uint32_t l = 0; l < aff__container_layers(c); l++) {
        const aff_clayer *y = aff__container_layer(c, l);
        for (int64_t k = 0; k < opt.topk; k++) {
            const uint8_t *p = aff__container_expert(c, l, (uint32_t)(aff__splitmix64(rng) % y->n_experts));
            for (uint64_t i = 0; i < y->stride; i += 64) sum += p[i];
            *bytes += y->stride;
        }
    }
    return sum;
}

static void bench(const aff_container *c)
{
    uint64_t rng = 1, bytes = 0;
    volatile uint64_t sum = touch(c, &rng, &bytes); /* the first is for warming up; kept, so that the reads happen */
    bytes = 0;
    const uint64_t start = aff__now_ns();
    for (int64_t i = 0; i < opt.bench; i++) sum = sum + touch(c, &rng, &bytes);
    const double seconds = (double)(aff__now_ns() - start) * 1e-9;
    printf("\nbench        %" PRId64 " tokens of %" PRId64 " experts a layer: %s, %.2f GB/s, %.3f ms a token\n",
           opt.bench, opt.topk, human(bytes), seconds > 0 ? (double)bytes * 1e-9 / seconds : 0,
           seconds * 1e3 / (double)opt.bench);
}

int main(int argc, char **argv)
{
    int first, rc = aff__options_main(&usage, argc, argv, &first);
    if (rc >= 0) return rc;
    if (opt.bench && opt.json) {
        fprintf(stderr, "aff-info: --bench prints text: leave out --json\n");
        return 2;
    }
    aff_error err = {0};
    aff_container *c;
    const char *path = argv[first], *sound = "structure checked; --verify would read and check the contents too";
    aff_status s = open_it(&c, path, &err);
    if (s == AFF_OK && !opt.json) print_text(c);
    if (s == AFF_OK && !aff__container_has_hashes(c))
        sound = "structure checked; this file has no hashes to check its contents by";
    if (s == AFF_OK && opt.verify) {
        s = check(c, &err);
        sound = "structure and every hash checked";
    }
    if (s == AFF_OK && opt.hashes) s = hash_experts(c, &err);
    if (s == AFF_OK && opt.bench) bench(c);
    if (s == AFF_OK && opt.draft) s = check_draft(c, &err);
    if (s == AFF_OK && opt.against) s = aff__container_compare(c, opt.against, &err);
    rc = conclude(path, c, sound, s, &err);
    aff__container_close(c);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "error: cannot write the output\n");
        return 1;
    }
    return rc;
}
