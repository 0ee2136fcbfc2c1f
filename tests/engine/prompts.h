/* prompts.h - the demonstration model's prompts as ids, for the checks of the engine. Included by one file a program.
 */
#ifndef AFF_TEST_PROMPTS_H
#define AFF_TEST_PROMPTS_H
#include "base/file.h"
#include "engine/engine.h"
#include "engine/text.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EVAL  AFF_SOURCE_DIR "/tools/tiny/eval/"
#define MODEL AFF_SOURCE_DIR "/models/tiny-v4"

enum { MOST_PROMPTS = 2000 };
typedef enum prompt_kind { CODE, PROSE, CHAT, OTHER, KINDS = 3 } prompt_kind;

typedef struct prompt {
    prompt_kind kind;
    int n;
    int32_t *ids;
} prompt;

static prompt prompts[MOST_PROMPTS];
static int n_prompts;
static aff_error err;

static void must(aff_status s)
{
    if (s == AFF_OK) return;
    fprintf(stderr, "%s\n", err.msg);
    exit(1);
}

/* Ids of a text; bos: begin-of-sequence before it. */
__attribute__((unused)) static int ids_of(const aff_tokenizer *t, const char *text, size_t n, bool bos, int32_t **ids)
{
    int64_t count;
    must(aff__prompt_ids(t, text, n, "prompt", ids, &count, &err));
    if (!bos) memmove(*ids, *ids + 1, (size_t)--count * sizeof **ids);
    return (int)count;
}

static void add_prompt(const aff_tokenizer *t, const char *text, size_t n, prompt_kind kind, bool bos)
{
    prompt *p = &prompts[n_prompts];
    if (n_prompts == MOST_PROMPTS || !n) return;
    *p = (prompt){.kind = kind};
    p->n = ids_of(t, text, n, bos, &p->ids);
    n_prompts++;
}

/* Up to `most` prompts of a file of lines of JSON, every `step`-th from `first` on; of one kind ("kind" in the file) or
 * of all (NULL). */
__attribute__((unused)) static int add_lines(const aff_tokenizer *t, const char *path, const char *kind, prompt_kind as,
                                             int first, int step, int most)
{
    static char line[1 << 20];
    int seen = 0, added = 0;
    FILE *f = fopen(path, "r");
    if (!f) must(aff__fail_errno(&err, "%s: cannot open", path));
    while (added < most && fgets(line, sizeof line, f)) {
        json_t *j = json_loads(line, 0, NULL);
        const char *p = json_string_value(json_object_get(j, "prompt")),
                   *k = json_string_value(json_object_get(j, "kind"));
        if (p && (!kind || (k && strcmp(k, kind) == 0)) && seen++ % step == first) {
            add_prompt(t, p, strlen(p), as, true);
            added++;
        }
        json_decref(j);
    }
    fclose(f);
    return added;
}

/* The first thirds of lines of a text, up to a space; lines of more than 40 characters, every `step`-th from `first`
 * on. */
__attribute__((unused)) static int add_beginnings(const aff_tokenizer *t, const char *path, int first, int step,
                                                  int most)
{
    char *data;
    size_t size;
    int seen = 0, added = 0;
    must(aff__read_file(path, 1 << 28, &data, &size, &err));
    for (char *at = data, *end; added < most && (end = memchr(at, '\n', size - (size_t)(at - data))); at = end + 1) {
        const char *cut = memchr(at, ' ', (size_t)(end - at));
        for (const char *c = at; c < at + (end - at) / 3 && cut; c++)
            if (*c == ' ') cut = c;
        if (!cut || end - at <= 40 || seen++ % step != first) continue;
        add_prompt(t, at, (size_t)(cut - at), PROSE, true);
        added++;
    }
    free(data);
    return added;
}

__attribute__((unused)) static void free_prompts(void)
{
    while (n_prompts) free(prompts[--n_prompts].ids);
}
#endif
