/* The container: layout golden values of spec container 4.1, 5 and 7, round trips, damage, hostile headers, the
 * writer's rules. */
#define _GNU_SOURCE
#include "support/test.h"
#include "base/file.h"
#include "format/container.h"
#include "format/container_disk.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

static char dir[64], path[96];

static int group_setup(void **state)
{
    snprintf(dir, sizeof dir, "/tmp/aff_container_XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/t.aff", dir);
    return 0;
}

static int group_teardown(void **state)
{
    unlink(path);
    return rmdir(dir); /* fails if any test left a lock or a temporary file behind */
}

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        aff_error ok_err_ = {0}, *err = &ok_err_;                                                                      \
        if ((call) != AFF_OK) fail_msg("%s: %s", #call, ok_err_.msg);                                                  \
    } while (0)

/* The call must fail with a message that contains `text`. */
#define REFUSED(call, text)                                                                                            \
    do {                                                                                                               \
        aff_error re_ = {0}, *err = &re_;                                                                              \
        if ((call) == AFF_OK) fail_msg("%s: accepted", #call);                                                         \
        if (!strstr(re_.msg, text)) fail_msg("%s: '%s' lacks '%s'", #call, re_.msg, text);                             \
    } while (0)

static char *slurp(size_t *n)
{
    char *data = NULL;
    OK(aff__read_file(path, 1u << 30, &data, n, err));
    return data;
}

/* Byte i of the content of object k: nothing repeats in step with a plane or a record. */
static uint8_t pattern(uint64_t k, uint64_t i)
{
    return (uint8_t)((i * 2654435761u + k * 40503u) >> 11);
}

static void fill(uint8_t *p, uint64_t n, uint64_t k)
{
    for (uint64_t i = 0; i < n; i++) p[i] = pattern(k, i);
}

static void valid_codebook(uint8_t book[8192])
{
    for (int i = 0; i < 8192; i++)
        book[i] = (uint8_t)((pattern(7, (uint64_t)i) & 0x80) | (8 + pattern(9, (uint64_t)i) % 56));
}

/* The worked file of spec container 7. */
static aff_status write_worked(bool compat, const char *prov)
{
    static const char meta[] = "{\"num_hidden_layers\":1}";
    uint8_t book[8192], vec[16], mat[16384], record[8192], scale = 127;
    uint64_t i[3];
    aff_cwriter *w;
    valid_codebook(book);
    fill(vec, sizeof vec, 1);
    fill(mat, sizeof mat, 2);
    OK(aff__cwriter_create(&w, path, compat, err));
    OK(aff__cwriter_meta(w, meta, strlen(meta), err));
    OK(aff__cwriter_declare(w, "__codebook", AFF_F32, 1, 2048, &i[0], err));
    OK(aff__cwriter_declare(w, "n", AFF_F32, 1, 4, &i[1], err));
    OK(aff__cwriter_declare(w, "w", AFF_FP8, 128, 128, &i[2], err));
    OK(aff__cwriter_layer(w, 2, AFF_Q2P875Q4, 64, 64, err));
    if (prov) OK(aff__cwriter_provenance(w, prov, strlen(prov), err));
    OK(aff__cwriter_begin(w, err));
    assert_int_equal(aff__cwriter_layer_layout(w, 0)->stride, sizeof record);
    for (uint32_t e = 2; e-- > 0;) {
        fill(record, sizeof record, 10 + e);
        OK(aff__cwriter_expert(w, 0, e, record, err));
    }
    OK(aff__cwriter_tensor(w, i[2], mat, sizeof mat, &scale, 1, err));
    OK(aff__cwriter_tensor(w, i[1], vec, sizeof vec, NULL, 0, err));
    OK(aff__cwriter_tensor(w, i[0], book, sizeof book, NULL, 0, err));
    OK(aff__cwriter_finish(w, err));
    return AFF_OK;
}

static const uint8_t worked_header[128] = {
    0x41, 0x46, 0x46, 0x49, 0x4e, 0x49, 0x54, 0x59, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xc0, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x17, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xd8, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x05, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x62, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x48, 0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x20, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x40, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x38, 0x04, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x40,
    0x20, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};

static void put64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(v >> 8 * i);
}

/* A matrix descriptor as spec container 2.2 has it. */
static void descriptor(uint8_t *p, uint64_t rows, uint64_t cols, uint64_t quant, uint64_t d, uint64_t dn, uint64_t s,
                       uint64_t sn, uint64_t r, uint64_t rn)
{
    const uint64_t v[9] = {rows, cols, quant, d, dn, s, sn, r, rn};
    for (int i = 0; i < 9; i++) put64(p + 8 * i, v[i]);
}

static void worked_file(void **state)
{
    size_t n;
    uint8_t *want = calloc(1, 2113536);
    write_worked(true, NULL);
    uint8_t *got = (uint8_t *)slurp(&n);
    assert_int_equal(n, 2113536);
    assert_memory_equal(got, worked_header, sizeof worked_header);
    /* The whole file, put together from the spec's figures alone. */
    memcpy(want, worked_header, sizeof worked_header);
    memcpy(want + 192, "{\"num_hidden_layers\":1}", 23);
    memcpy(want + 216, "__codebook", 10);
    descriptor(want + 216 + 128, 1, 2048, 0, 0, 8192, 8192, 0, 8192, 0);
    memcpy(want + 424, "n", 1);
    descriptor(want + 424 + 128, 1, 4, 0, 0, 16, 256, 0, 256, 0);
    put64(want + 424 + 200, 8192);
    memcpy(want + 632, "w", 1);
    descriptor(want + 632 + 128, 128, 128, 3, 0, 16384, 16384, 1, 16640, 0);
    put64(want + 632 + 200, 8448);
    put64(want + 840, 2ull << 32); /* layer 0, 2 experts */
    put64(want + 856, 8192);
    descriptor(want + 840 + 24, 64, 64, 33, 0, 1280, 3840, 192, 4608, 128);
    descriptor(want + 840 + 96, 64, 64, 33, 1280, 1280, 4096, 192, 4864, 128);
    descriptor(want + 840 + 168, 64, 64, 33, 2560, 1280, 4352, 192, 5120, 128);
    valid_codebook(want + 1280);
    fill(want + 1280 + 8192, 16, 1);
    fill(want + 1280 + 8448, 16384, 2);
    want[1280 + 8448 + 16384] = 127;
    fill(want + 2097152, 8192, 10);
    fill(want + 2097152 + 8192, 8192, 11);
    assert_memory_equal(got, want, 2113536);
    free(got);
    free(want);
    aff_container *c;
    OK(aff__container_open(&c, path, err));
    assert_false(aff__container_has_hashes(c));
    REFUSED(aff__container_verify(c, NULL, NULL, err), "no hashes");
    aff__container_close(c);
}

static void round_trip(void **state)
{
    static const char prov[] = "{\"tool\":\"test\"}";
    const char *text;
    size_t n;
    aff_container *c;
    write_worked(false, prov);
    OK(aff__container_open(&c, path, err));
    OK(aff__container_verify(c, NULL, NULL, err));
    assert_string_equal(aff__container_path(c), path);
    aff__container_meta(c, &text, &n);
    assert_int_equal(n, 23);
    assert_memory_equal(text, "{\"num_hidden_layers\":1}", n);
    aff__container_provenance(c, &text, &n);
    assert_int_equal(n, strlen(prov));
    assert_memory_equal(text, prov, n);
    /* provenance behind the pool, the table at the next multiple of 8: 48 bytes and 8 for each of 3 blobs and 2 records
     */
    assert_int_equal(aff__container_size(c), 2113536 + 16 + 48 + 8 * 5);
    assert_int_equal(aff__container_tensors(c), 3);
    assert_int_equal(aff__container_layers(c), 1);
    const aff_ctensor *t = aff__container_find(c, "w");
    assert_non_null(t);
    assert_ptr_equal(t, aff__container_tensor(c, 2));
    assert_int_equal(t->m.rows, 128);
    assert_int_equal(t->m.quant, AFF_FP8);
    assert_int_equal(t->blob[t->m.data_off + 1000], pattern(2, 1000));
    assert_int_equal(t->blob[t->m.scale_off], 127);
    assert_null(aff__container_find(c, "absent"));
    assert_null(aff__container_tensor(c, 3));
    assert_null(aff__container_layer(c, 1));
    assert_null(aff__container_profile(c));
    assert_int_equal(aff__container_expert_offset(c, 0, 1), 2097152 + 8192);
    assert_int_equal(aff__container_expert(c, 0, 1)[4097], pattern(11, 4097));
    aff__container_close(c);
}

/* ---- predicted sizes of the real models (spec container 1, 4.1, 5) ---- */

static void declare(aff_cwriter *w, const char *prefix, const char *leaf, aff_dtype t, uint64_t rows, uint64_t cols)
{
    char name[128];
    snprintf(name, sizeof name, "%s%s", prefix, leaf);
    OK(aff__cwriter_declare(w, name, t, rows, cols, NULL, err));
}

static void declare_block(aff_cwriter *w, const char *p, bool hashed, int ratio)
{
    declare(w, p, "attn_norm", AFF_F32, 1, 4096);
    declare(w, p, "ffn_norm", AFF_F32, 1, 4096);
    declare(w, p, "attn_sinks", AFF_F32, 1, 64);
    declare(w, p, "attn_q_a", AFF_FP8, 1024, 4096);
    declare(w, p, "attn_q_b", AFF_FP8, 32768, 1024);
    declare(w, p, "attn_kv", AFF_FP8, 512, 4096);
    declare(w, p, "attn_out_a", AFF_FP8, 8192, 4096);
    declare(w, p, "attn_out_b", AFF_FP8, 4096, 8192);
    declare(w, p, "attn_q_norm", AFF_F32, 1, 1024);
    declare(w, p, "attn_kv_norm", AFF_F32, 1, 512);
    declare(w, p, "ffn_gate_inp", AFF_BF16, 256, 4096);
    if (hashed)
        declare(w, p, "ffn_gate_hash", AFF_F32, 129280, 6);
    else
        declare(w, p, "ffn_gate_bias", AFF_F32, 1, 256);
    declare(w, p, "shexp_gate", AFF_FP8, 2048, 4096);
    declare(w, p, "shexp_up", AFF_FP8, 2048, 4096);
    declare(w, p, "shexp_down", AFF_FP8, 4096, 2048);
    for (int i = 0; i < 2; i++) {
        declare(w, p, i ? "hc_ffn_fn" : "hc_attn_fn", AFF_BF16, 24, 16384);
        declare(w, p, i ? "hc_ffn_base" : "hc_attn_base", AFF_F32, 1, 24);
        declare(w, p, i ? "hc_ffn_scale" : "hc_attn_scale", AFF_F32, 1, 3);
    }
    if (ratio == 0) return;
    uint64_t width = ratio == 4 ? 1024 : 512;
    declare(w, p, "comp_wkv", AFF_BF16, width, 4096);
    declare(w, p, "comp_wgate", AFF_BF16, width, 4096);
    declare(w, p, "comp_ape", AFF_F32, (uint64_t)ratio, width);
    declare(w, p, "comp_norm", AFF_F32, 1, 512);
    if (ratio != 4) return;
    declare(w, p, "idx_wq_b", AFF_FP8, 8192, 1024);
    declare(w, p, "idx_proj", AFF_BF16, 64, 4096);
    declare(w, p, "idx_comp_wkv", AFF_BF16, 256, 4096);
    declare(w, p, "idx_comp_wgate", AFF_BF16, 256, 4096);
    declare(w, p, "idx_comp_ape", AFF_F32, 4, 256);
    declare(w, p, "idx_comp_norm", AFF_F32, 1, 128);
}

static void predicted_sizes(void **state)
{
    aff_cwriter *w;
    char p[32], meta[2048] = {0};
    memset(meta, ' ', sizeof meta);
    OK(aff__cwriter_create(&w, path, true, err));
    OK(aff__cwriter_meta(w, meta, sizeof meta, err));
    declare(w, "", "__codebook", AFF_F32, 1, 2048);
    declare(w, "", "token_embd", AFF_BF16, 129280, 4096);
    declare(w, "", "output", AFF_BF16, 129280, 4096);
    declare(w, "", "output_norm", AFF_F32, 1, 4096);
    declare(w, "", "hc_head_fn", AFF_BF16, 4, 16384);
    declare(w, "", "hc_head_base", AFF_F32, 1, 4);
    declare(w, "", "hc_head_scale", AFF_F32, 1, 1);
    for (int l = 0; l < 43; l++) {
        snprintf(p, sizeof p, "blk.%d.", l);
        declare_block(w, p, l < 3, l < 2 ? 0 : l % 2 ? 128 : 4);
        OK(aff__cwriter_layer(w, 256, AFF_Q2P875Q4, 2048, 4096, err));
    }
    uint64_t last;
    OK(aff__cwriter_declare(w, "the_1201st", AFF_F32, 1, 1, &last, err));
    assert_int_equal(last, 1200);
    OK(aff__cwriter_layout(w, err));
    /* the extra tensor disappears in the alignment of the pool */
    assert_true(aff__cwriter_file_size(w) == 108506644480u);
    assert_true(aff__cwriter_layer_layout(w, 42)->base_off == 42 * 2319450112ull);
    aff__cwriter_abort(w);

    OK(aff__cwriter_create(&w, path, true, err));
    OK(aff__cwriter_meta(w, meta, sizeof meta, err));
    declare(w, "", "__codebook", AFF_F32, 1, 2048);
    declare(w, "", "mtp_main_proj", AFF_FP8, 4096, 4096 * 3);
    declare(w, "", "mtp_main_norm", AFF_F32, 1, 4096);
    declare(w, "", "mtp_norm", AFF_F32, 1, 4096);
    declare(w, "", "mtp_hc_head_fn", AFF_BF16, 4, 16384);
    declare(w, "", "mtp_hc_head_base", AFF_F32, 1, 4);
    declare(w, "", "mtp_hc_head_scale", AFF_F32, 1, 1);
    declare(w, "", "mtp_markov_w1", AFF_BF16, 129280, 256);
    declare(w, "", "mtp_markov_w2", AFF_BF16, 129280, 256);
    declare(w, "", "mtp_confidence", AFF_BF16, 1, 4096 + 256);
    for (int s = 0; s < 3; s++) {
        snprintf(p, sizeof p, "mtp.%d.", s);
        declare_block(w, p, false, 0);
        OK(aff__cwriter_layer(w, 256, AFF_Q2P875Q4, 2048, 4096, err));
    }
    OK(aff__cwriter_declare(w, "the_74th", AFF_F32, 1, 1, &last, err));
    assert_int_equal(last, 73);
    OK(aff__cwriter_layout(w, err));
    assert_true(aff__cwriter_file_size(w) == 7549747200u);
    aff__cwriter_abort(w);
}

static void check_record(aff_dtype t, uint64_t inter, uint64_t hidden, const uint64_t off[9], uint64_t stride)
{
    aff_clayer y = {0};
    assert_true(aff__layout_record(&y, t, inter, hidden));
    const uint64_t got[9] = {y.gate.data_off,  y.up.data_off,     y.down.data_off, y.gate.scale_off, y.up.scale_off,
                             y.down.scale_off, y.gate.rscale_off, y.up.rscale_off, y.down.rscale_off};
    for (int i = 0; i < 9; i++) assert_true(got[i] == off[i]);
    assert_true(y.stride == stride);
}

static void record_layouts(void **state)
{
    static const uint64_t v4[9] = {0, 2621440, 5242880, 7864320, 8257536, 8650752, 9043968, 9048064, 9052160};
    static const uint64_t v41[9] = {0, 3686400, 7372800, 11059200, 11612160, 12165120, 12718080, 12722688, 12727296};
    static const uint64_t fp4[9] = {0, 4194304, 8388608, 12582912, 12845056, 13107200, 13369344, 13369344, 13369344};
    check_record(AFF_Q2P875Q4, 2048, 4096, v4, 9060352);
    check_record(AFF_Q2P875G, 2048, 4096, v4, 9060352);
    check_record(AFF_Q2P875Q4, 2304, 5120, v41, 12738560);
    check_record(AFF_MXFP4, 2048, 4096, fp4, 13369344);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(worked_file), cmocka_unit_test(round_trip),
                                       cmocka_unit_test(predicted_sizes), cmocka_unit_test(record_layouts)};
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
