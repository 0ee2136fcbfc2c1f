/* encode.h - the default encoder: the best codes and scales that a decoder of dtypes 33 and 34 can read.
 *
 * For each block of 16: three scales around its largest weight, two variants, sign and rotation, 24 choices in all.
 * Without importance each is judged by its exact error. With it the choices are ranked by the errors of the unweighted
 * nearest entries, and for the first few the codes are searched anew under the columns' weights. Row scales are powers
 * of two while codes are chosen, which keeps the grid of the source; at the end each row's scale moves to its
 * least-squares value if that lowers the row's error. With second moments of the inputs (feedback.h) every quad aims at
 * its weights plus what earlier columns left, and row scales stay powers of two. The bytes are a function of source,
 * weights or moments, and codebook alone.
 */
#ifndef AFF_QUANT_ENCODE_H
#define AFF_QUANT_ENCODE_H
#include "quant/expert.h"
#include "quant/feedback.h"
#include "quant/search.h"

typedef struct aff_encode_space aff_encode_space; /* what one thread needs, for matrices of up to `cols` columns */
aff_status aff__encode_space_create(aff_encode_space **out, uint64_t cols, aff_error *err);
void aff__encode_space_free(aff_encode_space *s);

/* Encodes src (scales at most 252, see aff__mxfp4_check) into the planes of m in `record` and adds the error to e.
 * weight [cols], each >= 0 and finite, or NULL. With f, the factors of m's columns, it only weighs the error in e. */
void aff__encode_matrix(const aff_search *s, aff_encode_space *space, const aff_matdesc *m, const aff_mxfp4 *src,
                        const float *weight, const aff_feedback *f, uint8_t *record, aff_qerror *e);

/* Somebody else who chooses codes and fields (a card): the same bytes. `choose` may be called by any number of threads. */
typedef struct aff_encoder {
    void *ctx;
    /* Once, before the first matrix; s stays as it is until the last. */
    aff_status (*begin)(void *ctx, const aff_search *s, aff_error *err);
    /* Codes and fields of m in `record`; weight [cols] floored (aff__encode_weight), or NULL. */
    aff_status (*choose)(void *ctx, const aff_matdesc *m, const aff_mxfp4 *src, const float *weight, uint8_t *record, aff_error *err);
} aff_encoder;
/* aff__encode_matrix without feedback, by the encoder. */
aff_status aff__encode_matrix_by(const aff_encoder *by, const aff_search *s, aff_encode_space *space, const aff_matdesc *m,
                                 const aff_mxfp4 *src, const float *weight, uint8_t *record, aff_qerror *e, aff_error *err);

/* ---- for the fit ---- */

/* A block of 16 as the checkpoint holds it. */
typedef struct aff_block {
    uint16_t quad[4];
    int exponent; /* of the E8M0 scale: w = E2M1 * 2^exponent */
    double share; /* fit only: what its squared error counts */
} aff_block;

void aff__mxfp4_block(const aff_mxfp4 *m, uint64_t row, uint64_t block, aff_block *b);
/* Importance as the encoder uses it: at least 2^-10, since what calibration never saw large is still not free. */
float aff__encode_weight(float importance);

typedef struct aff_choice {
    int e, j;        /* block scale 2^(row + e); the quads are E2M1 * 2^j in the codebook's units */
    unsigned v, g;   /* variant; bit 0 sign, bit 1 rotation */
    uint16_t pos[4]; /* positions in the search table */
} aff_choice;

/* 2^exponent bounds the largest |weight| of the block: ceil(log2), INT_MIN for a block of zeros. */
int aff__block_top(const aff_block *b);
/* row: the row scale's exponent; weight [16] > 0 or NULL. */
aff_choice aff__choose(const aff_search *s, const aff_block *b, int row, const float *weight);

/* Sampled blocks of matrices. */
typedef struct aff_fit_samples {
    aff_block *block;    /* [n] */
    float (*weight)[16]; /* [n] */
    uint64_t n, cap, energy;
    bool weighted;
} aff_fit_samples;

/* Adds every step-th row of m, about 2^18 weights; weight [cols] or NULL. */
aff_status aff__fit_samples_add(aff_fit_samples *s, const aff_mxfp4 *m, const float *weight, aff_error *err);
void aff__fit_samples_free(aff_fit_samples *s);
/* A pure function of the samples. No samples (all weights zero) is an error. */
aff_status aff__cb_fit_joint(const aff_fit_samples *s, aff_pool *pool, uint8_t out[AFF_CB_BYTES], aff_error *err);
#endif
