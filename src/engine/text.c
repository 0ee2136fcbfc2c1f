#include "engine/text.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/container.h"
#include "format/json.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char bos_name[] = "<｜begin▁of▁sentence｜>", eos_name[] = "<｜end▁of▁sentence｜>";

static aff_status check_control(const aff_tokenizer *t, const char *path, const char *name, int64_t expected,
                                aff_error *err)
{
    int64_t got = aff__tokenizer_find(t, name);
    if (got < 0) return aff__fail(err, AFF_E_FORMAT, "%s: expected an added token %s, found none", path, name);
    if (expected >= 0 && got != expected)
        return aff__fail(err, AFF_E_FORMAT, "%s: token %s: expected id %lld as in the model's configuration, got %lld",
                         path, name, (long long)expected, (long long)got);
    return AFF_OK;
}

aff_status aff__tokenizer_open_for(aff_tokenizer **out, const char *path, const aff_config *cfg, aff_error *err)
{
    aff_tokenizer *t = NULL;
    *out = NULL;
    AFF_TRY(aff__tokenizer_open(&t, path, cfg ? cfg->vocab : 0, err));
    aff_status s = check_control(t, path, bos_name, cfg ? cfg->bos : -1, err);
    if (s == AFF_OK) s = check_control(t, path, eos_name, cfg ? cfg->eos : -1, err);
    if (s != AFF_OK) {
        aff__tokenizer_free(t);
        return s;
    }
    *out = t;
    return AFF_OK;
}

aff_status aff__tokenizer_beside(const char *model_path, char **path, aff_error *err)
{
    static const char file[] = "tokenizer.json";
    const char *slash = strrchr(model_path, '/');
    size_t n = aff__is_dir(model_path) ? strlen(model_path) : slash ? (size_t)(slash - model_path) + 1 : 0;
    *path = NULL;
    AFF_TRY(aff__realloc(path, n + sizeof file + 1, 1, "path of the tokenizer", err));
    bool join = n && model_path[n - 1] != '/';
    snprintf(*path, n + sizeof file + 1, "%.*s%s%s", (int)n, model_path, join ? "/" : "", file);
    if (access(*path, F_OK) != 0) {
        free(*path);
        *path = NULL;
    }
    return AFF_OK;
}

aff_status aff__prompt_ids(const aff_tokenizer *t, const char *text, size_t n, const char *name, int32_t **ids,
                           int64_t *n_ids, aff_error *err)
{
    aff_ids found = {0};
    *ids = NULL;
    *n_ids = 0;
    if (n == 0) return aff__fail(err, AFF_E_INVALID, "%s: expected a text, got an empty prompt", name);
    aff_status s = check_control(t, name, bos_name, -1, err);
    if (s == AFF_OK) s = aff__ids_push(&found, (uint32_t)aff__tokenizer_find(t, bos_name), err);
    if (s == AFF_OK) s = aff__tokenizer_encode(t, text, n, true, &found, err);
    if (s == AFF_OK) s = aff__realloc(ids, found.n, sizeof **ids, name, err);
    if (s == AFF_OK) {
        for (size_t i = 0; i < found.n; i++) (*ids)[i] = (int32_t)found.id[i];
        *n_ids = (int64_t)found.n;
    }
    aff__ids_free(&found);
    return s;
}

aff_status aff__chat_format_of(const char *path, aff_chat_format *format, aff_error *err)
{
    aff_container *c;
    json_t *v = NULL;
    const char *text;
    size_t n;
    if (aff__is_dir(path)) return AFF_OK;
    AFF_TRY(aff__container_open(&c, path, err));
    aff__container_provenance(c, &text, &n);
    if (n && aff__json_parse(&v, text, n, "provenance", false, NULL) == AFF_OK) {
        const json_t *name = json_object_get(v, "chat_encoding");
        if (json_is_string(name)) aff__chat_format_find(json_string_value(name), format);
    }
    json_decref(v);
    aff__container_close(c);
    return AFF_OK;
}
