/* compare.h - a container against the checkpoint it claims to come from. */
#ifndef AFF_QUANT_COMPARE_H
#define AFF_QUANT_COMPARE_H
#include "format/container.h"

/* config.json must be the same bytes, and every tensor that a container takes over unchanged (FP8 matrices with their
 * scales, FP4 experts) too. The first difference is an AFF_E_FORMAT that names it; a checkpoint that cannot be
 * quantised is an error as in aff__quantize. */
aff_status aff__container_compare(const aff_container *c, const char *checkpoint, aff_error *err);
#endif
