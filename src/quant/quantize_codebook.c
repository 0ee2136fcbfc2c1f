/* The codebook of a run: fitted, or read from a container or a raw file. */
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "quant/numbers.h"
#include "quant/quantize_job.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- fit ---- */

typedef struct sampling {
    aff_qjob *j;
    aff_cb_samples plain; /* --compat */
    aff_fit_samples joint;
    float *w, *weight;
} sampling;

static aff_status sample_expert(sampling *s, uint32_t layer, uint32_t expert, aff_error *err)
{
    const aff_qmatrix *m = aff__qplan_expert(&s->j->plan, layer, expert);
    for (int i = 0; i < 3; i++) {
        aff_error why = {0};
        aff_mxfp4 x = aff__q_matrix(s->j, &m[i], i);
        aff_status st = s->j->o->compat ? aff__mxfp4_decode(&x, s->w, &why) : aff__mxfp4_check(&x, &why);
        if (st != AFF_OK) return aff__fail(err, st, "tensor '%s': %s", m[i].scale->name, why.msg);
        if (s->j->o->compat)
            AFF_TRY(aff__cb_samples_add(&s->plain, s->w, x.rows, x.cols, err));
        else
            /* Error feedback spreads what is left over the columns, so that all of them count alike. */
            AFF_TRY(aff__fit_samples_add(
                &s->joint, &x,
                aff__q_fed_back(s->j, layer, expert, i) ? NULL : aff__q_weights(s->j, layer, expert, i, s->weight),
                err));
    }
    return AFF_OK;
}

/* All tensors of the expert lie in one shard. */
static bool in_shard(const aff_qmatrix m[3], int shard)
{
    for (int i = 0; i < 3; i++)
        if (m[i].weight->shard != shard || m[i].scale->shard != shard) return false;
    return true;
}

/* The experts of spec 5.1: eight of layer 0, or eight over all layers. */
static aff_status draw_samples(sampling *s, bool spread, aff_error *err)
{
    const aff_qplan *p = &s->j->plan;
    int shard = aff__qplan_expert(p, 0, 0)[0].weight->shard;
    AFF_TRY(aff__calloc(&s->weight, (uint64_t)(p->inter > p->hidden ? p->inter : p->hidden), sizeof(float), "weights",
                        err));
    if (s->j->o->compat)
        AFF_TRY(aff__calloc(&s->w, (uint64_t)p->inter * (uint64_t)p->hidden, sizeof(float), "expert matrix", err));
    for (uint64_t e = 0; e < 8; e++) {
        uint64_t layer = spread ? e * p->layers / 8 : 0, expert = 13 * e;
        if (spread)
            expert %= (uint64_t)p->experts;
        else if (expert >= (uint64_t)p->experts || !in_shard(aff__qplan_expert(p, 0, expert), shard))
            continue;
        AFF_TRY(sample_expert(s, (uint32_t)layer, (uint32_t)expert, err));
    }
    return AFF_OK;
}

static aff_status fit_codebook(aff_qjob *j, aff_error *err)
{
    uint64_t start = aff__now_ns();
    bool spread = j->o->cb_spread || !j->o->compat;
    sampling s = {.j = j};
    aff_status st = draw_samples(&s, spread, err);
    if (st == AFF_OK) {
        aff__q_say(j, "codebook: fitting on %" PRIu64 " blocks of %s", j->o->compat ? s.plain.blocks : s.joint.n,
                   spread ? "experts of all layers" : "layer 0's experts");
        st = j->o->compat ? aff__cb_fit(&s.plain, j->pool, j->codebook, err)
                          : aff__cb_fit_joint(&s.joint, j->pool, j->codebook, err);
    }
    if (st == AFF_OK) aff__q_say(j, "codebook: fitted in %.1f s", aff__q_seconds_since(start));
    j->codebook_from = spread ? "fit-spread" : "fit-layer0";
    aff__cb_samples_free(&s.plain);
    aff__fit_samples_free(&s.joint);
    free(s.w);
    free(s.weight);
    return st;
}

/* ---- from a container ---- */

/* A draft made for another model would still work as bytes; that deserves a loud line. */
static void compare_checkpoints(const aff_qjob *j, const aff_container *c)
{
    const char *text;
    size_t size;
    char mine[17];
    aff__container_provenance(c, &text, &size);
    json_t *prov = size ? json_loadb(text, size, 0, NULL) : NULL;
    const char *theirs = json_string_value(json_object_get(prov, "checkpoint_xxh3"));
    snprintf(mine, sizeof mine, "%016" PRIx64, j->checkpoint_hash);
    if (theirs && strcmp(theirs, mine) != 0)
        aff__q_warn(j, "warning: %s was made from another checkpoint (%s) than %s (%s)", j->o->codebook, theirs,
                    j->o->src, mine);
    json_decref(prov);
}

static aff_status read_codebook(aff_qjob *j, aff_error *err)
{
    aff_container *c;
    AFF_TRY(aff__container_open(&c, j->o->codebook, err));
    aff_status s = AFF_OK;
    const aff_ctensor *t = aff__container_find(c, "__codebook");
    if (!t || t->m.data_size != AFF_CB_BYTES) {
        s = aff__fail(err, AFF_E_FORMAT, "%s: tensor '__codebook': expected %d bytes, got %" PRIu64, j->o->codebook,
                      AFF_CB_BYTES, t ? t->m.data_size : 0);
    } else {
        memcpy(j->codebook, t->blob + t->m.data_off, AFF_CB_BYTES);
        if (!aff__cb_valid(j->codebook))
            s = aff__fail(err, AFF_E_FORMAT, "%s: tensor '__codebook': a byte has an exponent field outside 1..7",
                          j->o->codebook);
        if (j->o->dspark) compare_checkpoints(j, c);
    }
    aff__container_close(c);
    j->codebook_from = "given";
    if (s == AFF_OK) aff__q_say(j, "codebook: from %s", j->o->codebook);
    return s;
}

/* ---- raw files ---- */

enum { RAW_HEAD = 20, RAW_BYTES = RAW_HEAD + AFF_CB_BYTES * 4 };

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (8 * i));
}

/* `AFFCB001`, u32 4, variants, entries, then float32 values (container 12). */
static void make_raw(const uint8_t cb[AFF_CB_BYTES], uint8_t raw[RAW_BYTES])
{
    memcpy(raw, "AFFCB001", 8);
    put32(raw + 8, 4);
    put32(raw + 12, AFF_CB_VARIANTS);
    put32(raw + 16, AFF_CB_ENTRIES);
    for (size_t i = 0; i < AFF_CB_BYTES; i++) put32(raw + RAW_HEAD + 4 * i, aff__f32_bits(aff__e4m3_to_f32(cb[i])));
}

uint64_t aff__q_codebook_hash(const uint8_t cb[AFF_CB_BYTES])
{
    uint8_t raw[RAW_BYTES];
    uint64_t h = 0x14650FB0739D0383u;
    make_raw(cb, raw);
    for (size_t i = 8; i < RAW_BYTES; i++) h = (h ^ raw[i]) * 0x100000001B3u;
    return h;
}

aff_status aff__q_codebook_write(const aff_qjob *j, const char *path, aff_error *err)
{
    uint8_t raw[RAW_BYTES];
    aff_outfile f;
    make_raw(j->codebook, raw);
    AFF_TRY(aff__out_open(&f, path, err));
    aff_status s = aff__out_write(&f, raw, sizeof raw, 0, err);
    if (s != AFF_OK) {
        aff__out_abort(&f);
        return s;
    }
    AFF_TRY(aff__out_commit(&f, err));
    aff__q_say(j, "%s: codebook %016" PRIx64, path, aff__q_codebook_hash(j->codebook));
    return AFF_OK;
}

static aff_status read_raw(aff_qjob *j, aff_error *err)
{
    const char *path = j->o->codebook_raw;
    uint8_t want[RAW_BYTES];
    char *data;
    size_t n;
    AFF_TRY(aff__read_file(path, 1 << 20, &data, &n, err));
    aff_status s = AFF_OK;
    make_raw(j->codebook, want);
    if (n != RAW_BYTES || memcmp(data, want, RAW_HEAD) != 0)
        s = aff__fail(err, AFF_E_FORMAT, "%s: is no raw codebook of 2 x 1024 x 4 values (%d bytes), got %zu bytes",
                      path, RAW_BYTES, n);
    for (size_t i = 0; i < AFF_CB_BYTES && s == AFF_OK; i++) {
        uint32_t u;
        memcpy(&u, data + RAW_HEAD + 4 * i, 4);
        j->codebook[i] = aff__cb_round(aff__bits_f32(u));
        if (aff__e4m3_to_f32(j->codebook[i]) != aff__bits_f32(u))
            s = aff__fail(err, AFF_E_FORMAT, "%s: value %zu is not an E4M3 number with an exponent field of 1..7", path,
                          i);
    }
    free(data);
    j->codebook_from = "given";
    if (s == AFF_OK) aff__q_say(j, "codebook: from %s, %016" PRIx64, path, aff__q_codebook_hash(j->codebook));
    return s;
}

/* ---- which encoder this is ---- */

enum { PROBE_ROWS = 32, PROBE_COLS = 128, PROBE_BYTES = 4096 };

typedef struct probe {
    uint8_t codes[PROBE_ROWS * PROBE_COLS / 2], scales[PROBE_ROWS * PROBE_COLS / 32], record[3][PROBE_BYTES];
    float weight[PROBE_COLS], moments[PROBE_COLS * (PROBE_COLS + 1) / 2], w[PROBE_ROWS * PROBE_COLS];
} probe;

static void fill_probe(probe *p, aff_mxfp4 *m)
{
    uint64_t rng = 1;
    float *to = p->moments;
    for (size_t i = 0; i < sizeof p->codes; i++) p->codes[i] = (uint8_t)aff__splitmix64(&rng);
    for (size_t i = 0; i < sizeof p->scales; i++) p->scales[i] = (uint8_t)(118 + aff__splitmix64(&rng) % 3);
    for (int c = 0; c < PROBE_COLS; c++) p->weight[c] = (float)(1 + aff__splitmix64(&rng) % 16);
    for (int i = 0; i < PROBE_COLS; i++)
        for (int j = i; j < PROBE_COLS; j++) *to++ = i == j ? p->weight[i] : 1.0f / (float)(1 + j - i);
    *m = (aff_mxfp4){p->codes, p->scales, PROBE_ROWS, PROBE_COLS};
}

/* Every way of encoding that this job's codebook can take part in. */
static aff_status encode_probe(const aff_qjob *j, probe *p, aff_error *err)
{
    aff_matdesc m = {.rows = PROBE_ROWS, .cols = PROBE_COLS, .quant = (uint32_t)j->dtype};
    aff_mxfp4 src;
    aff_encode_space *space = NULL;
    aff_feedback *f = NULL;
    aff_qerror e = {0};
    m.scale_off = m.data_size = PROBE_ROWS * PROBE_COLS * 5 / 16;
    m.scale_size = PROBE_ROWS * PROBE_COLS * 3 / 64;
    m.rscale_off = m.scale_off + m.scale_size;
    fill_probe(p, &src);
    if (j->o->compat) {
        AFF_TRY(aff__mxfp4_decode(&src, p->w, err));
        aff__expert_matrix_encode(j->index, &m, p->w, NULL, p->record[0]);
        aff__expert_matrix_encode(j->index, &m, p->w, p->weight, p->record[1]);
        return AFF_OK;
    }
    aff_status s = aff__encode_space_create(&space, PROBE_COLS, err);
    if (s == AFF_OK) s = aff__feedback_create(&f, PROBE_COLS, err);
    if (s == AFF_OK) s = aff__feedback_factor(f, PROBE_COLS, (const uint8_t *)p->moments, NULL, err);
    for (int i = 0; i < 3 && s == AFF_OK; i++)
        aff__encode_matrix(j->search, space, &m, &src, i == 1 ? p->weight : NULL, i == 2 ? f : NULL, p->record[i], &e);
    aff__encode_space_free(space);
    aff__feedback_free(f);
    return s;
}

static aff_status identify_encoder(aff_qjob *j, aff_error *err)
{
    probe *p;
    AFF_TRY(aff__calloc(&p, 1, sizeof *p, "encoder", err));
    const aff_status s = encode_probe(j, p, err);
    j->encoder_hash = XXH3_64bits(p->record, sizeof p->record);
    free(p);
    return s;
}

aff_status aff__q_codebook(aff_qjob *j, aff_error *err)
{
    if (!j->has_codebook) return AFF_OK;
    AFF_TRY(j->o->codebook_raw ? read_raw(j, err) : j->o->codebook ? read_codebook(j, err) : fit_codebook(j, err));
    if (j->o->codebook_out) return AFF_OK; /* nothing will be searched */
    if (j->o->compat) {
        AFF_TRY(aff__cb_index_create(&j->index, j->codebook, AFF_CB_GRID_COMPAT, j->pool, err));
    } else {
        aff_cb_table t[AFF_CB_VARIANTS];
        aff__cb_unpack(j->codebook, t);
        AFF_TRY(aff__search_create(&j->search, t, AFF_SEARCH_JMIN, j->pool, err));
        if (j->o->encoder) AFF_TRY(j->o->encoder->begin(j->o->encoder->ctx, j->search, err));
    }
    return identify_encoder(j, err);
}

uint64_t aff__q_recipe_hash(const aff_qjob *j)
{
    struct {
        char version[32];
        uint64_t checkpoint, encoder, codebook, imatrix, dtype, compat, draft, layers, experts, inter, hidden;
    } k = {.checkpoint = j->checkpoint_hash,
           .encoder = j->encoder_hash,
           .codebook = j->has_codebook ? XXH3_64bits(j->codebook, AFF_CB_BYTES) : 0,
           .imatrix = j->imatrix ? aff__imatrix_info(j->imatrix)->hash : 0,
           .dtype = (uint64_t)j->dtype,
           .compat = j->o->compat,
           .draft = j->o->dspark,
           .layers = j->plan.layers,
           .experts = (uint64_t)j->plan.experts,
           .inter = (uint64_t)j->plan.inter,
           .hidden = (uint64_t)j->plan.hidden};
    strncpy(k.version, aff_version(), sizeof k.version - 1);
    return XXH3_64bits(&k, sizeof k);
}
