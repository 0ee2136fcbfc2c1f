/* The container: layout golden values of spec container 4.1, 5 and 7, round trips, damage, hostile headers, the
 * writer's rules. */
#define _GNU_SOURCE
#include "format/sample.h"
#include "base/mem.h"
#include "format/container_disk.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

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

/* ---- damage ---- */

static aff_status open_bytes(const uint8_t *p, size_t n, aff_error *err)
{
    aff_container *c;
    aff_status s = aff__container_open_memory(&c, p, n, "mem", err);
    aff__container_close(c);
    return s;
}

static aff_status open_and_verify(const uint8_t *p, size_t n, aff_error *err)
{
    aff_container *c;
    aff_status s = aff__container_open_memory(&c, p, n, "mem", err);
    if (s == AFF_OK) s = aff__container_verify(c, NULL, NULL, err);
    aff__container_close(c);
    return s;
}

static void tiny_contents(void **state)
{
    size_t n;
    uint8_t *p = tiny(&n);
    aff_container *c;
    OK(aff__container_open(&c, path, err));
    OK(aff__container_verify(c, NULL, NULL, err));
    const float *profile = aff__container_profile(c);
    assert_true(profile && profile[0] == 0.25f && profile[1] == 0.75f);
    /* hash table, spelled out from docs/container.md */
    const uint8_t *t = p + 2097152 + 8192 + 8;
    assert_int_equal(n, 2097152 + 8192 + 8 + 48 + 4 * 8);
    assert_memory_equal(t, "AFFHASH1\1\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0", 32);
    assert_memory_equal(p + 2097152 + 8192, "{\"a\":1}", 8);
    XXH3_state_t s;
    XXH3_64bits_reset(&s);
    uint64_t front = 1024; /* 192 + 2, 8-aligned; 2 x 208; 240; 8: 856, 256-aligned */
    XXH3_64bits_update(&s, p, front);
    XXH3_64bits_update(&s, "{\"a\":1}", 7);
    const uint64_t want[6] = {XXH3_64bits_digest(&s),
                              XXH3_64bits(p + front, 256),
                              XXH3_64bits(p + front + 256, 1280),
                              XXH3_64bits(p + TINY_POOL, 4096),
                              XXH3_64bits(p + TINY_POOL + 4096, 4096),
                              XXH3_64bits(t, 72)};
    for (int k = 0; k < 6; k++) {
        uint8_t b[8];
        put64(b, want[k]);
        assert_memory_equal(t + 32 + 8 * k, b, 8);
    }
    /* the mark of the additions, and the fields it vouches for */
    assert_memory_equal(p + 160, "AFF+HASH", 8);
    aff__container_close(c);
    free(p);
}

/* Cut anywhere, the file is refused: as it is, and with a header that claims the shorter length. */
static void truncations(void **state)
{
    size_t n;
    uint8_t *p = tiny(&n);
    for (int honest = 0; honest < 2; honest++) {
        for (size_t cut = 0; cut<n; cut += cut> 4096 && cut < TINY_POOL - 64 ? 8191 : 1) {
            uint8_t *q = malloc(cut ? cut : 1); /* exact, so that a read past the end shows */
            memcpy(q, p, cut);
            if (!honest && cut >= 120) put64(q + 112, cut);
            aff_error e = {0};
            if (open_bytes(q, cut, &e) == AFF_OK) fail_msg("cut at %zu: accepted", cut);
            free(q);
        }
    }
    free(p);
}

static void flip(uint8_t *p, size_t n, size_t byte, int bit)
{
    aff_error e = {0};
    p[byte] ^= (uint8_t)(1 << bit);
    if (open_and_verify(p, n, &e) == AFF_OK) fail_msg("byte %zu bit %d flipped: not noticed", byte, bit);
    p[byte] ^= (uint8_t)(1 << bit);
}

/* Every byte is covered by a check or a hash. */
static void bit_flips(void **state)
{
    size_t n, data_end = 1024 + TINY_BLOBS, tail = TINY_POOL + 8192;
    uint8_t *p = tiny(&n);
    aff_error e = {0};
    assert_int_equal(open_and_verify(p, n, &e), AFF_OK);
    for (size_t i = 0; i < 1024; i++)
        for (int b = 0; b < 8; b++) flip(p, n, i, b);
    for (size_t i = tail; i < n; i++)
        for (int b = 0; b < 8; b++) flip(p, n, i, b);
    for (size_t i = 1024; i < data_end; i++) flip(p, n, i, (int)(i % 8));
    for (size_t i = data_end; i < TINY_POOL; i += i == data_end ? 1 : 65521) flip(p, n, i, (int)(i % 8));
    flip(p, n, TINY_POOL - 1, 3);
    for (size_t i = TINY_POOL; i < tail; i++) flip(p, n, i, (int)(i % 8));
    /* what was hit is named */
    p[TINY_POOL + 5000] ^= 1;
    REFUSED(open_and_verify(p, n, err), "layer 0 expert 1");
    p[TINY_POOL + 5000] ^= 1;
    p[1024 + 256 + 77] ^= 1;
    REFUSED(open_and_verify(p, n, err), "tensor 'm'");
    free(p);
}

/* ---- hostile fields ---- */

typedef struct patch {
    size_t off;
    int bytes;
    uint64_t value;
    const char *message;
} patch;

static void refuse_patched(const patch *t, size_t count)
{
    size_t n;
    uint8_t *p = tiny(&n);
    for (size_t i = 0; i < count; i++) {
        uint8_t keep[8];
        memcpy(keep, p + t[i].off, 8);
        for (int b = 0; b < t[i].bytes; b++) p[t[i].off + (size_t)b] = (uint8_t)(t[i].value >> 8 * b);
        REFUSED(open_bytes(p, n, err), t[i].message);
        memcpy(p + t[i].off, keep, 8);
    }
    aff_error e = {0};
    assert_int_equal(open_and_verify(p, n, &e), AFF_OK);
    free(p);
}

enum { TENSORS = 200, LAYER = TENSORS + 2 * 208, GATE = LAYER + 24, UP = GATE + 72, DOWN = UP + 72 };
#define HUGE_ (UINT64_MAX - 255)

static void hostile_header(void **state)
{
    static const patch t[] = {
        {0, 1, 'a', "does not begin with 'AFFINITY'"},
        {8, 4, 2, "container version 2, this program reads version 1"},
        {112, 8, 2105433, "truncated, or one of several parts"},
        {16, 8, UINT64_MAX, "metadata at 18446744073709551615"},
        {24, 8, UINT64_MAX, "metadata"},
        {32, 8, HUGE_, "tensor directory"},
        {32, 8, 201, "expected a multiple of 8"},
        {40, 8, UINT64_MAX / 208 + 2, "tensor directory"},
        {40, 8, UINT64_MAX, "tensor directory"},
        {48, 8, HUGE_, "tensor data"},
        {48, 8, 1025, "tensor data at 1025: expected a multiple of 256"},
        {56, 8, UINT64_MAX, "tensor data"},
        {56, 8, 1024, "end past the"},
        {64, 8, HUGE_, "layer directory"},
        {72, 8, 0, "0 layers"},
        {72, 8, UINT64_MAX / 240 + 1, "layer directory"},
        {72, 8, 2, "layer 1"},
        {80, 8, 4096, "expert pool at 4096: expected a multiple of 2097152"},
        {80, 8, 2097152ull << 40, "expert pool"},
        {88, 8, UINT64_MAX, "expert pool"},
        {88, 8, 4096, "end past the expert pool of 4096 bytes"},
        {96, 8, HUGE_, "profile"},
        {104, 8, 12, "profile of 12 bytes: expected 4 for each of 2 experts"},
        {104, 8, UINT64_MAX - 3, "profile"},
        {LAYER + 240, 4, 0x7F800000, "profile value 0 is not finite"},
    };
    refuse_patched(t, sizeof t / sizeof *t);
}

static void hostile_layers(void **state)
{
    static const patch t[] = {
        {LAYER, 4, 1, "entry 0 of the layer directory says layer 1"},
        {LAYER + 4, 4, 0, "no experts"},
        {LAYER + 4, 4, UINT32_MAX, "end past the expert pool"},
        {LAYER + 8, 8, UINT64_MAX - 4095, "end past the expert pool"},
        {LAYER + 8, 8, 256, "expected multiples of 4096"},
        {LAYER + 16, 8, 0, "never finished"},
        {LAYER + 16, 8, 1ull << 63, "end past the expert pool"},
        {LAYER + 16, 8, 4000, "expected multiples of 4096"},
        {GATE, 8, 0, "0 x 32 does not suit dtype mxfp4"},
        {GATE, 8, 1ull << 62, "does not suit"},
        {GATE + 8, 8, 48, "columns of 32"},
        {GATE + 8, 8, 64, "expected 1024 bytes for 32 x 64 mxfp4, got 512"},
        {GATE + 16, 4, 99, "unknown dtype code 99"},
        {GATE + 16, 4, 33, "does not suit dtype q2p875q4"},
        {GATE + 24, 8, 255, "data at 255: expected a multiple of 256"},
        {GATE + 24, 8, HUGE_, "end past the 4096 bytes"},
        {UP + 24, 8, 256, "overlap"},
        {DOWN + 40, 8, 0, "overlap"},
        {GATE + 56, 8, HUGE_, "row scales at 18446744073709551360"}, /* empty, and still */
        {GATE + 56, 8, 4352, "end past the 4096 bytes"},
        {DOWN + 32, 8, 511, "expected 512 bytes"},
        {DOWN + 48, 8, 0, "scales: expected 32 bytes"},
        {DOWN + 64, 8, 1, "row scales: expected 0 bytes"},
        {DOWN + 16, 4, 41, "expected 1024 bytes for 32 x 32 fp8_e4m3_32"},
    };
    refuse_patched(t, sizeof t / sizeof *t);
}

static void hostile_tensors(void **state)
{
    static const patch t[] = {
        {TENSORS, 1, 0, "its name is empty"},
        {TENSORS, 1, '\n', "its name has byte 0x0a"},
        {TENSORS, 1, 0xC3, "its name has byte 0xc3"},
        {TENSORS, 1, 'm', "tensor 'm' is in the directory twice"},
        {TENSORS + 128, 8, UINT64_MAX, "does not suit"},
        {TENSORS + 128 + 16, 4, 5, "tensor 'v': unknown dtype code 5"},
        {TENSORS + 128 + 32, 8, 16, "expected 12 bytes for 1 x 3 f32, got 16"},
        {TENSORS + 128 + 40, 8, HUGE_, "scales at 18446744073709551360"},
        {TENSORS + 200, 8, HUGE_, "tensor 'v' at"},
        {TENSORS + 200, 8, 1, "expected a multiple of 256"},
        {TENSORS + 208 + 200, 8, 512, "end past the"},
        {TENSORS + 208 + 128 + 40, 8, 512, "overlap another plane"},
        {TENSORS + 208 + 128, 8, 33, "rows a multiple of 32"},
    };
    refuse_patched(t, sizeof t / sizeof *t);
    size_t n;
    uint8_t *p = tiny(&n);
    memset(p + TENSORS, 'v', 128);
    REFUSED(open_bytes(p, n, err), "not terminated within 128 bytes");
    free(p);
}

static void hostile_additions(void **state)
{
    static const patch t[] = {
        {120, 8, 2097152, "expected it behind the expert pool"},
        {120, 8, UINT64_MAX, "provenance"},
        {128, 8, 0, "expected it behind the expert pool"},
        {136, 8, UINT64_MAX - 7, "hash table"},
        {136, 8, 2097152, "hash table ends at"},
        {144, 8, 72, "hash table of 72 bytes"},
        {144, 8, 0, "hash table of 0 bytes"},
        {152, 8, 1ull << 63, "needs features 0x8000000000000000"},
        {160, 1, 'B', "bytes follow the expert pool"},
        {2097152 + 8192 + 8, 1, 'B', "damaged hash table"},
        {2097152 + 8192 + 16, 4, 2, "damaged hash table"},
        {2097152 + 8192 + 24, 8, 3, "damaged hash table"},
    };
    refuse_patched(t, sizeof t / sizeof *t);
}

/* Reserved bytes of older files may hold anything. */
static void older_files(void **state)
{
    size_t n;
    write_worked(true, NULL);
    uint8_t *p = (uint8_t *)slurp(&n);
    fill(p + 120, 72, 99);
    OK(open_bytes(p, n, err));
    for (int i = 120; i < 192; i++) p[i] = 0xFF;
    OK(open_bytes(p, n, err));
    memcpy(p + 160, "AFF+HASX", 8);
    OK(open_bytes(p, n, err));
    p[12] |= 0xFE; /* unknown flags are ignored */
    OK(open_bytes(p, n, err));
    /* codebook: exponent fields 0 and 8, then the pair format, whose 256 values are floats */
    uint8_t *book = p + 1280;
    book[5] = 0x87;
    REFUSED(open_bytes(p, n, err), "byte 5 is 0x87: expected an E4M3 exponent field of 1 to 7, got 0");
    book[5] = 0x40;
    REFUSED(open_bytes(p, n, err), "got 8");
    for (size_t m = 0; m < 3; m++) p[840 + 24 + 72 * m + 16] = 32;
    REFUSED(open_bytes(p, n, err), "expected 1024 bytes for experts of type q2p875, got 8192");
    put64(p + 216 + 128 + 8, 256);
    put64(p + 216 + 128 + 32, 1024);
    memset(book, 0, 1024);
    OK(open_bytes(p, n, err));
    book[7] = 0x7F, book[6] = 0x80;
    REFUSED(open_bytes(p, n, err), "value 1 is not finite");
    memcpy(p + 216, "__codebooc", 10);
    REFUSED(open_bytes(p, n, err), "'__codebook' is missing");
    free(p);
}

/* ---- the writer's rules ---- */

static void declarations_refused(void **state)
{
    aff_cwriter *w;
    char name[160];
    memset(name, 'x', sizeof name);
    name[128] = 0;
    OK(aff__cwriter_create(&w, path, true, err));
    REFUSED(aff__cwriter_layout(w, err), "at least one layer");
    REFUSED(aff__cwriter_declare(w, name, AFF_F32, 1, 1, NULL, err), "1 to 127 characters");
    name[127] = 0;
    OK(aff__cwriter_declare(w, name, AFF_F32, 1, 1, NULL, err));
    REFUSED(aff__cwriter_declare(w, name, AFF_F32, 1, 1, NULL, err), "declared twice");
    REFUSED(aff__cwriter_declare(w, "", AFF_F32, 1, 1, NULL, err), "1 to 127");
    REFUSED(aff__cwriter_declare(w, "a b", AFF_F32, 1, 1, NULL, err), "printable");
    REFUSED(aff__cwriter_declare(w, "a", AFF_FP8, 100, 128, NULL, err), "100 x 128 does not suit dtype fp8_e4m3");
    REFUSED(aff__cwriter_declare(w, "a", AFF_F32, 0, 128, NULL, err), "does not suit");
    REFUSED(aff__cwriter_declare(w, "a", AFF_F32, UINT64_MAX, 2, NULL, err), "does not suit");
    REFUSED(aff__cwriter_declare(w, "a", (aff_dtype)7, 1, 1, NULL, err), "unknown dtype code 7");
    REFUSED(aff__cwriter_declare(w, "a", AFF_Q8_0, 32, 32, NULL, err), "q8_0 is not written");
    REFUSED(aff__cwriter_declare(w, "a", AFF_Q2P875Q4, 64, 64, NULL, err), "for experts only");
    REFUSED(aff__cwriter_declare(w, "a", AFF_FP8_32, 32, 32, NULL, err), "not written in the compatible form");
    REFUSED(aff__cwriter_layer(w, 2, AFF_MXFP4, 64, 64, err), "not written in the compatible form");
    REFUSED(aff__cwriter_layer(w, 2, AFF_Q2P875, 64, 64, err), "not written");
    REFUSED(aff__cwriter_layer(w, 0, AFF_Q2P875Q4, 64, 64, err), "no experts");
    REFUSED(aff__cwriter_layer(w, 2, AFF_Q2P875Q4, 64, 96, err), "do not suit");
    REFUSED(aff__cwriter_provenance(w, "{}", 2, err), "compatible form");
    OK(aff__cwriter_layer(w, 2, AFF_Q2P875Q4, 64, 64, err));
    REFUSED(aff__cwriter_layer(w, 3, AFF_Q2P875Q4, 64, 64, err), "same number");
    REFUSED(aff__cwriter_layout(w, err), "need a tensor '__codebook'");
    OK(aff__cwriter_declare(w, "__codebook", AFF_F32, 1, 2048, NULL, err));
    OK(aff__cwriter_begin(w, err));
    REFUSED(aff__cwriter_begin(w, err), "begun twice");
    REFUSED(aff__cwriter_declare(w, "late", AFF_F32, 1, 1, NULL, err), "after the layout");
    uint8_t book[8192] = {0};
    REFUSED(aff__cwriter_tensor(w, 1, book, sizeof book, NULL, 0, err), "exponent field");
    aff__cwriter_abort(w);
}

static int entries(void)
{
    char cmd[128], text[16] = "";
    snprintf(cmd, sizeof cmd, "ls -A %s | wc -l", dir);
    FILE *f = popen(cmd, "r");
    assert_non_null(f);
    assert_non_null(fgets(text, sizeof text, f));
    pclose(f);
    return atoi(text);
}

static void payload_refused(void **state)
{
    uint64_t i[2];
    uint8_t record[4096] = {0}, mat[1024] = {0}, scale = 1;
    float v[3] = {0}, bad[2] = {0, 1.0f / 0.0f};
    unlink(path);
    aff_cwriter *w = tiny_begun(i);
    REFUSED(aff__cwriter_tensor(w, 9, v, 12, NULL, 0, err), "tensor 9 of 2");
    REFUSED(aff__cwriter_tensor(w, i[0], v, 8, NULL, 0, err), "expected 12 bytes and 0 of scales, got 8 and 0");
    REFUSED(aff__cwriter_tensor(w, i[1], mat, 1024, NULL, 0, err), "expected 1024 bytes and 1 of scales");
    REFUSED(aff__cwriter_expert(w, 0, 2, record, err), "no such expert");
    REFUSED(aff__cwriter_expert(w, 1, 0, record, err), "no such expert");
    REFUSED(aff__cwriter_profile(w, v, 3, err), "expected one for each of 2 experts");
    REFUSED(aff__cwriter_profile(w, bad, 2, err), "value 1 is not finite");
    OK(aff__cwriter_expert(w, 0, 1, record, err));
    REFUSED(aff__cwriter_expert(w, 0, 1, record, err), "layer 0 expert 1 is written twice");
    OK(aff__cwriter_tensor(w, i[1], mat, 1024, &scale, 1, err));
    REFUSED(aff__cwriter_tensor(w, i[1], mat, 1024, &scale, 1, err), "tensor 'm' is written twice");
    REFUSED(aff__cwriter_finish(w, err), "tensor 'v' was never written");
    assert_int_equal(entries(), 0);
    w = tiny_begun(i);
    OK(aff__cwriter_tensor(w, i[1], mat, 1024, &scale, 1, err));
    OK(aff__cwriter_tensor(w, i[0], v, 12, NULL, 0, err));
    OK(aff__cwriter_expert(w, 0, 1, record, err));
    REFUSED(aff__cwriter_finish(w, err), "layer 0 expert 0 was never written (1 experts are missing)");
    assert_int_equal(entries(), 0);
    OK(aff__cwriter_create(&w, path, false, err));
    REFUSED(aff__cwriter_expert(w, 0, 0, record, err), "before begin");
    REFUSED(aff__cwriter_finish(w, err), "before begin");
    assert_int_equal(entries(), 0);
}

/* What a crash before the end leaves has the right size and magic and is refused all the same. */
static void unfinished(void **state)
{
    uint64_t i[2];
    char cmd[256];
    aff_container *c;
    aff_cwriter *w = tiny_begun(i);
    tiny_fill(w, i);
    snprintf(cmd, sizeof cmd, "cp %s.tmp.?????? %s/crashed", path, dir);
    assert_int_equal(system(cmd), 0);
    aff__cwriter_abort(w);
    snprintf(cmd, sizeof cmd, "%s/crashed", dir);
    REFUSED(aff__container_open(&c, cmd, err), "the file was never finished");
    assert_null(c);
    unlink(cmd);
}

static void one_writer_at_a_time(void **state)
{
    aff_cwriter *w, *other;
    char lock[128];
    struct stat st;
    snprintf(lock, sizeof lock, "%s.lock", path);
    OK(aff__cwriter_create(&w, path, false, err));
    REFUSED(aff__cwriter_create(&other, path, false, err), "another program is writing this file");
    assert_null(other);
    assert_int_equal(stat(lock, &st), 0); /* the refused one did not remove it */
    aff__cwriter_abort(w);
    assert_int_equal(stat(lock, &st), -1);
    /* a lock file that nobody holds is no obstacle, one held by another program is */
    int fd = open(lock, O_RDWR | O_CREAT, 0600);
    OK(aff__cwriter_create(&w, path, false, err));
    aff__cwriter_abort(w);
    close(fd);
    fd = open(lock, O_RDWR | O_CREAT, 0600);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    REFUSED(aff__cwriter_create(&w, path, false, err), "another program");
    assert_int_equal(stat(lock, &st), 0);
    close(fd);
    unlink(lock);
    REFUSED(aff__cwriter_create(&w, dir, false, err), "is a folder");
    REFUSED(aff__cwriter_create(&w, "/nonexistent/x.aff", false, err), "/nonexistent/x.aff.lock: cannot create");
}

/* A limit on file size stands for a full disk: it fails the sizing, or a write in the middle. */
static void disk_full(void **state)
{
    struct rlimit old, small;
    uint64_t i[2];
    uint8_t record[4096] = {0};
    aff_cwriter *w;
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    unlink(path);
    small.rlim_cur = 1 << 20;
    OK(aff__cwriter_create(&w, path, false, err));
    OK(aff__cwriter_layer(w, 2, AFF_MXFP4, 32, 32, err));
    setrlimit(RLIMIT_FSIZE, &small);
    REFUSED(aff__cwriter_begin(w, err), "2105408 bytes");
    aff__cwriter_abort(w);
    assert_int_equal(entries(), 0);
    setrlimit(RLIMIT_FSIZE, &old);
    w = tiny_begun(i);
    small.rlim_cur = TINY_POOL + 4096 + 1000; /* the second record is cut short */
    setrlimit(RLIMIT_FSIZE, &small);
    OK(aff__cwriter_expert(w, 0, 0, record, err));
    REFUSED(aff__cwriter_expert(w, 0, 1, record, err), "cannot write at byte 2102248");
    setrlimit(RLIMIT_FSIZE, &old);
    aff__cwriter_abort(w);
    assert_int_equal(entries(), 0);
    /* the same failure while the additions are written, behind everything else */
    w = tiny_begun(i);
    tiny_fill(w, i);
    small.rlim_cur = TINY_POOL + 8192 + 3;
    setrlimit(RLIMIT_FSIZE, &small);
    REFUSED(aff__cwriter_finish(w, err), "cannot write");
    setrlimit(RLIMIT_FSIZE, &old);
    assert_int_equal(entries(), 0);
}

/* An old file of that name survives until the new one is whole. */
static void replaces_at_the_end(void **state)
{
    uint64_t i[2];
    size_t n;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    assert_int_equal(write(fd, "old", 3), 3);
    close(fd);
    aff_cwriter *w = tiny_begun(i);
    tiny_fill(w, i);
    char *old = slurp(&n);
    assert_int_equal(n, 3);
    free(old);
    OK(aff__cwriter_finish(w, err));
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, 2105432);
    assert_int_equal(st.st_mode & 0777, 0644);
}

/* ---- threads ---- */

typedef struct job {
    aff_cwriter *w;
    int written, refused;
} job;

/* Every thread tries every expert: each must be accepted from exactly one of them. */
static void *write_all(void *arg)
{
    job *j = arg;
    uint8_t record[4096];
    for (uint32_t l = 0; l < 4; l++)
        for (uint32_t e = 0; e < 16; e++) {
            fill(record, sizeof record, l * 16 + e);
            *(aff__cwriter_expert(j->w, l, e, record, NULL) == AFF_OK ? &j->written : &j->refused) += 1;
        }
    return NULL;
}

static void threads(void **state)
{
    job jobs[4] = {{0}};
    pthread_t t[4];
    aff_cwriter *w;
    aff_container *c;
    int written = 0, refused = 0;
    OK(aff__cwriter_create(&w, path, false, err));
    for (int l = 0; l < 4; l++) OK(aff__cwriter_layer(w, 16, AFF_MXFP4, 32, 32, err));
    OK(aff__cwriter_begin(w, err));
    for (int k = 0; k < 4; k++) {
        jobs[k].w = w;
        assert_int_equal(pthread_create(&t[k], NULL, write_all, &jobs[k]), 0);
    }
    for (int k = 0; k < 4; k++) {
        pthread_join(t[k], NULL);
        written += jobs[k].written;
        refused += jobs[k].refused;
    }
    assert_int_equal(written, 64);
    assert_int_equal(refused, 192);
    OK(aff__cwriter_finish(w, err));
    OK(aff__container_open(&c, path, err));
    OK(aff__container_verify(c, NULL, NULL, err));
    for (uint32_t l = 0; l < 4; l++)
        for (uint32_t e = 0; e < 16; e++)
            assert_int_equal(aff__container_expert(c, l, e)[4000], pattern(l * 16 + e, 4000));
    aff__container_close(c);
}

/* ---- memory ---- */

static aff_status write_tiny_or_fail(void)
{
    uint64_t i;
    float v = 1;
    uint8_t record[4096] = {0};
    aff_cwriter *w;
    AFF_TRY(aff__cwriter_create(&w, path, false, NULL));
    aff_status s = aff__cwriter_meta(w, "{}", 2, NULL);
    if (s == AFF_OK) s = aff__cwriter_declare(w, "v", AFF_F32, 1, 1, &i, NULL);
    if (s == AFF_OK) s = aff__cwriter_layer(w, 1, AFF_MXFP4, 32, 32, NULL);
    if (s == AFF_OK) s = aff__cwriter_begin(w, NULL);
    if (s == AFF_OK) s = aff__cwriter_tensor(w, i, &v, 4, NULL, 0, NULL);
    if (s == AFF_OK) s = aff__cwriter_expert(w, 0, 0, record, NULL);
    if (s == AFF_OK) s = aff__cwriter_profile(w, &v, 1, NULL);
    if (s == AFF_OK) return aff__cwriter_finish(w, NULL);
    aff__cwriter_abort(w);
    return s;
}

/* Every allocation may fail: an error, no leak, nothing left behind. */
static void out_of_memory(void **state)
{
    size_t n;
    aff_container *c;
    aff_status s = AFF_E_NOMEM;
    unlink(path);
    for (unsigned k = 1; s != AFF_OK; k++) {
        assert_in_range(k, 1, 100);
        assert_int_equal(entries(), 0);
        aff__alloc_fail_after(k);
        s = write_tiny_or_fail();
        aff__alloc_fail_after(0);
        assert_true(s == AFF_OK || s == AFF_E_NOMEM);
        if (s != AFF_OK) unlink(path); /* the last failures come after the rename */
    }
    uint8_t *p = (uint8_t *)slurp(&n);
    s = AFF_E_NOMEM;
    for (unsigned k = 1; s != AFF_OK; k++) {
        assert_in_range(k, 1, 100);
        aff__alloc_fail_after(k);
        s = aff__container_open_memory(&c, p, n, "mem", NULL);
        aff__alloc_fail_after(0);
        assert_true(s == AFF_OK || s == AFF_E_NOMEM);
    }
    aff__container_close(c);
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(worked_file),
                                       cmocka_unit_test(round_trip),
                                       cmocka_unit_test(predicted_sizes),
                                       cmocka_unit_test(record_layouts),
                                       cmocka_unit_test(tiny_contents),
                                       cmocka_unit_test(truncations),
                                       cmocka_unit_test(bit_flips),
                                       cmocka_unit_test(hostile_header),
                                       cmocka_unit_test(hostile_layers),
                                       cmocka_unit_test(hostile_tensors),
                                       cmocka_unit_test(hostile_additions),
                                       cmocka_unit_test(older_files),
                                       cmocka_unit_test(declarations_refused),
                                       cmocka_unit_test(payload_refused),
                                       cmocka_unit_test(unfinished),
                                       cmocka_unit_test(one_writer_at_a_time),
                                       cmocka_unit_test(disk_full),
                                       cmocka_unit_test(replaces_at_the_end),
                                       cmocka_unit_test(threads),
                                       cmocka_unit_test(out_of_memory)};
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
