#include "engine/memplan.h"
#include "base/mem.h"
#include "base/pages.h"
#include "format/json.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* "1.25 GiB", "60.0 MiB". */
typedef struct {
    char text[24];
} amount;
static amount amount_of(uint64_t bytes)
{
    amount a;
    if (bytes >> 30)
        snprintf(a.text, sizeof a.text, "%.2f GiB", (double)bytes / 1073741824.0);
    else
        snprintf(a.text, sizeof a.text, "%.1f MiB", (double)bytes / 1048576.0);
    return a;
}

/* Left free when slots of experts take "what is left". */
static const int64_t RESERVE = INT64_C(1536) << 20;

void aff__memplan_add(aff_memplan *p, int place, bool later, uint64_t bytes, const char *what, const char *note_format,
                      ...)
{
    va_list ap;
    if (!bytes) return;
    if (p->lines == AFF_MEMPLAN_LINES) {
        aff_memplan_line *last = &p->line[AFF_MEMPLAN_LINES - 1];
        last->bytes += bytes;
        snprintf(last->note, sizeof last->note, "and others");
        return;
    }
    aff_memplan_line *l = &p->line[p->lines++];
    *l = (aff_memplan_line){.place = place, .bytes = bytes, .later = later};
    snprintf(l->what, sizeof l->what, "%s", what);
    va_start(ap, note_format);
    vsnprintf(l->note, sizeof l->note, note_format, ap);
    va_end(ap);
}

/* ---- lines ---- */

static uint64_t memory_so_far(const aff_memplan *p)
{
    uint64_t n = 0;
    for (int i = 0; i < p->lines; i++)
        if (p->line[i].place == AFF_PLACE_MEMORY && !p->line[i].later) n += p->line[i].bytes;
    return n;
}

static const char *const whose[] = {"", "draft: "};

static void experts(aff_memplan *p, const aff_net_sizes *z, int i)
{
    char what[48];
    const int place = !z->experts_in_file ? AFF_PLACE_MEMORY : p->experts_mapped ? AFF_PLACE_FILE : AFF_PLACE_DISK;
    snprintf(what, sizeof what, "%srouted experts", whose[i]);
    aff__memplan_add(p, place, false, (uint64_t)z->experts[i] * z->expert, what, "%" PRId64 " of %" PRIu64 " bytes", z->experts[i], z->expert);
}

static void dense(aff_memplan *p, const aff_net *net)
{
    const aff_net_sizes z = aff__net_sizes(net);
    for (int i = 0; i < 2; i++) {
        char what[48];
        snprintf(what, sizeof what, "%sdense weights", whose[i]);
        aff__memplan_add(p, AFF_PLACE_FILE, false, z.file[i], what, "used where they lie in the file");
        snprintf(what, sizeof what, z.experts_in_file ? "%sconverted weights" : "%sdense weights", whose[i]);
        aff__memplan_add(p, AFF_PLACE_MEMORY, false, z.memory[i], what,
                         z.experts_in_file ? "norms, biases, tables" : "generated");
        if (!z.experts_in_file) experts(p, &z, i);
    }
}

/* Those of a file, whose place depends on what the rest leaves. */
static void routed(aff_memplan *p, const aff_net *net)
{
    const aff_net_sizes z = aff__net_sizes(net);
    for (int i = 0; i < 2 && z.experts_in_file; i++) experts(p, &z, i);
}

static void engine(aff_memplan *p, const aff_engine_bytes *b, bool listens)
{
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, b->runner.planes, "pass: activations", "%d rows", b->rows);
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, b->runner.plan, "pass: plan of the experts", "%d rows", b->rows);
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, b->runner.backend, "pass: kernels' scratch", "%d threads", b->threads);
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, b->logits, "logits of a decode pass", "%d rows", AFF_PASS_ROWS);
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, listens ? b->chunk_logits : 0, "logits of a prompt's chunk", "%d rows",
                     AFF_MAX_CHUNK);
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, b->sampler, "sampler", "%s", "");
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, b->slot_table, "slots", "%d", b->slots);
}

static void state(aff_memplan *p, const aff_engine_bytes *b)
{
    const uint64_t n = (uint64_t)b->slots;
    const aff_seq_plan *s = &b->seq;
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, n * s->raw, "state: raw rings", "%d sequence%s", b->slots,
                     b->slots > 1 ? "s" : "");
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, n * s->history, "state: compressor histories", "%s", "");
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, n * s->draft, "state: draft rings", "%s", "");
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, n * s->copy, "state: copy of the rings", "to undo a failed pass");
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, n * s->rows, "state: compressed rows",
                     "%" PRIu64 " B each; %" PRId64 " positions a sequence", s->row_bytes, b->commit);
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, n * s->keys, "state: indexer keys", "%" PRIu64 " B each",
                     s->key_bytes);
    aff__memplan_add(p, AFF_PLACE_MEMORY, true, n * (b->full - s->total), "state: growth",
                     "up to %" PRId64 " positions a sequence, %.2f B each", b->context, s->per_position);
    p->slots = b->slots;
    p->context = b->context;
    p->commit = b->commit;
    p->slot_fixed = s->total - s->rows - s->keys;
    p->per_position = s->per_position;
}

/* What is left of the machine's memory for experts: the rest of the plan, what is kept free, and the file's other weights, which are used at every token,
 * come first. */
static uint64_t left_for_experts(const aff_memplan *p, const aff_net_sizes *z, int64_t reserve)
{
    const uint64_t taken = memory_so_far(p) + z->file[0] + z->file[1] + (uint64_t)(reserve < 0 ? RESERVE : reserve);
    return p->available > taken ? p->available - taken : 0;
}

/* Where the experts are kept, before the line of the weights says so. */
static aff_status tiers(aff_memplan *p, const aff_memplan_input *in, aff_error *err)
{
    const aff_net_sizes z = aff__net_sizes(in->net);
    const int picks = aff__net_config(in->net)->picks;
    const int64_t all = z.experts[0] + z.experts[1], most = all + AFF_MOST_STAGING;
    const bool card = in->engine->device.choice == AFF_DEVICE_RT;
    const uint64_t left = left_for_experts(p, &z, in->host_reserve);
    p->experts_mapped = card || (in->host_pool < 0 && !z.experts_copied && (!z.experts_in_file || (uint64_t)all * z.expert <= left_for_experts(p, &z, 0)));
    if (card) p->card_host = in->host_pool < 0 || (uint64_t)in->host_pool > left ? left : (uint64_t)in->host_pool;
    if (p->experts_mapped) return AFF_OK;
    /* Bounded by what there is: memory that is not there would be missed at the first touch. */
    const bool clamped = in->host_pool > 0 && (uint64_t)in->host_pool > left;
    const uint64_t bytes = in->host_pool < 0 || clamped ? left : (uint64_t)in->host_pool;
    p->expert_slots = bytes / z.slot < (uint64_t)most ? (int64_t)(bytes / z.slot) : most;
    if (in->host_pool == 0) p->expert_slots = p->expert_staging = 2 * picks;
    if (p->expert_slots < picks && (in->host_pool < 0 || clamped)) p->expert_slots = picks; /* the verdict says that they do not fit, if so */
    AFF_TRY(aff__tiers_split(p->expert_slots, p->expert_staging, all, picks, z.slot, &p->expert_split, err));
    const int64_t pool = p->expert_split.pool;
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, (uint64_t)pool * z.slot, "experts: pool", "%" PRId64 " of %" PRId64 " in slots of %" PRIu64 " bytes%s", pool, all, z.slot,
                     clamped ? "; MORE WAS ASKED FOR" : "");
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, (uint64_t)p->expert_split.staging * z.slot, "experts: staging", "%" PRId64 " slots for those read from the disk as they are used%s",
                     p->expert_split.staging, clamped && !pool ? "; MORE WAS ASKED FOR" : "");
    return AFF_OK;
}

aff_status aff__memplan_make(aff_memplan *p, const aff_memplan_input *in, aff_error *err)
{
    aff_engine_bytes b;
    *p = (aff_memplan){.machine = *in->machine, .available = aff__machine_available(in->machine)};
    snprintf(p->model, sizeof p->model, "%s", aff__net_path(in->net));
    AFF_TRY(aff__engine_plan(&b, in->net, in->engine, err));
    p->experts_mapped = true;
    dense(p, in->net);
    engine(p, &b, in->listens_to_prompts);
    state(p, &b);
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, in->prefix_cache, "prefix cache",
                     "entries on their way to and from the disk, index");
    /* Code, libraries, stacks, the file's table of tensors, the tokenizer's tables: measured, not counted. */
    const uint64_t threads = (uint64_t)b.threads * (128 << 10), vocab = (uint64_t)aff__net_config(in->net)->vocab * 320;
    aff__memplan_add(p, AFF_PLACE_MEMORY, false, (UINT64_C(12) << 20) + threads + vocab, "program, tables, tokenizer",
                     "an estimate");
    AFF_TRY(tiers(p, in, err));
    routed(p, in->net);
    return AFF_OK;
}

/* ---- verdict ---- */

/* What to change so that it fits. */
static void advise(const aff_memplan *p, uint64_t need, char *out, size_t cap)
{
    const uint64_t state = (uint64_t)p->slots * (p->slot_fixed + (uint64_t)((double)p->commit * p->per_position)),
                   rest = need > state ? need - state : 0;
    if (rest + p->slot_fixed > p->available) {
        snprintf(out, cap, "even --slots 1 --kv-commit 0 needs %s", amount_of(rest + p->slot_fixed).text);
        return;
    }
    const uint64_t room = p->available - rest;
    uint64_t slots = (uint64_t)p->slots;
    if (slots * p->slot_fixed > room) slots = room / p->slot_fixed;
    /* Pages are whole: a little less than the quotient. */
    const double positions = p->per_position > 0 ? (double)(room - slots * p->slot_fixed) / p->per_position * 0.98 : 0;
    char flag[32] = "";
    if (slots < (uint64_t)p->slots) snprintf(flag, sizeof flag, "--slots %" PRIu64 " ", slots);
    const int64_t commit = (int64_t)positions / 256 * 256, all = p->commit * (int64_t)slots;
    snprintf(out, cap, "%s--kv-commit %" PRId64 " fits", flag, commit < all ? commit : all);
}

void aff__memplan_judge(aff_memplan *p)
{
    memset(p->total, 0, sizeof p->total);
    memset(p->later, 0, sizeof p->later);
    for (int i = 0; i < p->lines; i++)
        *(p->line[i].later ? &p->later[p->line[i].place] : &p->total[p->line[i].place]) += p->line[i].bytes;
    const uint64_t need = p->total[AFF_PLACE_MEMORY], file = p->total[AFF_PLACE_FILE];
    bool cards = true;
    for (int i = 0; i < p->machine.cards; i++) cards &= p->total[AFF_PLACE_CARD + i] <= p->machine.card[i];
    p->fits = cards && need <= p->available;
    if (!cards) {
        snprintf(p->verdict, sizeof p->verdict, "does not fit: a card has less memory than its lines say");
        return;
    }
    if (need > p->available) {
        char advice[160];
        advise(p, need, advice, sizeof advice);
        snprintf(p->verdict, sizeof p->verdict, "does not fit: %s needed, %s available, %s too few: %s",
                 amount_of(need).text, amount_of(p->available).text, amount_of(need - p->available).text, advice);
        return;
    }
    const uint64_t left = p->available - need;
    size_t n = (size_t)snprintf(p->verdict, sizeof p->verdict, "fits: %s needed, %s available", amount_of(need).text,
                                amount_of(p->available).text);
    if (file > left)
        n += (size_t)snprintf(
            p->verdict + n, sizeof p->verdict - n,
            "; of the file's %s of weights %s do not stay in memory and are read again as they are used",
            amount_of(file).text, amount_of(file - left).text);
    if (p->later[AFF_PLACE_MEMORY] > (file < left ? left - file : 0) && n < sizeof p->verdict)
        snprintf(p->verdict + n, sizeof p->verdict - n,
                 "; not all sequences can grow to %" PRId64 " positions at a time", p->context);
}

aff_status aff__memplan_check(const aff_memplan *p, aff_error *err)
{
    return p->fits ? AFF_OK
                   : aff__fail(
                         err, AFF_E_NOMEM,
                         "memory plan: %s (--plan prints it; --memory MIB overrules what the system says is available)",
                         p->verdict);
}

/* ---- output ---- */

static const char *place_name(int place, char buf[16])
{
    static const char *const names[] = {"memory", "file", "disk"};
    if (place < AFF_PLACE_CARD) return names[place];
    snprintf(buf, 16, "card %d", place - AFF_PLACE_CARD);
    return buf;
}

void aff__memplan_print(const aff_memplan *p, FILE *to)
{
    const aff_machine *m = &p->machine;
    char buf[16];
    fprintf(to, "memory plan: %s\n", p->model);
    for (int i = 0; i < p->lines; i++) {
        const aff_memplan_line *l = &p->line[i];
        fprintf(to, "  %-32s %-7s %16" PRIu64 "%s%s%s\n", l->what, place_name(l->place, buf), l->bytes,
                l->later ? " later" : "", *l->note ? "  " : "", l->note);
    }
    for (int i = 0; i < AFF_MEMPLAN_PLACES; i++)
        if (p->total[i] || i == AFF_PLACE_MEMORY)
            fprintf(to, "  %-32s %-7s %16" PRIu64 "  %s\n", "total", place_name(i, buf), p->total[i],
                    amount_of(p->total[i]).text);
    fprintf(to, "  a position takes %.2f bytes; %d sequence%s of up to %" PRId64 " positions\n", p->per_position,
            p->slots, p->slots > 1 ? "s" : "", p->context);
    fprintf(to, "  machine%s: %s, available %s", m->described ? " (described)" : "", amount_of(m->ram).text,
            amount_of(p->available).text);
    if (m->cgroup)
        fprintf(to, "; cgroup v%d limit %s, %s of it left", m->cgroup, amount_of(m->limit).text,
                amount_of(m->limit_free).text);
    for (int i = 0; i < m->cards; i++) fprintf(to, "; card %d: %s", i, amount_of(m->card[i]).text);
    if (m->cards && !p->total[AFF_PLACE_CARD]) fprintf(to, " (this plan uses no card)");
    if (!m->described) {
        char pages[320];
        aff__pages_line(pages, sizeof pages);
        fprintf(to, "\n  pages: %s", pages);
    }
    fprintf(to, "\n  verdict: %s\n", p->verdict);
}

aff_status aff__memplan_json(const aff_memplan *p, FILE *to, aff_error *err)
{
    char buf[16];
    json_t *lines = json_array(), *totals = json_object(), *o;
    for (int i = 0; i < p->lines; i++) {
        const aff_memplan_line *l = &p->line[i];
        json_array_append_new(lines,
                              json_pack("{s:s,s:s,s:I,s:b,s:s}", "what", l->what, "place", place_name(l->place, buf),
                                        "bytes", (json_int_t)l->bytes, "later", (int)l->later, "note", l->note));
    }
    for (int i = 0; i < AFF_MEMPLAN_PLACES; i++)
        if (p->total[i]) json_object_set_new(totals, place_name(i, buf), json_integer((json_int_t)p->total[i]));
    o = json_pack("{s:s,s:o,s:o,s:I,s:I,s:i,s:I,s:I,s:f,s:b,s:s}", "model", p->model, "lines", lines, "total", totals,
                  "available", (json_int_t)p->available, "ram", (json_int_t)p->machine.ram, "slots", p->slots,
                  "context", (json_int_t)p->context, "kv_commit", (json_int_t)p->commit * p->slots,
                  "bytes_per_position", p->per_position, "fits", (int)p->fits, "verdict", p->verdict);
    const bool ok = o && json_dumpf(o, to, JSON_INDENT(2)) == 0 && fputc('\n', to) != EOF;
    json_decref(o);
    return ok ? AFF_OK : aff__fail(err, AFF_E_IO, "memory plan: cannot write it as JSON");
}
