/* aff-eval - how well a model predicts a text, and how far its predictions are from another's. docs/quality.md says
 * what each figure means. */
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/options.h"
#include "engine/compare.h"
#include "engine/idlist.h"
#include "engine/text.h"
#include "state/seq.h"
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint64_t file_limit = 1ull << 30; /* bytes of a text or id list */
enum { FLOOR_PASS = 37, MAX_WORST = 1000 };

typedef struct flags {
    const char *model, *ref, *logits, *numerics, *ref_numerics, *text, *tokens, *tokenizer, *save, *cpu_path;
    int64_t chunk, skip, limit, top, worst, floor, memory, threads, max_layers;
    bool json;
    aff_numerics mode, ref_mode;
} flags;

typedef struct app {
    flags f;
    aff_net *model, *ref;
    aff_tokenizer *tok;
    aff_logits_in *saved;
    aff_logits_out *save;
    int32_t *ids, *worst;
    int64_t n;
    aff_eval_row *row;
    aff_eval_summary sum;
    const char *stage; /* for progress */
    bool shown;
    uint64_t reported; /* ns of the last line, 0 before the first */
    /* The floor: of `floor_n` positions. */
    int64_t floor_n, floor_differ;
    aff_eval_summary arithmetic; /* fast against sim */
} app;

static volatile sig_atomic_t interrupted;

static void on_signal(int sig)
{
    interrupted = 1;
}

static int complain(const aff_error *err, int code)
{
    fprintf(stderr, "aff-eval: %s\n", err->msg);
    return code;
}

/* ---- command line ---- */

static int parse(flags *f, int argc, char **argv)
{
    *f = (flags){.numerics = "fast", .ref_numerics = "fast", .chunk = 512, .worst = 10, .floor = 256, .memory = 1024};
    const aff_option table[] = {
        {"model", 'm', AFF_OPT_STR, &f->model, "PATH", "Model to judge: container (.aff) or checkpoint folder.",
         "Models"},
        {"ref", 0, AFF_OPT_STR, &f->ref, "PATH",
         "Reference: what the model is compared with. Without it: perplexity alone."},
        {"logits", 0, AFF_OPT_STR, &f->logits, "FILE", "Reference from a file of --save-logits instead."},
        {"numerics", 0, AFF_OPT_STR, &f->numerics, "MODE", "Arithmetic of the model: math, sim or fast [fast]."},
        {"ref-numerics", 0, AFF_OPT_STR, &f->ref_numerics, "MODE", "The same of the reference [fast]."},
        {"max-layers", 0, AFF_OPT_INT, &f->max_layers, "N", "Only the first N layers of both [all].", NULL, 1,
         AFF_MAX_LAYERS},
        {"prompt-file", 'f', AFF_OPT_STR, &f->text, "FILE", "Text to predict, all of it (- is standard input).",
         "Text"},
        {"tokens", 0, AFF_OPT_STR, &f->tokens, "LIST", "Token ids instead of a text: a,b,c or @FILE."},
        {"tokenizer", 0, AFF_OPT_STR, &f->tokenizer, "FILE",
         "tokenizer.json [the one in the model's or the reference's folder]."},
        {"chunk", 0, AFF_OPT_INT, &f->chunk, "N",
         "Tokens of a sequence; each starts with begin-of-sequence and knows nothing of the others [512].", NULL, 1,
         1e9},
        {"skip", 0, AFF_OPT_INT, &f->skip, "N", "Leave the first N tokens of every sequence out of the figures [0].",
         NULL, 0, 1e9},
        {"limit", 0, AFF_OPT_INT, &f->limit, "N", "Only the text's first N tokens [all].", NULL, 1, 1e12},
        {"save-logits", 0, AFF_OPT_STR, &f->save, "FILE",
         "Keep the reference's predictions (without --ref, --logits: the model's).", "Output"},
        {"top", 0, AFF_OPT_INT, &f->top, "N",
         "In --save-logits keep the N largest logits of a position and the mass of the others [0: all of them, "
         "float32].",
         NULL, 0, AFF_LOGITS_TOP_MAX},
        {"worst", 0, AFF_OPT_INT, &f->worst, "N", "Positions to list where the two differ most [10].", NULL, 0,
         MAX_WORST},
        {"json", 0, AFF_OPT_FLAG, &f->json, NULL, "Print one JSON object."},
        {"floor", 0, AFF_OPT_INT, &f->floor, "N",
         "Positions on which the reference is compared with itself: computed another way, and `fast` against `sim` "
         "[256; 0: not at all].",
         NULL, 0, 1e12},
        {"memory", 0, AFF_OPT_INT, &f->memory, "MIB",
         "For the rows in flight of each model; more reads the weights fewer times [1024].", "Running", 1, 1e9},
        {"threads", 0, AFF_OPT_INT, &f->threads, "N", "Threads [one per CPU]. Changes no result.", NULL, 1, 4096},
        {"cpu-path", 0, AFF_OPT_STR, &f->cpu_path, "SET",
         "Use at most this instruction set: scalar, avx2 or avx512. Changes no result."},
        {0}};
    const aff_usage usage = {
        "aff-eval",
        "",
        "Perplexity of a model on a text, and its distance from a reference: KL divergence and agreement.",
        table,
        0,
        0};
    int first;
    return aff__options_main(&usage, argc, argv, &first);
}

/* Index of `value` among the names; an error that lists them. */
static aff_status one_of(const char *flag, const char *value, const char *const names[3], int *index, aff_error *err)
{
    for (*index = 0; *index < 3; ++*index)
        if (strcmp(value, names[*index]) == 0) return AFF_OK;
    return aff__fail(err, AFF_E_INVALID, "%s: expected %s, %s or %s, got '%s'", flag, names[0], names[1], names[2],
                     value);
}

static aff_status bad(aff_error *err, const char *message)
{
    return aff__fail(err, AFF_E_INVALID, "%s", message);
}

static aff_status check_flags(flags *f, aff_error *err)
{
    static const char *const modes[] = {"math", "sim", "fast"}, *const paths[] = {"scalar", "avx2", "avx512"};
    int i;
    if (!f->model && !(f->ref && f->save))
        return bad(err, "expected a model (-m PATH), or --ref PATH with --save-logits FILE");
    if (f->ref && f->logits) return bad(err, "--ref and --logits: expected one of them, got both");
    if (!f->text == !f->tokens) return bad(err, "expected a text: one of --prompt-file FILE and --tokens LIST");
    if (f->save && f->logits) return bad(err, "--save-logits: the reference is already saved (--logits)");
    if (f->top && !f->save) return bad(err, "--top: expected --save-logits FILE with it, got none");
    if (f->top && f->top < AFF_LOGITS_TOP_MIN) return bad(err, "--top: expected 0 or 5 to 4096");
    if (f->skip >= f->chunk) return bad(err, "--skip: expected less than --chunk: nothing would be left");
    AFF_TRY(one_of("--numerics", f->numerics, modes, &i, err));
    f->mode = (aff_numerics)i;
    AFF_TRY(one_of("--ref-numerics", f->ref_numerics, modes, &i, err));
    f->ref_mode = (aff_numerics)i;
    if (!f->cpu_path) return AFF_OK;
    AFF_TRY(one_of("--cpu-path", f->cpu_path, paths, &i, err));
    aff__cpu_cap((aff_cpu_level)i);
    return AFF_OK;
}

/* ---- models and text ---- */

static const aff_net *any_net(const app *a)
{
    return a->model ? a->model : a->ref;
}

static aff_status open_net(const app *a, aff_net **net, const char *path, aff_numerics mode, aff_error *err)
{
    return path
               ? aff__net_open(net, path, &(aff_net_options){.numerics = mode, .max_layers = (int)a->f.max_layers}, err)
               : AFF_OK;
}

static aff_status open_tokenizer(app *a, aff_error *err)
{
    char *beside = NULL;
    if (!a->f.tokenizer && a->f.model) AFF_TRY(aff__tokenizer_beside(a->f.model, &beside, err));
    if (!a->f.tokenizer && !beside && a->f.ref) AFF_TRY(aff__tokenizer_beside(a->f.ref, &beside, err));
    const char *path = a->f.tokenizer ? a->f.tokenizer : beside;
    aff_status s = AFF_OK;
    if (path)
        s = aff__tokenizer_open_for(&a->tok, path, aff__net_config(any_net(a)), err);
    else if (a->f.text)
        s = aff__fail(err, AFF_E_INVALID, "%s: expected a tokenizer.json beside it, found none: give --tokenizer FILE",
                      aff__net_path(any_net(a)));
    free(beside);
    return s;
}

static aff_status read_ids(app *a, aff_error *err)
{
    const char *list = a->f.tokens;
    char *text = NULL;
    size_t size;
    if (list && list[0] != '@') return aff__idlist_parse(list, strlen(list), "--tokens", &a->ids, &a->n, err);
    const char *name = list ? list + 1 : a->f.text;
    AFF_TRY(aff__read_file(name, file_limit, &text, &size, err));
    const aff_status s = list ? aff__idlist_parse(text, size, name, &a->ids, &a->n, err)
                              : aff__prompt_ids(a->tok, text, size, name, &a->ids, &a->n, err);
    free(text);
    return s;
}

/* The text without begin-of-sequence, which the sequences have of their own. */
static aff_status read_text(app *a, aff_error *err)
{
    AFF_TRY(open_tokenizer(a, err));
    if (a->f.text) AFF_TRY(read_ids(a, err));
    if (a->ids[0] == aff__net_config(any_net(a))->bos) memmove(a->ids, a->ids + 1, (size_t)--a->n * sizeof *a->ids);
    if (a->f.limit && a->f.limit < a->n) a->n = a->f.limit;
    return a->n ? AFF_OK
                : aff__fail(err, AFF_E_INVALID, "%s: expected a text, got begin-of-sequence alone",
                            a->f.text ? a->f.text : "--tokens");
}

static aff_status open_save(app *a, aff_error *err)
{
    const aff_net *net = a->ref ? a->ref : a->model;
    aff_logits_head h = {.vocab = (uint32_t)aff__net_config(net)->vocab,
                         .top = (uint32_t)a->f.top,
                         .chunk = (uint32_t)a->f.chunk,
                         .numerics = (uint32_t)aff__net_numerics(net),
                         .bos = (uint32_t)aff__net_config(net)->bos,
                         .positions = (uint64_t)a->n,
                         .text = aff__text_hash(a->ids, a->n)};
    AFF_TRY(aff__net_fingerprint(net, &h.model, err));
    return aff__logits_create(&a->save, a->f.save, &h, err);
}

static aff_status prepare(app *a, aff_error *err)
{
    const flags *f = &a->f;
    AFF_TRY(open_net(a, &a->model, f->model, f->mode, err));
    AFF_TRY(open_net(a, &a->ref, f->ref, f->ref_mode, err));
    AFF_TRY(read_text(a, err));
    if (f->logits) AFF_TRY(aff__logits_open(&a->saved, f->logits, true, err));
    AFF_TRY(aff__calloc(&a->row, (uint64_t)a->n, sizeof *a->row, "figures", err));
    AFF_TRY(aff__calloc(&a->worst, (uint64_t)f->worst + 1, sizeof *a->worst, "worst positions", err));
    return f->save ? open_save(a, err) : AFF_OK;
}

/* ---- running ---- */

static void clear_progress(app *a)
{
    if (a->shown) fputs("\r\033[K", stderr);
    a->shown = false;
}

/* On a terminal one line that is rewritten, elsewhere a line every ten seconds. */
static bool on_progress(void *ctx, bool ref, int64_t first, int64_t rows, int layer, int layers)
{
    app *a = ctx;
    const bool terminal = isatty(STDERR_FILENO);
    const uint64_t now = aff__now_ns();
    if (!a->reported) a->reported = now;
    if (terminal || now - a->reported > 10000000000u) {
        fprintf(stderr, "%s%s%s: tokens %" PRId64 " to %" PRId64 " of %" PRId64 ", layer %d of %d%s",
                terminal ? "\r\033[K" : "", a->stage, ref ? " (reference)" : "", first, first + rows, a->n, layer,
                layers, terminal ? "" : "\n");
        a->reported = now;
        a->shown = terminal;
    }
    return !interrupted;
}

static aff_compare comparison(app *a)
{
    return (aff_compare){.model = {.net = a->model, .threads = (int)a->f.threads},
                         .ref = {.net = a->ref, .threads = (int)a->f.threads},
                         .id = a->ids,
                         .n = a->n,
                         .chunk = a->f.chunk,
                         .bos = (int32_t)aff__net_config(any_net(a))->bos,
                         .memory = (uint64_t)a->f.memory << 20,
                         .ctx = a,
                         .progress = on_progress};
}

static int of5(const app *a)
{
    const int vocab = aff__net_config(any_net(a))->vocab;
    return vocab < 5 ? vocab : 5;
}

static bool with_ref(const app *a)
{
    return a->saved || (a->ref && a->model);
}

/* The same weights computed another way: no bit may differ. */
static aff_status floor_width(app *a, const aff_net *net, aff_eval_row *row, aff_error *err)
{
    const aff_cpu_level level = aff__cpu_level();
    aff_compare c = comparison(a);
    a->stage = "floor, another width";
    c.n = a->floor_n;
    c.model.net = c.ref.net = net;
    c.ref.pass = FLOOR_PASS;
    c.ref.threads = c.model.threads == 1 ? 2 : 1 + c.model.threads / 2;
    c.ref.capped = true;
    c.ref.level = level > AFF_CPU_SCALAR ? (aff_cpu_level)(level - 1) : level;
    AFF_TRY(aff__compare(&c, row, err));
    for (int64_t i = 0; i < c.n; i++) a->floor_differ += row[i].kl != 0 || row[i].nll != row[i].ref_nll;
    return AFF_OK;
}

/* The same weights with the published arithmetic (`sim`) and with the production one (`fast`). */
static aff_status floor_arithmetic(app *a, const char *path, aff_eval_row *row, aff_error *err)
{
    aff_net *fast = NULL, *sim = NULL;
    aff_status s = open_net(a, &fast, path, AFF_FAST, err);
    if (s == AFF_OK) s = open_net(a, &sim, path, AFF_SIM, err);
    if (s == AFF_OK) {
        aff_compare c = comparison(a);
        a->stage = "floor, fast against sim";
        c.n = a->floor_n;
        c.model.net = fast;
        c.ref.net = sim;
        s = aff__compare(&c, row, err);
    }
    if (s == AFF_OK) s = aff__eval_summarise(row, a->floor_n, a->f.chunk, 0, true, of5(a), &a->arithmetic, err);
    aff__net_close(fast);
    aff__net_close(sim);
    return s;
}

static aff_status run(app *a, aff_error *err)
{
    aff_compare c = comparison(a);
    const aff_net *weights = a->ref ? a->ref : a->model;
    a->stage = "evaluating";
    c.saved = a->saved;
    c.save = a->save;
    AFF_TRY(aff__compare(&c, a->row, err));
    AFF_TRY(aff__eval_summarise(a->row, a->n, a->f.chunk, a->f.skip, with_ref(a), of5(a), &a->sum, err));
    if (a->save) {
        aff_logits_out *save = a->save;
        a->save = NULL;
        AFF_TRY(aff__logits_finish(save, err));
    }
    a->floor_n = a->f.floor < a->n ? a->f.floor : a->n;
    if (!a->floor_n || !with_ref(a)) return AFF_OK;
    aff_eval_row *row;
    AFF_TRY(aff__calloc(&row, (uint64_t)a->floor_n, sizeof *row, "figures", err));
    aff_status s = floor_width(a, weights, row, err);
    if (s == AFF_OK) s = floor_arithmetic(a, aff__net_path(weights), row, err);
    free(row);
    return s;
}

/* ---- worst positions ---- */

static double badness(const app *a, int64_t i)
{
    return with_ref(a) ? a->row[i].kl : a->row[i].nll;
}

/* Fills a->worst, the worst first, the earlier first among equals; returns how many. */
static int find_worst(app *a)
{
    int n = 0;
    for (int64_t i = 0; i < a->n && a->f.worst; i++) {
        if (i % a->f.chunk < a->f.skip || (n == a->f.worst && badness(a, i) <= badness(a, a->worst[n - 1]))) continue;
        int k = n < a->f.worst ? n++ : n - 1;
        for (; k > 0 && badness(a, i) > badness(a, a->worst[k - 1]); k--) a->worst[k] = a->worst[k - 1];
        a->worst[k] = (int32_t)i;
    }
    return n;
}

/* A token as printable text: its bytes in quotes, or its number. */
static const char *token_text(const app *a, int32_t id, char buf[48])
{
    size_t n = 0, k = 0;
    const char *s = a->tok && id >= 0 ? aff__tokenizer_bytes(a->tok, (uint32_t)id, &n) : NULL;
    if (!s) {
        snprintf(buf, 48, "%d", id);
        return buf;
    }
    buf[k++] = '"';
    for (size_t i = 0; i < n && k < 40; i++) {
        const unsigned char c = (unsigned char)s[i];
        if (c >= ' ' && c < 127 && c != '"' && c != '\\')
            buf[k++] = (char)c;
        else
            k += (size_t)snprintf(buf + k, 48 - k, "\\x%02x", c);
    }
    buf[k++] = '"';
    buf[k] = 0;
    return buf;
}

/* ---- text output ---- */

static const char *const mode_name[] = {"math", "sim", "fast"};

static void print_stat(const char *name, const aff_eval_stat *s)
{
    printf("%-22s %12.6g %12.6g %12.6g %12.6g %12.6g\n", name, s->mean, s->se, s->median, s->p99, s->max);
}

static void print_perplexity(const char *name, const aff_eval_stat *nll)
{
    printf("%-22s %12.6g %12.6g\n", name, exp(nll->mean), exp(nll->mean) * nll->se);
}

static void print_floor(const app *a)
{
    if (!a->floor_n) return;
    printf("\nfloor, on %" PRId64 " tokens of the %s's weights:\n", a->floor_n, a->ref ? "reference" : "model");
    if (a->floor_differ)
        printf("  another kernel width: %" PRId64 " positions DIFFER; they must be equal to the bit\n",
               a->floor_differ);
    else
        printf("  another kernel width: KL 0, every figure equal to the bit\n");
    printf("  fast against sim:     KL %.6g +- %.2g, median %.6g, p99 %.6g, max %.6g, top-1 %.2f %%\n",
           a->arithmetic.kl.mean, a->arithmetic.kl.se, a->arithmetic.kl.median, a->arithmetic.kl.p99,
           a->arithmetic.kl.max, 100 * a->arithmetic.top1);
}

static void print_worst(app *a)
{
    const int n = find_worst(a);
    char t[48], m[48], r[48];
    if (n)
        printf("\nworst positions (token of the text, counted from 0):\n%10s %12s %10s%s\n", "token",
               with_ref(a) ? "KL" : "nll", with_ref(a) ? "nll" : "",
               with_ref(a) ? "    ref nll  text / model / reference" : "text / model");
    for (int i = 0; i < n; i++) {
        const int32_t at = a->worst[i];
        const aff_eval_row *w = &a->row[at];
        if (with_ref(a))
            printf("%10d %12.6g %10.4f %10.4f  %s / %s / %s\n", at, w->kl, w->nll, w->ref_nll,
                   token_text(a, a->ids[at], t), token_text(a, w->top, m), token_text(a, w->ref_top, r));
        else
            printf("%10d %12.6g            %s / %s\n", at, w->nll, token_text(a, a->ids[at], t),
                   token_text(a, w->top, m));
    }
}

static void print_text(app *a)
{
    const flags *f = &a->f;
    const aff_eval_summary *s = &a->sum;
    printf("text       %s: %" PRId64 " tokens in sequences of %" PRId64 "; %" PRId64 " judged\n",
           f->text ? f->text : "token ids", a->n, f->chunk, s->positions);
    printf("model      %s (%s)\n", aff__net_path(any_net(a)), mode_name[a->model ? f->mode : f->ref_mode]);
    if (a->saved)
        printf("reference  %s (saved, %s%s)\n", f->logits, mode_name[aff__logits_head(a->saved)->numerics],
               aff__logits_head(a->saved)->top ? ", largest logits only: KL is a lower bound" : "");
    else if (with_ref(a))
        printf("reference  %s (%s)\n", f->ref, mode_name[f->ref_mode]);
    printf("\n%-22s %12s %12s %12s %12s %12s\n", "", "mean", "std error", "median", "p99", "max");
    print_perplexity("perplexity", &s->nll);
    if (with_ref(a)) print_perplexity("reference perplexity", &s->ref_nll);
    print_stat("nll (nats)", &s->nll);
    if (with_ref(a)) {
        print_stat("reference nll", &s->ref_nll);
        print_stat("nll - reference nll", &s->delta);
        print_stat("KL(reference, model)", &s->kl);
        printf("%-22s %11.3f%% %11.3f%%\n%-22s %11.3f%% %11.3f%%\n", "same top 1", 100 * s->top1, 100 * s->top1_se,
               "shared of top 5", 100 * s->top5, 100 * s->top5_se);
        print_floor(a);
    }
    print_worst(a);
}

/* ---- JSON output ---- */

static json_t *json_stat(const aff_eval_stat *s)
{
    return json_pack("{s:f,s:f,s:f,s:f,s:f}", "mean", s->mean, "se", s->se, "median", s->median, "p99", s->p99, "max",
                     s->max);
}

static json_t *json_perplexity(const aff_eval_stat *nll)
{
    return json_pack("{s:f,s:f}", "mean", exp(nll->mean), "se", exp(nll->mean) * nll->se);
}

static json_t *json_model(const char *path, aff_numerics mode, uint64_t fingerprint)
{
    char hex[17];
    snprintf(hex, sizeof hex, "%016" PRIx64, fingerprint);
    return json_pack("{s:s,s:s,s:s}", "path", path, "numerics", mode_name[mode], "fingerprint", hex);
}

static void json_reference(const app *a, json_t *o, uint64_t fingerprint)
{
    const aff_eval_summary *s = &a->sum;
    const aff_logits_head *h = a->saved ? aff__logits_head(a->saved) : NULL;
    json_object_set_new(o, "reference",
                        json_model(h ? a->f.logits : a->f.ref, h ? (aff_numerics)h->numerics : a->f.ref_mode,
                                   h ? h->model : fingerprint));
    json_object_set_new(o, "kl_is_lower_bound", json_boolean(h && h->top));
    json_object_set_new(o, "reference_perplexity", json_perplexity(&s->ref_nll));
    json_object_set_new(o, "reference_nll", json_stat(&s->ref_nll));
    json_object_set_new(o, "delta_nll", json_stat(&s->delta));
    json_object_set_new(o, "kl", json_stat(&s->kl));
    json_object_set_new(o, "top1", json_pack("{s:f,s:f}", "mean", s->top1, "se", s->top1_se));
    json_object_set_new(o, "top5", json_pack("{s:f,s:f}", "mean", s->top5, "se", s->top5_se));
    if (!a->floor_n) return;
    json_object_set_new(o, "floor",
                        json_pack("{s:I,s:I,s:o,s:f}", "positions", (json_int_t)a->floor_n, "width_differs",
                                  (json_int_t)a->floor_differ, "fast_sim_kl", json_stat(&a->arithmetic.kl),
                                  "fast_sim_top1", a->arithmetic.top1));
}

static json_t *json_worst(app *a)
{
    json_t *list = json_array();
    const int n = find_worst(a);
    for (int i = 0; i < n; i++) {
        const aff_eval_row *w = &a->row[a->worst[i]];
        json_t *e = json_pack("{s:i,s:i,s:i,s:f}", "position", a->worst[i], "token", a->ids[a->worst[i]], "top", w->top,
                              "nll", w->nll);
        if (with_ref(a))
            json_object_update_new(
                e, json_pack("{s:i,s:f,s:f}", "reference_top", w->ref_top, "reference_nll", w->ref_nll, "kl", w->kl));
        json_array_append_new(list, e);
    }
    return list;
}

static aff_status print_json(app *a, aff_error *err)
{
    uint64_t model = 0, ref = 0;
    char hex[17];
    AFF_TRY(aff__net_fingerprint(any_net(a), &model, err));
    if (a->ref) AFF_TRY(aff__net_fingerprint(a->ref, &ref, err));
    snprintf(hex, sizeof hex, "%016" PRIx64, aff__text_hash(a->ids, a->n));
    json_t *o = json_object();
    json_object_set_new(o, "text",
                        json_pack("{s:s,s:I,s:I,s:I,s:s}", "name", a->f.text ? a->f.text : "ids", "tokens",
                                  (json_int_t)a->n, "chunk", (json_int_t)a->f.chunk, "skip", (json_int_t)a->f.skip,
                                  "xxh3", hex));
    json_object_set_new(o, "model", json_model(aff__net_path(any_net(a)), a->model ? a->f.mode : a->f.ref_mode, model));
    json_object_set_new(o, "positions", json_integer(a->sum.positions));
    json_object_set_new(o, "perplexity", json_perplexity(&a->sum.nll));
    json_object_set_new(o, "nll", json_stat(&a->sum.nll));
    if (with_ref(a)) json_reference(a, o, ref);
    json_object_set_new(o, "worst", json_worst(a));
    if (json_dumpf(o, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) != 0)
        aff__fail(err, AFF_E_IO, "standard output: cannot write");
    putchar('\n');
    json_decref(o);
    return err->code;
}

static int judge(app *a)
{
    aff_error err = {0};
    aff_status s = prepare(a, &err);
    if (s == AFF_OK) s = run(a, &err);
    clear_progress(a);
    if (s != AFF_OK) return complain(&err, 1);
    if (a->f.json) {
        if (print_json(a, &err) != AFF_OK) return complain(&err, 1);
    } else {
        print_text(a);
    }
    if (fflush(stdout) != 0) {
        aff__fail_errno(&err, "standard output: cannot write");
        return complain(&err, 1);
    }
    if (a->floor_differ) {
        aff__fail(&err, AFF_E_UNSUPPORTED,
                  "%" PRId64 " of %" PRId64
                  " positions depend on kernel width or threads: the figures cannot be reproduced",
                  a->floor_differ, a->floor_n);
        return complain(&err, 1);
    }
    return 0;
}

int main(int argc, char **argv)
{
    static app a;
    aff_error err = {0};
    struct sigaction stop = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND}, ignore = {.sa_handler = SIG_IGN};
    int code = parse(&a.f, argc, argv);
    if (code >= 0) return code;
    if (check_flags(&a.f, &err) != AFF_OK) return complain(&err, 2);
    sigaction(SIGINT, &stop, NULL); /* the second one kills */
    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGPIPE, &ignore, NULL); /* an error of the write instead */
    if (a.f.tokens &&
        read_ids(&a, &err) != AFF_OK) /* a malformed file is a failure of the file, not of the command line */
        code = complain(&err, err.code == AFF_E_INVALID && a.f.tokens[0] != '@' ? 2 : 1);
    else
        code = judge(&a);
    aff__logits_abort(a.save);
    aff__logits_close(a.saved);
    aff__tokenizer_free(a.tok);
    aff__net_close(a.model);
    aff__net_close(a.ref);
    free(a.ids);
    free(a.worst);
    free(a.row);
    return code;
}
