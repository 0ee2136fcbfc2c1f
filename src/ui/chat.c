#include "ui/chat.h"
#include "base/mem.h"
#include "ui/guard.h"
#include "ui/line.h"
#include "ui/locale.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

typedef struct chat {
    aff_talk *t;
    aff_line *line;
    bool quit;
} chat;

static void say(const char *text)
{
    printf("\033[2m%s\033[0m\n", text);
}

static void complain(const aff_error *err)
{
    printf("\033[31m%s\033[0m\n", err->msg);
}

/* ---- commands ---- */

static void help(chat *c, const char *arg)
{
    say("/reset             forget the conversation\n"
        "/system [TEXT]     set the system prompt, or remove it; the conversation begins anew\n"
        "/think LEVEL       off, low, high or max\n"
        "/set [NAME VALUE]  temp, top-p, top-k, min-p, seed (a number or random), n (most tokens of an answer, 0: no bound)\n"
        "/save FILE, /load FILE\n"
        "/stats             tokens, times, what was reused\n"
        "/quit              leave; so does Ctrl-D\n"
        "Ctrl-C interrupts an answer or gives up a line. A line that ends in \\ goes on in the next one.");
}

static void reset(chat *c, const char *arg)
{
    aff__talk_reset(c->t);
    say("the conversation is forgotten");
}

static void set_system(chat *c, const char *arg)
{
    char *copy = NULL;
    aff_error err = {0};
    if (*arg && aff__strndup(&copy, arg, strlen(arg), &err) != AFF_OK) {
        complain(&err);
        return;
    }
    free(c->t->system);
    c->t->system = copy;
    aff__talk_reset(c->t);
    say(copy ? "system prompt set; the conversation begins anew" : "system prompt removed; the conversation begins anew");
}

static void think(chat *c, const char *arg)
{
    static const char *const names[] = {"none", "low", "high", "max"};
    if (strcmp(arg, "off") == 0) arg = "none";
    for (int i = 0; i < 4; i++)
        if (strcmp(arg, names[i]) == 0) {
            c->t->effort = names[i];
            say(i ? "the model thinks before it answers" : "the model answers at once");
            return;
        }
    say("/think: expected off, low, high or max");
}

static void show_settings(const chat *c)
{
    const aff_sampling *s = &c->t->sampling;
    char text[240], seed[32];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)s->seed);
    snprintf(text, sizeof text, "temp %g  top-p %g  top-k %lld  min-p %g  seed %s  n %lld  think %s", s->temperature, s->top_p, (long long)s->top_k,
             s->min_p, c->t->random_seed ? "random" : seed, (long long)c->t->n_predict, strcmp(c->t->effort, "none") ? c->t->effort : "off");
    say(text);
}

static void set(chat *c, const char *arg)
{
    char name[16], value[32], *end;
    if (sscanf(arg, "%15s %31s", name, value) != 2) {
        show_settings(c);
        return;
    }
    errno = 0;
    const double v = strtod(value, &end);
    const bool number = end != value && !*end && !errno && isfinite(v), count = number && v >= 0 && v == floor(v) && v < 9e15;
    aff_sampling s = c->t->sampling;
    bool ok = number;
    if (strcmp(name, "temp") == 0)
        s.temperature = v;
    else if (strcmp(name, "top-p") == 0)
        s.top_p = v;
    else if (strcmp(name, "min-p") == 0)
        s.min_p = v;
    else if (strcmp(name, "top-k") == 0 && (ok = count))
        s.top_k = (int64_t)v;
    else if (strcmp(name, "n") == 0 && (ok = count))
        c->t->n_predict = (int64_t)v;
    else if (strcmp(name, "seed") == 0 && (ok = count || strcmp(value, "random") == 0)) {
        c->t->random_seed = !count;
        s.seed = count ? (uint64_t)v : 0;
    } else
        ok = false;
    aff_error err = {0};
    if (!ok)
        say("/set: expected temp, top-p, top-k, min-p, seed or n, and a number");
    else if (aff__sampling_check(&s, &err) != AFF_OK)
        complain(&err);
    else {
        c->t->sampling = s;
        show_settings(c);
    }
}

static void save(chat *c, const char *arg)
{
    aff_error err = {0};
    if (!*arg)
        say("/save: expected a file's name");
    else if (aff__talk_save(c->t, arg, &err) != AFF_OK)
        complain(&err);
    else
        say("saved");
}

static void load(chat *c, const char *arg)
{
    aff_error err = {0};
    if (!*arg)
        say("/load: expected a file's name");
    else if (aff__talk_load(c->t, arg, &err) != AFF_OK)
        complain(&err);
    else {
        char text[64];
        snprintf(text, sizeof text, "loaded, %zu messages", json_array_size(c->t->messages));
        say(text);
    }
}

static double rate(int64_t n, uint64_t ns)
{
    return ns ? (double)n * 1e9 / (double)ns : 0;
}

static void stats(chat *c, const char *arg)
{
    const aff_outcome *o = &c->t->last;
    aff_draft_stats d;
    char text[400];
    aff__engine_draft_stats(c->t->engine, &d);
    int64_t offered = 0, accepted = 0;
    for (int i = 0; i < AFF_MAX_WIDTH; i++) {
        offered += d.offered[i];
        accepted += d.accepted[i];
    }
    snprintf(text, sizeof text,
             "last turn: %lld tokens reused, prompt %lld tok in %.3fs (%.1f tok/s),\n"
             "           answer %lld tok in %.3fs (%.1f tok/s)\n"
             "context:   %lld of %lld tokens, %.1f MiB kept for the next turn\n"
             "drafts:    %.1f %% accepted, %.2f tokens a pass",
             (long long)o->restored, (long long)o->prefilled, (double)o->prefill_ns / 1e9, rate(o->prefilled, o->prefill_ns), (long long)o->decoded,
             (double)o->decode_ns / 1e9, rate(o->decoded, o->decode_ns), (long long)(c->t->covered ? c->t->n_ids : 0),
             (long long)aff__engine_context(c->t->engine), (double)aff__keep_bytes(c->t->keep) / 1048576,
             offered ? 100.0 * (double)accepted / (double)offered : 0.0, d.passes ? (double)d.tokens / (double)d.passes : 0.0);
    say(text);
}

static void quit(chat *c, const char *arg)
{
    c->quit = true;
}

static const struct command {
    const char *name;
    void (*fn)(chat *c, const char *arg);
} commands[] = {{"/help", help}, {"/?", help},      {"/reset", reset}, {"/system", set_system}, {"/think", think}, {"/set", set},
                {"/save", save}, {"/load", load}, {"/stats", stats}, {"/quit", quit},         {"/exit", quit}};

static void command(chat *c, const char *line)
{
    const size_t n = strcspn(line, " \t");
    const char *arg = line + n + strspn(line + n, " \t");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        if (strlen(commands[i].name) == n && strncmp(commands[i].name, line, n) == 0) {
            commands[i].fn(c, arg);
            return;
        }
    say("no such command: /help lists them");
}

/* ---- the loop ---- */

static void turn(chat *c, const aff_buf *text)
{
    static const char *const why[] = {"[cut off: /set n bounds an answer]", NULL, "[the context is full: /reset begins another conversation]",
                                      "[interrupted]"};
    aff_error err = {0};
    (void)aff__line_interrupted();
    if (c->t->random_seed && getrandom(&c->t->sampling.seed, sizeof c->t->sampling.seed, 0) != (ssize_t)sizeof c->t->sampling.seed) c->t->sampling.seed++;
    if (aff__talk_send(c->t, text->s, text->n, &err) != AFF_OK)
        complain(&err);
    else if (why[c->t->last.stop])
        say(why[c->t->last.stop]);
}

/* A message: lines, joined where one ends in a backslash. */
static aff_line_end read_message(chat *c, aff_buf *all, aff_buf *one)
{
    const char *prompt = "> ";
    all->n = 0;
    for (;;) {
        const aff_line_end end = aff__line_read(c->line, prompt, one);
        if (end != AFF_LINE_OK) return end;
        const bool more = one->n && one->s[one->n - 1] == '\\';
        if (aff__buf_put(all, one->s, one->n - more, NULL) != AFF_OK || (more && aff__buf_put(all, "\n", 1, NULL) != AFF_OK)) return AFF_LINE_EOF;
        if (!more) return AFF_LINE_OK;
        prompt = ". ";
    }
}

aff_status aff__chat_run(aff_talk *t, const char *name, aff_error *err)
{
    chat c = {.t = t};
    aff_buf all = {0}, one = {0};
    char path[1024];
    aff__use_utf8();
    t->out = stdout;
    t->colour = true;
    t->interrupted = aff__line_interrupted;
    if (!t->effort) t->effort = "high";
    aff__guard_open(STDIN_FILENO, "\033[0m\r\n", 6);
    aff_status s = aff__talk_init(t, err);
    if (s == AFF_OK) s = aff__line_open(&c.line, aff__history_path(path, sizeof path) ? path : NULL, err);
    if (s == AFF_OK) printf("\033[2m%s, context %lld. /help lists the commands, Ctrl-C interrupts, Ctrl-D leaves.\033[0m\n", name, (long long)aff__engine_context(t->engine));
    while (s == AFF_OK && !c.quit) {
        fflush(stdout);
        const aff_line_end end = read_message(&c, &all, &one);
        if (end == AFF_LINE_EOF) break;
        if (end == AFF_LINE_INTERRUPTED || !all.n || strspn(all.s, " \t\n") == all.n) continue;
        if (!strchr(all.s, '\n')) aff__line_remember(c.line, all.s);
        if (*all.s == '/')
            command(&c, all.s);
        else
            turn(&c, &all);
    }
    aff__line_close(c.line);
    aff__buf_free(&all);
    aff__buf_free(&one);
    aff__guard_close();
    return s;
}
