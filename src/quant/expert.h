/* expert.h - routed experts: one matrix, one record; encoding, decoding, re-ordering, error (spec quantiser 7, 14;
 * container 4, 10).
 *
 * A record is the `stride` bytes of one expert. A matrix descriptor (aff_matdesc) says where its three planes lie in
 * the record. Dtypes: AFF_Q2P875Q4 (33, planes row by row), AFF_Q2P875G (34, the same bytes as [group of 64
 * columns][row]), AFF_Q2P875 (32, decoded only), AFF_MXFP4 (40, the checkpoint's bytes). Columns are a multiple of 64
 * for 32..34 and of 32 for 40. */
#ifndef AFF_QUANT_EXPERT_H
#define AFF_QUANT_EXPERT_H
#include "format/container.h"
#include "quant/codebook.h"

/* A matrix as the checkpoint holds it: [rows][cols/2] E2M1 pairs, low nibble first; [rows][cols/32] E8M0. */
typedef struct aff_mxfp4 {
    const uint8_t *codes, *scales;
    uint64_t rows, cols;
} aff_mxfp4;

/* Where the 20 code bytes and the 3 field bytes of (row, group of 64 columns) stand in a record, dtypes 32..34. */
uint64_t aff__group_codes_at(const aff_matdesc *m, uint64_t row, uint64_t group);
uint64_t aff__group_fields_at(const aff_matdesc *m, uint64_t row, uint64_t group);

/* A scale above 2^125 (252), with which 6 is not finite in float32, or NaN (255) is an error. */
aff_status aff__mxfp4_check(const aff_mxfp4 *m, aff_error *err);
/* out [rows x cols], exact. A scale above 2^125 (252), with which 6 is not finite in float32, or NaN (255) is an error.
 */
aff_status aff__mxfp4_decode(const aff_mxfp4 *m, float *out, aff_error *err);

/* The earlier tool's encoder: w [m->rows x m->cols], all finite, into the planes of m in `record` (dtype 33 or 34).
 * col_weight [cols], >= 0, or NULL: importance, which decides between fields but not between codes (spec quantiser 7). */
void aff__expert_matrix_encode(const aff_cb_index *ix, const aff_matdesc *m, const float *w, const float *col_weight,
                               uint8_t *record);

/* Decodes one matrix to out [rows x cols]: w = ((row scale * 2^e) * +-1) * T in float32 (33, 34), ((row scale * scale)
 * * T) (32), E2M1 * E8M0 (40). codebook: AFF_CB_BYTES packed bytes for 33 and 34, 256 little-endian floats for 32,
 * unused for 40. AFF_E_UNSUPPORTED for any other dtype. */
aff_status aff__expert_matrix_decode(const aff_matdesc *m, const uint8_t *record, const uint8_t *codebook, float *out);
/* One row of it. */
aff_status aff__expert_row_decode(const aff_matdesc *m, const uint8_t *record, const uint8_t *codebook, uint64_t row,
                                  float *out);

/* Copies a record between the row order (33) and the group order (34): codes and fields of all three matrices move, row
 * scales and padding stay. dst and src are stride bytes and do not overlap. */
void aff__expert_record_permute(const aff_clayer *layer, uint8_t *dst, const uint8_t *src, bool to_groups);
/* The same of one plane: a matrix's codes, or its fields. */
void aff__expert_plane_permute(uint8_t *dst, const uint8_t *src, const aff_matdesc *m, bool fields, bool to_groups);

/* Squared sums of one or more matrices. */
typedef struct aff_qerror {
    double err2, w2;   /* sum (w - w')^2, sum w^2 */
    double werr2, ww2; /* the same weighted by column importance; zero if there was none */
    double max;        /* largest |w - w'| */
} aff_qerror;

/* Adds the error of the encoded matrix against w; col_weight [cols] or NULL. */
aff_status aff__expert_matrix_error(const aff_matdesc *m, const uint8_t *record, const uint8_t *codebook,
                                    const float *w, const float *col_weight, aff_qerror *e);
/* Relative Frobenius error ||w - w'|| / ||w||, 0 if w is all zero. */
double aff__qerror_relative(const aff_qerror *e);
double aff__qerror_weighted(const aff_qerror *e);
#endif
