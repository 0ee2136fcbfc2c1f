#include "quant/expert.h"
#include "quant/numbers.h"
#include <float.h>
#include <math.h>
#include <string.h>

enum { GROUP = 64, BLOCK = 16, CODE_BYTES = 20, FIELD_BYTES = 3, BLOCK_BYTES = 5 };

/* Where the bytes of (row, group of 64 columns) stand in the planes of a matrix. */
typedef struct places {
    uint64_t code_row, code_group, field_row, field_group;
} places;

static places places_of(const aff_matdesc *m)
{
    uint64_t groups = m->cols / GROUP;
    if (m->quant == AFF_Q2P875G) return (places){CODE_BYTES, m->rows * CODE_BYTES, FIELD_BYTES, m->rows * FIELD_BYTES};
    return (places){groups * CODE_BYTES, CODE_BYTES, groups * FIELD_BYTES, FIELD_BYTES};
}

uint64_t aff__group_codes_at(const aff_matdesc *m, uint64_t row, uint64_t group)
{
    places at = places_of(m);
    return m->data_off + row * at.code_row + group * at.code_group;
}

uint64_t aff__group_fields_at(const aff_matdesc *m, uint64_t row, uint64_t group)
{
    places at = places_of(m);
    return m->scale_off + row * at.field_row + group * at.field_group;
}

static uint64_t get_le(const uint8_t *p, int n)
{
    uint64_t v = 0;
    for (int i = 0; i < n; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

static void put_le(uint8_t *p, uint64_t v, int n)
{
    for (int i = 0; i < n; i++) p[i] = (uint8_t)(v >> (8 * i));
}

/* ---- MXFP4 ---- */

static void mxfp4_row(const uint8_t *codes, const uint8_t *scales, uint64_t cols, float *out)
{
    for (uint64_t c = 0; c < cols; c += 2) {
        float s = aff__e8m0_to_f32(scales[c / 32]);
        out[c] = aff__e2m1_table[codes[c / 2] & 15] * s;
        out[c + 1] = aff__e2m1_table[codes[c / 2] >> 4] * s;
    }
}

aff_status aff__mxfp4_check(const aff_mxfp4 *m, aff_error *err)
{
    for (uint64_t i = 0; i < m->rows * (m->cols / 32); i++) {
        if (m->scales[i] > 252)
            return aff__fail(err, AFF_E_FORMAT,
                             "scale byte %llu: expected at most 252, got %d: the weights would not be finite",
                             (unsigned long long)i, m->scales[i]);
    }
    return AFF_OK;
}

aff_status aff__mxfp4_decode(const aff_mxfp4 *m, float *out, aff_error *err)
{
    AFF_TRY(aff__mxfp4_check(m, err));
    for (uint64_t r = 0; r < m->rows; r++)
        mxfp4_row(m->codes + r * (m->cols / 2), m->scales + r * (m->cols / 32), m->cols, out + r * m->cols);
    return AFF_OK;
}

/* ---- encoding ---- */

static float abs_max(const float *x, uint64_t n)
{
    float m = 0;
    for (uint64_t i = 0; i < n; i++) m = fabsf(x[i]) > m ? fabsf(x[i]) : m;
    return m;
}

static int nearest_exponent(double ideal)
{
    int mid = 0;
    for (int e = 1; e < 8; e++)
        if (fabs((double)(1 << e) - ideal) < fabs((double)(1 << mid) - ideal)) mid = e;
    return mid;
}

/* weight: of the four quads, the mean of their columns' importance, or NULL.
 * Squared error of a block under one choice of variant (its grid), scale, sign and rotation; stops once it reaches
 * `limit`. The products only grow with the sum, so what is cut off could not have won. */
static double choice_error(const aff_cb_grid *g, const float *w, const float *weight, float s, int h, float bs,
                           double limit)
{
    float acc = 0;
    double err = 0;
    for (int i = 0; i < BLOCK; i += 4) {
        float t[4], d;
        for (int p = 0; p < 4; p++) t[p] = w[i + ((p + h) & 3)] * s;
        aff__cb_grid_nearest(g, t, &d);
        acc += weight ? d * weight[i / 4] : d;
        err = (double)acc * (double)bs * (double)bs;
        if (err >= limit) break;
    }
    return err;
}

/* The field (exponent, sign, rotation, variant) of the least error; the first of equals in the order of the loops. */
static uint32_t choose_field(const aff_cb_index *ix, const float *w, const float *weight, float rs)
{
    float bmax = abs_max(w, BLOCK);
    if (bmax == 0 || rs == 0) return 0;
    int mid = nearest_exponent((double)bmax / (double)rs);
    int from = mid > 0 ? mid - 1 : 0, to = mid < 7 ? mid + 1 : 7;
    uint32_t best = 0;
    double best_err = DBL_MAX;
    for (uint32_t v = 0; v < AFF_CB_VARIANTS; v++) {
        for (int e = from; e <= to; e++) {
            float bs = rs * (float)(1 << e), inv = 1.0f / bs;
            for (uint32_t g = 0; g < 4; g++) {
                double err = choice_error(&ix->grid[v], w, weight, g & 1 ? -inv : inv, g & 2 ? 2 : 0, bs, best_err);
                if (err < best_err) {
                    best_err = err;
                    best = (uint32_t)e | g << 3 | v << 5;
                }
            }
        }
    }
    return best;
}

/* Of each quad's columns: float32 sum in column order, divided by 4. */
static void quad_means(const float *col_weight, float mean[4])
{
    for (int q = 0; q < 4; q++) {
        const float *c = col_weight + 4 * q;
        mean[q] = (((c[0] + c[1]) + c[2]) + c[3]) / 4;
    }
}

/* Four 10-bit codes, the first lowest. Divides where the search multiplied: other programs' bytes depend on it. */
static uint64_t choose_codes(const aff_cb_index *ix, const float *w, float rs, uint32_t field)
{
    float bs = rs * (float)(1 << (field & 7));
    int h = field & 16 ? 2 : 0;
    uint64_t codes = 0;
    if (bs <= 0) return 0;
    if (field & 8) bs = -bs;
    for (int i = 0; i < 4; i++) {
        float t[4], d;
        for (int p = 0; p < 4; p++) t[p] = w[4 * i + ((p + h) & 3)] / bs;
        codes |= (uint64_t)aff__cb_grid_nearest(&ix->grid[field >> 5], t, &d) << (10 * i);
    }
    return codes;
}

void aff__expert_matrix_encode(const aff_cb_index *ix, const aff_matdesc *m, const float *w, const float *col_weight,
                               uint8_t *record)
{
    places at = places_of(m);
    for (uint64_t r = 0; r < m->rows; r++) {
        const float *row = w + r * m->cols;
        uint16_t scale = aff__f32_to_bf16(ldexpf(abs_max(row, m->cols), -7));
        float rs = aff__bf16_to_f32(scale);
        put_le(record + m->rscale_off + r * 2, scale, 2);
        for (uint64_t g = 0; g < m->cols / GROUP; g++) {
            uint8_t *codes = record + m->data_off + r * at.code_row + g * at.code_group;
            uint8_t *fields = record + m->scale_off + r * at.field_row + g * at.field_group;
            uint32_t four = 0;
            for (int b = 0; b < 4; b++) {
                const float *block = row + g * GROUP + b * BLOCK;
                float mean[4];
                if (col_weight) quad_means(col_weight + g * GROUP + b * BLOCK, mean);
                uint32_t field = choose_field(ix, block, col_weight ? mean : NULL, rs);
                put_le(codes + b * BLOCK_BYTES, choose_codes(ix, block, rs, field), BLOCK_BYTES);
                four |= field << (6 * b);
            }
            put_le(fields, four, FIELD_BYTES);
        }
    }
}

/* ---- decoding ---- */

static void decode_quads(const uint8_t *codebook, uint64_t codes, uint32_t field, float rs, float out[BLOCK])
{
    float bs = rs * (float)(1 << (field & 7)) * (field & 8 ? -1.0f : 1.0f);
    int h = field & 16 ? 2 : 0;
    for (int i = 0; i < 4; i++) {
        const uint8_t *t = codebook + ((field >> 5) * AFF_CB_ENTRIES + (codes >> (10 * i) & 1023)) * 4;
        for (int p = 0; p < 4; p++) out[4 * i + p] = bs * aff__e4m3_to_f32(t[(p + h) & 3]);
    }
}

/* The retired format: 5-bit codes of pairs, field = scale:4 | variant:2, 4 x 32 x 2 floats. */
static void decode_pairs(const uint8_t *codebook, uint64_t codes, uint32_t field, float rs, float out[BLOCK])
{
    float bs = rs * (float)(field & 15);
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 2; j++) {
            uint64_t at = ((field >> 4) * 32 + (codes >> (5 * i) & 31)) * 2 + (uint64_t)j;
            out[2 * i + j] = bs * aff__bits_f32((uint32_t)get_le(codebook + at * 4, 4));
        }
    }
}

static bool known(const aff_matdesc *m)
{
    return m->quant == AFF_MXFP4 || m->quant == AFF_Q2P875Q4 || m->quant == AFF_Q2P875G || m->quant == AFF_Q2P875;
}

/* Columns that piece_decode gives at once. */
static uint64_t piece_width(const aff_matdesc *m)
{
    return m->quant == AFF_MXFP4 ? 32 : GROUP;
}

static void piece_decode(const aff_matdesc *m, const uint8_t *record, const uint8_t *codebook, uint64_t row,
                         uint64_t piece, float out[GROUP])
{
    if (m->quant == AFF_MXFP4) {
        mxfp4_row(record + m->data_off + (row * m->cols / 32 + piece) * 16,
                  record + m->scale_off + row * m->cols / 32 + piece, 32, out);
        return;
    }
    places at = places_of(m);
    float rs = aff__bf16_to_f32((uint16_t)get_le(record + m->rscale_off + row * 2, 2));
    const uint8_t *codes = record + m->data_off + row * at.code_row + piece * at.code_group;
    uint32_t four = (uint32_t)get_le(record + m->scale_off + row * at.field_row + piece * at.field_group, FIELD_BYTES);
    for (int b = 0; b < 4; b++) {
        uint64_t c = get_le(codes + b * BLOCK_BYTES, BLOCK_BYTES);
        uint32_t field = four >> (6 * b) & 63;
        if (m->quant == AFF_Q2P875)
            decode_pairs(codebook, c, field, rs, out + b * BLOCK);
        else
            decode_quads(codebook, c, field, rs, out + b * BLOCK);
    }
}

aff_status aff__expert_row_decode(const aff_matdesc *m, const uint8_t *record, const uint8_t *codebook, uint64_t row,
                                  float *out)
{
    if (!known(m)) return AFF_E_UNSUPPORTED;
    uint64_t width = piece_width(m);
    for (uint64_t g = 0; g < m->cols / width; g++) piece_decode(m, record, codebook, row, g, out + g * width);
    return AFF_OK;
}

aff_status aff__expert_matrix_decode(const aff_matdesc *m, const uint8_t *record, const uint8_t *codebook, float *out)
{
    for (uint64_t r = 0; r < m->rows; r++) AFF_TRY(aff__expert_row_decode(m, record, codebook, r, out + r * m->cols));
    return AFF_OK;
}

/* ---- order of the planes ---- */

static void permute_plane(uint8_t *dst, const uint8_t *src, uint64_t rows, uint64_t groups, size_t unit, bool to_groups)
{
    for (uint64_t r = 0; r < rows; r++) {
        for (uint64_t g = 0; g < groups; g++) {
            uint64_t by_row = (r * groups + g) * unit, by_group = (g * rows + r) * unit;
            memcpy(dst + (to_groups ? by_group : by_row), src + (to_groups ? by_row : by_group), unit);
        }
    }
}

void aff__expert_plane_permute(uint8_t *dst, const uint8_t *src, const aff_matdesc *m, bool fields, bool to_groups)
{
    permute_plane(dst, src, m->rows, m->cols / GROUP, fields ? FIELD_BYTES : CODE_BYTES, to_groups);
}

void aff__expert_record_permute(const aff_clayer *layer, uint8_t *dst, const uint8_t *src, bool to_groups)
{
    const aff_matdesc *m[3] = {&layer->gate, &layer->up, &layer->down};
    memcpy(dst, src, layer->stride);
    for (int i = 0; i < 3; i++) {
        aff__expert_plane_permute(dst + m[i]->data_off, src + m[i]->data_off, m[i], false, to_groups);
        aff__expert_plane_permute(dst + m[i]->scale_off, src + m[i]->scale_off, m[i], true, to_groups);
    }
}

/* ---- error ---- */

aff_status aff__expert_matrix_error(const aff_matdesc *m, const uint8_t *record, const uint8_t *codebook,
                                    const float *w, const float *col_weight, aff_qerror *e)
{
    if (!known(m)) return AFF_E_UNSUPPORTED;
    uint64_t width = piece_width(m);
    for (uint64_t r = 0; r < m->rows; r++) {
        for (uint64_t g = 0; g < m->cols / width; g++) {
            const float *x = w + r * m->cols + g * width;
            float y[GROUP];
            piece_decode(m, record, codebook, r, g, y);
            for (uint64_t c = 0; c < width; c++) {
                double d = (double)x[c] - (double)y[c], x2 = (double)x[c] * (double)x[c];
                double weight = col_weight ? (double)col_weight[g * width + c] : 0;
                e->err2 += d * d;
                e->w2 += x2;
                e->werr2 += weight * d * d;
                e->ww2 += weight * x2;
                e->max = fabs(d) > e->max ? fabs(d) : e->max;
            }
        }
    }
    return AFF_OK;
}

double aff__qerror_relative(const aff_qerror *e)
{
    return e->w2 > 0 ? sqrt(e->err2 / e->w2) : 0;
}
double aff__qerror_weighted(const aff_qerror *e)
{
    return e->ww2 > 0 ? sqrt(e->werr2 / e->ww2) : 0;
}
