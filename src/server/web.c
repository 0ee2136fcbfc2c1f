#include "server/web.h"
#include "base/host.h"
#include "base/mem.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

extern const char aff_web_html[], aff_web_html_end[], aff_web_css[], aff_web_css_end[], aff_web_app[], aff_web_app_end[],
    aff_web_markdown[], aff_web_markdown_end[], aff_web_machine[], aff_web_machine_end[], aff_web_icon[], aff_web_icon_end[];

static const struct file {
    const char *path, *type, *bytes, *end;
} files[] = {{"/", "text/html; charset=utf-8", aff_web_html, aff_web_html_end},
             {"/index.html", "text/html; charset=utf-8", aff_web_html, aff_web_html_end},
             {"/style.css", "text/css; charset=utf-8", aff_web_css, aff_web_css_end},
             {"/app.js", "text/javascript; charset=utf-8", aff_web_app, aff_web_app_end},
             {"/markdown.js", "text/javascript; charset=utf-8", aff_web_markdown, aff_web_markdown_end},
             {"/machine.js", "text/javascript; charset=utf-8", aff_web_machine, aff_web_machine_end},
             {"/icon.svg", "image/svg+xml", aff_web_icon, aff_web_icon_end}};

/* Nothing but the bundle's own files, no inline script or style, no frame, no form that leaves. */
static const char policy[] = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
                             "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

bool aff__web_answer(aff_exchange *x)
{
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        const struct file *f = &files[i];
        char tag[24];
        if (strcmp(f->path, aff__x_path(x)) != 0) continue;
        const size_t n = (size_t)((uintptr_t)f->end - (uintptr_t)f->bytes);
        snprintf(tag, sizeof tag, "\"%016" PRIx64 "\"", (uint64_t)XXH3_64bits(f->bytes, n));
        aff__x_header(x, "Content-Security-Policy", policy);
        aff__x_header(x, "X-Content-Type-Options", "nosniff");
        aff__x_header(x, "Referrer-Policy", "no-referrer");
        aff__x_header(x, "ETag", tag);
        aff__x_header(x, "Cache-Control", "no-cache"); /* kept, but asked for again: another version may serve */
        const bool known = strstr(aff__x_if_none_match(x), tag) != NULL;
        aff__x_respond(x, known ? 304 : 200, f->type, f->bytes, known ? 0 : n);
        return true;
    }
    return false;
}

/* ---- the machine ---- */

static void put_counts(aff_jout *j, const char *name, const int64_t *v, int n)
{
    aff__jout_fmt(j, ", \"%s\": [", name);
    for (int i = 0; i < n; i++) aff__jout_fmt(j, i ? ", %" PRId64 : "%" PRId64, v[i]);
    aff__jout_raw(j, "]");
}

/* A character per expert, layer after layer: its tier, and its heat as 64 steps of sqrt(heat / most). */
static void put_plane(aff_jout *j, const aff_snapshot *s, const float *heat, const uint8_t *tier)
{
    static const char steps[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", names[] = "chd";
    const int n = s->layers * s->experts;
    float most = 0;
    char *text = NULL;
    for (int i = 0; i < n; i++)
        if (heat[i] > most) most = heat[i];
    if (aff__realloc(&text, (uint64_t)n + 1, 1, "plane", NULL) != AFF_OK) {
        j->failed = true;
        return;
    }
    text[n] = 0;
    for (int i = 0; i < n; i++) text[i] = names[tier[i]];
    aff__jout_fmt(j, "\"layers\": %d, \"experts\": %d, \"picks\": %d, \"tier\": \"", s->layers, s->experts, s->picks);
    aff__jout_raw(j, text);
    for (int i = 0; i < n; i++) text[i] = steps[most > 0 ? lrintf(63 * sqrtf(heat[i] / most)) : 0];
    aff__jout_raw(j, "\", \"heat\": \"");
    aff__jout_raw(j, text);
    aff__jout_fmt(j, "\", \"heat_most\": %.4g}", (double)most);
    free(text);
}

static void put_slots(aff_jout *j, const aff_snapshot *s)
{
    aff__jout_raw(j, ", \"slots\": [");
    for (int i = 0; i < s->slots; i++) {
        const aff_slot_view *v = &s->slot[i];
        aff__jout_fmt(j, "%s{\"phase\": \"%s\", \"past\": %" PRId64 ", \"prompt\": %" PRId64 ", \"tokens\": %" PRId64 "}",
                      i ? ", " : "", v->answering ? "answer" : v->busy ? "prompt" : "idle", v->past, v->prompt, v->tokens);
    }
    aff__jout_raw(j, "]");
}

static void put_tiers(aff_jout *j, const aff_tier_counters *c)
{
    aff__jout_fmt(j, ", \"tiers\": {\"decode\": [%" PRId64 ", %" PRId64 ", %" PRId64 "], \"prompt\": [%" PRId64 ", %" PRId64 ", %" PRId64 "]", c->picks[0][0], c->picks[0][1],
                  c->picks[0][2], c->picks[1][0], c->picks[1][1], c->picks[1][2]);
    aff__jout_fmt(j, ", \"disk_bytes\": %" PRIu64 ", \"disk_seconds\": %.3f, \"disk_wait_seconds\": %.3f, \"disk_failed\": %" PRId64, c->disk_bytes, (double)c->disk_busy_ns / 1e9,
                  (double)c->wait_disk_ns / 1e9, c->disk_failed);
    aff__jout_fmt(j, ", \"link_bytes\": %" PRIu64 ", \"up_bytes\": %" PRIu64 ", \"down_bytes\": %" PRIu64 ", \"moves\": [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "]}", c->link_bytes,
                  c->up_bytes, c->down_bytes, c->promotions[0], c->demotions[0], c->promotions[1], c->demotions[1]);
}

static void put_device(aff_jout *j, const aff_device_view *d)
{
    aff__jout_raw(j, "{\"id\": ");
    aff__jout_cstr(j, d->id);
    aff__jout_raw(j, ", \"name\": ");
    aff__jout_cstr(j, d->name);
    aff__jout_raw(j, ", \"arch\": ");
    aff__jout_cstr(j, d->arch);
    aff__jout_fmt(j, ", \"memory\": %" PRIu64 ", \"free\": %" PRIu64 ", \"use\": {", d->memory, d->free);
    for (int i = 0; i < AFF_USES; i++) aff__jout_fmt(j, "%s\"%s\": %" PRIu64, i ? ", " : "", aff__device_use_names[i], d->use[i]);
    aff__jout_fmt(j, "}, \"link\": {\"gen\": %d, \"width\": %d, \"rate\": %" PRIu64 "}", d->link_gen, d->link_width, d->link_rate);
    aff__jout_fmt(j, ", \"records\": %d, \"passes\": %" PRIu64 ", \"repeated\": %" PRIu64 "}", d->records, d->passes, d->repeated);
}

static void put_snapshot(aff_jout *j, const aff_serving *sv, const aff_snapshot *s, const float *heat, const uint8_t *tier)
{
    static const char *const drafts[] = {"none", "dspark", "mtp1"};
    aff_host h;
    aff__host_read(&h);
    aff__jout_raw(j, "{\"model\": ");
    aff__jout_cstr(j, sv->model);
    aff__jout_fmt(j, ", \"version\": \"%s\", \"time\": %.3f, \"uptime\": %" PRIu64 ", \"context\": %" PRId64, aff_version(),
                  (double)s->at_ns / 1e9, (uint64_t)time(NULL) - sv->started, s->context);
    aff__jout_fmt(j, ", \"running\": %d, \"waiting\": %d", s->running, s->waiting);
    put_slots(j, s);
    aff__jout_fmt(j, ", \"prompt_rows\": %" PRId64 ", \"prompt_seconds\": %.6f, \"tokens\": %" PRId64 ", \"decode_seconds\": %.6f",
                  s->passes.prompt_rows, (double)s->passes.prompt_ns / 1e9, s->passes.tokens, (double)s->passes.decode_ns / 1e9);
    aff__jout_fmt(j, ", \"draft\": {\"kind\": \"%s\", \"passes\": %" PRId64 ", \"blocks\": %" PRId64, drafts[aff__net_draft(sv->net)],
                  s->draft.passes, s->draft.blocks);
    put_counts(j, "offered", s->draft.offered, AFF_MAX_WIDTH);
    put_counts(j, "accepted", s->draft.accepted, AFF_MAX_WIDTH);
    aff__jout_fmt(j, "}, \"host\": {\"cpus\": %d, \"cpu_seconds\": %.3f, \"memory\": %" PRIu64 ", \"available\": %" PRIu64, h.cpus,
                  (double)h.cpu_ns / 1e9, h.total, h.available);
    aff__jout_fmt(j, ", \"resident\": %" PRIu64 ", \"peak\": %" PRIu64 ", \"state\": %" PRIu64 "}, \"devices\": [", h.rss, h.peak,
                  s->on_device ? 0 : s->state_bytes);
    if (s->on_device) put_device(j, &s->device);
    aff__jout_raw(j, "]");
    if (s->tiered) put_tiers(j, &s->tiers);
    aff__jout_raw(j, ", \"plane\": {");
    put_plane(j, s, heat, tier);
    aff__jout_raw(j, "}");
}

void aff__web_snapshot(aff_serving *sv, aff_exchange *x)
{
    aff_snapshot s;
    float *heat = NULL;
    uint8_t *tier = NULL;
    aff_jout j = {0};
    aff__engine_snapshot(sv->engine, &s, NULL); /* for the size */
    const uint64_t n = (uint64_t)s.layers * (uint64_t)s.experts;
    if (aff__calloc(&heat, n, sizeof *heat, "plane", NULL) == AFF_OK && aff__calloc(&tier, n, 1, "plane", NULL) == AFF_OK) {
        aff__engine_snapshot(sv->engine, &s, heat);
        aff__engine_tiers(sv->engine, tier);
        put_snapshot(&j, sv, &s, heat, tier);
    } else {
        j.failed = true;
    }
    aff__x_header(x, "Cache-Control", "no-store");
    if (j.failed)
        aff__answer_error(x, AFF_CHAT_COMPLETIONS, 500, "out of memory", NULL, NULL);
    else
        aff__x_respond(x, 200, "application/json", j.b.s, j.b.n);
    free(heat);
    free(tier);
    aff__buf_free(&j.b);
}
