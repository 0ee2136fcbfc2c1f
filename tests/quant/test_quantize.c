/* quantize: whole checkpoints to containers; what is written, that it repeats, and what is refused. The checkpoints are
 * the random ones of the golden data, re-written with a change here and there. */
#include "support/test.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/container.h"
#include "format/gguf.h"
#include "format/safetensors.h"
#include "quant/numbers.h"
#include "quant/quant_naive.h"
#include "quant/expert.h"
#include "quant/imatrix.h"
#include "quant/quantize.h"
#include "ui/progress.h"
#include <glob.h>
#include <jansson.h>
#include <sys/stat.h>
#include <unistd.h>

#define DSPARK AFF_TESTS_DIR "/golden/v4-sim/ckpt-dspark"
#define MTP1   AFF_TESTS_DIR "/golden/v4-sim/ckpt-mtp1"

static char tmp[64]; /* this program's folder */

static const char *at(const char *name)
{
    static char path[256][256];
    static int turn;
    turn = (turn + 1) % 256;
    snprintf(path[turn], sizeof path[turn], "%s/%s", tmp, name);
    return path[turn];
}

static int set_up(void **state)
{
    (void)state;
    snprintf(tmp, sizeof tmp, "/tmp/aff-quantize-XXXXXX");
    return mkdtemp(tmp) && mkdir(at("ck"), 0755) == 0 && mkdir(at("out"), 0755) == 0 ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    static const char *const patterns[] = {"ck/*", "out/*", "blobs/*", "mo-blobs/*", "*", ""};
    for (int i = 0; i < 6; i++) {
        glob_t g;
        if (glob(at(patterns[i]), 0, NULL, &g) != 0) continue;
        for (size_t k = 0; k < g.gl_pathc; k++) remove(g.gl_pathv[k]);
        globfree(&g);
    }
    return 0;
}

/* ---- checkpoints with one thing changed ---- */

typedef struct tensor {
    char name[128];
    const char *dtype;
    int ndim;
    uint64_t shape[8], size;
    uint8_t *data;
} tensor;

/* What to change: of tensor `name`, or a replacement in config.json. Zero fields change nothing. */
typedef struct edit {
    const char *name;
    bool drop;
    bool empty; /* no elements: shape [0] */
    bool zero;  /* `name` is a prefix: all weights under it become 0 */
    const char *copy_as; /* add a second tensor of this name */
    const char *dtype;
    uint64_t rows, cols; /* new shape; the data are cut to it */
    int64_t poke_at;     /* byte to overwrite, counted from 1 */
    uint8_t poke[8];
    int poke_n;
    const char *config_from, *config_to;
} edit;

static uint64_t elem_size(const char *dtype)
{
    if (strcmp(dtype, "I64") == 0) return 8;
    if (strcmp(dtype, "F32") == 0 || strcmp(dtype, "I32") == 0) return 4;
    return strcmp(dtype, "BF16") == 0 || strcmp(dtype, "F16") == 0 ? 2 : 1;
}

static void put_tensor(FILE *data, json_t *header, const tensor *t)
{
    json_t *shape = json_array();
    uint64_t from = (uint64_t)ftell(data);
    for (int i = 0; i < t->ndim; i++) json_array_append_new(shape, json_integer((json_int_t)t->shape[i]));
    assert_int_equal(fwrite(t->data, 1, t->size, data), t->size);
    json_object_set_new(header, t->name,
                        json_pack("{s:s, s:o, s:[I,I]}", "dtype", t->dtype, "shape", shape, "data_offsets",
                                  (json_int_t)from, (json_int_t)(from + t->size)));
}

static void apply(const edit *e, tensor *t)
{
    if (e->dtype) t->dtype = e->dtype;
    if (e->cols) {
        t->ndim = e->rows ? 2 : 1;
        t->shape[0] = e->rows ? e->rows : e->cols;
        t->shape[1] = e->cols;
    }
    uint64_t n = elem_size(t->dtype);
    for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
    assert_true(n <= t->size);
    t->size = n;
    for (int i = 0; i < e->poke_n; i++) t->data[e->poke_at - 1 + i] = e->poke[i];
}

static void write_config(const char *src, const edit *e)
{
    char *text, path[512];
    size_t n;
    aff_error err = {0};
    snprintf(path, sizeof path, "%s/config.json", src);
    assert_int_equal(aff__read_file(path, 1 << 20, &text, &n, &err), AFF_OK);
    FILE *f = fopen(at("ck/config.json"), "wb");
    char *hit = e->config_from ? strstr(text, e->config_from) : NULL;
    if (e->config_from) {
        assert_non_null(hit);
        fprintf(f, "%.*s%s%s", (int)(hit - text), text, e->config_to, hit + strlen(e->config_from));
    } else {
        fwrite(text, 1, n, f);
    }
    fclose(f);
    free(text);
}

/* The checkpoint of folder src with the edit, as one file in ck/. */
static void write_checkpoint(const char *src, const edit *e)
{
    aff_ckpt *c;
    aff_error err = {0};
    bool found = !e->name;
    if (aff__ckpt_open(&c, src, &err) != AFF_OK) fail_msg("%s", err.msg);
    write_config(src, e);
    json_t *header = json_object();
    FILE *data = tmpfile();
    for (uint64_t i = 0; i < aff__ckpt_count(c); i++) {
        const aff_st_tensor *s = aff__ckpt_at(c, i);
        tensor t = {.dtype = aff__st_dtype_name(s->dtype), .ndim = s->ndim, .size = s->size};
        snprintf(t.name, sizeof t.name, "%s", s->name);
        memcpy(t.shape, s->shape, sizeof t.shape);
        t.data = malloc(s->size + 8);
        memcpy(t.data, s->data, s->size);
        bool mine = e->name && (e->zero ? strncmp(e->name, s->name, strlen(e->name)) : strcmp(e->name, s->name)) == 0;
        if (mine) apply(e, &t);
        if (mine && e->zero && strstr(s->name, ".weight")) memset(t.data, 0, t.size);
        if (mine && e->empty) t.ndim = 1, t.shape[0] = t.size = 0;
        if (!(mine && e->drop)) put_tensor(data, header, &t);
        if (mine && e->copy_as) {
            snprintf(t.name, sizeof t.name, "%s", e->copy_as);
            put_tensor(data, header, &t);
        }
        found = found || mine;
        free(t.data);
    }
    assert_true(found);
    char *text = json_dumps(header, JSON_COMPACT);
    uint64_t n = strlen(text);
    FILE *f = fopen(at("ck/model.safetensors"), "wb");
    fwrite(&n, 1, 8, f);
    fwrite(text, 1, n, f);
    rewind(data);
    char buf[65536];
    for (size_t k; (k = fread(buf, 1, sizeof buf, data)) > 0;) fwrite(buf, 1, k, f);
    fclose(f);
    fclose(data);
    free(text);
    json_decref(header);
    aff__ckpt_close(c);
}

/* ---- runs ---- */

static void quantize(aff_quantize_options o)
{
    aff_error err = {0};
    if (aff__quantize(&o, &err) != AFF_OK) fail_msg("%s", err.msg);
}

static void refused(aff_quantize_options o, const char *line)
{
    aff_error err = {0};
    glob_t g;
    o.out = at("out/refused.aff");
    if (aff__quantize(&o, &err) == AFF_OK) fail_msg("expected an error with '%s'", line);
    if (!strstr(err.msg, line)) fail_msg("expected '%s', got '%s'", line, err.msg);
    assert_null(strchr(err.msg, '\n'));
    assert_int_not_equal(access(o.out, F_OK), 0);
    if (strstr(err.msg, "--resume goes on")) { /* experts were done: they are kept, and nothing else */
        assert_int_equal(remove(at("out/refused.aff.partial")), 0);
        assert_int_equal(remove(at("out/refused.aff.journal")), 0);
    }
    assert_int_equal(glob(at("out/refused*"), 0, NULL, &g), GLOB_NOMATCH); /* no file, no temporary, no lock */
}

static void same_file(const char *a, const char *b)
{
    char *x, *y;
    size_t n, m;
    aff_error err = {0};
    assert_int_equal(aff__read_file(a, 1 << 28, &x, &n, &err), AFF_OK);
    assert_int_equal(aff__read_file(b, 1 << 28, &y, &m, &err), AFF_OK);
    assert_int_equal(n, m);
    assert_memory_equal(x, y, n);
    free(x);
    free(y);
}

static aff_container *open_container(const char *path)
{
    aff_container *c;
    aff_error err = {0};
    if (aff__container_open(&c, path, &err) != AFF_OK) fail_msg("%s", err.msg);
    return c;
}

static aff_ckpt *open_dspark(void)
{
    aff_ckpt *c;
    aff_error err = {0};
    if (aff__ckpt_open(&c, DSPARK, &err) != AFF_OK) fail_msg("%s", err.msg);
    return c;
}

static void check_names(const aff_container *c, const char *const *names, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        const aff_ctensor *t = aff__container_tensor(c, i);
        assert_string_equal(t->name, names[i]);
    }
}

static void check_f32(const aff_container *c, const aff_ckpt *k, const char *name, const char *src)
{
    const aff_ctensor *t = aff__container_find(c, name);
    const aff_st_tensor *s = aff__ckpt_find(k, src);
    assert_non_null(t);
    assert_int_equal(t->m.quant, AFF_F32);
    for (uint64_t i = 0; i < t->m.rows * t->m.cols; i++) {
        float got, want;
        memcpy(&got, t->blob + i * 4, 4);
        if (s->dtype == AFF_ST_F32) {
            memcpy(&want, s->data + i * 4, 4);
        } else if (s->dtype == AFF_ST_I64) {
            int64_t v;
            memcpy(&v, s->data + i * 8, 8);
            want = (float)v;
        } else {
            want = aff__bits_f32((uint32_t)s->data[2 * i] << 16 | (uint32_t)s->data[2 * i + 1] << 24);
        }
        assert_true(got == want);
    }
}

static void check_fp8(const aff_container *c, const aff_ckpt *k, const char *name, const char *src)
{
    char buf[128];
    const aff_ctensor *t = aff__container_find(c, name);
    snprintf(buf, sizeof buf, "%s.weight", src);
    const aff_st_tensor *w = aff__ckpt_find(k, buf);
    snprintf(buf, sizeof buf, "%s.scale", src);
    const aff_st_tensor *s = aff__ckpt_find(k, buf);
    assert_int_equal(t->m.quant, AFF_FP8);
    assert_int_equal(t->m.rows, w->shape[0]);
    assert_int_equal(t->m.cols, w->shape[1]);
    assert_memory_equal(t->blob, w->data, w->size);
    assert_int_equal(t->m.scale_size, s->size);
    assert_memory_equal(t->blob + t->m.scale_off, s->data, s->size);
}

static aff_mxfp4 source_matrix(const aff_ckpt *k, const char *layer, int e, int part)
{
    static const char *const names[3] = {"w1", "w3", "w2"};
    char buf[128];
    snprintf(buf, sizeof buf, "%s.ffn.experts.%d.%s.weight", layer, e, names[part]);
    const aff_st_tensor *w = aff__ckpt_find(k, buf);
    snprintf(buf, sizeof buf, "%s.ffn.experts.%d.%s.scale", layer, e, names[part]);
    return (aff_mxfp4){w->data, aff__ckpt_find(k, buf)->data, w->shape[0], w->shape[1] * 2};
}

static const aff_matdesc *part_of(const aff_clayer *l, int part)
{
    return part == 0 ? &l->gate : part == 1 ? &l->up : &l->down;
}

/* The default container; other tests take its codebook. */
static void model_container(void **state)
{
    (void)state;
    quantize((aff_quantize_options){.src = DSPARK, .out = at("main.aff"), .threads = 1});
    /* Again with more threads, one shard instead of two, and the default said aloud. */
    write_checkpoint(DSPARK, &(edit){0});
    quantize((aff_quantize_options){.src = at("ck"), .out = at("again.aff"), .threads = 3, .cb_spread = true});
    same_file(at("main.aff"), at("again.aff"));

    aff_container *c = open_container(at("main.aff"));
    aff_ckpt *k = open_dspark();
    aff_error err = {0};
    assert_int_equal(aff__container_verify(c, NULL, NULL, &err), AFF_OK);
    static const char *const names[] = {
        "__codebook",          "token_embd",         "output",
        "output_norm",         "hc_head_fn",         "hc_head_base",
        "hc_head_scale",       "blk.0.attn_norm",    "blk.0.ffn_norm",
        "blk.0.attn_sinks",    "blk.0.attn_q_a",     "blk.0.attn_q_b",
        "blk.0.attn_kv",       "blk.0.attn_out_a",   "blk.0.attn_out_b",
        "blk.0.attn_q_norm",   "blk.0.attn_kv_norm", "blk.0.ffn_gate_inp",
        "blk.0.ffn_gate_hash", "blk.0.shexp_gate",   "blk.0.shexp_up",
        "blk.0.shexp_down",    "blk.0.hc_attn_fn",   "blk.0.hc_attn_base",
        "blk.0.hc_attn_scale", "blk.0.hc_ffn_fn",    "blk.0.hc_ffn_base",
        "blk.0.hc_ffn_scale",  "blk.1.attn_norm",
    };
    check_names(c, names, sizeof names / sizeof *names);
    assert_int_equal(aff__container_tensors(c), 7 + 3 * 21 + 2 * 4 + 6);
    check_f32(c, k, "output_norm", "norm.weight");
    check_f32(c, k, "hc_head_fn", "hc_head_fn");
    check_f32(c, k, "blk.2.hc_ffn_fn", "layers.2.hc_ffn_fn");
    check_f32(c, k, "blk.1.ffn_gate_hash", "layers.1.ffn.gate.tid2eid");
    check_f32(c, k, "blk.2.ffn_gate_bias", "layers.2.ffn.gate.bias");
    check_f32(c, k, "blk.2.comp_ape", "layers.2.attn.compressor.ape");
    check_f32(c, k, "blk.1.idx_comp_norm", "layers.1.attn.indexer.compressor.norm.weight");
    check_fp8(c, k, "blk.1.idx_wq_b", "layers.1.attn.indexer.wq_b");
    check_fp8(c, k, "blk.0.shexp_down", "layers.0.ffn.shared_experts.w2");
    const aff_ctensor *embd = aff__container_find(c, "token_embd");
    assert_int_equal(embd->m.quant, AFF_BF16);
    assert_memory_equal(embd->blob, aff__ckpt_find(k, "embed.weight")->data, embd->m.data_size);
    assert_null(aff__container_find(c, "blk.2.idx_wq_b"));
    assert_null(aff__container_find(c, "blk.2.ffn_gate_hash"));

    const uint8_t *cb = aff__container_find(c, "__codebook")->blob;
    float *w = malloc(128 * 128 * sizeof *w);
    for (uint32_t l = 0; l < 3; l++) {
        char layer[32];
        snprintf(layer, sizeof layer, "layers.%u", l);
        for (int e = 0; e < 5; e++) {
            aff_qerror q = {0};
            for (int i = 0; i < 3; i++) {
                aff_mxfp4 src = source_matrix(k, layer, e, i);
                const aff_matdesc *m = part_of(aff__container_layer(c, l), i);
                assert_int_equal(m->quant, AFF_Q2P875G);
                assert_int_equal(aff__mxfp4_decode(&src, w, &err), AFF_OK);
                assert_int_equal(aff__expert_matrix_error(m, aff__container_expert(c, l, (uint32_t)e), cb, w, NULL, &q),
                                 AFF_OK);
            }
            assert_true(aff__qerror_relative(&q) > 0.05 && aff__qerror_relative(&q) < 0.2);
        }
    }
    free(w);

    const char *text;
    size_t n;
    char *config;
    aff__container_provenance(c, &text, &n);
    json_t *prov = json_loadb(text, n, 0, NULL);
    assert_string_equal(json_string_value(json_object_get(prov, "chat_encoding")), "0731");
    assert_string_equal(json_string_value(json_object_get(prov, "role")), "main");
    assert_int_equal(strlen(json_string_value(json_object_get(prov, "checkpoint_xxh3"))), 16);
    assert_int_equal(strlen(json_string_value(json_object_get(prov, "codebook_xxh3"))), 16);
    assert_string_equal(json_string_value(json_object_get(json_object_get(prov, "recipe"), "codebook")), "fit-spread");
    json_decref(prov);
    aff__container_meta(c, &text, &n);
    size_t m;
    assert_int_equal(aff__read_file(DSPARK "/config.json", 1 << 20, &config, &m, &err), AFF_OK);
    assert_int_equal(n, m);
    assert_memory_equal(text, config, n);
    free(config);
    aff__ckpt_close(k);
    aff__container_close(c);
}

static void compatible_container(void **state)
{
    (void)state;
    quantize((aff_quantize_options){.src = DSPARK, .out = at("compat.aff"), .threads = 2, .compat = true});
    aff_container *c = open_container(at("compat.aff"));
    aff_ckpt *k = open_dspark();
    aff_error err = {0};
    const char *text;
    size_t n;
    aff__container_provenance(c, &text, &n);
    assert_int_equal(n, 0);
    assert_false(aff__container_has_hashes(c));
    /* bf16 hyper-connection matrices, rounded to nearest even */
    const aff_ctensor *fn = aff__container_find(c, "blk.1.hc_attn_fn");
    const aff_st_tensor *src_fn = aff__ckpt_find(k, "layers.1.hc_attn_fn");
    assert_int_equal(fn->m.quant, AFF_BF16);
    for (uint64_t i = 0; i < fn->m.rows * fn->m.cols; i++) {
        uint32_t u;
        memcpy(&u, src_fn->data + i * 4, 4);
        assert_int_equal(fn->blob[i * 2] | fn->blob[i * 2 + 1] << 8, (u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    assert_int_equal(aff__container_find(c, "hc_head_fn")->m.quant, AFF_BF16);
    check_f32(c, k, "blk.1.hc_attn_base", "layers.1.hc_attn_base");

    /* The codebook is fitted on layer 0's experts 0, 13, 26 ... that exist: here 0 alone. */
    aff_cb_samples s = {0};
    uint8_t cb[AFF_CB_BYTES];
    float *w = malloc(128 * 128 * sizeof *w);
    for (int i = 0; i < 3; i++) {
        aff_mxfp4 src = source_matrix(k, "layers.0", 0, i);
        assert_int_equal(aff__mxfp4_decode(&src, w, &err), AFF_OK);
        assert_int_equal(aff__cb_samples_add(&s, w, src.rows, src.cols, &err), AFF_OK);
    }
    assert_int_equal(aff__cb_fit(&s, NULL, cb, &err), AFF_OK);
    assert_memory_equal(aff__container_find(c, "__codebook")->blob, cb, AFF_CB_BYTES);
    aff__cb_samples_free(&s);

    /* Layer 2, expert 4, down: the first rows as the text says. */
    enum { ROWS = 6, COLS = 128 };
    static aff_cb_table t[2];
    uint8_t codes[ROWS * COLS * 5 / 16] = {0}, fields[ROWS * COLS * 3 / 64] = {0};
    uint16_t scales[ROWS];
    aff_mxfp4 src = source_matrix(k, "layers.2", 4, 2);
    assert_int_equal(aff__mxfp4_decode(&src, w, &err), AFF_OK);
    aff__cb_unpack(cb, t);
    naive_encode(t, 1, w, ROWS, COLS, codes, fields, scales);
    const aff_matdesc *m = &aff__container_layer(c, 2)->down;
    const uint8_t *rec = aff__container_expert(c, 2, 4);
    assert_int_equal(m->quant, AFF_Q2P875Q4);
    assert_memory_equal(rec + m->data_off, codes, sizeof codes);
    assert_memory_equal(rec + m->scale_off, fields, sizeof fields);
    assert_memory_equal(rec + m->rscale_off, scales, sizeof scales);
    free(w);
    aff__ckpt_close(k);
    aff__container_close(c);
}

static void draft_container(void **state)
{
    (void)state;
    quantize((aff_quantize_options){
        .src = DSPARK, .out = at("draft.aff"), .threads = 1, .dspark = true, .codebook = at("main.aff")});
    quantize((aff_quantize_options){
        .src = DSPARK, .out = at("again.aff"), .threads = 2, .dspark = true, .codebook = at("main.aff")});
    same_file(at("draft.aff"), at("again.aff"));
    aff_container *c = open_container(at("draft.aff")), *main_c = open_container(at("main.aff"));
    aff_ckpt *k = open_dspark();
    static const char *const names[] = {
        "__codebook",        "mtp_main_proj", "mtp_main_norm", "mtp_norm",       "mtp_hc_head_fn",  "mtp_hc_head_base",
        "mtp_hc_head_scale", "mtp_markov_w1", "mtp_markov_w2", "mtp_confidence", "mtp.0.attn_norm",
    };
    check_names(c, names, sizeof names / sizeof *names);
    assert_int_equal(aff__container_tensors(c), 73);
    assert_int_equal(aff__container_layers(c), 3);
    assert_memory_equal(aff__container_find(c, "__codebook")->blob, aff__container_find(main_c, "__codebook")->blob,
                        AFF_CB_BYTES);
    check_fp8(c, k, "mtp_main_proj", "mtp.0.main_proj");
    check_f32(c, k, "mtp_main_norm", "mtp.0.main_norm.weight");
    check_f32(c, k, "mtp_norm", "mtp.2.norm.weight");
    check_f32(c, k, "mtp.1.ffn_gate_bias", "mtp.1.ffn.gate.bias");
    check_fp8(c, k, "mtp.2.attn_kv", "mtp.2.attn.wkv");
    const char *a, *b;
    size_t n, m;
    aff__container_provenance(c, &a, &n);
    aff__container_provenance(main_c, &b, &m);
    json_t *pa = json_loadb(a, n, 0, NULL), *pb = json_loadb(b, m, 0, NULL);
    assert_string_equal(json_string_value(json_object_get(pa, "role")), "draft");
    static const char *const shared[] = {"checkpoint_xxh3", "codebook_xxh3", "chat_encoding"};
    for (int i = 0; i < 3; i++)
        assert_string_equal(json_string_value(json_object_get(pa, shared[i])),
                            json_string_value(json_object_get(pb, shared[i])));
    json_decref(pa);
    json_decref(pb);
    aff__ckpt_close(k);
    aff__container_close(main_c);
    aff__container_close(c);
}

static void lossless_container(void **state)
{
    (void)state;
    quantize((aff_quantize_options){.src = DSPARK, .out = at("fp4.aff"), .threads = 2, .mxfp4 = true});
    quantize(
        (aff_quantize_options){.src = DSPARK, .out = at("fp4-draft.aff"), .threads = 2, .mxfp4 = true, .dspark = true});
    aff_ckpt *k = open_dspark();
    for (int draft = 0; draft < 2; draft++) {
        aff_container *c = open_container(at(draft ? "fp4-draft.aff" : "fp4.aff"));
        assert_null(aff__container_find(c, "__codebook"));
        for (uint32_t l = 0; l < 3; l++) {
            char layer[32];
            snprintf(layer, sizeof layer, draft ? "mtp.%u" : "layers.%u", l);
            for (int e = 0; e < 5; e++) {
                for (int i = 0; i < 3; i++) {
                    aff_mxfp4 src = source_matrix(k, layer, e, i);
                    const aff_matdesc *m = part_of(aff__container_layer(c, l), i);
                    const uint8_t *rec = aff__container_expert(c, l, (uint32_t)e);
                    assert_int_equal(m->quant, AFF_MXFP4);
                    assert_int_equal(m->data_size, src.rows * src.cols / 2);
                    assert_memory_equal(rec + m->data_off, src.codes, m->data_size);
                    assert_memory_equal(rec + m->scale_off, src.scales, m->scale_size);
                }
            }
        }
        aff__container_close(c);
    }
    aff__ckpt_close(k);
}

static void first_layers(void **state)
{
    (void)state;
    quantize((aff_quantize_options){.src = DSPARK, .out = at("one.aff"), .mxfp4 = true, .layers = 2});
    aff_container *c = open_container(at("one.aff"));
    assert_int_equal(aff__container_layers(c), 2);
    assert_non_null(aff__container_find(c, "blk.1.attn_kv"));
    assert_null(aff__container_find(c, "blk.2.attn_kv"));
    aff__container_close(c);
    /* The June layout: its draft is out of scope for the model and has no companion form. */
    quantize((aff_quantize_options){.src = MTP1, .out = at("june.aff"), .mxfp4 = true});
    c = open_container(at("june.aff"));
    const char *text;
    size_t n;
    aff__container_provenance(c, &text, &n);
    json_t *prov = json_loadb(text, n, 0, NULL);
    assert_string_equal(json_string_value(json_object_get(prov, "chat_encoding")), "v4");
    json_decref(prov);
    aff__container_close(c);
    refused((aff_quantize_options){.src = MTP1, .mxfp4 = true, .dspark = true}, "MTP-1");
}

/* ---- importance ---- */

enum { LAYERS = 3, EXPERTS = 5, WIDTH = 128 };

/* The upper triangle of sum v v^T over a few vectors v that share a direction. */
static void put_moments(float *to, uint64_t *rng)
{
    float v[40][WIDTH];
    for (int t = 0; t < 40; t++) {
        const float z = naive_gauss(rng);
        for (int c = 0; c < WIDTH; c++) v[t][c] = naive_gauss(rng) + z * (float)(c % 3);
    }
    for (int i = 0; i < WIDTH; i++)
        for (int j = i; j < WIDTH; j++) {
            double s = 0;
            for (int t = 0; t < 40; t++) s += (double)v[t][i] * (double)v[t][j];
            *to++ = (float)s;
        }
}

enum { TRIANGLE = WIDTH * (WIDTH + 1) / 2 };

/* A GGUF imatrix of second moments besides: of gate in layers 0 and 1, of down in layers 1 and 2; expert 2 of layer 1 was
 * never seen. */
static void declare_moments(aff_gguf_out *o, uint64_t index[LAYERS][2])
{
    aff_error err = {0};
    for (int l = 0; l < LAYERS; l++)
        for (int down = 0; down < 2; down++) {
            char name[96];
            const uint64_t dims[2] = {TRIANGLE, down ? EXPERTS : 1};
            if (l == (down ? 0 : 2)) continue;
            snprintf(name, sizeof name, "blk.%d.ffn_%s_exps.weight.in_cov", l, down ? "down" : "gate");
            assert_int_equal(aff__gguf_out_tensor(o, name, 2, dims, &index[l][down], &err), AFF_OK);
        }
}

static void data_moments(aff_gguf_out *o, uint64_t index[LAYERS][2])
{
    aff_error err = {0};
    uint64_t rng = 78;
    float *buf = calloc(EXPERTS, TRIANGLE * sizeof *buf);
    assert_non_null(buf);
    for (int l = 0; l < LAYERS; l++)
        for (int down = 0; down < 2; down++) {
            if (l == (down ? 0 : 2)) continue;
            for (int e = 0; e < (down ? EXPERTS : 1); e++) {
                put_moments(buf + e * TRIANGLE, &rng);
                if (l == 1 && e == 2) memset(buf + e * TRIANGLE, 0, TRIANGLE * sizeof *buf);
            }
            assert_int_equal(aff__gguf_out_data(o, index[l][down], buf, &err), AFF_OK);
        }
    free(buf);
}

static bool with_moments; /* of write_imatrix */

/* GGUF imatrix of the checkpoint. Expert 2 of layer 1 was never seen; counts are 10 * layer + expert + 1. scale: of all
 * sums. */
static void write_imatrix(const char *path, float scale, const char *rename)
{
    static const char *const part[3] = {"gate", "up", "down"};
    aff_gguf_out *o;
    aff_error err = {0};
    uint64_t index[LAYERS][3][2];
    assert_int_equal(aff__gguf_out_create(&o, path, &err), AFF_OK);
    assert_int_equal(aff__gguf_out_string(o, "general.type", "imatrix", &err), AFF_OK);
    for (int l = 0; l < LAYERS; l++) {
        for (int i = 0; i < 3; i++) {
            char name[96];
            uint64_t dims[2] = {WIDTH, EXPERTS}, one[2] = {1, EXPERTS};
            snprintf(name, sizeof name, "blk.%d.ffn_%s_%s.weight.in_sum2", l, part[i], rename);
            assert_int_equal(aff__gguf_out_tensor(o, name, 2, dims, &index[l][i][0], &err), AFF_OK);
            snprintf(name, sizeof name, "blk.%d.ffn_%s_%s.weight.counts", l, part[i], rename);
            assert_int_equal(aff__gguf_out_tensor(o, name, 2, one, &index[l][i][1], &err), AFF_OK);
        }
    }
    uint64_t moments[LAYERS][2];
    if (with_moments) declare_moments(o, moments);
    assert_int_equal(aff__gguf_out_begin(o, &err), AFF_OK);
    if (with_moments) data_moments(o, moments);
    uint64_t rng = 77;
    for (int l = 0; l < LAYERS; l++) {
        for (int i = 0; i < 3; i++) {
            float sum[EXPERTS][WIDTH], count[EXPERTS];
            for (int e = 0; e < EXPERTS; e++) {
                bool seen = !(l == 1 && e == 2);
                count[e] = seen ? (float)(10 * l + e + 1) : 0;
                for (int c = 0; c < WIDTH; c++) sum[e][c] = seen ? expf(2 * naive_gauss(&rng)) * count[e] * scale : 0;
            }
            assert_int_equal(aff__gguf_out_data(o, index[l][i][0], sum[0], &err), AFF_OK);
            assert_int_equal(aff__gguf_out_data(o, index[l][i][1], count, &err), AFF_OK);
        }
    }
    assert_int_equal(aff__gguf_out_finish(o, &err), AFF_OK);
}

/* Weighted relative error of expert (0, 1)'s gate under the imatrix. */
static double weighted_error(const char *path, const aff_imatrix *im)
{
    aff_container *c = open_container(path);
    aff_ckpt *k = open_dspark();
    float *w = malloc(WIDTH * WIDTH * sizeof *w), weight[WIDTH];
    aff_qerror e = {0};
    for (int i = 0; i < 3; i++) {
        aff_mxfp4 src = source_matrix(k, "layers.0", 1, i);
        assert_int_equal(aff__mxfp4_decode(&src, w, NULL), AFF_OK);
        assert_true(aff__imatrix_weights(im, 0, 1, (aff_im_part)i, weight));
        assert_int_equal(aff__expert_matrix_error(part_of(aff__container_layer(c, 0), i),
                                                  aff__container_expert(c, 0, 1),
                                                  aff__container_find(c, "__codebook")->blob, w, weight, &e),
                         AFF_OK);
    }
    free(w);
    aff__ckpt_close(k);
    aff__container_close(c);
    return aff__qerror_weighted(&e);
}

static void importance(void **state)
{
    (void)state;
    aff_error err = {0};
    aff_imatrix *im;
    write_imatrix(at("im.gguf"), 1, "exps");
    aff_im_shape shape = {LAYERS, EXPERTS, WIDTH, WIDTH};
    assert_int_equal(aff__imatrix_open(&im, at("im.gguf"), &shape, &err), AFF_OK);
    quantize((aff_quantize_options){.src = DSPARK,
                                    .out = at("im.aff"),
                                    .imatrix = at("im.gguf"),
                                    .codebook = at("main.aff"),
                                    .threads = 2,
                                    .verify = true,
                                    .report = at("r.json")});
    quantize((aff_quantize_options){
        .src = DSPARK, .out = at("im-compat.aff"), .imatrix = at("im.gguf"), .compat = true, .threads = 2});
    /* The same codebook and weights, other codes: better by a lot where it counts. Fitted under importance: better
     * still. */
    double plain = weighted_error(at("main.aff"), im), weighted = weighted_error(at("im.aff"), im),
           compat = weighted_error(at("im-compat.aff"), im);
    assert_true(weighted < 0.85 * plain);
    assert_true(weighted < 0.85 * compat);
    assert_true(compat < weighted_error(at("compat.aff"), im)); /* its own use of importance helps a little */
    aff__imatrix_close(im);

    aff_container *c = open_container(at("im.aff"));
    const float *p = aff__container_profile(c);
    assert_non_null(p);
    assert_true(p[0] == 1 && p[4] == 5 && p[5 + 2] == 0 && p[2 * 5 + 3] == 24);
    const char *text;
    size_t n;
    aff__container_provenance(c, &text, &n);
    json_t *prov = json_loadb(text, n, 0, NULL);
    assert_int_equal(strlen(json_string_value(json_object_get(prov, "imatrix_xxh3"))), 16);
    json_decref(prov);
    aff__container_close(c);

    json_t *report = json_load_file(at("r.json"), 0, NULL),
           *layer = json_array_get(json_object_get(report, "layers"), 0);
    assert_int_equal(json_array_size(json_object_get(report, "layers")), LAYERS);
    assert_int_equal(json_integer_value(json_object_get(report, "unseen_experts")), 1);
    double e01 = json_real_value(json_array_get(json_object_get(layer, "experts_weighted"), 1));
    assert_true(fabs(e01 - weighted) < 1e-9);
    json_decref(report);

    refused((aff_quantize_options){.src = DSPARK, .imatrix = at("nowhere.gguf")}, "nowhere.gguf");
    write_imatrix(at("im2.gguf"), 1, "shexp");
    refused((aff_quantize_options){.src = DSPARK, .imatrix = at("im2.gguf")}, "im2.gguf");
    write_imatrix(at("im2.gguf"), NAN, "exps");
    refused((aff_quantize_options){.src = DSPARK, .imatrix = at("im2.gguf")}, "blk.0.ffn_down_exps.weight");
}

static void same_record(const aff_container *a, const aff_container *b, uint32_t l, uint32_t e, bool same)
{
    const aff_clayer *y = aff__container_layer(a, l);
    if ((memcmp(aff__container_expert(a, l, e), aff__container_expert(b, l, e), y->stride) == 0) != same)
        fail_msg("layer %u expert %u: %s", l, e, same ? "differs" : "is the same");
}

/* Second moments: other bytes where they are, the same elsewhere and from any number of threads; through blobs and --verify
 * as well; --compat ignores them. */
static void error_feedback(void **state)
{
    (void)state;
    with_moments = true;
    write_imatrix(at("mo.gguf"), 1, "exps");
    with_moments = false;
    aff_quantize_options o = {.src = DSPARK, .out = at("mo.aff"), .imatrix = at("mo.gguf"), .codebook = at("main.aff"),
                              .threads = 1, .verify = true};
    quantize(o);
    o.out = at("mo2.aff");
    o.threads = 3;
    quantize(o);
    same_file(at("mo.aff"), at("mo2.aff"));
    o.verify = false;
    o.experts_dir = at("mo-blobs");
    quantize(o);
    o.experts_from = o.experts_dir;
    o.experts_dir = NULL;
    quantize(o);
    same_file(at("mo.aff"), at("mo2.aff"));

    aff_container *a = open_container(at("mo.aff")), *b = open_container(at("im.aff"));
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t e = 0; e < EXPERTS; e++) same_record(a, b, l, e, false);
    aff__container_close(a);
    aff__container_close(b);
    quantize((aff_quantize_options){
        .src = DSPARK, .out = at("mo2.aff"), .imatrix = at("mo.gguf"), .compat = true, .threads = 2});
    same_file(at("im-compat.aff"), at("mo2.aff"));
}

/* ---- several machines, one after the other ---- */

static void copy_edited(const char *from, const char *to, long at_byte)
{
    char *data;
    size_t n;
    aff_error err = {0};
    assert_int_equal(aff__read_file(from, 1 << 28, &data, &n, &err), AFF_OK);
    if (at_byte >= 0) data[at_byte] ^= 1;
    FILE *f = fopen(to, "wb");
    assert_int_equal(fwrite(data, 1, at_byte < 0 ? n + (size_t)at_byte : n, f), at_byte < 0 ? n + (size_t)at_byte : n);
    fclose(f);
    free(data);
}

static void split_and_join(void **state)
{
    (void)state;
    quantize(
        (aff_quantize_options){.src = DSPARK, .out = "unused", .codebook_out = at("cb.raw"), .imatrix = at("im.gguf")});
    char *raw;
    size_t n;
    aff_error err = {0};
    assert_int_equal(aff__read_file(at("cb.raw"), 1 << 20, &raw, &n, &err), AFF_OK);
    assert_int_equal(n, 32788);
    assert_memory_equal(raw, "AFFCB001\4\0\0\0\2\0\0\0\0\4\0\0", 20);
    free(raw);
    aff_quantize_options o = {
        .src = DSPARK, .out = at("whole.aff"), .codebook_raw = at("cb.raw"), .imatrix = at("im.gguf")};
    quantize(o);
    o.experts_dir = at("blobs");
    o.range_to = 2;
    o.threads = 1;
    o.out = at("joined.aff");
    quantize(o);
    o.range_from = 1;
    o.range_to = 0;
    o.threads = 3;
    quantize(o); /* layer 1 is there already */
    o.range_from = 0;
    o.experts_from = o.experts_dir;
    o.experts_dir = NULL;
    o.verify = true;
    quantize(o);
    same_file(at("whole.aff"), at("joined.aff"));

    /* What does not belong together. */
    aff_quantize_options bad = o;
    bad.imatrix = NULL;
    refused(bad, "size of the imatrix");
    write_imatrix(at("im2.gguf"), 1.5f, "exps");
    bad.imatrix = at("im2.gguf"); /* the same size, other numbers */
    refused(bad, "its imatrix is another");
    bad = o;
    bad.codebook_raw = NULL;
    bad.codebook = at("main.aff");
    refused(bad, "codebook");
    bad = o;
    bad.compat = true;
    refused(bad, "recipe");
    bad.compat = false;
    write_checkpoint(DSPARK,
                     &(edit){.name = "layers.1.attn.kv_norm.weight", .poke_at = 1, .poke = {0x5a}, .poke_n = 1});
    bad.src = at("ck");
    refused(bad, "recipe");
    rename(at("blobs/L001.affx"), at("blobs/keep"));
    refused(o, "L001.affx");
    copy_edited(at("blobs/L000.affx"), at("blobs/L001.affx"), 70000);
    refused(o, "its layer is another");
    copy_edited(at("blobs/keep"), at("blobs/L001.affx"), -3);
    refused(o, "expected");
    copy_edited(at("blobs/keep"), at("blobs/L001.affx"), 64 + 8); /* a plane's size */
    refused(o, "plane 0: expected");
    copy_edited(at("blobs/keep"), at("blobs/L001.affx"), 64 + 5 * 144 + 1000); /* a code: only --verify can see it */
    refused(o, "layer 1 expert 0: its error is");
    copy_edited(at("cb.raw"), at("cb2.raw"), 20);
    bad = o;
    bad.codebook_raw = at("cb2.raw");
    refused(bad, "value 0 is not an E4M3 number");
    copy_edited(at("cb.raw"), at("cb2.raw"), -1);
    refused(bad, "no raw codebook");

    refused((aff_quantize_options){.src = DSPARK, .experts_dir = at("blobs")}, "--codebook-raw");
    refused(
        (aff_quantize_options){
            .src = DSPARK, .experts_dir = at("blobs"), .experts_from = at("blobs"), .codebook_raw = at("cb.raw")},
        "two steps");
    refused((aff_quantize_options){.src = DSPARK, .range_to = 2, .codebook_raw = at("cb.raw")}, "--layer-range");
    refused(
        (aff_quantize_options){
            .src = DSPARK, .experts_dir = at("blobs"), .range_from = 3, .codebook_raw = at("cb.raw")},
        "layers 0 to 2");
}

/* ---- continuing ---- */

static void resume_checks_what_it_finds(void **state)
{
    (void)state;
    aff_quantize_options o = {.src = DSPARK, .out = at("out/r.aff"), .codebook = at("main.aff"), .resume = true};
    quantize((aff_quantize_options){.src = DSPARK, .out = at("given.aff"), .codebook = at("main.aff")});
    quantize(o); /* nothing there: a fresh start */
    same_file(at("given.aff"), at("out/r.aff"));
    /* Left by another run: refused, and kept. */
    FILE *f = fopen(at("out/r.aff.journal"), "wb");
    fwrite("AFFJRNL1\1\2\3\4\5\6\7\10", 1, 16, f);
    fclose(f);
    aff_error err = {0};
    assert_int_equal(aff__quantize(&o, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "another checkpoint, codebook"));
    assert_int_equal(access(at("out/r.aff.journal"), F_OK), 0);
    o.resume = false;
    quantize(o);
    same_file(at("given.aff"), at("out/r.aff"));
    assert_int_not_equal(access(at("out/r.aff.journal"), F_OK), 0);
    assert_int_not_equal(access(at("out/r.aff.partial"), F_OK), 0);
    remove(at("out/r.aff"));
}

static void bad_checkpoints(void **state)
{
    (void)state;
    static const struct {
        edit e;
        bool dspark;
        const char *line;
    } cases[] = {
        {{.name = "layers.1.ffn.experts.2.w3.scale", .drop = true},
         false,
         "tensor 'layers.1.ffn.experts.2.w3.scale' is missing"},
        {{.name = "layers.2.attn.wq_a.scale", .drop = true}, false, "tensor 'layers.2.attn.wq_a.scale' is missing"},
        {{.name = "hc_head_base", .drop = true}, false, "tensor 'hc_head_base' is missing"},
        {{.name = "mtp.2.markov_head.markov_w2.weight", .drop = true},
         true,
         "tensor 'mtp.2.markov_head.markov_w2.weight' is missing"},
        {{.name = "embed.weight", .rows = 512, .cols = 64},
         false,
         "tensor 'embed.weight': expected shape [256, 128], got [512, 64]"},
        {{.name = "layers.0.attn.attn_sink", .cols = 1},
         false,
         "tensor 'layers.0.attn.attn_sink': expected shape [2], got [1]"},
        {{.name = "layers.0.attn.wkv.scale", .rows = 2, .cols = 1},
         false,
         "tensor 'layers.0.attn.wkv.scale': expected shape [4, 1], got [2, 1]"},
        {{.name = "norm.weight", .dtype = "F16"}, false, "tensor 'norm.weight': expected BF16 or F32, got F16"},
        {{.name = "layers.0.ffn.gate.tid2eid", .dtype = "I32"},
         false,
         "tensor 'layers.0.ffn.gate.tid2eid': expected I64, got I32"},
        {{.name = "layers.0.attn.wkv.weight", .dtype = "I8"},
         false,
         "tensor 'layers.0.attn.wkv.weight': expected F8_E4M3, got I8"},
        {{.name = "layers.2.ffn.experts.0.w1.weight", .dtype = "F8_E4M3"},
         false,
         "layers.2.ffn.experts.0.w1.weight': expected I8"},
        {{.name = "norm.weight", .copy_as = "layers.0.attn.extra.weight"},
         false,
         "tensor 'layers.0.attn.extra.weight' (BF16) has no place"},
        {{.name = "norm.weight", .copy_as = "mtp.1.extra"}, true, "tensor 'mtp.1.extra' (BF16) has no place"},
        {{.name = "layers.0.ffn.gate.tid2eid", .poke_at = 17, .poke = {5}, .poke_n = 1},
         false,
         "tid2eid': element 2 is no number of an expert"},
        {{.name = "layers.0.ffn.gate.tid2eid", .poke_at = 24, .poke = {0x80}, .poke_n = 1},
         false,
         "tid2eid': element 2 is no number of an expert"},
        {{.name = "layers.1.attn.wkv.weight", .poke_at = 8, .poke = {0xff}, .poke_n = 1},
         false,
         "layers.1.attn.wkv.weight': element 7 is not a number"},
        {{.name = "layers.1.attn.wkv.scale", .poke_at = 2, .poke = {0xff}, .poke_n = 1},
         false,
         "layers.1.attn.wkv.scale': element 1 is not a number"},
        {{.name = "layers.1.attn_norm.weight", .poke_at = 1, .poke = {0x80, 0x7f}, .poke_n = 2},
         false,
         "layers.1.attn_norm.weight': element 0 is not finite"},
        {{.name = "layers.1.ffn.experts.4.w2.scale", .poke_at = 4, .poke = {0xff}, .poke_n = 1},
         false,
         "layer 1 expert 4: w2: scale byte 3"},
        {{.name = "layers.0.attn.wo_a.weight",
          .rows = 64,
          .cols = 512,
          .config_from = "\"o_lora_rank\": 64",
          .config_to = "\"o_lora_rank\": 32"},
         false,
         "tensor 'layers.0.attn.wo_a.weight': 64 x 512: a container holds FP8 matrices of whole 128 x 128 tiles only"},
        {{.config_from = "\"moe_intermediate_size\": 128", .config_to = "\"moe_intermediate_size\": 16"},
         false,
         "experts of 16 x 128: mxfp4 needs both a multiple of 32"},
        {{.config_from = "\"hidden_size\"", .config_to = "\"hidden\""}, false, "hidden_size"},
        {{.config_from = "\"deepseek_v4\"", .config_to = "\"llama\""}, false, "'deepseek_v41', got 'llama'"},
        {{.config_from = "\"n_routed_experts\": 5", .config_to = "\"n_routed_experts\": 60000"},
         false,
         "expected 1080000 expert tensors"},
        {{.config_from = "\"compress_ratios\": [", .config_to = "\"compress_ratios\": [3,"},
         false,
         "entry 0 is neither 0 nor a power of two"},
        {{.config_from = "\"num_hidden_layers\": 3", .config_to = "\"num_hidden_layers\": 9"},
         false,
         "expected at least 9 entries, got 6"},
        {{.config_from = "\"o_groups\": 2", .config_to = "\"o_groups\": 3"}, false, "3 does not divide 2 heads of 512"},
        {{.name = "mtp.0.attn.wkv.weight", .drop = true}, true, "tensor 'mtp.0.attn.wkv.weight' is missing"},
        {{.name = "mtp.0.main_proj.weight", .drop = true}, true, "tensor 'mtp.0.main_proj.weight' is missing"},
        {{.config_from = "\"dspark_target_layer_ids\"", .config_to = "\"x\""}, true, "dspark_target_layer_ids"},
        {{.config_from = "\"dspark_target_layer_ids\": [", .config_to = "\"dspark_target_layer_ids\": [3,"},
         true,
         "entry 0 is not a layer below 3"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_checkpoint(DSPARK, &cases[i].e);
        refused((aff_quantize_options){.src = at("ck"), .mxfp4 = true, .dspark = cases[i].dspark, .threads = 2},
                cases[i].line);
    }
    /* What is wrong in a draft does not stop the model, and the other way round. */
    write_checkpoint(DSPARK, &(edit){.name = "norm.weight", .copy_as = "mtp.1.extra"});
    quantize((aff_quantize_options){.src = at("ck"), .out = at("again.aff"), .mxfp4 = true});
}

static void bad_options_and_files(void **state)
{
    (void)state;
    refused((aff_quantize_options){.src = DSPARK, .dspark = true}, "give --codebook MAIN.aff");
    refused((aff_quantize_options){.src = DSPARK, .mxfp4 = true, .compat = true}, "leave out --compat");
    refused((aff_quantize_options){.src = DSPARK, .mxfp4 = true, .cb_spread = true}, "needs no codebook");
    refused((aff_quantize_options){.src = DSPARK, .codebook = at("main.aff"), .cb_spread = true}, "--cb-spread");
    refused((aff_quantize_options){.src = DSPARK, .mxfp4 = true, .dspark = true, .layers = 1}, "--layers");
    refused((aff_quantize_options){.src = DSPARK, .mxfp4 = true, .layers = 4}, "the model has 3 layers");
    refused((aff_quantize_options){.mxfp4 = true}, "--src");
    refused((aff_quantize_options){.src = at("nowhere"), .mxfp4 = true}, "nowhere");
    refused((aff_quantize_options){.src = DSPARK, .dspark = true, .codebook = at("fp4.aff")}, "tensor '__codebook'");
    refused((aff_quantize_options){.src = DSPARK, .dspark = true, .codebook = DSPARK "/config.json"}, "config.json");
    aff_error err = {0};
    aff_quantize_options o = {.src = DSPARK, .out = at("no-such-folder/x.aff"), .mxfp4 = true};
    assert_int_equal(aff__quantize(&o, &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, "no-such-folder/x.aff"));
    o.out = at("out"); /* a folder */
    assert_int_equal(aff__quantize(&o, &err), AFF_E_IO);
    if (geteuid() != 0) {
        assert_int_equal(chmod(at("out"), 0555), 0);
        o.out = at("out/x.aff");
        assert_int_equal(aff__quantize(&o, &err), AFF_E_IO);
        assert_int_equal(chmod(at("out"), 0755), 0);
    }
}

static void out_of_memory(void **state)
{
    (void)state;
    aff_status s = AFF_E_NOMEM;
    for (unsigned k = 1; s != AFF_OK; k += 1 + k / 8) {
        aff_error err = {0};
        glob_t g;
        aff_quantize_options o = {.src = MTP1, .out = at("out/x.aff"), .mxfp4 = true, .threads = 1};
        aff__alloc_fail_after(k);
        s = aff__quantize(&o, &err);
        aff__alloc_fail_after(0);
        if (s == AFF_OK) break;
        assert_int_equal(s, AFF_E_NOMEM);
        assert_int_not_equal(access(at("out/x.aff"), F_OK), 0);
        if (glob(at("out/x*"), 0, NULL, &g) == 0) { /* .partial and .journal, or neither */
            assert_int_equal(g.gl_pathc, 2);
            for (size_t i = 0; i < 2; i++) remove(g.gl_pathv[i]);
            globfree(&g);
        }
    }
    assert_int_equal(remove(at("out/x.aff")), 0);
}

typedef struct heard {
    uint64_t calls, last, total;
    int warnings, lines;
    uint64_t stop_at; /* calls after which to stop, 0: never */
} heard;

static bool on_progress(void *ctx, uint64_t done, uint64_t total)
{
    heard *h = ctx;
    assert_true(done >= h->last && done <= total);
    h->calls++;
    h->last = done;
    h->total = total;
    return h->stop_at == 0 || h->calls < h->stop_at;
}

static void on_warning(void *ctx, const char *line)
{
    assert_non_null(strstr(line, "another checkpoint"));
    ((heard *)ctx)->warnings++;
}

static void on_line(void *ctx, const char *line)
{
    assert_non_null(line);
    ((heard *)ctx)->lines++;
}

static void tells_what_it_does(void **state)
{
    (void)state;
    heard h = {0};
    aff_quantize_options o = {.src = DSPARK,
                              .out = at("again.aff"),
                              .codebook = at("main.aff"),
                              .threads = 3,
                              .dspark = true,
                              .ctx = &h,
                              .say = on_line,
                              .warn = on_warning,
                              .progress = on_progress};
    quantize(o);
    assert_int_equal(h.last, h.total);
    assert_true(h.total > 0 && h.calls > 15 && h.lines > 5);
    assert_int_equal(h.warnings, 0);
    /* One changed norm: another checkpoint. */
    write_checkpoint(DSPARK,
                     &(edit){.name = "layers.1.attn.kv_norm.weight", .poke_at = 1, .poke = {0x5a}, .poke_n = 1});
    o.src = at("ck");
    h = (heard){0};
    quantize(o);
    assert_int_equal(h.warnings, 1);
}

/* Asked to stop among the dense tensors, it leaves no file behind; among the experts, what --resume needs. */
static void stops_when_asked(void **state)
{
    (void)state;
    aff_container *c = open_container(at("fp4.aff"));
    const uint64_t dense = aff__container_tensors(c); /* a call each, and one before */
    aff__container_close(c);
    for (int i = 0; i < 2; i++) {
        heard h = {.stop_at = i ? dense + 6 : 3};
        aff_error err = {0};
        aff_quantize_options o = {
            .src = DSPARK, .out = at("stopped.aff"), .threads = 2, .mxfp4 = true, .ctx = &h, .progress = on_progress};
        assert_int_equal(aff__quantize(&o, &err), AFF_E_CANCELLED);
        assert_true(h.last < h.total);
        char pattern[600];
        glob_t g;
        snprintf(pattern, sizeof pattern, "%s*", o.out);
        assert_int_equal(glob(pattern, 0, NULL, &g), i ? 0 : GLOB_NOMATCH);
        if (!i) continue;
        assert_int_equal(g.gl_pathc, 2); /* .journal and .partial */
        globfree(&g);
        assert_non_null(strstr(err.msg, "--resume"));
        h = (heard){0};
        o.resume = true;
        quantize(o);
        same_file(at("fp4.aff"), o.out);
        assert_int_equal(glob(pattern, 0, NULL, &g), 0);
        assert_int_equal(g.gl_pathc, 1);
        globfree(&g);
    }
}

/* A bad scale in the last expert is found when its turn comes: the others are kept, through every --resume. */
static void goes_on_after_an_error(void **state)
{
    (void)state;
    aff_error err = {0};
    aff_quantize_options o = {.src = at("ck"), .out = at("out/e.aff"), .codebook = at("main.aff"), .threads = 1};
    write_checkpoint(DSPARK, &(edit){.name = "layers.2.ffn.experts.4.w2.scale", .poke_at = 4, .poke = {0xff}, .poke_n = 1});
    assert_int_equal(aff__quantize(&o, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "layer 2 expert 4: w2: scale byte 3"));
    assert_non_null(strstr(err.msg, "--resume"));
    assert_int_not_equal(access(o.out, F_OK), 0);
    assert_int_equal(access(at("out/e.aff.partial"), F_OK), 0);
    heard h = {0};
    o.resume = true;
    o.ctx = &h;
    o.progress = on_progress;
    assert_int_equal(aff__quantize(&o, &err), AFF_E_FORMAT);
    assert_int_equal(access(at("out/e.aff.journal"), F_OK), 0); /* kept again */
    o.src = DSPARK; /* another checkpoint: refused, and still kept */
    h = (heard){0};
    assert_int_equal(aff__quantize(&o, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "another checkpoint"));
    assert_int_equal(access(at("out/e.aff.partial"), F_OK), 0);
    o.resume = false;
    h = (heard){0};
    quantize(o);
    assert_int_not_equal(access(at("out/e.aff.partial"), F_OK), 0);
    remove(at("out/e.aff"));
}

/* NaN among the dense tensors shows before the fit, in a run that would fit. */
static void bad_values_show_first(void **state)
{
    (void)state;
    heard h = {0};
    aff_error err = {0};
    const aff_quantize_options o = {.src = at("ck"), .out = at("out/n.aff"), .threads = 2, .ctx = &h, .say = on_line};
    write_checkpoint(DSPARK, &(edit){.name = "layers.1.attn_norm.weight", .poke_at = 1, .poke = {0x80, 0x7f}, .poke_n = 2});
    assert_int_equal(aff__quantize(&o, &err), AFF_E_FORMAT);
    assert_non_null(strstr(err.msg, "layers.1.attn_norm.weight': element 0 is not finite"));
    assert_int_equal(h.lines, 2); /* what the source is; nothing of a codebook */
    assert_null(strstr(err.msg, "--resume"));
}

/* An expert of zeros, and tensors of no elements. */
static void nothing_inside(void **state)
{
    (void)state;
    aff_error err = {0};
    uint8_t *rows = calloc(128, 128 * sizeof(float));
    write_checkpoint(DSPARK, &(edit){.name = "layers.1.ffn.experts.3.", .zero = true});
    with_moments = true;
    write_imatrix(at("mo.gguf"), 1, "exps");
    with_moments = false;
    for (int i = 0; i < 4; i++) {
        static const char *const name[] = {"zero0.aff", "zero1.aff", "zero2.aff", "zero3.aff"};
        quantize((aff_quantize_options){.src = at("ck"),
                                        .out = at(name[i]),
                                        .codebook = i < 3 ? at("main.aff") : NULL,
                                        .imatrix = i == 1 ? at("im.gguf") : i == 2 ? at("mo.gguf") : NULL,
                                        .compat = i == 3,
                                        .threads = 2,
                                        .verify = true});
        aff_container *c = open_container(at(name[i]));
        for (int p = 0; p < 3; p++) {
            assert_int_equal(aff__expert_matrix_decode(part_of(aff__container_layer(c, 1), p), aff__container_expert(c, 1, 3),
                                                       aff__container_find(c, "__codebook")->blob, (float *)(void *)rows),
                             AFF_OK);
            for (int k = 0; k < 128 * 128; k++) assert_true(((float *)(void *)rows)[k] == 0);
        }
        aff__container_close(c);
    }
    free(rows);
    static const char *const empty[] = {"norm.weight", "layers.0.attn.wkv.weight", "layers.1.ffn.experts.3.w1.scale"};
    for (int i = 0; i < 3; i++) {
        write_checkpoint(DSPARK, &(edit){.name = empty[i], .empty = true});
        const aff_quantize_options o = {.src = at("ck"), .out = at("out/z.aff"), .mxfp4 = true};
        assert_int_equal(aff__quantize(&o, &err), AFF_E_FORMAT);
        assert_non_null(strstr(err.msg, empty[i]));
        assert_non_null(strstr(err.msg, "got [0]"));
    }
}

static void progress_lines(void **state)
{
    (void)state;
    char buf[160];
    aff__progress_format(buf, sizeof buf, "x", 1ull << 29, 1ull << 31, 8000000000u);
    assert_string_equal(buf, "x: 25.0 %, 0.50 of 2.00 GiB, 64.0 MiB/s, 0:00:24 left");
    aff__progress_format(buf, sizeof buf, "x", 1 << 20, 100 << 20, 400000000u);
    assert_string_equal(buf, "x: 1.0 %, 1.00 of 100.00 MiB");
    aff__progress_format(buf, sizeof buf, "x", 1ull << 30, 7200ull << 30, 1000000000u);
    assert_string_equal(buf, "x: 0.0 %, 1.00 of 7200.00 GiB, 1024.0 MiB/s, 1:59:59 left");
    aff__progress_format(buf, sizeof buf, "x", 0, 0, 0);
    assert_string_equal(buf, "x: 100.0 %, 0.00 of 0.00 MiB");
    aff__progress_format(buf, 12, "x", 1ull << 29, 1ull << 31, 8000000000u);
    assert_string_equal(buf, "x: 25.0 %, ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(model_container), cmocka_unit_test(compatible_container),
        cmocka_unit_test(draft_container), cmocka_unit_test(lossless_container),
        cmocka_unit_test(first_layers),    cmocka_unit_test(importance),
        cmocka_unit_test(error_feedback),
        cmocka_unit_test(split_and_join),  cmocka_unit_test(resume_checks_what_it_finds),
        cmocka_unit_test(bad_checkpoints), cmocka_unit_test(bad_options_and_files),
        cmocka_unit_test(out_of_memory),   cmocka_unit_test(tells_what_it_does),
        cmocka_unit_test(stops_when_asked),
        cmocka_unit_test(goes_on_after_an_error),
        cmocka_unit_test(bad_values_show_first),
        cmocka_unit_test(nothing_inside),
        cmocka_unit_test(progress_lines),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
