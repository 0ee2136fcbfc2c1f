#include "quant/compare.h"
#include "base/mem.h"
#include "quant/quantize_plan.h"
#include "quant/refold.h"
#include <stdlib.h>
#include <string.h>

static aff_status differs(const aff_container *c, const char *what, const aff_qplan *p, const aff_st_tensor *t,
                          aff_error *err)
{
    return aff__fail(err, AFF_E_FORMAT, "%s: %s differs from tensor '%s' of %s", aff__container_path(c), what, t->name,
                     aff__ckpt_shard_path(p->ckpt, t->shard));
}

static aff_status compare_refolded(const aff_container *c, const aff_qplan *p, const aff_qdense *d,
                                   const aff_ctensor *t, aff_error *err)
{
    uint8_t *buf;
    const uint64_t n = d->src->size;
    if (d->rows % 128 || d->cols % 128 || t->m.data_size != n || t->m.scale_size != n / 16384)
        return differs(c, d->name, p, d->src, err);
    AFF_TRY(aff__calloc(&buf, n + n / 16384, 1, d->name, err));
    aff__refold_fp8(d->src->data, d->scale->data, d->rows, d->cols, buf, buf + n);
    const bool same = memcmp(t->blob + t->m.data_off, buf, (size_t)n) == 0 &&
                      memcmp(t->blob + t->m.scale_off, buf + n, (size_t)(n / 16384)) == 0;
    free(buf);
    return same ? AFF_OK : differs(c, d->name, p, d->src, err);
}

static aff_status compare_dense(const aff_container *c, const aff_qplan *p, aff_error *err)
{
    for (uint64_t i = 0; i < p->n_dense; i++) {
        const aff_qdense *d = &p->dense[i];
        const aff_ctensor *t = aff__container_find(c, d->name);
        if (!t) return aff__fail(err, AFF_E_FORMAT, "%s: tensor '%s' is missing", aff__container_path(c), d->name);
        if (t->m.rows != d->rows || t->m.cols != d->cols)
            return aff__fail(err, AFF_E_FORMAT,
                             "%s: tensor '%s': expected %llu x %llu as in the checkpoint, got %llu x %llu",
                             aff__container_path(c), d->name, (unsigned long long)d->rows, (unsigned long long)d->cols,
                             (unsigned long long)t->m.rows, (unsigned long long)t->m.cols);
        if (t->m.quant == AFF_FP8 && d->dtype == AFF_FP8_32) {
            AFF_TRY(compare_refolded(c, p, d, t, err));
            continue;
        }
        if (!d->scale || t->m.quant != (uint32_t)d->dtype) continue;
        if (t->m.data_size != d->src->size || memcmp(t->blob + t->m.data_off, d->src->data, (size_t)d->src->size) != 0)
            return differs(c, d->name, p, d->src, err);
        if (t->m.scale_size != d->scale->size ||
            memcmp(t->blob + t->m.scale_off, d->scale->data, (size_t)d->scale->size) != 0)
            return differs(c, d->name, p, d->scale, err);
    }
    return AFF_OK;
}

static aff_status compare_expert(const aff_container *c, const aff_qplan *p, uint32_t l, uint32_t e, aff_error *err)
{
    const aff_clayer *y = aff__container_layer(c, l);
    const aff_matdesc *d[3] = {&y->gate, &y->up, &y->down};
    const aff_qmatrix *m = aff__qplan_expert(p, l, e);
    const uint8_t *record = aff__container_expert(c, l, e);
    for (int i = 0; i < 3 && d[i]->quant == AFF_MXFP4; i++) {
        if (d[i]->data_size != m[i].weight->size ||
            memcmp(record + d[i]->data_off, m[i].weight->data, (size_t)d[i]->data_size) != 0)
            return differs(c, "an expert", p, m[i].weight, err);
        if (d[i]->scale_size != m[i].scale->size ||
            memcmp(record + d[i]->scale_off, m[i].scale->data, (size_t)d[i]->scale_size) != 0)
            return differs(c, "an expert", p, m[i].scale, err);
    }
    return AFF_OK;
}

static aff_status compare_experts(const aff_container *c, const aff_qplan *p, aff_error *err)
{
    for (uint32_t l = 0; l < aff__container_layers(c); l++) {
        const aff_clayer *y = aff__container_layer(c, l);
        if (y->n_experts != p->experts || y->gate.rows != (uint64_t)p->inter || y->gate.cols != (uint64_t)p->hidden)
            return aff__fail(
                err, AFF_E_FORMAT, "%s: layer %u: expected %lld experts of %lld x %lld as in the checkpoint",
                aff__container_path(c), l, (long long)p->experts, (long long)p->inter, (long long)p->hidden);
        for (uint32_t e = 0; e < y->n_experts; e++) AFF_TRY(compare_expert(c, p, l, e, err));
    }
    return AFF_OK;
}

aff_status aff__container_compare(const aff_container *c, const char *checkpoint, aff_error *err)
{
    aff_quantize_options o = {.src = checkpoint,
                              .layers = 0,
                              .dspark = aff__container_find(c, "mtp_main_proj") != NULL,
                              .mxfp4 = aff__container_layer(c, 0)->gate.quant == AFF_MXFP4};
    aff_qplan p;
    const char *meta;
    size_t n;
    if (!o.dspark) o.layers = aff__container_layers(c);
    aff_status s = aff__qplan_make(&p, &o, err);
    aff__container_meta(c, &meta, &n);
    if (s == AFF_OK && (n != p.config_size || memcmp(meta, p.config, n) != 0))
        s = aff__fail(err, AFF_E_FORMAT, "%s: its config differs from %s/config.json", aff__container_path(c),
                      checkpoint);
    if (s == AFF_OK && p.layers != aff__container_layers(c))
        s = aff__fail(err, AFF_E_FORMAT, "%s: %u layers, expected %u as in the checkpoint", aff__container_path(c),
                      aff__container_layers(c), p.layers);
    if (s == AFF_OK) s = compare_dense(c, &p, err);
    if (s == AFF_OK) s = compare_experts(c, &p, err);
    aff__qplan_free(&p);
    return s;
}
