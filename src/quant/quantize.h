/* quantize.h - from a checkpoint folder to a container (spec quantiser 1-3, 8-11).
 *
 * The output is a pure function of the checkpoint, the codebook given, the imatrix and the options; not of threads,
 * shard order, processor or time. */
#ifndef AFF_QUANT_QUANTIZE_H
#define AFF_QUANT_QUANTIZE_H
#include "quant/encode.h"

typedef struct aff_quantize_options {
    const char *src;              /* checkpoint folder */
    const char *out;              /* container to write */
    const char *imatrix;          /* importance of the columns, or NULL */
    const char *codebook;         /* container whose codebook is used; NULL: fit one */
    const char *codebook_raw;     /* the same from a raw file; wins over `codebook` */
    const char *codebook_out;     /* write the codebook raw and do nothing else */
    const char *experts_dir;      /* write only experts, one blob a layer, into this folder */
    const char *experts_from;     /* take the experts from such blobs */
    int64_t range_from, range_to; /* with experts_dir: layers from..to-1; range_to 0: to the last */
    const char *report;           /* JSON of the errors, or NULL */
    int64_t layers;               /* only the first so many layers, 0: all. The result is for experiments, no model */
    int threads;                  /* 0: one per allowed CPU */
    const aff_encoder *encoder;   /* chooses the codes (not with compat or mxfp4, not under error feedback); NULL: this program's threads */
    bool dspark;                  /* the draft stages mtp.* into a companion; needs a codebook unless mxfp4 */
    bool mxfp4;                   /* keep the experts' FP4 as it is */
    bool cb_spread;               /* fit on experts of all layers; the default unless `compat` */
    bool compat;                  /* the earlier tool's file, byte for byte */
    bool resume;                  /* go on with what a run of the same that ended early left behind */
    bool verify;                  /* re-decode every expert of the finished file */
    void *ctx;                    /* of the three below, each of which may be NULL; called by one thread at a time */
    void (*say)(void *ctx, const char *line);
    void (*warn)(void *ctx, const char *line);
    bool (*progress)(void *ctx, uint64_t done, uint64_t total); /* checkpoint bytes; false stops with AFF_E_CANCELLED */
} aff_quantize_options;

/* Combinations that make no sense (AFF_E_INVALID). aff__quantize checks them too. */
aff_status aff__quantize_check(const aff_quantize_options *o, aff_error *err);

/* Everything about the checkpoint but the experts' scales is checked before the first byte is written; `out` appears
 * complete or not at all. A run that ends early with experts done leaves `out`.partial and `out`.journal for `resume`,
 * and the error says so. */
aff_status aff__quantize(const aff_quantize_options *o, aff_error *err);
#endif
