/* ask_internal.h - what the decoders of the dialects share. */
#ifndef AFF_SERVER_ASK_INTERNAL_H
#define AFF_SERVER_ASK_INTERNAL_H
#include "server/ask.h"

/* What is known of a field. One that would change the text and is not supported may only be null or say that nothing
 * changes. */
typedef enum aff_field_kind { AFF_F_USED, AFF_F_HARMLESS, AFF_F_REFUSED } aff_field_kind;
typedef struct aff_field {
    const char *name;
    aff_field_kind kind;
} aff_field;

/* AFF_E_INVALID with the field's name in param and in front of the sentence. */
aff_status ask__bad(aff_ask *a, aff_error *err, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
aff_status ask__fields(aff_ask *a, const json_t *obj, const aff_field *known,
                       aff_error *err); /* ends with a NULL name */
aff_status ask__ignore(aff_ask *a, const char *name, aff_error *err);
/* A field of obj, NULL when absent or null. */
json_t *ask__get(const json_t *obj, const char *key);
aff_status ask__bool(aff_ask *a, const json_t *obj, const char *key, bool *out, aff_error *err);
aff_status ask__int(aff_ask *a, const json_t *obj, const char *key, int64_t min, int64_t max, int64_t *out,
                    aff_error *err);
aff_status ask__num(aff_ask *a, const json_t *obj, const char *key, double min, double max, double *out,
                    aff_error *err);
aff_status ask__object(aff_ask *a, const json_t *obj, const char *key, json_t **out, aff_error *err);
aff_status ask__array(aff_ask *a, const json_t *obj, const char *key, json_t **out, aff_error *err);
bool ask__is_name(const json_t *v); /* a text that is not empty, without NUL */
aff_status ask__text(aff_ask *a, const json_t *obj, const char *key, const char **out, aff_error *err);
/* temperature, top_p, top_k, min_p, seed, penalties, logit_bias, stream: as in every dialect. */
aff_status ask__sampling(aff_ask *a, int vocab, double max_temperature, aff_error *err);
aff_status ask__stops(aff_ask *a, const char *key, aff_error *err); /* a string or an array of strings */
/* A response format of any dialect (NULL: none), and tool_choice; hide: tools are not to be shown. ask__form comes last and brings both
 * together with the tools. */
aff_status ask__format(aff_ask *a, const json_t *v, const char *param, aff_error *err);
aff_status ask__choice(aff_ask *a, const json_t *choice, bool *hide, aff_error *err);
aff_status ask__form(aff_ask *a, aff_error *err);
aff_status ask__effort(aff_ask *a, const json_t *effort, const char *param, aff_error *err);
/* Appends {"role", "content"...} etc.; takes v; NULL v is out of memory. */
aff_status ask__append(json_t *array, json_t *v, aff_error *err);

aff_status ask__messages(aff_ask *a, int vocab, aff_error *err);
aff_status ask__responses(aff_ask *a, int vocab, aff_error *err);
#endif
