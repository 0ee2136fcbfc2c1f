/* text.h - a tokenizer that fits a model, and a raw prompt as ids (spec text-and-serving 6.1). */
#ifndef AFF_ENGINE_TEXT_H
#define AFF_ENGINE_TEXT_H
#include "model/config.h"
#include "text/chat.h"
#include "text/tokenizer.h"

/* Opens tokenizer.json (file or folder). With a configuration (NULL allowed) vocabulary size and the ids of begin and
 * end of sequence must be the model's. */
aff_status aff__tokenizer_open_for(aff_tokenizer **out, const char *path, const aff_config *cfg, aff_error *err);

/* Where a model's tokenizer lies by default: tokenizer.json in the checkpoint folder, or beside the container. *path is
 * malloc'ed, NULL when there is no such file. */
aff_status aff__tokenizer_beside(const char *model_path, char **path, aff_error *err);

/* Begin-of-sequence and the ids of text[0..n), control-token strings recognised, no chat template. *ids is malloc'ed.
 * `name` names the text in errors; an empty text is AFF_E_INVALID. */
aff_status aff__prompt_ids(const aff_tokenizer *t, const char *text, size_t n, const char *name, int32_t **ids,
                           int64_t *n_ids, aff_error *err);
/* The generation of chat encoding that a container names in its provenance; *format stays as it is when it names none, or `path` is a
 * checkpoint. */
aff_status aff__chat_format_of(const char *path, aff_chat_format *format, aff_error *err);
#endif
