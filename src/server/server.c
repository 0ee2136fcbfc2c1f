#include "server/server.h"
#include "base/mem.h"
#include "format/json.h"
#include "server/gen.h"
#include "server/lanes.h"
#include "server/web.h"
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum phase { LOADING, SERVING, FAILED, STOPPING } phase; /* FAILED: its device has */

struct aff_server {
    aff_server_options o;
    aff_serving sv; /* all of it there from SERVING on */
    aff_vocab *vocab;
    aff_http *http;
    aff_lanes *lanes;
    atomic_int phase;
    pthread_t engine_thread;
    bool stepping;
};

typedef void (*endpoint_fn)(aff_server *s, aff_exchange *x);

static void reply(aff_exchange *x, aff_jout *j, const char *type)
{
    if (j->failed)
        aff__answer_error(x, AFF_CHAT_COMPLETIONS, 500, "out of memory", NULL, NULL);
    else
        aff__x_respond(x, 200, type, j->b.n ? j->b.s : "", j->b.n);
    aff__buf_free(&j->b);
}

static void bad_request(aff_exchange *x, aff_dialect d, aff_status s, const aff_error *err, const char *param)
{
    aff__answer_error(x, d, s == AFF_E_INVALID || s == AFF_E_FORMAT || s == AFF_E_LIMIT ? 400 : 500, err->msg, param,
                      NULL);
}

/* ---- text ---- */

static void generate(aff_server *s, aff_exchange *x, aff_dialect d)
{
    aff_ask ask;
    aff_error err = {0};
    const aff_buf *b = aff__x_body(x);
    const aff_status st = aff__ask_decode(&ask, d, b->n ? b->s : "", b->n, s->sv.cfg->vocab, &err);
    if (st == AFF_OK) {
        aff__gen_start(&s->sv, x, &ask);
        return;
    }
    bad_request(x, d, st, &err, ask.param);
    aff__ask_free(&ask);
}

static void chat_completions(aff_server *s, aff_exchange *x)
{
    generate(s, x, AFF_CHAT_COMPLETIONS);
}
static void completions(aff_server *s, aff_exchange *x)
{
    generate(s, x, AFF_COMPLETIONS);
}
static void messages(aff_server *s, aff_exchange *x)
{
    generate(s, x, AFF_MESSAGES);
}
static void responses(aff_server *s, aff_exchange *x)
{
    generate(s, x, AFF_RESPONSES);
}

static void count_tokens(aff_server *s, aff_exchange *x)
{
    aff_ask ask;
    aff_error err = {0};
    aff_jout j = {0};
    int32_t *ids = NULL;
    int64_t n = 0;
    bool thinking;
    const aff_buf *b = aff__x_body(x);
    aff_status st = aff__ask_decode(&ask, AFF_MESSAGES, b->n ? b->s : "", b->n, s->sv.cfg->vocab, &err);
    if (st == AFF_OK) st = aff__gen_prompt(&s->sv, &ask, &ids, &n, &thinking, &err);
    if (st != AFF_OK) {
        bad_request(x, AFF_MESSAGES, st, &err, ask.param);
    } else {
        aff__jout_fmt(&j, "{\"input_tokens\": %" PRId64 "}", n);
        reply(x, &j, "application/json");
    }
    free(ids);
    aff__ask_free(&ask);
}

static void apply_template(aff_server *s, aff_exchange *x)
{
    aff_ask ask;
    aff_error err = {0};
    aff_jout j = {0};
    aff_chat_prompt p = {0};
    const aff_buf *b = aff__x_body(x);
    aff_status st = aff__ask_decode(&ask, AFF_CHAT_COMPLETIONS, b->n ? b->s : "", b->n, s->sv.cfg->vocab, &err);
    if (st == AFF_OK) st = aff__ask_render(&ask, s->o.format, &p, &err);
    if (st != AFF_OK) {
        bad_request(x, AFF_CHAT_COMPLETIONS, st, &err, ask.param);
    } else {
        aff__jout_raw(&j, "{\"prompt\": ");
        aff__jout_str(&j, p.text, p.n);
        aff__jout_raw(&j, "}");
        reply(x, &j, "application/json");
        aff__chat_prompt_free(&p);
    }
    aff__ask_free(&ask);
}

static aff_status flag(const json_t *o, const char *key, bool *out, aff_error *err)
{
    const json_t *v = json_object_get(o, key);
    if (!v || json_is_null(v)) return AFF_OK;
    if (!json_is_boolean(v)) return aff__fail(err, AFF_E_INVALID, "%s: expected true or false", key);
    *out = json_is_true(v);
    return AFF_OK;
}

/* A token's bytes as a string, or as numbers where they are no UTF-8 of their own. */
static void put_piece(aff_jout *j, const char *s, size_t n)
{
    aff_utf8_stream u = {0};
    char *out = NULL;
    if (aff__realloc(&out, n + 8, 3, "piece", NULL) != AFF_OK) {
        j->failed = true;
        return;
    }
    size_t got = aff__utf8_push(&u, s, n, out);
    if (!u.n && got == n && memcmp(out, s, n) == 0) {
        aff__jout_str(j, s, n);
    } else {
        aff__jout_raw(j, "[");
        for (size_t i = 0; i < n; i++) aff__jout_fmt(j, i ? ", %d" : "%d", (uint8_t)s[i]);
        aff__jout_raw(j, "]");
    }
    free(out);
}

static aff_status tokens_of(aff_server *s, const json_t *o, const aff_buf *body, aff_ids *ids, bool *pieces,
                            aff_error *err)
{
    bool bos = false, parse = true;
    const json_t *text = json_object_get(o, "content");
    if (!text) text = json_object_get(o, "prompt");
    AFF_TRY(flag(o, "add_special", &bos, err));
    AFF_TRY(flag(o, "parse_special", &parse, err));
    AFF_TRY(flag(o, "with_pieces", pieces, err));
    if (!text && json_object_get(o, "messages")) {
        aff_ask ask;
        aff_chat_prompt p = {0};
        aff_status st = aff__ask_decode(&ask, AFF_CHAT_COMPLETIONS, body->s, body->n, s->sv.cfg->vocab, err);
        if (st == AFF_OK) st = aff__ask_render(&ask, s->o.format, &p, err);
        if (st == AFF_OK) {
            st = aff__tokenizer_encode_segments(s->sv.tok, p.seg, p.n_seg, ids, err);
            aff__chat_prompt_free(&p);
        }
        aff__ask_free(&ask);
        return st;
    }
    if (!aff__json_is_text(text)) return aff__fail(err, AFF_E_INVALID, "content: expected a string");
    if (bos) AFF_TRY(aff__ids_push(ids, (uint32_t)s->sv.cfg->bos, err));
    return aff__tokenizer_encode(s->sv.tok, json_string_value(text), json_string_length(text), parse, ids, err);
}

static void tokenize(aff_server *s, aff_exchange *x)
{
    json_t *o = NULL;
    aff_error err = {0};
    aff_ids ids = {0};
    aff_jout j = {0};
    bool pieces = false;
    const aff_buf *b = aff__x_body(x);
    aff_status st = aff__ask_object(&o, b->n ? b->s : "", b->n, &err);
    if (st == AFF_OK) st = tokens_of(s, o, b, &ids, &pieces, &err);
    if (st != AFF_OK) {
        bad_request(x, AFF_CHAT_COMPLETIONS, st, &err, NULL);
    } else {
        aff__jout_raw(&j, "{\"tokens\": [");
        for (size_t i = 0; i < ids.n; i++) {
            size_t n;
            const char *bytes = aff__tokenizer_bytes(s->sv.tok, ids.id[i], &n);
            aff__jout_fmt(&j, pieces ? "%s{\"id\": %u, \"piece\": " : "%s%u", i ? ", " : "", ids.id[i]);
            if (!pieces) continue;
            put_piece(&j, bytes, n);
            aff__jout_raw(&j, "}");
        }
        aff__jout_fmt(&j, "], \"count\": %zu, \"max_model_len\": %" PRId64 "}", ids.n,
                      aff__engine_context(s->sv.engine));
        reply(x, &j, "application/json");
    }
    aff__ids_free(&ids);
    json_decref(o);
}

static aff_status text_of(const aff_server *s, const json_t *list, aff_buf *text, aff_error *err)
{
    if (!json_is_array(list)) return aff__fail(err, AFF_E_INVALID, "tokens: expected an array of token ids");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        size_t n;
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= s->sv.cfg->vocab)
            return aff__fail(err, AFF_E_INVALID, "tokens: expected token ids below %d, entry %zu is none",
                             s->sv.cfg->vocab, i);
        const char *bytes = aff__tokenizer_bytes(s->sv.tok, (uint32_t)json_integer_value(v), &n);
        AFF_TRY(aff__buf_put(text, bytes, n, err));
    }
    return AFF_OK;
}

static void detokenize(aff_server *s, aff_exchange *x)
{
    json_t *o = NULL;
    aff_error err = {0};
    aff_buf text = {0};
    aff_jout j = {0};
    char *shown = NULL;
    const aff_buf *b = aff__x_body(x);
    aff_status st = aff__ask_object(&o, b->n ? b->s : "", b->n, &err);
    if (st == AFF_OK) st = text_of(s, json_object_get(o, "tokens"), &text, &err);
    if (st == AFF_OK) st = aff__realloc(&shown, text.n + 8, 3, "text", &err);
    if (st != AFF_OK) {
        bad_request(x, AFF_CHAT_COMPLETIONS, st, &err, NULL);
    } else {
        aff_utf8_stream u = {0};
        size_t n = aff__utf8_push(&u, text.n ? text.s : "", text.n, shown);
        n += aff__utf8_flush(&u, shown + n);
        aff__jout_raw(&j, "{\"content\": ");
        aff__jout_str(&j, shown, n);
        aff__jout_raw(&j, "}");
        reply(x, &j, "application/json");
    }
    free(shown);
    aff__buf_free(&text);
    json_decref(o);
}

/* ---- about the server ---- */

static void unavailable(aff_exchange *x, const char *message)
{
    aff_jout j = {0};
    aff__jout_raw(&j, "{\"error\": {\"code\": 503, \"message\": ");
    aff__jout_cstr(&j, message);
    aff__jout_raw(&j, ", \"type\": \"unavailable_error\"}}");
    aff__x_header(x, "Retry-After", "5");
    aff__x_respond(x, 503, "application/json", j.b.n ? j.b.s : "", j.b.n);
    aff__buf_free(&j.b);
}

static void health(aff_server *s, aff_exchange *x)
{
    char fault[sizeof s->sv.fault] = "";
    const phase p = (phase)atomic_load(&s->phase);
    pthread_mutex_lock(&s->sv.count_lock);
    memcpy(fault, s->sv.fault, sizeof fault);
    pthread_mutex_unlock(&s->sv.count_lock);
    if (p == LOADING)
        unavailable(x, "Loading model");
    else if (p == STOPPING)
        unavailable(x, "Stopping");
    else if (fault[0])
        unavailable(x, fault);
    else
        aff__x_respond(x, 200, "application/json", "{\"status\": \"ok\"}", 16);
}

static void version(aff_server *s, aff_exchange *x)
{
    aff_jout j = {0};
    aff__jout_fmt(&j, "{\"version\": \"%s\"}", aff_version());
    reply(x, &j, "application/json");
}

static void put_model(const aff_server *s, aff_jout *j)
{
    const long long context = (long long)aff__engine_context(s->sv.engine);
    aff__jout_raw(j, "{\"id\": ");
    aff__jout_cstr(j, s->sv.model);
    aff__jout_fmt(j,
                  ", \"object\": \"model\", \"created\": %" PRIu64
                  ", \"owned_by\": \"affinity\", \"context_length\": %lld, \"max_model_len\": %lld}",
                  s->sv.started, context, context);
}

static void models(aff_server *s, aff_exchange *x)
{
    aff_jout j = {0};
    aff__jout_raw(&j, "{\"object\": \"list\", \"data\": [");
    put_model(s, &j);
    aff__jout_raw(&j, "]}");
    reply(x, &j, "application/json");
}

/* Requests hold slots in the order of their numbers, so the first of them are at work and the rest wait. */
typedef struct load {
    int running, waiting;
    struct {
        uint64_t id;
        int64_t past, prompt;
    } at[AFF_MAX_SLOTS];
} load;

static void take_load(aff_server *s, load *l)
{
    *l = (load){0};
    pthread_mutex_lock(&s->sv.lock);
    for (aff_gen *g = s->sv.live; g; g = g->next) {
        pthread_mutex_lock(&g->lock);
        for (int i = 0; g->choice && i < g->ask.n; i++) {
            const aff_choice *c = &g->choice[i];
            int k = l->running;
            if (!c->submitted || c->done) continue;
            while (k > 0 && l->at[k - 1].id > c->id) k--;
            if (l->running == s->sv.slots) l->waiting++;
            if (k == s->sv.slots) continue;
            const int last = l->running < s->sv.slots ? l->running++ : s->sv.slots - 1;
            memmove(&l->at[k + 1], &l->at[k], (size_t)(last - k) * sizeof l->at[0]);
            l->at[k].id = c->id;
            l->at[k].prompt = g->n_prompt;
            l->at[k].past = c->tokens ? g->n_prompt + c->tokens : c->prefilled;
        }
        pthread_mutex_unlock(&g->lock);
    }
    pthread_mutex_unlock(&s->sv.lock);
}

static void slots(aff_server *s, aff_exchange *x)
{
    load l;
    aff_jout j = {0};
    take_load(s, &l);
    aff__jout_raw(&j, "[");
    for (int i = 0; i < s->sv.slots; i++) {
        const bool busy = i < l.running;
        aff__jout_fmt(&j, "%s{\"id\": %d, \"is_processing\": %s, \"n_ctx\": %" PRId64, i ? ", " : "", i,
                      busy ? "true" : "false", aff__engine_context(s->sv.engine));
        aff__jout_fmt(&j, ", \"n_prompt\": %" PRId64 ", \"n_past\": %" PRId64 "}", busy ? l.at[i].prompt : 0,
                      busy ? l.at[i].past : 0);
    }
    aff__jout_raw(&j, "]");
    reply(x, &j, "application/json");
}

static void snapshot(aff_server *s, aff_exchange *x)
{
    aff__web_snapshot(&s->sv, x);
}

static void metric(aff_jout *j, const char *name, const char *type, const char *help, double v)
{
    aff__jout_fmt(j, "# HELP affinity_%s %s\n# TYPE affinity_%s %s\naffinity_%s %.17g\n", name, help, name, type, name,
                  v);
}

static void tier_metrics(aff_jout *j, const aff_tier_counters *c)
{
    static const char *const when[] = {"decode", "prompt"}, *const tier[] = {"card", "memory", "disk"}, *const above[] = {"card", "memory"};
    aff__jout_raw(j, "# HELP affinity_expert_uses_total Experts that layers used, by where they were.\n# TYPE affinity_expert_uses_total counter\n");
    for (int p = 0; p < 2; p++)
        for (int t = 0; t < AFF_TIERS; t++)
            aff__jout_fmt(j, "affinity_expert_uses_total{phase=\"%s\",tier=\"%s\"} %" PRId64 "\n", when[p], tier[t], c->picks[p][t]);
    aff__jout_raw(j, "# HELP affinity_expert_moves_total Experts that changed places, by the tier they came into or left.\n# TYPE affinity_expert_moves_total counter\n");
    for (int k = 0; k < 2; k++)
        aff__jout_fmt(j, "affinity_expert_moves_total{tier=\"%s\",way=\"up\"} %" PRId64 "\naffinity_expert_moves_total{tier=\"%s\",way=\"down\"} %" PRId64 "\n", above[k],
                      c->promotions[k], above[k], c->demotions[k]);
    metric(j, "expert_disk_bytes_total", "counter", "Bytes of experts read from the disk.", (double)c->disk_bytes);
    metric(j, "expert_disk_reads_total", "counter", "Experts read from the disk.", (double)c->disk_requests);
    metric(j, "expert_disk_failed_total", "counter", "Of those, failed for good.", (double)c->disk_failed);
    metric(j, "expert_disk_retries_total", "counter", "Pieces of experts that were read again.", (double)c->disk_retries);
    metric(j, "expert_disk_busy_seconds_total", "counter", "Time with such a read under way.", (double)c->disk_busy_ns / 1e9);
    metric(j, "expert_disk_wait_seconds_total", "counter", "Time in which nothing could be computed before a read was done.", (double)c->wait_disk_ns / 1e9);
    metric(j, "expert_staged_again_total", "counter", "Uses of experts on disk whose bytes were still in memory.", (double)c->staged_again);
    metric(j, "expert_link_bytes_total", "counter", "Bytes of experts that kernels read over the link.", (double)c->link_bytes);
    metric(j, "expert_up_bytes_total", "counter", "Bytes copied to the card by moves.", (double)c->up_bytes);
    metric(j, "expert_down_bytes_total", "counter", "Bytes copied from the card by moves.", (double)c->down_bytes);
    metric(j, "expert_prefetch_bytes_total", "counter", "Bytes copied to the card ahead of their use.", (double)c->prefetch_bytes);
    metric(j, "expert_stream_bytes_total", "counter", "Bytes copied to the card for prompts.", (double)c->stream_bytes);
    metric(j, "expert_help_total", "counter", "Experts computed by the host for the card.", (double)c->help_items);
}

static void metrics(aff_server *s, aff_exchange *x)
{
    load l;
    aff_jout j = {0};
    aff_draft_stats d;
    take_load(s, &l);
    aff__engine_draft_stats(s->sv.engine, &d);
    pthread_mutex_lock(&s->sv.count_lock);
    metric(&j, "requests_total", "counter", "Requests for text whose fields were right.", (double)s->sv.count.requests);
    metric(&j, "requests_refused_total", "counter", "Of those, refused: too long, or no place in the queue.",
           (double)s->sv.count.refused);
    metric(&j, "choices_failed_total", "counter", "Answers that ended in an error.", (double)s->sv.count.failed);
    metric(&j, "choices_cancelled_total", "counter", "Answers whose client left.", (double)s->sv.count.cancelled);
    metric(&j, "choices_empty_total", "counter", "Answers with neither text nor calls.", (double)s->sv.count.empty);
    metric(&j, "prompt_tokens_total", "counter", "Prompt rows run.", (double)s->sv.count.prompt_tokens);
    metric(&j, "cached_prompts_total", "counter", "Prompts of which a beginning came out of the prefix cache.",
           (double)s->sv.count.cached_prompts);
    metric(&j, "cached_tokens_total", "counter", "Prompt rows that came out of it.", (double)s->sv.count.cached_tokens);
    metric(&j, "prompt_seconds_total", "counter", "Time of prompts in a slot, summed over requests.",
           (double)s->sv.count.prefill_ns / 1e9);
    metric(&j, "generated_tokens_total", "counter", "Tokens chosen.", (double)s->sv.count.tokens);
    metric(&j, "generation_seconds_total", "counter", "Time of answers in a slot, summed over requests.",
           (double)s->sv.count.decode_ns / 1e9);
    pthread_mutex_unlock(&s->sv.count_lock);
    metric(&j, "requests_running", "gauge", "Sequences in a slot.", l.running);
    metric(&j, "requests_queued", "gauge", "Sequences that wait for one.", l.waiting);
    double used = 0;
    for (int i = 0; i < l.running; i++) used += (double)l.at[i].past;
    metric(&j, "context_used_ratio", "gauge", "Positions in use, of those of all slots.",
           used / s->sv.slots / (double)aff__engine_context(s->sv.engine));
    metric(&j, "turns_kept", "gauge", "Answers kept token by token for when they come back.",
           (double)aff__replay_count(s->sv.replay));
    aff__jout_raw(&j, "# HELP affinity_drafted_tokens_total Drafted tokens verified, by place in the block.\n# TYPE "
                      "affinity_drafted_tokens_total counter\n");
    for (int i = 0; i < AFF_MAX_WIDTH; i++)
        aff__jout_fmt(&j, "affinity_drafted_tokens_total{place=\"%d\"} %" PRId64 "\n", i + 1, d.offered[i]);
    aff__jout_raw(
        &j,
        "# HELP affinity_accepted_tokens_total Of those, accepted.\n# TYPE affinity_accepted_tokens_total counter\n");
    for (int i = 0; i < AFF_MAX_WIDTH; i++)
        aff__jout_fmt(&j, "affinity_accepted_tokens_total{place=\"%d\"} %" PRId64 "\n", i + 1, d.accepted[i]);
    aff_snapshot view;
    aff__engine_snapshot(s->sv.engine, &view, NULL);
    tier_metrics(&j, &view.tiers);
    reply(x, &j, "text/plain; version=0.0.4");
}

/* ---- routing ---- */

static const struct route {
    const char *path;
    bool post, open; /* open: without a key */
    endpoint_fn fn;
} routes[] = {{"/v1/chat/completions", true, false, chat_completions},
              {"/chat/completions", true, false, chat_completions},
              {"/v1/completions", true, false, completions},
              {"/completions", true, false, completions},
              {"/v1/messages", true, false, messages},
              {"/v1/messages/count_tokens", true, false, count_tokens},
              {"/v1/responses", true, false, responses},
              {"/responses", true, false, responses},
              {"/tokenize", true, false, tokenize},
              {"/detokenize", true, false, detokenize},
              {"/apply-template", true, false, apply_template},
              {"/v1/models", false, false, models},
              {"/models", false, false, models},
              {"/metrics", false, false, metrics},
              {"/slots", false, false, slots},
              {"/snapshot", false, false, snapshot},
              {"/version", false, false, version},
              {"/health", false, true, health},
              {"/v1/health", false, true, health},
              {NULL, false, false, NULL}};

static aff_dialect dialect_of(const aff_exchange *x)
{
    return strncmp(aff__x_path(x), "/v1/messages", 12) == 0 ? AFF_MESSAGES : AFF_CHAT_COMPLETIONS;
}

/* Takes the same time whatever the first difference. */
static bool same_key(const char *given, const char *key)
{
    const size_t n = strlen(key), m = strlen(given);
    volatile unsigned diff = n != m;
    for (size_t i = 0; i < m; i++) diff |= (unsigned)(given[i] ^ key[n ? i % n : 0]);
    return !diff;
}

static bool allowed(const aff_server *s, const aff_exchange *x)
{
    const char *bearer = aff__x_authorization(x);
    if (!s->o.api_key) return true;
    if (strncmp(bearer, "Bearer ", 7) == 0 && same_key(bearer + 7, s->o.api_key)) return true;
    return same_key(aff__x_api_key(x), s->o.api_key);
}

/* Whether an origin may read the answer; writes the headers that say so. */
static bool cors(const aff_server *s, aff_exchange *x)
{
    const char *origin = aff__x_origin(x), *at = s->o.cors;
    const size_t n = strlen(origin);
    bool ok = false;
    if (!at || !n) return false;
    if (strcmp(at, "*") == 0) ok = true;
    for (; !ok && *at; at += strcspn(at, ","), at += *at == ',')
        ok = strcspn(at, ",") == n && strncmp(at, origin, n) == 0;
    if (!ok) return false;
    aff__x_header(x, "Access-Control-Allow-Origin", strcmp(s->o.cors, "*") == 0 ? "*" : origin);
    aff__x_header(x, "Vary", "Origin");
    return true;
}

static void preflight(const aff_server *s, aff_exchange *x)
{
    if (cors(s, x)) {
        aff__x_header(x, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
        aff__x_header(x, "Access-Control-Allow-Headers",
                      "authorization, content-type, x-api-key, anthropic-version, anthropic-beta");
        aff__x_header(x, "Access-Control-Max-Age", "86400");
    }
    aff__x_respond(x, 204, "text/plain", "", 0);
}

static bool one_model(aff_server *s, aff_exchange *x)
{
    const char *path = aff__x_path(x);
    aff_jout j = {0};
    if (strncmp(path, "/v1/models/", 11) != 0 || strcmp(path + 11, s->sv.model) != 0) return false;
    put_model(s, &j);
    reply(x, &j, "application/json");
    return true;
}

static void refuse_for_now(aff_exchange *x, const char *why)
{
    aff__x_header(x, "Retry-After", "5");
    aff__answer_error(x, dialect_of(x), 503, why, NULL, NULL);
}

/* On the thread of the sockets. */
static void handle(void *ctx, aff_exchange *x)
{
    aff_server *s = ctx;
    const phase at = (phase)atomic_load(&s->phase);
    const char *method = aff__x_method(x);
    const bool get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0, post = strcmp(method, "POST") == 0;
    const struct route *r = routes;
    if (strcmp(method, "OPTIONS") == 0) {
        preflight(s, x);
        return;
    }
    cors(s, x);
    if (get && aff__web_answer(x)) return;
    while (r->path && strcmp(r->path, aff__x_path(x)) != 0) r++;
    if (!(r->path && r->open) && !allowed(s, x)) {
        aff__x_header(x, "WWW-Authenticate", "Bearer");
        aff__answer_error(x, dialect_of(x), 401, "expected the server's key in Authorization: Bearer or x-api-key",
                          NULL, "invalid_api_key");
    } else if (!r->path) {
        if (!(get && at == SERVING && one_model(s, x)))
            aff__answer_error(x, dialect_of(x), 404, "no such path", NULL, NULL);
    } else if (r->post ? !post : !get) {
        aff__x_header(x, "Allow", r->post ? "POST, OPTIONS" : "GET, HEAD, OPTIONS");
        aff__answer_error(x, dialect_of(x), 405, "this path takes another method", NULL, NULL);
    } else if (r->open) {
        r->fn(s, x);
    } else if (at == LOADING) {
        refuse_for_now(x, "the model is being loaded: try again later");
    } else if (at == STOPPING && r->post) {
        refuse_for_now(x, "the server is stopping");
    } else if (at == FAILED && r->post) {
        aff_error why = {0};
        aff__engine_broken(s->sv.engine, &why);
        char text[sizeof why.msg + 80];
        snprintf(text, sizeof text, "the device failed, the server ends: %s", why.msg);
        refuse_for_now(x, text);
    } else if (!r->post) {
        r->fn(s, x);
    } else if (!aff__lanes_put(s->lanes, x)) {
        aff__answer_error(x, dialect_of(x), 500, "out of memory", NULL, NULL);
    }
}

/* On a lane's thread: a request that has been let through. */
static void work(void *ctx, aff_exchange *x)
{
    const struct route *r = routes;
    while (r->path && strcmp(r->path, aff__x_path(x)) != 0) r++;
    if (r->path) r->fn(ctx, x);
}

static void refuse(void *ctx, aff_exchange *x, int status, const char *message)
{
    aff__answer_error(x, dialect_of(x), status, message, NULL, NULL);
}

/* ---- start and stop ---- */

static void *step(void *ctx)
{
    aff_server *s = ctx;
    aff_engine *e = s->sv.engine;
    bool told = false;
    while (aff__engine_wait(e)) {
        aff__engine_step(e);
        if (told || !aff__engine_broken(e, NULL)) continue;
        told = true;
        int serving = SERVING;
        atomic_compare_exchange_strong(&s->phase, &serving, FAILED);
        if (s->o.failed) s->o.failed(s->o.failed_ctx);
    }
    return NULL;
}

aff_status aff__server_listen(aff_server **out, const aff_server_options *o, aff_error *err)
{
    aff_server *s = NULL;
    *out = NULL;
    AFF_TRY(aff__calloc(&s, 1, sizeof *s, "server", err));
    s->o = *o;
    s->sv = (aff_serving){.format = o->format,
                          .model = o->model ? o->model : "DeepSeek-V4-Flash",
                          .floor = o->max_tokens_floor,
                          .started = (uint64_t)time(NULL)};
    pthread_mutex_init(&s->sv.lock, NULL);
    pthread_mutex_init(&s->sv.count_lock, NULL);
    pthread_cond_init(&s->sv.idle, NULL);
    atomic_init(&s->phase, LOADING);
    s->o.http.ctx = s;
    s->o.http.handle = handle;
    s->o.http.refuse = refuse;
    aff_status st = aff__lanes_start(&s->lanes, work, s, err);
    if (st == AFF_OK) st = aff__http_start(&s->http, &s->o.http, err);
    if (st == AFF_OK)
        *out = s;
    else
        aff__server_stop(s, 0);
    return st;
}

aff_status aff__server_ready(aff_server *s, const aff_net *net, const aff_tokenizer *tok, const aff_server_options *o,
                             aff_error *err)
{
    s->o.engine = o->engine;
    if (!s->o.engine.slots) s->o.engine.slots = 4;
    s->sv.net = net;
    s->sv.cfg = aff__net_config(net);
    s->sv.tok = tok;
    s->sv.format = s->o.format = o->format;
    s->sv.think_end = (int32_t)aff__tokenizer_find(tok, "</think>");
    s->sv.slots = s->o.engine.slots;
    AFF_TRY(aff__replay_open(&s->sv.replay, tok, o->replay_dir, o->replay_bytes, s->o.engine.warn, s->o.engine.warn_ctx,
                             err));
    AFF_TRY(aff__vocab_of(&s->vocab, tok, (int32_t)s->sv.cfg->eos, err));
    s->sv.vocab = s->vocab;
    AFF_TRY(aff__engine_create(&s->sv.engine, net, &s->o.engine, err));
    if (pthread_create(&s->engine_thread, NULL, step, s) != 0)
        return aff__fail(err, AFF_E_NOMEM, "server: cannot start a thread");
    s->stepping = true;
    atomic_store(&s->phase, SERVING);
    return AFF_OK;
}

aff_status aff__server_start(aff_server **out, const aff_net *net, const aff_tokenizer *tok,
                             const aff_server_options *o, aff_error *err)
{
    AFF_TRY(aff__server_listen(out, o, err));
    const aff_status st = aff__server_ready(*out, net, tok, o, err);
    if (st != AFF_OK) {
        aff__server_stop(*out, 0);
        *out = NULL;
    }
    return st;
}

int aff__server_port(const aff_server *s)
{
    return aff__http_port(s->http);
}

aff_engine *aff__server_engine(aff_server *s)
{
    return s->sv.engine;
}

void aff__server_wait_idle(aff_server *s)
{
    pthread_mutex_lock(&s->sv.lock);
    while (s->sv.live) pthread_cond_wait(&s->sv.idle, &s->sv.lock);
    pthread_mutex_unlock(&s->sv.lock);
}

void aff__server_stop(aff_server *s, int drain_ms)
{
    if (!s) return;
    int serving = SERVING;
    bool served = atomic_compare_exchange_strong(&s->phase, &serving, STOPPING); /* else it stays at LOADING or FAILED */
    served |= serving == FAILED;
    if (s->http) aff__http_drain(s->http, served ? drain_ms : 0);
    aff__lanes_stop(s->lanes);
    if (served) {
        aff__server_wait_idle(s); /* clients that were dropped have cancelled theirs; the engine thread still runs */
    }
    if (s->stepping) {
        aff__engine_stop(s->sv.engine);
        pthread_join(s->engine_thread, NULL);
    }
    aff__http_stop(s->http);
    aff__engine_free(s->sv.engine);
    aff__replay_free(s->sv.replay);
    aff__vocab_free(s->vocab);
    pthread_cond_destroy(&s->sv.idle);
    pthread_mutex_destroy(&s->sv.lock);
    pthread_mutex_destroy(&s->sv.count_lock);
    free(s);
}
