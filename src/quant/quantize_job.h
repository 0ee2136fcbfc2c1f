/* quantize_job.h - what the parts of a quantiser run share. */
#ifndef AFF_QUANT_QUANTIZE_JOB_H
#define AFF_QUANT_QUANTIZE_JOB_H
#include "format/container.h"
#include "quant/encode.h"
#include "quant/imatrix.h"
#include "quant/quantize.h"
#include "quant/quantize_plan.h"
#include <pthread.h>

typedef struct aff_qjob {
    const aff_quantize_options *o;
    aff_qplan plan;
    aff_pool *pool;
    aff_cwriter *w;
    aff_dtype dtype; /* of the experts */
    bool begun;      /* the journal and the partial file are this run's */
    bool has_codebook;
    uint8_t codebook[AFF_CB_BYTES];
    uint64_t codebook_index;   /* the writer's */
    const char *codebook_from; /* for the provenance */
    aff_cb_index *index;       /* --compat */
    aff_search *search;        /* otherwise */
    aff_imatrix *imatrix;      /* NULL: unweighted */
    uint64_t imatrix_size;     /* bytes of its file */
    aff_feedback *feedback;    /* of gate and up of the layer at work; NULL: their imatrix has no moments */
    bool has_feedback;         /* it holds this layer's */
    uint64_t checkpoint_hash;
    uint64_t
        encoder_hash;     /* of what the encoder makes of a fixed matrix: the same program, or one that does the same */
    aff_qerror *errors;   /* [layers][experts] */
    pthread_mutex_t lock; /* guards the next three and the progress callback */
    uint64_t done, total; /* checkpoint bytes */
    bool stopped;         /* progress said so */
} aff_qjob;

void aff__q_say(const aff_qjob *j, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void aff__q_warn(const aff_qjob *j, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void aff__q_add_done(aff_qjob *j, uint64_t bytes);
/* AFF_E_CANCELLED once the progress callback has asked to stop. */
aff_status aff__q_go_on(aff_qjob *j, aff_error *err);
double aff__q_seconds_since(uint64_t ns);

/* Lets go of mapped pages, which otherwise count as ours until the end; of a tensor's. */
void aff__q_drop(const uint8_t *p, uint64_t n);
void aff__q_release(const aff_st_tensor *t);
/* Asks for them ahead of use. */
void aff__q_want(const aff_st_tensor *t);

aff_mxfp4 aff__q_matrix(const aff_qjob *j, const aff_qmatrix *m, int part);
/* Column weights of one matrix into out [cols]; NULL if there are none. */
const float *aff__q_weights(const aff_qjob *j, uint32_t layer, uint32_t expert, int part, float *out);

/* Whether error feedback encodes the matrix; its column weights then only weigh the reported error. */
bool aff__q_fed_back(const aff_qjob *j, uint32_t layer, uint32_t expert, int part);

/* Fits or reads the codebook and makes what searching it needs. */
aff_status aff__q_codebook(aff_qjob *j, aff_error *err);
/* The raw form of container 12, under its own name when complete. */
aff_status aff__q_codebook_write(const aff_qjob *j, const char *path, aff_error *err);
/* FNV-1a of the raw form's dimensions and values, with the earlier tool's basis (container 12). */
uint64_t aff__q_codebook_hash(const uint8_t cb[AFF_CB_BYTES]);
/* Everything that decides about an expert's bytes: what a blob or journal must have been made with. */
uint64_t aff__q_recipe_hash(const aff_qjob *j);

/* Encodes one expert into `record` (zeroed, stride bytes). */
typedef struct aff_qspace {
    float *scratch; /* [inter * hidden] floats; --compat and --verify */
    float *weight;  /* [max(inter, hidden)] */
    uint8_t *record;
    aff_encode_space *encode;
    aff_feedback *down; /* NULL: the imatrix has no moments for down */
} aff_qspace;
aff_status aff__q_spaces(const aff_qjob *j, uint64_t stride, aff_qspace **out, aff_error *err); /* one a thread */
void aff__q_spaces_free(const aff_qjob *j, aff_qspace *s);
aff_status aff__q_encode(const aff_qjob *j, const aff_clayer *layout, uint32_t layer, uint32_t expert, aff_qspace *s,
                         aff_qerror *e, aff_error *err);

/* Every expert into the container: encoded, or from blobs. */
aff_status aff__q_experts(aff_qjob *j, aff_error *err);
/* --experts-dir: blobs instead of a container. */
aff_status aff__q_blobs_write(aff_qjob *j, aff_error *err);
/* Records of a layer from its blob, errors into j->errors. */
aff_status aff__q_blob_layer(aff_qjob *j, uint32_t layer, aff_error *err);
/* Re-decodes the experts of the finished container and compares with j->errors. */
aff_status aff__q_verify(aff_qjob *j, aff_error *err);
void aff__q_table(const aff_qjob *j);
aff_status aff__q_report(const aff_qjob *j, double seconds, aff_error *err);
#endif
