/* serve.c - affinity --serve: flags, model, signals. */
#include "base/file.h"
#include "base/options.h"
#include "engine/setup.h"
#include "engine/text.h"
#include "server/listen.h"
#include "server/server.h"
#include "ui/dash.h"
#include "ui/guard.h"
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { AFF_EXIT_DEVICE = 4, AFF_FAILED_SECONDS = 10 };

typedef struct flags {
    const char *model, *tokenizer, *host, *key_file, *cors, *name, *format, *numerics, *dspark, *dspark_model, *width;
    const char *socket_mode, *ui;
    bool serve, quiet;
    int64_t port, slots, queue, chunk, threads, floor, max_body, connections, drain;
    aff_setup setup;
} flags;

static int complain(const aff_error *err, int code)
{
    fprintf(stderr, "affinity: %s\n", err->msg);
    return code;
}

static int parse(flags *f, int argc, char **argv)
{
    int first;
    *f = (flags){.host = "127.0.0.1",
                 .port = 8080,
                 .slots = 4,
                 .queue = 64,
                 .floor = 256000,
                 .max_body = 32,
                 .connections = 256,
                 .drain = 30,
                 .socket_mode = "600",
                 .name = "DeepSeek-V4-Flash",
                 .format = "auto",
                 .numerics = "fast",
                 .width = "auto",
                 .ui = "auto",
                 .setup = AFF_SETUP_NOTHING};
    const aff_option table[] = {
        {"serve", 0, AFF_OPT_FLAG, &f->serve, NULL, "Serve HTTP until SIGTERM.", "Server"},
        {"host", 0, AFF_OPT_STR, &f->host, "ADDRESS",
         "IPv4 or IPv6 address to listen on, or unix:PATH for a Unix socket [127.0.0.1]."},
        {"socket-mode", 0, AFF_OPT_STR, &f->socket_mode, "OCTAL", "Permissions of the Unix socket [600]."},
        {"port", 0, AFF_OPT_INT, &f->port, "N", "Port; 0 takes a free one, which is printed [8080].", NULL, 0, 65535},
        {"api-key-file", 0, AFF_OPT_STR, &f->key_file, "FILE",
         "A file whose first line is the key that clients must show; without it the environment's AFFINITY_API_KEY, if "
         "set."},
        {"cors", 0, AFF_OPT_STR, &f->cors, "ORIGINS",
         "Web pages that may use the server: origins separated by commas, or * [none]."},
        {"model-name", 0, AFF_OPT_STR, &f->name, "NAME", "The model's name for clients [DeepSeek-V4-Flash]."},
        {"chat-format", 0, AFF_OPT_STR, &f->format, "FORMAT",
         "auto, v4, 0731 or v4.1; auto asks the container [auto]."},
        {"max-tokens-floor", 0, AFF_OPT_INT, &f->floor, "N",
         "Smaller token limits of requests are raised to N: reasoning and answer share one budget. 0 honours the "
         "client [256000].",
         .max = 1e12},
        {"max-body", 0, AFF_OPT_INT, &f->max_body, "MIB", "Largest request body [32].", NULL, 1, 256},
        {"max-connections", 0, AFF_OPT_INT, &f->connections, "N", "Connections at a time [256].", NULL, 1, 65536},
        {"drain", 0, AFF_OPT_INT, &f->drain, "SECONDS", "After SIGTERM, time for answers in progress [30].",
         .max = 86400},
        {"quiet", 0, AFF_OPT_FLAG, &f->quiet, NULL, "No line per request on standard error."},
        {"ui", 0, AFF_OPT_STR, &f->ui, "auto|dash|plain", "A live dashboard, or lines only; auto draws on a terminal [auto]."},
        {"model", 'm', AFF_OPT_STR, &f->model, "PATH", "Container (.aff) or checkpoint folder.", "Model"},
        {"tokenizer", 0, AFF_OPT_STR, &f->tokenizer, "FILE",
         "The tokenizer.json, or a folder that holds it [the model's folder]."},
        {"numerics", 0, AFF_OPT_STR, &f->numerics, "MODE", "math, sim or fast [fast]."},
        {"slots", 0, AFF_OPT_INT, &f->slots, "N", "Sequences at a time [4].", NULL, 1, AFF_MAX_SLOTS},
        {"queue", 0, AFF_OPT_INT, &f->queue, "N", "Sequences that may wait; further ones get 429 [64].", NULL, 1,
         100000},
        {"prefill-chunk-size", 0, AFF_OPT_INT, &f->chunk, "N", "Prompt tokens per pass, 1 to 8192; changes no result [256, on a device 2048].", NULL,
         1, AFF_MAX_PASS},
        {"threads", 0, AFF_OPT_INT, &f->threads, "N", "Threads; changes no result [one per CPU].", NULL, 1, 4096},
        AFF_SETUP_OPTIONS(&f->setup),
        {"dspark", 0, AFF_OPT_STR, &f->dspark, "on|off",
         "Draft tokens ahead; changes no result [on, if the model has a draft].", "Speculation"},
        {"dspark-model", 0, AFF_OPT_STR, &f->dspark_model, "FILE", "The draft of a container [MODEL.dspark.aff]."},
        {"dspark-width", 0, AFF_OPT_STR, &f->width, "K", "Drafted tokens verified in a pass: 0 to 5, or auto [auto]."},
        {0}};
    const aff_usage usage = {"affinity", "", "Serves a DeepSeek-V4 model over HTTP.", table, 0, 0};
    return aff__options_main(&usage, argc, argv, &first);
}

static aff_status read_key(const flags *f, char **key, aff_error *err)
{
    size_t n;
    const char *env = getenv("AFFINITY_API_KEY");
    *key = NULL;
    if (f->key_file) {
        AFF_TRY(aff__read_file(f->key_file, 65536, key, &n, err));
        (*key)[strcspn(*key, "\r\n")] = 0;
        if (!**key)
            return aff__fail(err, AFF_E_FORMAT, "%s: expected a key in the first line, got nothing", f->key_file);
        return AFF_OK;
    }
    if (!env) return AFF_OK;
    if (!*env)
        return aff__fail(err, AFF_E_INVALID,
                         "AFFINITY_API_KEY: expected a key, got nothing: unset it to serve without one");
    *key = strdup(env);
    return *key ? AFF_OK : aff__fail(err, AFF_E_NOMEM, "key: out of memory");
}

static aff_status mode_of(const char *text, unsigned *mode, aff_error *err)
{
    char *end;
    const unsigned long v = strtoul(text, &end, 8);
    if (*text < '0' || *text > '7' || *end || v > 0777 || !v)
        return aff__fail(err, AFF_E_INVALID, "--socket-mode: expected an octal number from 1 to 777, got '%s'", text);
    *mode = (unsigned)v;
    return AFF_OK;
}

static aff_status fill(const flags *f, aff_server_options *o, aff_net_options *net, aff_error *err)
{
    AFF_TRY(aff__setup_check(&f->setup, err));
    if (!f->model) return aff__fail(err, AFF_E_INVALID, "--serve: expected a model: give -m PATH");
    if (!aff__chat_format_find(f->format, &o->format))
        return aff__fail(err, AFF_E_INVALID, "--chat-format: expected auto, v4, 0731 or v4.1, got '%s'", f->format);
    AFF_TRY(mode_of(f->socket_mode, &o->http.socket_mode, err));
    const char *const modes[] = {"math", "sim", "fast"};
    int i = 0;
    while (i < 3 && strcmp(f->numerics, modes[i]) != 0) i++;
    if (i == 3) return aff__fail(err, AFF_E_INVALID, "--numerics: expected math, sim or fast, got '%s'", f->numerics);
    net->numerics = (aff_numerics)i;
    if (f->dspark && strcmp(f->dspark, "on") != 0 && strcmp(f->dspark, "off") != 0)
        return aff__fail(err, AFF_E_INVALID, "--dspark: expected on or off, got '%s'", f->dspark);
    net->draft = !f->dspark || strcmp(f->dspark, "on") == 0;
    net->draft_if_any = !f->dspark && !f->dspark_model;
    net->draft_path = f->dspark_model;
    const bool automatic = strcmp(f->width, "auto") == 0;
    if (!automatic && (strlen(f->width) != 1 || *f->width < '0' || *f->width > '0' + AFF_MAX_WIDTH))
        return aff__fail(err, AFF_E_INVALID, "--dspark-width: expected 0 to %d or auto, got '%s'", AFF_MAX_WIDTH,
                         f->width);
    o->engine = (aff_engine_options){.threads = (int)f->threads,
                                     .slots = (int)f->slots,
                                     .queue = (int)f->queue,
                                     .chunk = f->chunk,
                                     .width = automatic ? AFF_WIDTH_AUTO : *f->width - '0'};
    aff__setup_engine(&f->setup, 0, &o->engine);
    o->http = (aff_http_options){.host = f->host,
                                 .port = (int)f->port,
                                 .socket_mode = o->http.socket_mode,
                                 .max_body = (size_t)f->max_body << 20,
                                 .max_connections = (int)f->connections,
                                 .log = f->quiet ? NULL : stderr};
    o->cors = f->cors;
    o->model = f->name;
    o->max_tokens_floor = f->floor;
    return AFF_OK;
}

/* The device has failed: as if a signal had come. */
static void end_program(void *ctx)
{
    atomic_bool *failed = ctx;
    atomic_store(failed, true);
    kill(getpid(), SIGTERM);
}

/* Clients and watchers get to see the 503 for a moment before nobody answers any more. */
static void stay(int64_t seconds)
{
    const int64_t ms = 1000 * (seconds < AFF_FAILED_SECONDS ? seconds : AFF_FAILED_SECONDS);
    struct timespec t = {.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
}

static void warn(void *ctx, const char *line)
{
    fprintf(stderr, "affinity: %s\n", line);
}

static aff_status open_all(const flags *f, aff_server_options *o, const aff_net_options *no, aff_net **net,
                           aff_tokenizer **tok, aff_error *err)
{
    char *beside = NULL;
    if (f->dspark_model && aff__is_dir(f->model))
        return aff__fail(err, AFF_E_INVALID, "--dspark-model: %s is a checkpoint, whose draft is part of it", f->model);
    if (o->format == AFF_CHAT_AUTO) AFF_TRY(aff__chat_format_of(f->model, &o->format, err));
    AFF_TRY(aff__net_open(net, f->model, no, err));
    if (!f->tokenizer) AFF_TRY(aff__tokenizer_beside(f->model, &beside, err));
    if (!f->tokenizer && !beside)
        return aff__fail(err, AFF_E_INVALID,
                         "%s: expected a tokenizer.json beside it, found none: give --tokenizer FILE", f->model);
    const aff_status s = aff__tokenizer_open_for(tok, f->tokenizer ? f->tokenizer : beside, aff__net_config(*net), err);
    free(beside);
    return s;
}

/* The memory plan, before anything is loaded. *code >= 0: --plan has been answered. */
static aff_status plan(const flags *f, const aff_server_options *o, aff_net_options no, aff_memplan *p, int *code,
                       aff_error *err)
{
    aff_net *outline;
    no.outline = true;
    *code = -1;
    AFF_TRY(aff__net_open(&outline, f->model, &no, err));
    aff_status s = aff__setup_plan(&f->setup, outline, &o->engine, false, p, err);
    aff__net_close(outline);
    AFF_TRY(s);
    if (f->setup.plan || f->setup.plan_json) {
        *code = aff__setup_answer(&f->setup, p);
        return AFF_OK;
    }
    aff__memplan_print(p, stderr);
    fprintf(stderr,
            "  not counted: answers kept for when they come back, at most 128 MiB; bodies of requests and answers, at "
            "most --max-body "
            "%lld MiB each\n",
            (long long)f->max_body);
    return aff__memplan_check(p, err);
}

/* Whether there is to be a dashboard. Not with a plan, which is all that is printed then. */
static aff_status decide(const flags *f, bool *draw, aff_error *err)
{
    aff_ui ui;
    const bool plans = f->setup.plan || f->setup.plan_json;
    if (!aff__ui_find(f->ui, &ui)) return aff__fail(err, AFF_E_INVALID, "--ui: expected auto, dash or plain, got '%s'", f->ui);
    if (plans && ui == AFF_UI_DASH) return aff__fail(err, AFF_E_INVALID, "--plan and --ui dash: expected one of them, got both");
    AFF_TRY(aff__ui_decide(plans ? AFF_UI_PLAIN : ui, draw, err));
    return AFF_OK;
}

/* "http://127.0.0.1:8080" or "unix:/run/affinity/affinity.sock" */
static void put_address(const flags *f, const aff_server *s, char *out, size_t cap)
{
    const bool v6 = strchr(f->host, ':') != NULL;
    if (aff__listen_is_unix(f->host))
        snprintf(out, cap, "%s", f->host);
    else
        snprintf(out, cap, "http://%s%s%s:%d", v6 ? "[" : "", f->host, v6 ? "]" : "", aff__server_port(s));
}

static bool beyond_this_machine(const flags *f)
{
    return strcmp(f->host, "127.0.0.1") != 0 && strcmp(f->host, "::1") != 0 && strcmp(f->host, "localhost") != 0 &&
           !aff__listen_is_unix(f->host);
}

/* Waits for the first signal on a thread of its own, so that loading a model, which takes minutes, can be ended too.
 * The second one ends the program. */
typedef struct signals {
    sigset_t set;
    pthread_t thread;
    atomic_bool loading;
} signals;

static void *wait_for_signal(void *ctx)
{
    signals *w = ctx;
    int sig;
    while (sigwait(&w->set, &sig) != 0) {
    }
    if (atomic_load(&w->loading)) {
        warn(NULL, "stopped before the model was loaded");
        aff__guard_restore();
        _exit(0); /* nothing was begun that needs an end */
    }
    signal(SIGINT, aff__guard_die);
    signal(SIGTERM, aff__guard_die);
    pthread_sigmask(SIG_UNBLOCK, &w->set, NULL);
    return NULL;
}

/* Before there are other threads: they inherit the mask. */
static aff_status catch_signals(signals *w, aff_error *err)
{
    sigemptyset(&w->set);
    sigaddset(&w->set, SIGINT);
    sigaddset(&w->set, SIGTERM);
    atomic_init(&w->loading, true);
    pthread_sigmask(SIG_BLOCK, &w->set, NULL);
    signal(SIGPIPE, SIG_IGN);
    return pthread_create(&w->thread, NULL, wait_for_signal, w) == 0
               ? AFF_OK
               : aff__fail(err, AFF_E_NOMEM, "server: cannot start a thread");
}

/* The thread that waited has ended, so a second signal needs another one that does not block it. */
static void let_signals_through(signals *w)
{
    pthread_join(w->thread, NULL);
    pthread_sigmask(SIG_UNBLOCK, &w->set, NULL);
}

int aff__serve_main(int argc, char **argv)
{
    flags f;
    aff_error err = {0};
    aff_server_options o = {0};
    aff_net_options no = {0};
    aff_net *net = NULL;
    aff_tokenizer *tok = NULL;
    aff_server *server = NULL;
    aff_prefix *cache = NULL;
    aff_dash *dash = NULL;
    bool draw = false;
    char *key = NULL;
    signals sig;
    char address[160], stage[192];
    aff_memplan p;
    atomic_bool failed;
    atomic_init(&failed, false);
    int code = parse(&f, argc, argv);
    if (code >= 0) return code;
    aff_status s = fill(&f, &o, &no, &err);
    if (s == AFF_OK) s = decide(&f, &draw, &err);
    if (s == AFF_OK) s = read_key(&f, &key, &err);
    if (s != AFF_OK) {
        free(key);
        return complain(&err, s == AFF_E_INVALID ? 2 : 1);
    }
    s = plan(&f, &o, no, &p, &code, &err);
    if (s != AFF_OK || code >= 0) {
        free(key);
        return s == AFF_OK ? code
                           : complain(&err, s == AFF_E_INVALID ? 2
                                            : s == AFF_E_NOMEM ? AFF_EXIT_DOES_NOT_FIT
                                                               : 1);
    }
    o.api_key = key;
    o.engine.warn = warn;
    o.failed = end_program;
    o.failed_ctx = &failed;
    s = catch_signals(&sig, &err);
    if (s != AFF_OK) {
        free(key);
        return complain(&err, 1);
    }
    if (draw) s = aff__dash_open(&dash, f.name, &err);
    aff__dash_stage(dash, "loading the model", false);
    if (s == AFF_OK) s = aff__server_listen(&server, &o, &err);
    if (s == AFF_OK) {
        put_address(&f, server, address, sizeof address);
        fprintf(stderr, "affinity: loading %s; requests to %s get 503 until that is done\n", f.model, address);
        s = open_all(&f, &o, &no, &net, &tok, &err);
    }
    if (s == AFF_OK) s = aff__setup_tiers(&f.setup, &p, net, warn, &err);
    if (s == AFF_OK) s = aff__setup_card(&f.setup, &p, warn, &o.engine, &err);
    if (s == AFF_OK) s = aff__setup_cache(&f.setup, net, warn, &o.engine, &cache, &err);
    if (s == AFF_OK && f.setup.cache_stays) o.replay_dir = f.setup.cache_dir;
    if (s == AFF_OK) s = aff__server_ready(server, net, tok, &o, &err);
    if (s == AFF_OK) {
        if (!key && beyond_this_machine(&f))
            warn(NULL, "WARNING: listening beyond this machine without a key: anybody who reaches it can use it "
                       "(--api-key-file)");
        if (f.floor)
            fprintf(stderr, "affinity: token limits below %lld are raised to it (--max-tokens-floor)\n",
                    (long long)f.floor);
        atomic_store(&sig.loading, false);
        fprintf(stderr, "affinity: listening on %s\n", address);
        snprintf(stage, sizeof stage, "serving on %s", address);
        aff__dash_stage(dash, stage, true);
        aff__dash_watch(dash, aff__server_engine(server), net);
        let_signals_through(&sig);
        if (atomic_load(&failed)) {
            aff__dash_stage(dash, "the device failed", false);
            stay(f.drain);
        }
        aff__dash_stage(dash, "stopping", false);
        fprintf(stderr, "affinity: stopping; answers in progress have %lld s\n", (long long)f.drain);
    }
    aff__dash_watch(dash, NULL, NULL);
    aff__server_stop(server, (int)f.drain * 1000);
    if (cache) aff__prefix_close(cache);
    aff__dash_close(dash);
    aff__tokenizer_free(tok);
    aff__net_close(net);
    free(key);
    return s != AFF_OK ? complain(&err, 1) : atomic_load(&failed) ? AFF_EXIT_DEVICE : 0;
}
