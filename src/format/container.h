/* container.h - the .aff container: reader and writer, version 1 to the byte (spec/container.md).
 *
 * Our additions in reserved header bytes (still version 1): u64 offset/size at 120/128 of a provenance JSON, at 136/144
 * of a table of XXH3-64 hashes, a required-features mask u64 at 152; they count only if a mark stands at 160, since
 * older files may hold anything there (docs/container.md). All lie after the expert pool, so file_size grows and older
 * readers (which ignore the reserved bytes) still read the rest. */
#ifndef AFF_FORMAT_CONTAINER_H
#define AFF_FORMAT_CONTAINER_H
#include "format/dtype.h"
#include "base/status.h"

typedef struct aff_matdesc { /* spec 2.2; offsets relative to the owning blob or record */
    uint64_t rows, cols;
    uint32_t quant; /* aff_dtype */
    uint64_t data_off, data_size, scale_off, scale_size, rscale_off, rscale_size;
} aff_matdesc;

typedef struct aff_ctensor {
    const char *name; /* NUL-terminated, owned by the container */
    aff_matdesc m;
    const uint8_t *blob; /* mapped; data at blob + m.data_off */
} aff_ctensor;

typedef struct aff_clayer {
    uint32_t n_experts;
    uint64_t stride, base_off; /* expert e: pool + base_off + e*stride */
    aff_matdesc gate, up, down;
} aff_clayer;

typedef struct aff_container aff_container;

/* Maps and checks `path`: every check of spec container 9 including those listed there as missing, and unknown bits of
 * the required-features mask. Hashes are not read here (aff__container_verify). */
aff_status aff__container_open(aff_container **out, const char *path, aff_error *err);
/* The same over bytes of the caller, which must stay as they are until close and be aligned to 16. */
aff_status aff__container_open_memory(aff_container **out, const void *data, size_t size, const char *name,
                                      aff_error *err);
void aff__container_close(aff_container *c);

const char *aff__container_path(const aff_container *c);
uint64_t aff__container_size(const aff_container *c);
const struct aff_map *aff__container_file(const aff_container *c); /* base/file.h; NULL over bytes of the caller */
void aff__container_meta(const aff_container *c, const char **text, size_t *size);       /* config.json, verbatim */
void aff__container_provenance(const aff_container *c, const char **text, size_t *size); /* size 0 when absent */
uint64_t aff__container_tensors(const aff_container *c);
const aff_ctensor *aff__container_tensor(const aff_container *c, uint64_t i);
const aff_ctensor *aff__container_find(const aff_container *c, const char *name);
uint32_t aff__container_layers(const aff_container *c);
const aff_clayer *aff__container_layer(const aff_container *c, uint32_t l);
/* The mapped record of expert e of layer l (stride bytes). */
const uint8_t *aff__container_expert(const aff_container *c, uint32_t l, uint32_t e);
uint64_t aff__container_expert_offset(const aff_container *c, uint32_t l, uint32_t e); /* absolute, for direct reads */
const float *aff__container_profile(const aff_container *c); /* NULL when flag bit 0 is clear */
bool aff__container_has_hashes(const aff_container *c);
/* Hashes every blob, record and the directories against the table; the first mismatch is named. */
aff_status aff__container_verify(const aff_container *c, void (*progress)(void *ctx, uint64_t done, uint64_t total),
                                 void *ctx, aff_error *err);

/* ---- writer: declare everything, begin, fill in any order from any thread, finish. ---- */
typedef struct aff_cwriter aff_cwriter;
/* Takes an exclusive lock on `path`.lock, held until finish or abort: a second writer of the same file fails here.
 * compat: none of our additions, the earlier tool's file byte for byte (its dtypes only). */
aff_status aff__cwriter_create(aff_cwriter **out, const char *path, bool compat, aff_error *err);
aff_status aff__cwriter_meta(aff_cwriter *w, const char *text, size_t size, aff_error *err);
/* Declares a dense tensor; the declaration's index is what aff__cwriter_tensor takes. */
aff_status aff__cwriter_declare(aff_cwriter *w, const char *name, aff_dtype dtype, uint64_t rows, uint64_t cols,
                                uint64_t *index, aff_error *err);
/* Declares the next layer: gate/up [inter x hidden], down [hidden x inter]. */
aff_status aff__cwriter_layer(aff_cwriter *w, uint32_t n_experts, aff_dtype dtype, uint64_t inter, uint64_t hidden,
                              aff_error *err);
/* Computes the layout and touches no file: for asking how large it will be. Nothing can be declared afterwards.
 * Optional: begin does it too. Refuses no layers, and quantised experts without their `__codebook` (1 x 2048 f32). */
aff_status aff__cwriter_layout(aff_cwriter *w, aff_error *err);
/* The layout, then the temporary file beside `path`: sized, its space reserved where the file system can, its header
 * written. */
aff_status aff__cwriter_begin(aff_cwriter *w, aff_error *err);
uint64_t aff__cwriter_file_size(const aff_cwriter *w); /* after layout or begin */
/* Planes of a declared dense tensor, each tensor exactly once, any thread; sizes must match the declaration exactly.
 * scale may be NULL when the dtype has none. */
aff_status aff__cwriter_tensor(aff_cwriter *w, uint64_t index, const void *data, uint64_t size, const void *scale,
                               uint64_t scale_size, aff_error *err);
/* Layout of an expert record of a layer, after layout or begin (as it will stand in the file), to fill a buffer of
 * `stride` zeroed bytes. */
const aff_clayer *aff__cwriter_layer_layout(const aff_cwriter *w, uint32_t l);
/* One whole record of `stride` bytes; each expert exactly once, any thread. */
aff_status aff__cwriter_expert(aff_cwriter *w, uint32_t l, uint32_t e, const void *record, aff_error *err);
/* begin for jobs of hours: the temporary file is `path`.partial and beside it `path`.journal notes every expert written, with
 * five figures of the caller, so that a killed run can be continued. key stands for everything that decides about the
 * content. resume: take over what the journal names (each record is read and its hash compared; *kept counts them); another key
 * or a damaged journal is AFF_E_FORMAT, no journal a fresh start. Otherwise whatever is there is overwritten. Abort removes
 * both. */
aff_status aff__cwriter_begin_journal(aff_cwriter *w, uint64_t key, bool resume, uint64_t *kept, aff_error *err);
/* True for an expert taken over or written; note (may be NULL) receives its figures. */
bool aff__cwriter_has_expert(const aff_cwriter *w, uint32_t l, uint32_t e, double note[5]);
/* aff__cwriter_expert with the figures; after begin_journal. */
aff_status aff__cwriter_expert_noted(aff_cwriter *w, uint32_t l, uint32_t e, const void *record, const double note[5],
                                     aff_error *err);
/* Popularity of every expert, layer-major; before finish, not from several threads. */
aff_status aff__cwriter_profile(aff_cwriter *w, const float *p, uint64_t count, aff_error *err);
aff_status aff__cwriter_provenance(aff_cwriter *w, const char *json, size_t size,
                                   aff_error *err); /* not with compat; before begin */
/* Call when every thread is done. Refuses if a tensor or expert is missing; data, fsync, directories and metadata,
 * fsync, layer directory, fsync, a look through aff__container_open, rename. Frees w in every case; an error suspends. */
aff_status aff__cwriter_finish(aff_cwriter *w, aff_error *err);
void aff__cwriter_abort(aff_cwriter *w); /* leaves nothing behind */
/* The same, but where a journal notes at least one expert, it and the .partial file stay for begin_journal's resume. */
void aff__cwriter_suspend(aff_cwriter *w);
#endif
