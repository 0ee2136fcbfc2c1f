#include "backend/gpu/rt_internal.h"
#include "base/mem.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define ROW(name, threads) {#name, "k_" #name, sizeof(aff_k_##name), threads},
const aff_kernel_desc aff__kernel_table[AFF_K_COUNT] = {AFF_GPU_KERNELS(ROW)};
#undef ROW

/* ---- --device ---- */

static bool number(const char **p, uint64_t most, uint64_t *out)
{
    uint64_t v = 0;
    if (!isdigit((unsigned char)**p)) return false;
    for (; isdigit((unsigned char)**p); ++*p) {
        v = v * 10 + (uint64_t)(**p - '0');
        if (v > most) return false;
    }
    *out = v;
    return true;
}

static bool size(const char **p, uint64_t *out)
{
    static const char units[] = "KMG";
    uint64_t v;
    if (!number(p, 1u << 30, &v)) return false;
    const char *unit = **p ? strchr(units, **p) : NULL;
    if (unit) ++*p;
    *out = v << (unit ? 10 * (unit - units + 1) : 0);
    return v > 0;
}

/* [Nx]SIZE[,fault=N][,taken=SIZE] */
static bool emulated(const char *p, aff_device_spec *out)
{
    const char *start = p;
    uint64_t v;
    if (number(&p, 16, &v) && *p == 'x' && v) {
        out->count = (int)v;
        p++;
    } else {
        p = start;
    }
    if (!size(&p, &out->bytes)) return false;
    while (*p) {
        if (strncmp(p, ",fault=", 7) == 0) {
            p += 7;
            if (!number(&p, 1u << 30, &out->fault) || !out->fault) return false;
        } else if (strncmp(p, ",taken=", 7) == 0) {
            p += 7;
            if (!size(&p, &out->taken)) return false;
        } else {
            return false;
        }
    }
    return true;
}

static const char *after(const char *text, const char *word)
{
    const size_t n = strlen(word);
    return strncmp(text, word, n) == 0 && (text[n] == 0 || text[n] == ':') ? text + n : NULL;
}

/* cuda:0,cuda:1 and the like: each must be a card; a model runs on one. */
static aff_status several(const char *text, aff_error *err)
{
    const char *p = text;
    int n = 0;
    while (*p) {
        char one[32];
        aff_device_spec spec;
        const size_t length = strcspn(p, ",");
        if (length >= sizeof one) return aff__fail(err, AFF_E_INVALID, "--device %s: expected names of cards separated by commas", text);
        memcpy(one, p, length);
        one[length] = 0;
        AFF_TRY(aff__device_parse(&spec, one, err));
        if (spec.choice != AFF_DEVICE_RT)
            return aff__fail(err, AFF_E_INVALID, "--device %s: expected cards only in a list, got %s", text, one);
        n++;
        p += length;
        if (*p == ',' && *++p == 0) return aff__fail(err, AFF_E_INVALID, "--device %s: expected a card behind every comma", text);
    }
    return aff__fail(err, AFF_E_UNSUPPORTED, "--device %s: %d cards: this version runs a model on one card: name one of them", text, n);
}

aff_status aff__device_gpus(const aff_device_spec *spec, int64_t gpus, aff_error *err)
{
    const char *why = NULL, *words[] = {"cuda", "hip", "emu"};
    const bool named = spec->choice == AFF_DEVICE_RT;
    int n, kind = AFF_RT_CUDA;
    if (spec->choice == AFF_DEVICE_CPU) return aff__fail(err, AFF_E_INVALID, "--gpus and --device cpu: expected one of them, got both");
    if (named && spec->kind == AFF_RT_EMU) {
        kind = AFF_RT_EMU;
        n = spec->count;
    } else {
        kind = named ? spec->kind : AFF_RT_CUDA;
        n = aff__rt_count((aff_rt_kind)kind, &why);
        if (!named && !n) {
            const char *other;
            const int hip = aff__rt_count(AFF_RT_HIP, &other);
            if (hip) kind = AFF_RT_HIP;
            n = hip;
        }
    }
    if (!n) return aff__fail(err, AFF_E_UNSUPPORTED, "--gpus %lld: no card: %s", (long long)gpus, why ? why : "none was found");
    if (gpus > n)
        return aff__fail(err, AFF_E_INVALID, "--gpus %lld: expected at most %d, so many %s cards there are", (long long)gpus, n, words[kind]);
    if (gpus > 1)
        return aff__fail(err, AFF_E_UNSUPPORTED, "--gpus %lld: this version runs a model on one card: use --gpus 1 or --device %s:0", (long long)gpus,
                         words[kind]);
    return AFF_OK;
}

aff_status aff__device_parse(aff_device_spec *out, const char *text, aff_error *err)
{
    static const struct {
        const char *word;
        aff_rt_kind kind;
        bool amd;
    } kinds[] = {{"cuda", AFF_RT_CUDA, false},
                 {"hip", AFF_RT_HIP, false},
                 {"emu", AFF_RT_EMU, false},
                 {"emu-amd", AFF_RT_EMU, true}};
    bool ok = false;
    *out = (aff_device_spec){.choice = AFF_DEVICE_AUTO, .count = 1};
    if (strcmp(text, "auto") == 0) return AFF_OK;
    if (strchr(text, ',') && strncmp(text, "emu", 3) != 0) return several(text, err);
    if (strcmp(text, "cpu") == 0) {
        out->choice = AFF_DEVICE_CPU;
        return AFF_OK;
    }
    for (int i = 0; i < 4; i++) {
        const char *p = after(text, kinds[i].word);
        uint64_t v = 0;
        if (!p) continue;
        out->choice = AFF_DEVICE_RT;
        out->kind = kinds[i].kind;
        out->amd = kinds[i].amd;
        out->bytes = out->kind == AFF_RT_EMU ? 1u << 30 : 0;
        if (!*p)
            ok = true;
        else if (out->kind == AFF_RT_EMU)
            ok = emulated(p + 1, out);
        else
            ok = ++p && number(&p, 1023, &v) && *p == 0;
        if (out->kind != AFF_RT_EMU) out->index = (int)v;
    }
    if (ok) return AFF_OK;
    return aff__fail(
        err, AFF_E_INVALID,
        "--device %s: expected auto, cpu, cuda:N, hip:N, emu:[Nx]SIZE or emu-amd:[Nx]SIZE (as in emu:2x512M)", text);
}

/* ---- devices ---- */

int aff__rt_count(aff_rt_kind kind, const char **why)
{
    const char *ignored;
    if (!why) why = &ignored;
    *why = NULL;
    return kind == AFF_RT_CUDA ? aff__rt_cuda_count(why) : kind == AFF_RT_HIP ? aff__rt_hip_count(why) : 0;
}

static aff_status check_index(aff_rt_kind kind, int index, aff_error *err)
{
    const char *why, *word = kind == AFF_RT_CUDA ? "cuda" : "hip";
    const int n = aff__rt_count(kind, &why);
    if (n == 0) return aff__fail(err, AFF_E_UNSUPPORTED, "--device %s:%d: %s", word, index, why ? why : "no device");
    if (index >= n)
        return aff__fail(err, AFF_E_INVALID, "--device %s:%d: this machine has %d such device%s", word, index, n,
                         n == 1 ? "" : "s");
    return AFF_OK;
}

aff_status aff__rt_describe(aff_rt_kind kind, int index, aff_rt_info *out, aff_error *err)
{
    AFF_TRY(check_index(kind, index, err));
    return kind == AFF_RT_CUDA ? aff__rt_cuda_describe(index, out, err) : aff__rt_hip_describe(index, out, err);
}

aff_status aff__rt_open(aff_rt **out, const aff_device_spec *spec, aff_error *err)
{
    *out = NULL;
    if (spec->choice != AFF_DEVICE_RT) return aff__fail(err, AFF_E_INVALID, "opening a device: none was named");
    if (spec->kind != AFF_RT_EMU) AFF_TRY(check_index(spec->kind, spec->index, err));
    AFF_TRY(spec->kind == AFF_RT_EMU    ? aff__rt_emu_open(out, spec, err)
            : spec->kind == AFF_RT_CUDA ? aff__rt_cuda_open(out, spec->index, err)
                                        : aff__rt_hip_open(out, spec->index, err));
    pthread_mutex_init(&(*out)->lock, NULL);
    return AFF_OK;
}

void aff__rt_close(aff_rt *rt)
{
    if (!rt) return;
    pthread_mutex_destroy(&rt->lock);
    free(rt->piece);
    rt->ops->close(rt);
}

const aff_rt_info *aff__rt_info(const aff_rt *rt)
{
    return &rt->info;
}

const char *aff__kernel_name(aff_kernel k)
{
    return aff__kernel_table[k].name;
}

/* ---- what is held ---- */

aff_device_use aff__rt_use(const char *what)
{
    return strstr(what, "expert")    ? AFF_USE_EXPERTS
           : strstr(what, "weight")  ? AFF_USE_WEIGHTS
           : strstr(what, "context") ? AFF_USE_STATE
                                     : AFF_USE_BUFFERS;
}

static aff_status hold(aff_rt *rt, void *p, uint64_t bytes, const char *what, aff_error *err)
{
    aff_status s = AFF_OK;
    const aff_device_use use = aff__rt_use(what);
    pthread_mutex_lock(&rt->lock);
    if (rt->pieces == rt->cap) {
        const uint64_t cap = rt->cap ? rt->cap * 2 : 256;
        s = aff__realloc(&rt->piece, cap, sizeof *rt->piece, what, err);
        if (s == AFF_OK) rt->cap = cap;
    }
    if (s == AFF_OK) {
        rt->piece[rt->pieces++] = (aff_rt_piece){p, bytes, use};
        rt->use[use] += bytes;
    }
    pthread_mutex_unlock(&rt->lock);
    return s;
}

/* Every piece that begins within. */
static void let_go(aff_rt *rt, const char *p, uint64_t bytes)
{
    pthread_mutex_lock(&rt->lock);
    for (uint64_t i = 0; i < rt->pieces;) {
        const aff_rt_piece *x = &rt->piece[i];
        if (x->p < p || x->p >= p + bytes) {
            i++;
            continue;
        }
        rt->use[x->use] -= x->bytes;
        rt->piece[i] = rt->piece[--rt->pieces];
    }
    pthread_mutex_unlock(&rt->lock);
}

void aff__rt_uses(aff_rt *rt, uint64_t use[AFF_USES])
{
    pthread_mutex_lock(&rt->lock);
    memcpy(use, rt->use, sizeof rt->use);
    pthread_mutex_unlock(&rt->lock);
}

/* ---- the table ---- */

aff_status aff__rt_free_memory(aff_rt *rt, uint64_t *bytes, aff_error *err)
{
    return rt->ops->free_memory(rt, bytes, err);
}

aff_status aff__rt_alloc(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    bytes = bytes ? bytes : 1;
    AFF_TRY(rt->ops->alloc(rt, p, bytes, what, err));
    const aff_status s = hold(rt, *p, bytes, what, err);
    if (s != AFF_OK) {
        rt->ops->free(rt, *p);
        *p = NULL;
    }
    return s;
}

void aff__rt_free(aff_rt *rt, void *p)
{
    if (!p) return;
    let_go(rt, p, 1);
    rt->ops->free(rt, p);
}

aff_status aff__rt_reserve(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    return rt->ops->reserve(rt, p, bytes, what, err);
}

aff_status aff__rt_commit(aff_rt *rt, void *p, uint64_t bytes, const char *what, aff_error *err)
{
    AFF_TRY(rt->ops->commit(rt, p, bytes, what, err));
    const aff_status s = hold(rt, p, bytes, what, err);
    if (s != AFF_OK) rt->ops->decommit(rt, p, bytes);
    return s;
}

void aff__rt_decommit(aff_rt *rt, void *p, uint64_t bytes)
{
    let_go(rt, p, bytes);
    rt->ops->decommit(rt, p, bytes);
}

void aff__rt_unreserve(aff_rt *rt, void *p, uint64_t bytes)
{
    if (p) rt->ops->unreserve(rt, p, bytes);
}

aff_status aff__rt_host_alloc(aff_rt *rt, void **p, uint64_t bytes, const char *what, aff_error *err)
{
    return rt->ops->host_alloc(rt, p, bytes ? bytes : 1, what, err);
}

void aff__rt_host_free(aff_rt *rt, void *p)
{
    if (p) rt->ops->host_free(rt, p);
}

aff_status aff__rt_host_register(aff_rt *rt, void *p, uint64_t bytes, aff_error *err)
{
    return rt->ops->host_register(rt, p, bytes, err);
}

void aff__rt_host_unregister(aff_rt *rt, void *p)
{
    if (p) rt->ops->host_unregister(rt, p);
}

aff_status aff__rt_stream_create(aff_rt *rt, aff_stream **out, aff_error *err)
{
    return rt->ops->stream_create(rt, out, err);
}

void aff__rt_stream_free(aff_rt *rt, aff_stream *s)
{
    if (s) rt->ops->stream_free(rt, s);
}

aff_status aff__rt_sync(aff_rt *rt, aff_stream *s, aff_error *err)
{
    return rt->ops->sync(rt, s, err);
}

aff_status aff__rt_event_create(aff_rt *rt, aff_event **out, aff_error *err)
{
    return rt->ops->event_create(rt, out, err);
}

void aff__rt_event_free(aff_rt *rt, aff_event *e)
{
    if (e) rt->ops->event_free(rt, e);
}

aff_status aff__rt_record(aff_rt *rt, aff_event *e, aff_stream *s, aff_error *err)
{
    return rt->ops->record(rt, e, s, err);
}

aff_status aff__rt_wait(aff_rt *rt, aff_stream *s, aff_event *e, aff_error *err)
{
    return rt->ops->wait(rt, s, e, err);
}

aff_status aff__rt_event_sync(aff_rt *rt, aff_event *e, aff_error *err)
{
    return rt->ops->event_sync(rt, e, err);
}

aff_status aff__rt_elapsed(aff_rt *rt, aff_event *from, aff_event *to, float *ms, aff_error *err)
{
    return rt->ops->elapsed(rt, from, to, ms, err);
}

aff_status aff__rt_copy(aff_rt *rt, aff_stream *s, void *to, const void *from, uint64_t bytes, aff_error *err)
{
    if (!bytes) return AFF_OK;
    for (int i = 0; i < AFF_RT_COUNTED; i++) {
        const aff_stream *none = NULL;
        if (!__atomic_compare_exchange_n(&rt->copied[i].s, &none, s, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED) && none != s) continue;
        __atomic_fetch_add(&rt->copied[i].bytes, bytes, __ATOMIC_RELAXED);
        break;
    }
    return rt->ops->copy(rt, s, to, from, bytes, err);
}

uint64_t aff__rt_copied(const aff_rt *rt, const aff_stream *s)
{
    for (int i = 0; i < AFF_RT_COUNTED; i++)
        if (__atomic_load_n(&rt->copied[i].s, __ATOMIC_RELAXED) == s) return __atomic_load_n(&rt->copied[i].bytes, __ATOMIC_RELAXED);
    return 0;
}

aff_status aff__rt_fill(aff_rt *rt, aff_stream *s, void *p, uint8_t byte, uint64_t bytes, aff_error *err)
{
    return bytes ? rt->ops->fill(rt, s, p, byte, bytes, err) : AFF_OK;
}

aff_status aff__rt_launch(aff_rt *rt, aff_stream *s, aff_kernel k, unsigned grid, unsigned block, unsigned smem,
                          unsigned flags, const void *args, aff_error *err)
{
    const aff_kernel_desc *d = &aff__kernel_table[k];
    if (!grid || !block || block > d->max_threads || (int64_t)smem > rt->info.shared_bytes)
        return aff__fail(
            err, AFF_E_INVALID,
            "%s: kernel %s with %u blocks of %u threads and %u bytes of shared memory: at most %u threads and %d bytes",
            rt->info.name, d->name, grid, block, smem, d->max_threads, rt->info.shared_bytes);
    if (flags & AFF_LAUNCH_COOPERATIVE && !rt->info.cooperative)
        return aff__fail(err, AFF_E_UNSUPPORTED, "%s: kernel %s: no cooperative launches on this device", rt->info.name,
                         d->name);
    if (!rt->info.programmatic)
        flags &= ~(unsigned)AFF_LAUNCH_PROGRAMMATIC; /* an ordinary launch gives the same results */
    return rt->ops->launch(rt, s, k, grid, block, smem, flags, args, err);
}

aff_status aff__rt_kernel_info(aff_rt *rt, aff_kernel k, unsigned block, unsigned smem, aff_kernel_info *out,
                               aff_error *err)
{
    return rt->ops->kernel_info(rt, k, block, smem, out, err);
}

aff_status aff__rt_capture_begin(aff_rt *rt, aff_stream *s, aff_error *err)
{
    return rt->ops->capture_begin(rt, s, err);
}

aff_status aff__rt_capture_end(aff_rt *rt, aff_stream *s, aff_graph **out, aff_error *err)
{
    return rt->ops->capture_end(rt, s, out, err);
}

aff_status aff__rt_graph_launch(aff_rt *rt, aff_graph *g, aff_stream *s, aff_error *err)
{
    return rt->ops->graph_launch(rt, g, s, err);
}

void aff__rt_graph_free(aff_rt *rt, aff_graph *g)
{
    if (g) rt->ops->graph_free(rt, g);
}
