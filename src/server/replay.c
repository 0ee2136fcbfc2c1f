#include "server/replay.h"
#include "base/file.h"
#include "base/mem.h"
#include "format/json.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

enum { BUCKETS = 4096, FILE_HEAD = 16 };
static const uint64_t default_bytes = UINT64_C(64) << 20;
static const char magic[8] = {'A', 'F', 'F', 'T', 'U', 'R', 'N', '1'};

typedef struct entry {
    uint64_t key;
    aff_buf record; /* owns what turn points to */
    aff_turn turn;
    struct entry *next; /* of the bucket */
    struct entry *newer, *older;
} entry;

struct aff_replay {
    const aff_tokenizer *tok;
    pthread_mutex_t lock;
    entry *bucket[BUCKETS], *newest, *oldest;
    uint64_t bytes, limit; /* of records */
    size_t count;
    char *path; /* NULL: no file */
    int fd;
    uint64_t fingerprint, file_bytes;
    bool warned;
    void (*warn)(void *ctx, const char *line);
    void *warn_ctx;
};

/* ---- what is the same ---- */

static bool is_white(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static void trim(const char **s, size_t *n)
{
    while (*n && is_white(**s)) {
        (*s)++;
        (*n)--;
    }
    while (*n && is_white((*s)[*n - 1])) (*n)--;
}

static bool same_bytes(const char *a, size_t n, const char *b, size_t m)
{
    return n == m && (n == 0 || memcmp(a, b, n) == 0);
}

static bool same_trimmed(const char *a, size_t n, const char *b, size_t m)
{
    trim(&a, &n);
    trim(&b, &m);
    return same_bytes(a, n, b, m);
}

static bool same_value(const json_t *a, const json_t *b);

static bool same_object(const json_t *a, const json_t *b)
{
    const char *key;
    json_t *v;
    if (json_object_size(a) != json_object_size(b)) return false;
    json_object_foreach((json_t *)(uintptr_t)a, key, v)
    {
        const json_t *w = json_object_get(b, key);
        if (!w || !same_value(v, w)) return false;
    }
    return true;
}

/* Clients write 1.0 as 1 and sort keys. */
static bool same_value(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b) && (json_is_real(a) || json_is_real(b)))
        return json_number_value(a) >= json_number_value(b) && json_number_value(a) <= json_number_value(b);
    if (json_is_object(a) && json_is_object(b)) return same_object(a, b);
    if (!json_is_array(a) || !json_is_array(b)) return json_equal(a, b);
    if (json_array_size(a) != json_array_size(b)) return false;
    for (size_t i = 0; i < json_array_size(a); i++)
        if (!same_value(json_array_get(a, i), json_array_get(b, i))) return false;
    return true;
}

static json_t *parse(const char *s, size_t n)
{
    json_t *v = NULL;
    return aff__json_parse_exact(&v, s, n, "arguments", false, 256, NULL) == AFF_OK ? v : NULL;
}

static bool same_arguments(const aff_turn_call *c, const json_t *given)
{
    json_t *mine = parse(c->arguments, c->n_arguments), *theirs = NULL;
    if (json_is_object(given))
        theirs = json_incref((json_t *)(uintptr_t)given);
    else if (aff__json_is_text(given))
        theirs = parse(json_string_value(given), json_string_length(given));
    bool same = mine && theirs && same_value(mine, theirs);
    if (!same && aff__json_is_text(given))
        same = same_bytes(c->arguments, c->n_arguments, json_string_value(given), json_string_length(given));
    json_decref(mine);
    json_decref(theirs);
    return same;
}

static bool same_call(const aff_turn_call *c, const json_t *v)
{
    const json_t *f = json_object_get(v, "function"), *id = json_object_get(v, "id"),
                 *name = json_object_get(f, "name");
    return aff__json_is_text(id) && aff__json_is_text(name) &&
           same_bytes(c->id, c->n_id, json_string_value(id), json_string_length(id)) &&
           same_bytes(c->name, c->n_name, json_string_value(name), json_string_length(name)) &&
           same_arguments(c, json_object_get(f, "arguments"));
}

/* ---- what a message says ---- */

typedef struct said {
    aff_buf text;
    const char *reasoning;
    size_t n_reasoning;
    const json_t *calls; /* NULL: none */
} said;

/* false: it has something no model says. */
static bool read_message(said *m, const json_t *v)
{
    const json_t *c = json_object_get(v, "content"), *r = json_object_get(v, "reasoning_content"),
                 *calls = json_object_get(v, "tool_calls");
    if (!r || json_is_null(r)) r = json_object_get(v, "reasoning");
    *m = (said){.reasoning = "", .calls = json_array_size(calls) ? calls : NULL};
    if (r && !json_is_null(r)) {
        if (!aff__json_is_text(r)) return false;
        m->reasoning = json_string_value(r);
        m->n_reasoning = json_string_length(r);
    }
    if (aff__json_is_text(c))
        return aff__buf_put(&m->text, json_string_value(c), json_string_length(c), NULL) == AFF_OK;
    if (c && !json_is_null(c) && !json_is_array(c)) return false;
    for (size_t i = 0; i < json_array_size(c); i++) {
        const json_t *t = json_object_get(json_array_get(c, i), "text");
        if (!aff__json_is_text(t) ||
            aff__buf_put(&m->text, json_string_value(t), json_string_length(t), NULL) != AFF_OK)
            return false;
    }
    return true;
}

static bool same_turn(const aff_turn *t, const said *m, bool thinking)
{
    if (t->thinking != thinking || t->n_calls != json_array_size(m->calls)) return false;
    if (!same_trimmed(t->text, t->n_text, m->text.s, m->text.n)) return false;
    if (!(t->n_calls && !m->n_reasoning) && !same_trimmed(t->reasoning, t->n_reasoning, m->reasoning, m->n_reasoning))
        return false;
    for (size_t i = 0; i < t->n_calls; i++)
        if (!same_call(&t->call[i], json_array_get(m->calls, i))) return false;
    return true;
}

/* ---- the index ---- */

static uint64_t key_of(const char *id, size_t n_id, const char *reasoning, size_t n_reasoning, const char *text,
                       size_t n_text)
{
    XXH3_state_t h;
    if (id) return XXH3_64bits(id, n_id);
    trim(&reasoning, &n_reasoning);
    trim(&text, &n_text);
    XXH3_INITSTATE(&h);
    XXH3_64bits_reset_withSeed(&h, 1);
    XXH3_64bits_update(&h, reasoning, n_reasoning);
    XXH3_64bits_update(&h, "", 1);
    XXH3_64bits_update(&h, text, n_text);
    return XXH3_64bits_digest(&h);
}

static uint64_t key_of_turn(const aff_turn *t)
{
    return key_of(t->n_calls ? t->call[0].id : NULL, t->n_calls ? t->call[0].n_id : 0, t->reasoning, t->n_reasoning,
                  t->text, t->n_text);
}

static void age_out(aff_replay *r, entry *e)
{
    *(e->newer ? &e->newer->older : &r->newest) = e->older;
    *(e->older ? &e->older->newer : &r->oldest) = e->newer;
    e->newer = e->older = NULL;
}

static void make_newest(aff_replay *r, entry *e)
{
    e->older = r->newest;
    *(r->newest ? &r->newest->newer : &r->oldest) = e;
    r->newest = e;
}

static void drop(aff_replay *r, entry *e)
{
    entry **at = &r->bucket[e->key % BUCKETS];
    while (*at != e) at = &(*at)->next;
    *at = e->next;
    age_out(r, e);
    r->bytes -= e->record.n;
    r->count--;
    aff__turn_free(&e->turn);
    aff__buf_free(&e->record);
    free(e);
}

static bool known_ids(const aff_replay *r, const aff_turn *t)
{
    for (size_t i = 0; i < t->n_ids; i++)
        if (t->ids[i] >= aff__tokenizer_size(r->tok)) return false;
    return true;
}

/* The same record again, which many short answers are. */
static bool renew(aff_replay *r, uint64_t key, const aff_buf *record)
{
    entry *e = r->bucket[key % BUCKETS];
    while (e && !(e->key == key && same_bytes(e->record.s, e->record.n, record->s, record->n))) e = e->next;
    if (!e) return false;
    age_out(r, e);
    make_newest(r, e);
    return true;
}

/* Takes the record (also when it fails), whose turn it reads. false: there is none that was new. */
static bool insert(aff_replay *r, aff_buf *record)
{
    entry *e = NULL;
    size_t at = 0;
    bool ok = record->n <= r->limit && aff__calloc(&e, 1, sizeof *e, "turn", NULL) == AFF_OK &&
              aff__turn_read(&e->turn, record->s, record->n, &at) && known_ids(r, &e->turn);
    if (ok) {
        e->key = key_of_turn(&e->turn);
        ok = !renew(r, e->key, record);
    }
    if (!ok) {
        if (e) aff__turn_free(&e->turn);
        free(e);
        aff__buf_free(record);
        return false;
    }
    e->record = *record;
    *record = (aff_buf){0};
    e->next = r->bucket[e->key % BUCKETS];
    r->bucket[e->key % BUCKETS] = e;
    make_newest(r, e);
    r->bytes += e->record.n;
    r->count++;
    while (r->bytes > r->limit) drop(r, r->oldest);
    return true;
}

static const entry *find(aff_replay *r, const said *m, bool thinking)
{
    const json_t *id = json_object_get(json_array_get(m->calls, 0), "id");
    if (m->calls && !aff__json_is_text(id)) return NULL;
    const uint64_t key = key_of(m->calls ? json_string_value(id) : NULL, m->calls ? json_string_length(id) : 0,
                                m->reasoning, m->n_reasoning, m->text.n ? m->text.s : "", m->text.n);
    entry *e = r->bucket[key % BUCKETS];
    while (e && !(e->key == key && same_turn(&e->turn, m, thinking))) e = e->next;
    if (!e) return NULL;
    age_out(r, e);
    make_newest(r, e);
    return e;
}

/* ---- the file ---- */

static void trouble(aff_replay *r, const char *what)
{
    char line[512];
    if (r->warn && !r->warned) {
        snprintf(line, sizeof line, "%.200s: %.200s: turns are not kept for the next process", r->path, what);
        r->warn(r->warn_ctx, line);
    }
    r->warned = true;
    if (r->fd >= 0) close(r->fd);
    r->fd = -1;
}

static bool write_all(int fd, const char *s, size_t n)
{
    while (n) {
        const ssize_t w = write(fd, s, n);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) return false;
        s += w;
        n -= (size_t)w;
    }
    return true;
}

static void put_head(const aff_replay *r, char head[FILE_HEAD])
{
    memcpy(head, magic, sizeof magic);
    for (int i = 0; i < 8; i++) head[8 + i] = (char)(r->fingerprint >> 8 * i);
}

/* A file of what is in memory, oldest first, in place of the one that is there. */
static aff_status rewrite(aff_replay *r, aff_error *err)
{
    aff_outfile o;
    char head[FILE_HEAD];
    uint64_t at = FILE_HEAD;
    if (r->fd >= 0) close(r->fd);
    r->fd = -1;
    AFF_TRY(aff__out_open_named(&o, r->path, ".tmp", false, err));
    aff_status s = fchmod(o.fd, 0600) == 0 ? AFF_OK : aff__fail_errno(err, "%s: cannot set its mode", r->path);
    put_head(r, head);
    if (s == AFF_OK) s = aff__out_write(&o, head, sizeof head, 0, err);
    for (const entry *e = r->oldest; e && s == AFF_OK; at += e->record.n, e = e->newer)
        s = aff__out_write(&o, e->record.s, e->record.n, at, err);
    if (s != AFF_OK) {
        aff__out_abort(&o);
        return s;
    }
    AFF_TRY(aff__out_commit(&o, err));
    r->file_bytes = at;
    r->fd = open(r->path, O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW);
    return r->fd >= 0 ? AFF_OK : aff__fail_errno(err, "%s: cannot open", r->path);
}

/* What is in the file, up to the first record that is damaged. */
static aff_status load(aff_replay *r, aff_error *err)
{
    char *bytes = NULL, head[FILE_HEAD];
    size_t n = 0, at = FILE_HEAD;
    if (!aff__file_exists(r->path)) return AFF_OK;
    const aff_status s = aff__read_file(r->path, 4 * r->limit + (64u << 20), &bytes, &n, err);
    if (s == AFF_E_NOMEM) return s;
    put_head(r, head);
    if (s != AFF_OK || n < sizeof head || memcmp(bytes, head, sizeof head) != 0) n = 0;
    while (at < n) {
        aff_turn t;
        aff_buf record = {0};
        const size_t from = at;
        if (!aff__turn_read(&t, bytes, n, &at)) break;
        aff__turn_free(&t);
        if (aff__buf_put(&record, bytes + from, at - from, NULL) == AFF_OK) insert(r, &record);
    }
    free(bytes);
    return AFF_OK;
}

/* ---- outside ---- */

static uint64_t fingerprint_of(const aff_tokenizer *t)
{
    XXH3_state_t h;
    XXH3_INITSTATE(&h);
    XXH3_64bits_reset(&h);
    for (int64_t i = 0; i < aff__tokenizer_size(t); i++) {
        size_t n;
        const char *s = aff__tokenizer_bytes(t, (uint32_t)i, &n);
        const uint32_t len = (uint32_t)n;
        XXH3_64bits_update(&h, &len, sizeof len);
        XXH3_64bits_update(&h, s, n);
    }
    return XXH3_64bits_digest(&h);
}

aff_status aff__replay_open(aff_replay **out, const aff_tokenizer *tok, const char *dir, uint64_t bytes,
                            void (*warn)(void *ctx, const char *line), void *warn_ctx, aff_error *err)
{
    aff_replay *r = NULL;
    char path[4096];
    *out = NULL;
    AFF_TRY(aff__calloc(&r, 1, sizeof *r, "turns", err));
    *r = (aff_replay){.tok = tok, .limit = bytes ? bytes : default_bytes, .fd = -1, .warn = warn, .warn_ctx = warn_ctx};
    pthread_mutex_init(&r->lock, NULL);
    aff_status s = AFF_OK;
    if (dir) {
        s = aff__path_join(path, sizeof path, dir, "turns", err);
        if (s == AFF_OK) s = aff__strndup(&r->path, path, strlen(path), err);
        r->fingerprint = fingerprint_of(tok);
        if (s == AFF_OK) s = load(r, err);
        if (s == AFF_OK) s = rewrite(r, err);
    }
    if (s == AFF_OK)
        *out = r;
    else
        aff__replay_free(r);
    return s;
}

void aff__replay_free(aff_replay *r)
{
    if (!r) return;
    while (r->oldest) drop(r, r->oldest);
    if (r->fd >= 0) close(r->fd);
    pthread_mutex_destroy(&r->lock);
    free(r->path);
    free(r);
}

void aff__replay_put(aff_replay *r, const aff_turn *t)
{
    aff_buf record = {0};
    aff_error err = {0};
    if (aff__turn_write(&record, t, NULL) != AFF_OK) {
        aff__buf_free(&record);
        return;
    }
    pthread_mutex_lock(&r->lock);
    const size_t n = record.n;
    if (insert(r, &record) && r->fd >= 0) {
        if (!write_all(r->fd, r->newest->record.s, n)) trouble(r, strerror(errno));
        r->file_bytes += n;
        if (r->fd >= 0 && r->file_bytes > 2 * r->limit + FILE_HEAD && rewrite(r, &err) != AFF_OK) trouble(r, err.msg);
    }
    pthread_mutex_unlock(&r->lock);
}

/* The ids' text, invalid bytes as U+FFFD. */
static bool put_text(const aff_replay *r, const aff_turn *t, aff_buf *text)
{
    aff_utf8_stream u = {0};
    char tail[8], small[1024], *large = NULL;
    bool ok = true;
    for (size_t i = 0; i < t->n_ids && ok; i++) {
        size_t n;
        const char *s = aff__tokenizer_bytes(r->tok, t->ids[i], &n);
        if (3 * (n + 4) > sizeof small && aff__realloc(&large, n + 4, 3, "text", NULL) != AFF_OK) ok = false;
        char *to = large ? large : small;
        ok = ok && aff__buf_put(text, to, aff__utf8_push(&u, s, n, to), NULL) == AFF_OK;
    }
    free(large);
    return ok && aff__buf_put(text, tail, aff__utf8_flush(&u, tail), NULL) == AFF_OK;
}

bool aff__replay_find(aff_replay *r, const json_t *message, bool thinking, aff_buf *text, aff_ids *ids)
{
    said m;
    bool ok = read_message(&m, message);
    pthread_mutex_lock(&r->lock);
    const entry *e = ok ? find(r, &m, thinking) : NULL;
    ok = e && put_text(r, &e->turn, text);
    for (size_t i = 0; ok && i < e->turn.n_ids; i++) ok = aff__ids_push(ids, e->turn.ids[i], NULL) == AFF_OK;
    pthread_mutex_unlock(&r->lock);
    aff__buf_free(&m.text);
    return ok;
}

size_t aff__replay_count(aff_replay *r)
{
    pthread_mutex_lock(&r->lock);
    const size_t n = r->count;
    pthread_mutex_unlock(&r->lock);
    return n;
}
