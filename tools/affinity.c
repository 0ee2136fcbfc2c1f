/* affinity - continues a prompt, or shows what the model computes for one. docs/cli.md describes every flag. */
#include "base/clock.h"
#include "base/cpu.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/options.h"
#include "engine/collect.h"
#include "engine/engine.h"
#include "engine/idlist.h"
#include "engine/route_trace.h"
#include "engine/setup.h"
#include "engine/text.h"
#include "server/server.h"
#include "ui/chat.h"
#include "ui/dash.h"
#include "ui/guard.h"
#include "ui/line.h"
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { DEFAULT_PREDICT = 32 };
static const uint64_t file_limit = 1ull << 30; /* bytes of a prompt or id list */
static const uint64_t collect_memory = 1ull << 30; /* bytes for the rows in flight of --collect-imatrix */

/* The command line. NAN, INT64_MIN and NULL: not given. */
typedef struct flags {
    const char *model, *tokenizer, *prompt, *prompt_file, *tokens, *logits_out, *numerics, *force, *cpu_path, *collect, *moments;
    const char *dspark, *dspark_model, *dspark_width, *bias, *route_trace, *ui, *format;
    bool serve, no_echo, ignore_eos, dump_tokens, logits_last;
    int64_t n, top_k, seed, dump_logits, max_layers, chunk, threads, slots, logprobs, imatrix_chunk;
    double temp, top_p, min_p, presence, frequency, repetition;
    int width, moments_index; /* --dspark-width, --imatrix-moments */
    bool text_from_file; /* of -p and --prompt-file the last one counts */
    aff_numerics mode;
    aff_setup setup;
    aff_ui ui_mode;
    aff_chat_format chat_format;
} flags;

typedef struct app {
    flags f;
    aff_net *net;
    aff_tokenizer *tok;
    aff_engine *engine;
    aff_prefix *cache;
    aff_route_trace *trace;
    char *text; /* the prompt as given, NULL for --tokens */
    size_t text_size;
    int32_t *prompt, *forced, *chosen;
    int64_t n_prompt, n_forced, n_chosen;
    aff_utf8_stream stream;
    char *piece; /* output of the stream */
    size_t piece_cap;
    int32_t *top; /* [dump_logits] */
    float *last;  /* [vocab] the last row of logits, for --logits-last */
    aff_bias *bias;
    int n_bias;
    aff_dash *dash;
    FILE *to; /* text: standard output, or with a dashboard memory, until the terminal is free again */
    char *held;
    size_t n_held;
    aff_outfile out;
    bool out_open, progress_shown, separate, draw; /* draw: a dashboard */
    uint64_t reported; /* ns of the last progress line, 0 before the first */
    FILE *report;      /* lines of --logprobs, in memory */
    char *report_text;
    size_t report_size;
    int write_errno;   /* standard output failed */
    aff_status failed; /* inside an event that cannot return it */
    aff_error err;
} app;

static volatile sig_atomic_t interrupted;

static void on_signal(int sig)
{
    interrupted = 1;
    signal(sig, aff__guard_die); /* the second one kills */
}

static int complain(const aff_error *err, int code)
{
    fprintf(stderr, "affinity: %s\n", err->msg);
    return code;
}

/* ---- Command line ---- */

/* Place of an argument string, or of a part of one, on the command line. */
static int place(char *const *argv, int argc, const char *p)
{
    for (int i = 0; i < argc; i++)
        if (p && (uintptr_t)p >= (uintptr_t)argv[i] && (uintptr_t)p <= (uintptr_t)argv[i] + strlen(argv[i])) return i;
    return -1;
}

static int parse(flags *f, int argc, char **argv)
{
    *f = (flags){.n = INT64_MIN,
                 .top_k = INT64_MIN,
                 .seed = INT64_MIN,
                 .imatrix_chunk = INT64_MIN,
                 .temp = NAN,
                 .top_p = NAN,
                 .min_p = NAN,
                 .logprobs = -1,
                 .slots = 1,
                 .setup = AFF_SETUP_NOTHING,
                 .numerics = "fast",
                 .ui = "auto",
                 .format = "auto"};
    const aff_option table[] = {
        {"model", 'm', AFF_OPT_STR, &f->model, "PATH", "Container (.aff) or checkpoint folder.", "Model and prompt"},
        {"tokenizer", 0, AFF_OPT_STR, &f->tokenizer, "FILE",
         "The tokenizer.json, or a folder that holds it [the model's folder]."},
        {"prompt", 'p', AFF_OPT_STR, &f->prompt, "TEXT", "Text to continue; raw, begin-of-sequence is put before it."},
        {"prompt-file", 0, AFF_OPT_STR, &f->prompt_file, "FILE",
         "The same from a file, all of it (- is standard input)."},
        {"tokens", 0, AFF_OPT_STR, &f->tokens, "LIST",
         "Token ids instead of a text: a,b,c or @FILE; nothing is put before them."},
        {"chat-format", 0, AFF_OPT_STR, &f->format, "FORMAT",
         "Of a conversation, which is what -m alone begins on a terminal: auto, v4, 0731 or v4.1; auto asks the container [auto]."},
        {"serve", 0, AFF_OPT_FLAG, &f->serve, NULL, "Serve HTTP instead; affinity --serve --help lists the flags."},
        {"n-predict", 'n', AFF_OPT_INT, &f->n, "N", "Tokens to generate [32; 0 with --dump-logits or --logits-out].",
         .max = 1e12},
        {"temp", 0, AFF_OPT_NUM, &f->temp, "T", "Temperature; 0 takes the most likely token [0].", "Sampling", 0, 1e6},
        {"top-k", 0, AFF_OPT_INT, &f->top_k, "K", "Keep the K most likely tokens; 0 is off [0].", .max = INT32_MAX},
        {"top-p", 0, AFF_OPT_NUM, &f->top_p, "P",
         "Keep the most likely tokens that together have this probability [1].", .max = 1},
        {"min-p", 0, AFF_OPT_NUM, &f->min_p, "P", "Keep tokens at least this likely relative to the likeliest [0].",
         .max = 1},
        {"seed", 0, AFF_OPT_INT, &f->seed, "S", "Seed of the draws [0]."},
        {"presence-penalty", 0, AFF_OPT_NUM, &f->presence, "X", "Taken off the logit of each token of the output [0].", NULL, -100, 100},
        {"frequency-penalty", 0, AFF_OPT_NUM, &f->frequency, "X", "The same, times the number of its occurrences [0].", NULL, -100, 100},
        {"repetition-penalty", 0, AFF_OPT_NUM, &f->repetition, "X",
         "Divides positive and multiplies negative logits of the tokens of prompt and output [1].", NULL, 1e-3, 100},
        {"logit-bias", 0, AFF_OPT_STR, &f->bias, "LIST", "Added to logits: ID=BIAS,ID=BIAS,..."},
        {"ignore-eos", 0, AFF_OPT_FLAG, &f->ignore_eos, NULL, "Go on after the end-of-sequence token."},
        {"no-echo", 0, AFF_OPT_FLAG, &f->no_echo, NULL, "Do not print the prompt.", "Output"},
        {"ui", 0, AFF_OPT_STR, &f->ui, "auto|dash|plain",
         "A live dashboard while it runs, or lines only; auto draws on a terminal [auto]."},
        {"dump-tokens", 0, AFF_OPT_FLAG, &f->dump_tokens, NULL,
         "Print the prompt's ids and exit, without loading the model."},
        {"dump-logits", 0, AFF_OPT_INT, &f->dump_logits, "K",
         "Print the K largest logits of every position instead of text.", NULL, 1, AFF_SAMPLER_MAX_VOCAB},
        {"logits-out", 0, AFF_OPT_STR, &f->logits_out, "FILE",
         "Write the logits: float32, one row of the vocabulary per position."},
        {"logits-last", 0, AFF_OPT_FLAG, &f->logits_last, NULL, "Only the last row in --logits-out."},
        {"logprobs", 0, AFF_OPT_INT, &f->logprobs, "K",
         "Print each generated token's log-probability and the K most likely ones, on standard error at the end.", NULL, 0, AFF_MAX_TOP_LOGPROBS},
        {"collect-imatrix", 0, AFF_OPT_STR, &f->collect, "FILE",
         "Generate nothing: run the text and write how large the inputs of every expert's columns are (GGUF), for "
         "aff-quantize --imatrix.", "Calibration"},
        {"imatrix-chunk", 0, AFF_OPT_INT, &f->imatrix_chunk, "N",
         "Cut that text into sequences of N tokens, each after begin-of-sequence [512].", NULL, 1, 1e9},
        {"imatrix-moments", 0, AFF_OPT_STR, &f->moments, "WHAT",
         "Whole second moments of the inputs besides, for error feedback: none, gate (gate and up), all, or auto: gate up to "
         "8 GiB, down up to 1 GiB [auto]."},
        {"numerics", 0, AFF_OPT_STR, &f->numerics, "MODE",
         "How much of the published arithmetic is reproduced: math, sim or fast [fast].", "Running"},
        {"prefill-chunk-size", 0, AFF_OPT_INT, &f->chunk, "N", "Prompt tokens per pass, 1 to 8192; changes no result [256, on a device 2048].", NULL,
         1, AFF_MAX_PASS},
        {"threads", 0, AFF_OPT_INT, &f->threads, "N", "Threads; changes no result [one per CPU].", NULL, 1, 4096},
        {"slots", 0, AFF_OPT_INT, &f->slots, "N", "Sequences the engine has room for; affinity runs one [1].", NULL, 1, AFF_MAX_SLOTS},
        {"cpu-path", 0, AFF_OPT_STR, &f->cpu_path, "SET", "Use at most this instruction set: scalar, avx2 or avx512."},
        AFF_SETUP_OPTIONS(&f->setup),
        {"dspark", 0, AFF_OPT_STR, &f->dspark, "on|off", "Draft tokens ahead; changes no result [on, if the model has a draft].", "Speculation"},
        {"dspark-model", 0, AFF_OPT_STR, &f->dspark_model, "FILE", "The draft of a container [MODEL.dspark.aff]."},
        {"dspark-width", 0, AFF_OPT_STR, &f->dspark_width, "K", "Drafted tokens verified in a pass: 0 to 5, or auto, which measures what pays [auto]."},
        {"force-tokens", 0, AFF_OPT_STR, &f->force, "LIST", "Generate these ids in turn, whatever the model says.",
         "Diagnosis"},
        {"route-trace", 0, AFF_OPT_STR, &f->route_trace, "FILE", "Write which experts every layer of every pass used (docs/bench.md has the format)."},
        {"max-layers", 0, AFF_OPT_INT, &f->max_layers, "N", "Run only the first N layers: not the model's output.",
         NULL, 1, AFF_MAX_LAYERS},
        {0}};
    const aff_usage usage = {"affinity", "", "Continues a prompt with a DeepSeek-V4 model.", table, 0, 0};
    int first, status = 0;
    char **order = malloc((size_t)argc * sizeof *order); /* getopt moves operands in argv */
    if (!order) return complain(&(aff_error){.msg = "out of memory"}, 1);
    memcpy(order, argv, (size_t)argc * sizeof *order);
    status = aff__options_main(&usage, argc, argv, &first);
    f->text_from_file = place(order, argc, f->prompt_file) > place(order, argc, f->prompt);
    free(order);
    return status;
}

static aff_status bad(aff_error *err, const char *message)
{
    return aff__fail(err, AFF_E_INVALID, "%s", message);
}

static bool sampler_flags(const flags *f)
{
    return !isnan(f->temp) || f->top_k != INT64_MIN || !isnan(f->top_p) || !isnan(f->min_p) || f->seed != INT64_MIN;
}

/* A conversation: nothing says what else to do, and there is somebody. */
static bool talks(const flags *f)
{
    return f->model && !f->prompt && !f->prompt_file && !f->tokens && !f->dump_tokens && !f->dump_logits && !f->logits_out && !f->collect &&
           !f->force && !f->route_trace && f->logprobs < 0 && !f->setup.plan && !f->setup.plan_json && isatty(STDIN_FILENO) == 1 &&
           isatty(STDOUT_FILENO) == 1;
}

/* Which flags go together. */
static aff_status check_flags(const flags *f, aff_error *err)
{
    bool text = f->prompt || f->prompt_file, plan = f->setup.plan || f->setup.plan_json;
    AFF_TRY(aff__setup_check(&f->setup, err));
    if (text && f->tokens) return bad(err, "--tokens and --prompt or --prompt-file: expected one of them, got both");
    if (!text && !f->tokens && !plan && !talks(f))
        return bad(err, "expected a prompt (-p TEXT, --prompt-file FILE or --tokens LIST), got none");
    if (text && !f->text_from_file && !*f->prompt) return bad(err, "--prompt: expected a text, got an empty prompt");
    if (!f->model && !f->dump_tokens) return bad(err, "expected a model (-m PATH), got none");
    if (!f->model && !f->tokenizer && text)
        return bad(err, "--dump-tokens: expected --tokenizer FILE or -m PATH, got neither");
    if (f->logits_last && !f->logits_out)
        return bad(err, "--logits-last: expected --logits-out FILE with it, got none");
    if (f->dump_tokens && (f->dump_logits || f->logits_out || f->force))
        return bad(
            err,
            "--dump-tokens stops before the model runs: expected no --dump-logits, --logits-out or --force-tokens");
    if (f->imatrix_chunk != INT64_MIN && !f->collect)
        return bad(err, "--imatrix-chunk: expected --collect-imatrix FILE with it, got none");
    if (f->moments && !f->collect)
        return bad(err, "--imatrix-moments: expected --collect-imatrix FILE with it, got none");
    if (f->collect && (f->dump_tokens || f->dump_logits || f->logits_out || f->force || f->n != INT64_MIN || f->ignore_eos ||
                       sampler_flags(f)))
        return bad(err, "--collect-imatrix generates nothing: expected no sampling or output flags, no -n, got one");
    if (f->dspark_model && f->dspark && strcmp(f->dspark, "off") == 0)
        return bad(err, "--dspark-model and --dspark off: expected one of them, got both");
    if (strcmp(f->ui, "dash") == 0 && (f->dump_tokens || f->dump_logits || f->collect || plan))
        return bad(err, "--ui dash shows a text as it comes: expected none of --dump-tokens, --dump-logits, --plan and --collect-imatrix with it, got one");
    if (strcmp(f->ui, "dash") == 0 && talks(f)) return bad(err, "--ui dash: a conversation has no dashboard: expected a prompt with it, got none");
    if (f->setup.cache_dir && talks(f)) return bad(err, "--prefix-cache-dir: a conversation keeps its state in memory: expected a prompt with it, got none");
    if (f->force && sampler_flags(f))
        return bad(
            err,
            "--force-tokens and a sampling flag (--temp, --top-k, --top-p, --min-p, --seed): expected one, got both");
    return AFF_OK;
}

/* Index of `value` among names, which ends with NULL. */
static aff_status one_of(const char *flag, const char *value, const char *const *names, int *index, aff_error *err)
{
    char all[64] = "";
    for (int i = 0; names[i]; i++) {
        *index = i;
        if (strcmp(value, names[i]) == 0) return AFF_OK;
        size_t n = strlen(all);
        snprintf(all + n, sizeof all - n, "%s%s", i == 0 ? "" : names[i + 1] ? ", " : " or ", names[i]);
    }
    return aff__fail(err, AFF_E_INVALID, "%s: expected %s, got '%s'", flag, all, value);
}

static aff_status check_enums(flags *f, aff_error *err)
{
    static const char *const modes[] = {"math", "sim", "fast", NULL}, *const paths[] = {"scalar", "avx2", "avx512",
                                                                                        NULL};
    int i;
    AFF_TRY(one_of("--numerics", f->numerics, modes, &i, err));
    f->mode = i == 0 ? AFF_MATH : i == 1 ? AFF_SIM : AFF_FAST;
    static const char *const switches[] = {"on", "off", NULL}, *const widths[] = {"0", "1", "2", "3", "4", "5", "auto", NULL};
    if (f->dspark) AFF_TRY(one_of("--dspark", f->dspark, switches, &i, err));
    static const char *const moments[] = {"auto", "none", "gate", "all", NULL}; /* as aff_moments */
    if (f->moments) AFF_TRY(one_of("--imatrix-moments", f->moments, moments, &f->moments_index, err));
    if (!aff__ui_find(f->ui, &f->ui_mode)) return aff__fail(err, AFF_E_INVALID, "--ui: expected auto, dash or plain, got '%s'", f->ui);
    if (!aff__chat_format_find(f->format, &f->chat_format))
        return aff__fail(err, AFF_E_INVALID, "--chat-format: expected auto, v4, 0731 or v4.1, got '%s'", f->format);
    f->width = AFF_WIDTH_AUTO;
    if (f->dspark_width) {
        AFF_TRY(one_of("--dspark-width", f->dspark_width, widths, &i, err));
        if (i <= AFF_MAX_WIDTH) f->width = i;
    }
    if (!f->cpu_path) return AFF_OK;
    AFF_TRY(one_of("--cpu-path", f->cpu_path, paths, &i, err));
    aff_cpu_level want = i == 0 ? AFF_CPU_SCALAR : i == 1 ? AFF_CPU_AVX2 : AFF_CPU_AVX512, have = aff__cpu_level();
    if (want > have)
        fprintf(stderr, "affinity: note: --cpu-path %s: this machine has only %s, which is used\n", f->cpu_path,
                aff__cpu_level_name(have));
    aff__cpu_cap(want);
    return AFF_OK;
}

/* ---- Prompt ---- */

/* "ID=BIAS,..." */
static aff_status read_bias(app *a, aff_error *err)
{
    const char *at = a->f.bias;
    for (; at && *at && a->n_bias < AFF_MAX_BIAS; a->n_bias++) {
        char *end;
        const long id = strtol(at, &end, 10);
        const bool split = end != at && *end == '=';
        at = end + 1;
        const float bias = split ? strtof(at, &end) : 0;
        if (!split || end == at || id < 0 || id > INT32_MAX || (*end && (*end != ',' || !end[1])))
            return aff__fail(err, AFF_E_INVALID, "--logit-bias: expected ID=BIAS,ID=BIAS,..., got '%s'", a->f.bias);
        AFF_TRY(aff__realloc(&a->bias, (uint64_t)a->n_bias + 1, sizeof *a->bias, "logit bias", err));
        a->bias[a->n_bias] = (aff_bias){(int32_t)id, bias};
        at = *end ? end + 1 : end;
    }
    return at && *at ? aff__fail(err, AFF_E_INVALID, "--logit-bias: expected at most %d entries, got more", AFF_MAX_BIAS) : AFF_OK;
}

/* "a,b,c" or "@FILE". A malformed file is a failure of the file, not of the command line. */
static aff_status read_ids(const char *flag, const char *list, int32_t **ids, int64_t *n, aff_error *err)
{
    if (list[0] != '@') return aff__idlist_parse(list, strlen(list), flag, ids, n, err);
    char *text = NULL;
    size_t size;
    AFF_TRY(aff__read_file(list + 1, file_limit, &text, &size, err));
    aff_status s = aff__idlist_parse(text, size, list + 1, ids, n, err);
    free(text);
    return s == AFF_E_INVALID ? AFF_E_FORMAT : s;
}

static aff_status read_text(app *a, aff_error *err)
{
    if (!a->f.text_from_file) {
        a->text_size = strlen(a->f.prompt);
        return aff__strndup(&a->text, a->f.prompt, a->text_size, err);
    }
    return aff__read_file(a->f.prompt_file, file_limit, &a->text, &a->text_size, err);
}

/* Opens the tokenizer named, or the model's if it has one; a text cannot do without. */
static aff_status open_tokenizer(app *a, aff_error *err)
{
    char *beside = NULL;
    const char *path = a->f.tokenizer;
    if (!path) {
        AFF_TRY(aff__tokenizer_beside(a->f.model, &beside, err));
        path = beside;
    }
    aff_status s = AFF_OK;
    if (path)
        s = aff__tokenizer_open_for(&a->tok, path, a->net ? aff__net_config(a->net) : NULL, err);
    else if (a->text)
        s = aff__fail(err, AFF_E_INVALID, "%s: expected a tokenizer.json beside it, found none: give --tokenizer FILE",
                      a->f.model);
    free(beside);
    return s;
}

static aff_status encode_prompt(app *a, aff_error *err)
{
    const char *name = a->f.text_from_file ? a->f.prompt_file : "--prompt";
    return aff__prompt_ids(a->tok, a->text, a->text_size, name, &a->prompt, &a->n_prompt, err);
}

static void print_ids(FILE *to, const int32_t *ids, int64_t n)
{
    for (int64_t i = 0; i < n; i++) fprintf(to, "%s%d", i ? "," : "", ids[i]);
    fputc('\n', to);
}

static aff_status dump_tokens(app *a, aff_error *err)
{
    if (a->text) {
        AFF_TRY(open_tokenizer(a, err));
        AFF_TRY(encode_prompt(a, err));
    }
    print_ids(stdout, a->prompt, a->n_prompt);
    return fflush(stdout) == 0 ? AFF_OK : aff__fail_errno(err, "standard output: cannot write");
}

/* ---- Output while it runs ---- */

static bool flush_output(app *a)
{
    if (fflush(stdout) != 0 && !a->write_errno) a->write_errno = errno ? errno : EIO;
    return !a->write_errno;
}

/* Characters of the text, in whatever pieces. */
static void put_text(app *a, const char *s, size_t n)
{
    fwrite(s, 1, n, a->to);
    aff__dash_text(a->dash, s, n);
}

/* Without a tokenizer, the id; else what it adds to the text. */
static aff_status print_token(app *a, int32_t id, aff_error *err)
{
    if (!a->tok) {
        char number[16];
        put_text(a, number, (size_t)snprintf(number, sizeof number, "%s%d", a->separate ? " " : "", id));
        a->separate = true;
        return AFF_OK;
    }
    size_t n;
    const char *bytes = aff__tokenizer_bytes(a->tok, (uint32_t)id, &n);
    if (3 * (n + 4) > a->piece_cap) {
        AFF_TRY(aff__realloc(&a->piece, 3 * (n + 4), 1, "text of a token", err));
        a->piece_cap = 3 * (n + 4);
    }
    put_text(a, a->piece, aff__utf8_push(&a->stream, bytes, n, a->piece));
    return AFF_OK;
}

/* A character that the text's last token left incomplete. */
static void finish_text(app *a)
{
    char tail[16];
    put_text(a, tail, aff__utf8_flush(&a->stream, tail));
}

static aff_status echo_prompt(app *a, aff_error *err)
{
    if (a->text) {
        put_text(a, a->text, a->text_size);
    } else {
        for (int64_t i = 0; i < a->n_prompt; i++) AFF_TRY(print_token(a, a->prompt[i], err));
        finish_text(a);
    }
    flush_output(a);
    return AFF_OK;
}

static void clear_progress(app *a)
{
    if (a->progress_shown) fputs("\r\033[K", stderr);
    a->progress_shown = false;
}

static bool on_progress(void *ctx, int64_t done, int64_t total)
{
    app *a = ctx;
    char stage[64];
    snprintf(stage, sizeof stage, done < total ? "prompt, %lld of %lld tokens" : "answering", (long long)done, (long long)total);
    aff__dash_stage(a->dash, stage, done >= total);
    if (done < total && isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r\033[Kprefill %lld of %lld tokens", (long long)done, (long long)total);
        a->progress_shown = true;
    } else {
        clear_progress(a);
    }
    return !interrupted && !a->write_errno;
}

/* One line of --logprobs: position, id, its log-probability, then the likeliest ids with theirs. Kept until the text is out. */
static void keep_logprobs(app *a, const aff_token *t)
{
    if (a->f.logprobs < 0 || !a->report) return;
    fprintf(a->report, "logprob %lld %d %.6f", (long long)t->pos, t->id, (double)t->logprob);
    for (int i = 0; i < t->n_top; i++) fprintf(a->report, " %d %.6f", t->top[i], (double)t->top_logprob[i]);
    fputc('\n', a->report);
}

static bool on_token(void *ctx, const aff_token *t)
{
    app *a = ctx;
    a->chosen[a->n_chosen++] = t->id;
    keep_logprobs(a, t);
    bool end = t->id == aff__net_config(a->net)->eos && !a->f.ignore_eos && !a->n_forced;
    if (!a->f.dump_logits && !end) {
        a->failed = print_token(a, t->id, &a->err);
        flush_output(a);
    }
    return a->failed == AFF_OK && !interrupted && !a->write_errno;
}

static aff_status on_logits(void *ctx, int64_t pos, int rows, const float *logits, aff_error *err)
{
    app *a = ctx;
    int vocab = aff__net_config(a->net)->vocab, k = (int)a->f.dump_logits;
    if (a->out_open && !a->f.logits_last) {
        uint64_t row = (uint64_t)vocab * sizeof(float);
        AFF_TRY(aff__out_write(&a->out, logits, row * (uint64_t)rows, row * (uint64_t)pos, err));
    }
    if (a->last) memcpy(a->last, logits + (size_t)(rows - 1) * (size_t)vocab, (size_t)vocab * sizeof *a->last);
    for (int r = 0; r < rows && k; r++) {
        const float *l = logits + (size_t)r * (size_t)vocab;
        int64_t p = pos + r;
        AFF_TRY(aff__top_logits(l, vocab, k, a->top, err));
        printf("position %lld token %d\n", (long long)p, p < a->n_prompt ? a->prompt[p] : a->chosen[p - a->n_prompt]);
        for (int i = 0; i < k; i++) printf("%6d %.9g\n", a->top[i], (double)l[a->top[i]]);
    }
    flush_output(a);
    return AFF_OK;
}

static void on_warning(void *ctx, const char *line)
{
    fprintf(stderr, "affinity: %s\n", line);
}

/* ---- The run ---- */

static aff_net_options net_options(const flags *f)
{
    return (aff_net_options){.numerics = f->mode,
                             .max_layers = (int)f->max_layers,
                             .draft = !f->dspark || strcmp(f->dspark, "on") == 0,
                             .draft_if_any = !f->dspark && !f->dspark_model,
                             .draft_path = f->dspark_model};
}

/* What the configuration alone can refuse. */
static aff_status check_against(const app *a, const aff_config *cfg, aff_error *err)
{
    const flags *f = &a->f;
    const int64_t n_prompt = a->n_prompt;
    AFF_TRY(aff__check_ids("prompt", a->prompt, n_prompt, cfg->vocab, err));
    AFF_TRY(aff__check_ids("forced tokens", a->forced, a->n_forced, cfg->vocab, err));
    AFF_TRY(aff__adjust_check(&(aff_adjust){.bias = a->bias, .n_bias = a->n_bias}, cfg->vocab, err));
    if (f->max_layers > cfg->layers)
        return aff__fail(err, AFF_E_INVALID, "--max-layers: expected 1 to %d, got %lld", cfg->layers,
                         (long long)f->max_layers);
    if (f->dump_logits > cfg->vocab)
        return aff__fail(err, AFF_E_INVALID, "--dump-logits: expected 1 to %d, got %lld", cfg->vocab,
                         (long long)f->dump_logits);
    if (n_prompt > cfg->max_positions)
        return aff__fail(err, AFF_E_LIMIT,
                         "prompt: expected at most %lld tokens, the model's context, got %lld: shorten it",
                         (long long)cfg->max_positions, (long long)n_prompt);
    if (f->setup.kv_size > cfg->max_positions)
        return aff__fail(err, AFF_E_LIMIT, "--kv-size: expected at most %lld, the model's context, got %lld",
                         (long long)cfg->max_positions, (long long)f->setup.kv_size);
    if (f->setup.kv_size > 0 && n_prompt > f->setup.kv_size)
        return aff__fail(err, AFF_E_LIMIT, "prompt: expected at most --kv-size %lld tokens, got %lld: shorten it",
                         (long long)f->setup.kv_size, (long long)n_prompt);
    return AFF_OK;
}

/* The memory plan, before anything is loaded. *code >= 0: --plan has been answered. */
static aff_status plan(app *a, aff_engine_options *o, aff_memplan *p, int *code, aff_error *err)
{
    flags *f = &a->f;
    aff_net_options no = net_options(f);
    const bool answer = f->setup.plan || f->setup.plan_json;
    no.outline = true;
    AFF_TRY(aff__net_open(&a->net, f->model, &no, err));
    const aff_config *cfg = aff__net_config(a->net);
    if (a->text || !answer) AFF_TRY(open_tokenizer(a, err));
    if (a->text) AFF_TRY(encode_prompt(a, err));
    AFF_TRY(check_against(a, cfg, err));
    if (f->n == INT64_MIN) f->n = f->dump_logits || f->logits_out ? 0 : DEFAULT_PREDICT;
    int64_t needed = f->n < cfg->max_positions - a->n_prompt ? a->n_prompt + f->n : cfg->max_positions;
    if (!a->n_prompt) needed = 0; /* --plan without a prompt: for the model's whole context */
    aff__setup_engine(&f->setup, needed, o);
    AFF_TRY(aff__setup_plan(&f->setup, a->net, o, f->dump_logits || f->logits_out, p, err));
    aff__net_close(a->net);
    a->net = NULL;
    if (answer)
        *code = aff__setup_answer(&f->setup, p);
    else if (!talks(f))
        aff__memplan_print(p, stderr);
    return answer ? AFF_OK : aff__memplan_check(p, err);
}

/* Loads everything, so that all that can be refused is refused before the first pass. *code >= 0: there is nothing to run. */
static aff_status prepare(app *a, int *code, aff_error *err)
{
    flags *f = &a->f;
    aff_memplan p;
    aff_engine_options o = {.threads = (int)f->threads,
                            .slots = (int)f->slots,
                            .chunk = f->chunk,
                            .width = f->width,
                            .warn = on_warning};
    *code = -1;
    if (f->dspark_model && aff__is_dir(f->model))
        return aff__fail(err, AFF_E_INVALID, "--dspark-model: %s is a checkpoint, whose draft is part of it", f->model);
    AFF_TRY(plan(a, &o, &p, code, err));
    if (*code >= 0) return AFF_OK;
    const aff_net_options no = net_options(f);
    AFF_TRY(aff__net_open(&a->net, f->model, &no, err));
    AFF_TRY(aff__setup_tiers(&f->setup, &p, a->net, on_warning, err));
    AFF_TRY(aff__setup_card(&a->f.setup, &p, on_warning, &o, err));
    AFF_TRY(aff__setup_cache(&f->setup, a->net, on_warning, &o, &a->cache, err));
    if (f->route_trace) {
        AFF_TRY(aff__route_trace_open(&a->trace, f->route_trace, a->net, err));
        o.route = aff__route_trace_note;
        o.route_ctx = a->trace;
    }
    AFF_TRY(aff__engine_create(&a->engine, a->net, &o, err));
    const uint64_t vocab = (uint64_t)aff__net_config(a->net)->vocab;
    AFF_TRY(aff__calloc(&a->chosen, (uint64_t)(o.context - a->n_prompt) + 1, sizeof *a->chosen, "generated ids", err));
    if (f->logits_last) AFF_TRY(aff__calloc(&a->last, vocab, sizeof *a->last, "last logits", err));
    if (f->logprobs >= 0 && !(a->report = open_memstream(&a->report_text, &a->report_size)))
        return aff__fail_errno(err, "log-probabilities: no memory");
    AFF_TRY(aff__calloc(&a->top, (uint64_t)f->dump_logits, sizeof *a->top, "top logits", err));
    if (f->logits_out) {
        AFF_TRY(aff__out_open(&a->out, f->logits_out, err));
        a->out_open = true;
    }
    return AFF_OK;
}

static void announce(const app *a)
{
    const flags *f = &a->f;
    const int layers = aff__net_config(a->net)->layers;
    const aff_draft_kind draft = aff__net_draft(a->net);
    if (draft == AFF_DRAFT_NONE)
        fprintf(stderr, "speculation: off (%s)\n", f->dspark ? "--dspark off" : "the model has no draft, or not for these layers");
    else
        fprintf(stderr, "speculation: %s, width %s\n", draft == AFF_DRAFT_DSPARK ? "DSpark" : "MTP-1", f->dspark_width ? f->dspark_width : "auto");
    if (f->max_layers && f->max_layers < layers)
        printf("--max-layers %lld of %d: the output is not the model's\n", (long long)f->max_layers, layers);
    if (sampler_flags(f) && !(f->temp > 0) && (f->top_k != INT64_MIN || !isnan(f->top_p) || !isnan(f->min_p)))
        fprintf(stderr, "affinity: note: --top-k, --top-p and --min-p have no effect at temperature 0 (see --temp)\n");
}

static void catch_signals(void)
{
    struct sigaction stop = {.sa_handler = on_signal}, ignore = {.sa_handler = SIG_IGN};
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGPIPE, &ignore, NULL); /* an error of the write instead */
}

static double rate(int64_t tokens, uint64_t ns)
{
    return ns ? (double)tokens * 1e9 / (double)ns : 0;
}

static void print_rates(const char *what, const int64_t *part, const int64_t *whole)
{
    fprintf(stderr, ", %s", what);
    for (int i = 0; i < AFF_MAX_WIDTH && whole[i]; i++) fprintf(stderr, " %.3f", (double)part[i] / (double)whole[i]);
}

static void print_table(const char *what, const int64_t *n, const double *ns)
{
    fputs(what, stderr);
    for (int i = 1; i <= AFF_PASS_ROWS; i++)
        if (n[i]) fprintf(stderr, " %d:%lldx%.3fms", i, (long long)n[i], ns[i] / 1e6);
    fputc('\n', stderr);
}

/* What the drafts did: spec text-and-serving 6.1. */
static void draft_summary(const app *a)
{
    aff_draft_stats s;
    int64_t offered = 0, accepted = 0;
    if (aff__net_draft(a->net) == AFF_DRAFT_NONE) return;
    aff__engine_draft_stats(a->engine, &s);
    for (int i = 0; i < AFF_MAX_WIDTH; i++) {
        offered += s.offered[i];
        accepted += s.accepted[i];
    }
    fprintf(stderr, "drafts: %lld blocks (%lld not verified, %lld passes without), %lld tokens verified, %lld accepted (%.1f %%), %.2f tokens a pass",
            (long long)s.blocks, (long long)s.unused, (long long)s.skipped, (long long)offered, (long long)accepted,
            offered ? 100.0 * (double)accepted / (double)offered : 0.0, s.passes ? (double)s.tokens / (double)s.passes : 0.0);
    print_rates("accepted by place", s.accepted, s.offered);
    print_rates("equal by place", s.marginal, s.offered);
    fputc('\n', stderr);
    print_table("passes by rows:", s.rows, s.times.verify);
    if (s.blocks) print_table("draft passes by sequences:", s.drafts, s.times.draft);
}

/* Where the experts were, if they have slots. */
static void tier_summary(app *a)
{
    aff_snapshot s;
    char line[640];
    aff__engine_snapshot(a->engine, &s, NULL);
    if (!s.tiered) return;
    aff__tier_counters_line(&s.tiers, line, sizeof line);
    fprintf(stderr, "%s\n", line);
}

static void summary(app *a, const aff_outcome *o)
{
    static const char *const why[] = {"", " [stopped at EOS]", " [stopped at the end of the context]",
                                      " [interrupted]"};
    struct rusage u;
    fputs("generated ids: ", stderr);
    print_ids(stderr, a->chosen, a->n_chosen);
    if (a->report && fflush(a->report) == 0) fputs(a->report_text, stderr);
    draft_summary(a);
    tier_summary(a);
    if (a->cache) fprintf(stderr, "prefix cache: %lld of %lld tokens restored\n", (long long)o->restored, (long long)(o->restored + o->prefilled));
    fprintf(stderr, "prefill %lld tok in %.3fs (%.2f tok/s), decode %lld tok in %.3fs (%.2f tok/s)%s\n",
            (long long)o->prefilled, (double)o->prefill_ns / 1e9, rate(o->prefilled, o->prefill_ns),
            (long long)o->decoded, (double)o->decode_ns / 1e9, rate(o->decoded, o->decode_ns), why[o->stop]);
    if (getrusage(RUSAGE_SELF, &u) == 0) fprintf(stderr, "peak RSS %.1f MiB\n", (double)u.ru_maxrss / 1024);
}

/* The logits file appears only when it is whole. */
static aff_status finish_logits(app *a, aff_error *err)
{
    if (!a->out_open) return AFF_OK;
    if (interrupted) return aff__fail(err, AFF_E_CANCELLED, "%s: not written: interrupted", a->f.logits_out);
    uint64_t row = (uint64_t)aff__net_config(a->net)->vocab * sizeof(float);
    if (a->f.logits_last) AFF_TRY(aff__out_write(&a->out, a->last, row, 0, err));
    a->out_open = false;
    return aff__out_commit(&a->out, err);
}

/* ---- Conversation ---- */

static aff_status restore(void *ctx, aff_seq *seq, const int32_t *ids, int64_t n, int64_t most, int64_t *matched, aff_error *err)
{
    const aff_status s = aff__keep_restore(ctx, seq, ids, n, most, err);
    *matched = aff__seq_pos(seq);
    return s;
}

static void publish(void *ctx, const aff_seq *seq, const int32_t *ids)
{
    aff__keep_publish(ctx, seq, ids);
}

/* What a conversation's turns are made with; sampling as the server's, unless flags say otherwise. */
static aff_talk talk_of(const app *a, aff_keep *keep, int64_t most)
{
    const flags *f = &a->f;
    aff_talk t = {.engine = a->engine, .net = a->net, .tok = a->tok, .keep = keep, .format = f->chat_format, .n_predict = most};
    aff_sampling_init(&t.sampling);
    t.sampling.temperature = isnan(f->temp) ? 1 : f->temp;
    t.sampling.top_p = isnan(f->top_p) ? 0.95 : f->top_p;
    if (!isnan(f->min_p)) t.sampling.min_p = f->min_p;
    if (f->top_k != INT64_MIN) t.sampling.top_k = f->top_k;
    t.random_seed = f->seed == INT64_MIN;
    if (!t.random_seed) t.sampling.seed = (uint64_t)f->seed;
    return t;
}

static aff_status open_for_talk(app *a, aff_keep *keep, aff_error *err)
{
    const flags *f = &a->f;
    aff_memplan p;
    int code = -1;
    aff_engine_options o = {
        .threads = (int)f->threads, .slots = 1, .chunk = f->chunk, .width = f->width, .warn = on_warning, .cache = {keep, restore, publish}};
    if (f->dspark_model && aff__is_dir(f->model))
        return aff__fail(err, AFF_E_INVALID, "--dspark-model: %s is a checkpoint, whose draft is part of it", f->model);
    AFF_TRY(plan(a, &o, &p, &code, err));
    if (!a->tok) return aff__fail(err, AFF_E_INVALID, "%s: expected a tokenizer.json beside it, found none: give --tokenizer FILE", f->model);
    const aff_net_options no = net_options(f);
    AFF_TRY(aff__net_open(&a->net, f->model, &no, err));
    AFF_TRY(aff__setup_tiers(&f->setup, &p, a->net, on_warning, err));
    AFF_TRY(aff__setup_card(&a->f.setup, &p, on_warning, &o, err));
    return aff__engine_create(&a->engine, a->net, &o, err);
}

static aff_status converse(app *a, aff_error *err)
{
    const char *slash = strrchr(a->f.model, '/');
    const int64_t most = a->f.n > 0 ? a->f.n : 0; /* plan() gives an n that was not given the default of a prompt */
    aff_keep *keep = NULL;
    aff__line_signals(); /* before there are threads */
    if (a->f.chat_format == AFF_CHAT_AUTO) AFF_TRY(aff__chat_format_of(a->f.model, &a->f.chat_format, err));
    AFF_TRY(aff__keep_create(&keep, err));
    aff_status s = open_for_talk(a, keep, err);
    if (s == AFF_OK) {
        aff_talk t = talk_of(a, keep, most);
        s = aff__chat_run(&t, slash && slash[1] ? slash + 1 : a->f.model, err);
        aff__talk_free(&t);
    }
    aff__engine_free(a->engine);
    a->engine = NULL;
    aff__keep_free(keep);
    return s;
}

/* ---- Dashboard ---- */

static aff_status enter_dash(app *a, aff_error *err)
{
    const char *slash = a->f.model ? strrchr(a->f.model, '/') : NULL;
    if (!a->draw || a->f.dump_logits || a->f.setup.plan || a->f.setup.plan_json) return AFF_OK;
    a->to = open_memstream(&a->held, &a->n_held);
    if (!a->to) {
        a->to = stdout;
        return aff__fail_errno(err, "dashboard: no memory");
    }
    AFF_TRY(aff__dash_open(&a->dash, slash && slash[1] ? slash + 1 : a->f.model, err));
    aff__dash_stage(a->dash, "loading the model", false);
    return AFF_OK;
}

/* The terminal is as it was; the text that was held back is written to it. */
static void leave_dash(app *a)
{
    aff__dash_watch(a->dash, NULL, NULL);
    aff__dash_close(a->dash);
    a->dash = NULL;
    if (a->to == stdout) return;
    fclose(a->to);
    a->to = stdout;
    fwrite(a->held, 1, a->n_held, stdout);
    free(a->held);
}

static aff_status generate(app *a, aff_error *err)
{
    const flags *f = &a->f;
    aff_request r = {.prompt = a->prompt,
                     .n_prompt = a->n_prompt,
                     .n_predict = f->n,
                     .ignore_eos = f->ignore_eos,
                     .forced = a->forced,
                     .n_forced = a->n_forced,
                     .adjust = {.repetition = f->repetition,
                                .presence = f->presence,
                                .frequency = f->frequency,
                                .bias = a->bias,
                                .n_bias = a->n_bias},
                     .logprobs = f->logprobs >= 0,
                     .top_logprobs = f->logprobs > 0 ? (int)f->logprobs : 0};
    aff_sampling_init(&r.sampling);
    if (f->logits_last && !f->dump_logits) r.logits_from = a->n_prompt - 1;
    if (!isnan(f->temp)) r.sampling.temperature = f->temp;
    if (!isnan(f->top_p)) r.sampling.top_p = f->top_p;
    if (!isnan(f->min_p)) r.sampling.min_p = f->min_p;
    if (f->top_k != INT64_MIN) r.sampling.top_k = f->top_k;
    if (f->seed != INT64_MIN) r.sampling.seed = (uint64_t)f->seed;
    bool rows = f->dump_logits || f->logits_out, text = !f->dump_logits;
    aff_events ev = {.ctx = a, .progress = on_progress, .token = on_token, .logits = rows ? on_logits : NULL};
    aff_outcome o;

    AFF_TRY(aff__engine_check(a->engine, &r, err)); /* before anything is printed */
    announce(a);
    aff__dash_stage(a->dash, "answering", true);
    if (text && !f->no_echo) AFF_TRY(echo_prompt(a, err));
    aff_status s = aff__engine_run(a->engine, &r, &ev, &o, err);
    clear_progress(a);
    if (text) {
        finish_text(a);
        put_text(a, "\n", 1);
    }
    leave_dash(a);
    flush_output(a);
    AFF_TRY(s);
    if (a->failed != AFF_OK) {
        *err = a->err;
        return a->failed;
    }
    errno = a->write_errno;
    if (errno) return aff__fail_errno(err, "standard output: cannot write");
    summary(a, &o);
    aff_route_trace *t = a->trace;
    a->trace = NULL;
    AFF_TRY(aff__route_trace_close(t, true, err));
    return finish_logits(a, err);
}

/* ---- Importance matrix ---- */

/* On a terminal one line that is rewritten, elsewhere a line every ten seconds. */
static bool on_layer(void *ctx, int64_t first, int64_t rows, int layer, int layers)
{
    app *a = ctx;
    const bool terminal = isatty(STDERR_FILENO);
    const uint64_t now = aff__now_ns();
    if (!a->reported) a->reported = now;
    if (terminal || now - a->reported > 10000000000u) {
        fprintf(stderr, "%stokens %lld to %lld of %lld, layer %d of %d%s", terminal ? "\r\033[K" : "", (long long)first,
                (long long)(first + rows), (long long)a->n_prompt, layer, layers, terminal ? "" : "\n");
        a->reported = now;
        a->progress_shown = terminal;
    }
    return !interrupted;
}

static aff_status collect(app *a, aff_error *err)
{
    const flags *f = &a->f;
    AFF_TRY(aff__net_open(&a->net, f->model, &(aff_net_options){.numerics = f->mode, .max_layers = (int)f->max_layers},
                          err));
    const int32_t bos = (int32_t)aff__net_config(a->net)->bos;
    if (a->text) {
        AFF_TRY(open_tokenizer(a, err));
        AFF_TRY(encode_prompt(a, err));
    }
    const int64_t skip = a->prompt[0] == bos; /* every sequence has its own */
    const aff_collect c = {.net = a->net,
                           .id = a->prompt + skip,
                           .n = a->n_prompt - skip,
                           .chunk = f->imatrix_chunk == INT64_MIN ? 512 : f->imatrix_chunk,
                           .bos = bos,
                           .threads = (int)f->threads,
                           .moments = (aff_moments)f->moments_index,
                           .memory = collect_memory,
                           .dataset = a->text ? a->f.text_from_file ? f->prompt_file : "--prompt" : "--tokens",
                           .ctx = a,
                           .progress = on_layer};
    aff_collected out;
    const aff_status s = aff__collect_imatrix(&c, f->collect, &out, err);
    clear_progress(a);
    AFF_TRY(s);
    printf("%s: %lld tokens in sequences of %lld; %lld of %lld experts were never used\n", f->collect, (long long)c.n,
           (long long)c.chunk, (long long)out.unseen, (long long)out.pairs);
    return fflush(stdout) == 0 ? AFF_OK : aff__fail_errno(err, "standard output: cannot write");
}

static int run(app *a)
{
    aff_error err = {0};
    flags *f = &a->f;
    if (check_flags(f, &err) != AFF_OK || check_enums(f, &err) != AFF_OK) return complain(&err, 2);
    aff_status s = AFF_OK;
    if (f->tokens) s = read_ids("--tokens", f->tokens, &a->prompt, &a->n_prompt, &err);
    if (s == AFF_OK && f->bias) s = read_bias(a, &err);
    if (s == AFF_OK && f->force) s = read_ids("--force-tokens", f->force, &a->forced, &a->n_forced, &err);
    if (s != AFF_OK) return complain(&err, s == AFF_E_INVALID ? 2 : 1);
    if ((f->prompt || f->prompt_file) && read_text(a, &err) != AFF_OK) return complain(&err, 1);
    if (a->text && !a->text_size) { /* -p "" was refused before: this is a file */
        aff__fail(&err, AFF_E_FORMAT, "%s: expected a text, got an empty prompt", f->prompt_file);
        return complain(&err, 1);
    }
    if (f->dump_tokens) return dump_tokens(a, &err) == AFF_OK ? 0 : complain(&err, 1);
    if (f->collect) {
        catch_signals();
        return collect(a, &err) == AFF_OK ? 0 : complain(&err, 1);
    }
    int code = -1, failed = 1;
    if (aff__ui_decide(f->ui_mode, &a->draw, &err) != AFF_OK) return complain(&err, 2);
    s = talks(f) ? converse(a, &err) : enter_dash(a, &err);
    if (s == AFF_OK && !talks(f)) {
        s = prepare(a, &code, &err);
        if (s == AFF_E_NOMEM) failed = AFF_EXIT_DOES_NOT_FIT;
        if (s == AFF_OK && code < 0) {
            aff__dash_watch(a->dash, a->engine, a->net);
            catch_signals();
            s = generate(a, &err);
        }
    }
    leave_dash(a);
    return s != AFF_OK ? complain(&err, failed) : code >= 0 ? code : 0;
}

int main(int argc, char **argv)
{
    static app a;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--serve") == 0) return aff__serve_main(argc, argv);
    int code = parse(&a.f, argc, argv);
    if (code >= 0) return code;
    a.to = stdout;
    code = run(&a);
    if (a.out_open) aff__out_abort(&a.out);
    aff__engine_free(a.engine);
    aff__route_trace_close(a.trace, false, NULL);
    if (a.cache) aff__prefix_close(a.cache);
    aff__tokenizer_free(a.tok);
    aff__net_close(a.net);
    free(a.text);
    free(a.prompt);
    free(a.forced);
    free(a.chosen);
    free(a.piece);
    free(a.top);
    free(a.last);
    free(a.bias);
    if (a.report) fclose(a.report);
    free(a.report_text);
    return code;
}
