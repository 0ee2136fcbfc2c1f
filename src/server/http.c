#include "server/http.h"
#include "base/clock.h"
#include "base/mem.h"
#include "server/listen.h"
#include <errno.h>
#include <inttypes.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef POLLRDHUP
#define POLLRDHUP 0x2000 /* of Linux; poll.h shows it only with extensions */
#endif

enum { MAX_HEADERS = 12, READ_BLOCK = 32768, TICK_MS = 500 };
static const size_t max_pending = 8u << 20;

/* A connection, from accept to close. Under the lock of aff_http. */
typedef struct conn {
    struct conn *next, *prev;
    uint64_t serial;
    int fd;
    uint64_t since;  /* ns: waiting for a header since then; 0: not waiting */
    aff_exchange *x; /* the request in progress */
    bool dropped;    /* shut down; the library will close it */
} conn;

struct aff_exchange {
    aff_http *h;
    conn *c;
    struct MHD_Connection *mhd;
    char method[16], path[256], id[40];
    char *authorization, *api_key, *origin, *if_none_match;
    aff_buf body;
    size_t received;
    bool early; /* answered before its body was read */

    pthread_mutex_t lock; /* of all below; taken after the lock of aff_http */
    int refs;
    bool whole, suspended, queued, begun, ended, known_size, completed, gone;
    int status;
    struct {
        char *name, *value;
    } header[MAX_HEADERS];
    int n_headers;
    char type[64];
    char heartbeat[128];
    aff_buf out;
    size_t taken, sent; /* of out.s; in all */
    uint64_t arrived, whole_at, wrote,
        read_on; /* ns: first seen; body complete; last write; last time the client took bytes */
    void (*on_gone)(void *user);
    void *user;
};

struct aff_http {
    aff_http_options o;
    struct MHD_Daemon *daemon;
    int port, wake;
    pthread_t watcher;
    bool watching;
    pthread_mutex_t lock;
    pthread_cond_t quiet; /* pending became 0 */
    conn *first;
    uint64_t serial;
    int pending;
    bool stop, draining, dropping;
    struct pollfd *set; /* [2 * (max_connections + 2)] of the watcher: the current set, the next one */
    uint64_t *set_serial;
};

/* ---- exchanges ---- */

static void poke(aff_http *h)
{
    const uint64_t one = 1;
    while (write(h->wake, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

static void make_id(char *out, size_t cap)
{
    uint64_t r[2] = {0};
    if (getrandom(r, sizeof r, 0) != (ssize_t)sizeof r) r[0] = aff__now_ns();
    snprintf(out, cap, "req_%016" PRIx64 "%016" PRIx64, r[0], r[1]);
}

static char *header_copy(struct MHD_Connection *c, const char *name)
{
    const char *v = MHD_lookup_connection_value(c, MHD_HEADER_KIND, name);
    char *copy = NULL;
    if (!v || aff__strndup(&copy, v, strlen(v), NULL) != AFF_OK) return NULL;
    return copy;
}

static aff_exchange *make_exchange(aff_http *h, struct MHD_Connection *m, const char *url, const char *method)
{
    aff_exchange *x = NULL;
    if (aff__calloc(&x, 1, sizeof *x, "request", NULL) != AFF_OK) return NULL;
    const union MHD_ConnectionInfo *ci = MHD_get_connection_info(m, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    pthread_mutex_init(&x->lock, NULL);
    x->h = h;
    x->mhd = m;
    x->refs = 1;
    x->arrived = aff__now_ns();
    snprintf(x->method, sizeof x->method, "%s", method);
    snprintf(x->path, sizeof x->path, "%s", url);
    make_id(x->id, sizeof x->id);
    x->authorization = header_copy(m, "Authorization");
    x->api_key = header_copy(m, "x-api-key");
    x->origin = header_copy(m, "Origin");
    x->if_none_match = header_copy(m, "If-None-Match");
    pthread_mutex_lock(&h->lock);
    h->pending++;
    x->c = ci ? ci->socket_context : NULL;
    if (x->c) {
        x->c->x = x;
        x->c->since = 0;
    }
    pthread_mutex_unlock(&h->lock);
    return x;
}

void aff__x_ref(aff_exchange *x)
{
    pthread_mutex_lock(&x->lock);
    x->refs++;
    pthread_mutex_unlock(&x->lock);
}

void aff__x_unref(aff_exchange *x)
{
    pthread_mutex_lock(&x->lock);
    const bool last = --x->refs == 0;
    pthread_mutex_unlock(&x->lock);
    if (!last) return;
    for (int i = 0; i < x->n_headers; i++) {
        free(x->header[i].name);
        free(x->header[i].value);
    }
    aff__buf_free(&x->body);
    aff__buf_free(&x->out);
    free(x->authorization);
    free(x->api_key);
    free(x->origin);
    free(x->if_none_match);
    pthread_mutex_destroy(&x->lock);
    free(x);
}

const char *aff__x_method(const aff_exchange *x)
{
    return x->method;
}
const char *aff__x_path(const aff_exchange *x)
{
    return x->path;
}
const char *aff__x_id(const aff_exchange *x)
{
    return x->id;
}
const char *aff__x_authorization(const aff_exchange *x)
{
    return x->authorization ? x->authorization : "";
}
const char *aff__x_api_key(const aff_exchange *x)
{
    return x->api_key ? x->api_key : "";
}
const char *aff__x_origin(const aff_exchange *x)
{
    return x->origin ? x->origin : "";
}
const char *aff__x_if_none_match(const aff_exchange *x)
{
    return x->if_none_match ? x->if_none_match : "";
}
const aff_buf *aff__x_body(const aff_exchange *x)
{
    return &x->body;
}
void aff__x_release_body(aff_exchange *x)
{
    aff__buf_free(&x->body);
}

/* The connection goes on if it waited. While it waits the library does not touch it, so that only the thread that
 * clears `suspended` may call the library, and does so without the lock. */
static void unlock_and_resume(aff_exchange *x)
{
    const bool resume = x->suspended;
    x->suspended = false;
    pthread_mutex_unlock(&x->lock);
    if (resume) MHD_resume_connection(x->mhd);
}

/* Marks x as left; calls the owner once. */
static void leave(aff_exchange *x)
{
    pthread_mutex_lock(&x->lock);
    void (*fn)(void *) = x->on_gone;
    void *user = x->user;
    x->on_gone = NULL;
    x->gone = true;
    unlock_and_resume(x);
    if (fn) fn(user);
}

bool aff__x_on_gone(aff_exchange *x, void (*gone)(void *user), void *user)
{
    pthread_mutex_lock(&x->lock);
    const bool here = !x->gone;
    x->on_gone = here ? gone : NULL;
    x->user = user;
    pthread_mutex_unlock(&x->lock);
    return here;
}

bool aff__x_forget_gone(aff_exchange *x)
{
    pthread_mutex_lock(&x->lock);
    const bool had = x->on_gone != NULL;
    x->on_gone = NULL;
    pthread_mutex_unlock(&x->lock);
    return had;
}

bool aff__x_is_gone(aff_exchange *x)
{
    pthread_mutex_lock(&x->lock);
    const bool gone = x->gone;
    pthread_mutex_unlock(&x->lock);
    return gone;
}

void aff__x_header(aff_exchange *x, const char *name, const char *value)
{
    char *n = NULL, *v = NULL;
    pthread_mutex_lock(&x->lock);
    if (x->n_headers < MAX_HEADERS && !x->begun && aff__strndup(&n, name, strlen(name), NULL) == AFF_OK &&
        aff__strndup(&v, value, strlen(value), NULL) == AFF_OK) {
        char *to = v;
        for (const char *s = v; *s; s++)
            if (*s >= ' ' && *s < 127) *to++ = *s;
        *to = 0;
        x->header[x->n_headers].name = n;
        x->header[x->n_headers++].value = v;
        n = v = NULL;
    }
    pthread_mutex_unlock(&x->lock);
    free(n);
    free(v);
}

static void begin(aff_exchange *x, int status, const char *type)
{
    x->begun = true;
    x->status = status;
    x->wrote = x->read_on = aff__now_ns();
    snprintf(x->type, sizeof x->type, "%s", type);
}

void aff__x_respond(aff_exchange *x, int status, const char *type, const char *body, size_t n)
{
    pthread_mutex_lock(&x->lock);
    if (!x->begun) {
        begin(x, status, type);
        x->known_size = x->ended = true;
        if (aff__buf_put(&x->out, body, n, NULL) != AFF_OK) x->status = 500;
    }
    unlock_and_resume(x);
}

void aff__x_begin(aff_exchange *x, int status, const char *type)
{
    pthread_mutex_lock(&x->lock);
    if (!x->begun) begin(x, status, type);
    unlock_and_resume(x);
    poke(x->h);
}

void aff__x_heartbeat(aff_exchange *x, const char *s)
{
    pthread_mutex_lock(&x->lock);
    snprintf(x->heartbeat, sizeof x->heartbeat, "%s", s);
    pthread_mutex_unlock(&x->lock);
}

bool aff__x_write(aff_exchange *x, const char *s, size_t n)
{
    pthread_mutex_lock(&x->lock);
    bool ok = !x->gone && !x->ended;
    if (ok && x->out.n - x->taken > max_pending) ok = false;
    if (ok && x->taken == x->out.n) {
        x->taken = x->out.n = 0;
        x->read_on = aff__now_ns(); /* from now on the client can be late */
    }
    if (ok && x->taken > max_pending) {
        memmove(x->out.s, x->out.s + x->taken, x->out.n - x->taken);
        x->out.n -= x->taken;
        x->taken = 0;
    }
    ok = ok && aff__buf_put(&x->out, s, n, NULL) == AFF_OK;
    if (ok) x->wrote = aff__now_ns();
    unlock_and_resume(x);
    return ok;
}

void aff__x_end(aff_exchange *x)
{
    pthread_mutex_lock(&x->lock);
    x->ended = true;
    unlock_and_resume(x);
}

/* ---- the library's side ---- */

static ssize_t read_answer(void *cls, uint64_t pos, char *buf, size_t max)
{
    aff_exchange *x = cls;
    ssize_t got;
    pthread_mutex_lock(&x->lock);
    const size_t have = x->out.n - x->taken;
    if (x->gone && !x->ended) {
        got = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (have) {
        const size_t n = have < max ? have : max;
        memcpy(buf, x->out.s + x->taken, n);
        x->taken += n;
        x->sent += n;
        x->read_on = aff__now_ns();
        got = (ssize_t)n;
    } else if (x->ended) {
        got = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        x->suspended = true;
        MHD_suspend_connection(x->mhd);
        got = 0;
    }
    pthread_mutex_unlock(&x->lock);
    return got;
}

static bool closing(aff_http *h)
{
    pthread_mutex_lock(&h->lock);
    const bool yes = h->draining;
    pthread_mutex_unlock(&h->lock);
    return yes;
}

static void answer_freed(void *cls)
{
    aff__x_unref(cls);
}

/* The answer has begun: its headers do not change any more. Without x->lock, which the library's own lock of the
 * response comes before (read_answer). */
static enum MHD_Result queue_answer(aff_exchange *x)
{
    struct MHD_Response *r = MHD_create_response_from_callback(x->known_size ? x->out.n : MHD_SIZE_UNKNOWN, READ_BLOCK,
                                                               read_answer, x, answer_freed);
    if (!r) return MHD_NO;
    aff__x_ref(x);
    MHD_add_response_header(r, "Content-Type", x->type);
    MHD_add_response_header(r, "x-request-id", x->id);
    if (!x->known_size) MHD_add_response_header(r, "Cache-Control", "no-cache");
    if (x->early || closing(x->h)) MHD_add_response_header(r, "Connection", "close");
    for (int i = 0; i < x->n_headers; i++) MHD_add_response_header(r, x->header[i].name, x->header[i].value);
    const enum MHD_Result ok = MHD_queue_response(x->mhd, (unsigned)x->status, r);
    MHD_destroy_response(r);
    return ok;
}

typedef struct lengths {
    int length, coding;
    bool bad;
    uint64_t value;
} lengths;

static enum MHD_Result count_length(void *cls, enum MHD_ValueKind kind, const char *key, const char *value)
{
    lengths *l = cls;
    if (strcasecmp(key, "Transfer-Encoding") == 0) {
        l->coding++;
        if (!value || strcasecmp(value, "chunked") != 0) l->bad = true;
    }
    if (strcasecmp(key, "Content-Length") != 0) return MHD_YES;
    const size_t n = value ? strlen(value) : 0;
    l->length++;
    if (!n || n > 18 || strspn(value, "0123456789") != n)
        l->bad = true;
    else
        l->value = strtoull(value, NULL, 10);
    return MHD_YES;
}

static void refuse(aff_exchange *x, int status, const char *message)
{
    pthread_mutex_lock(&x->lock); /* the watcher looks at it */
    x->early = true;
    pthread_mutex_unlock(&x->lock);
    x->h->o.refuse(x->h->o.ctx, x, status, message);
}

/* The first call for a request: what its header allows us to refuse. */
static void check_header(aff_exchange *x, const char *url)
{
    lengths l = {0};
    MHD_get_connection_values(x->mhd, MHD_HEADER_KIND, count_length, &l);
    if (l.length + l.coding > 1 || l.bad)
        refuse(x, 400,
               "expected one Content-Length or Transfer-Encoding: chunked, got several, both or a malformed one");
    else if (l.value > x->h->o.max_body)
        refuse(x, 413, "the body is larger than this server takes (--max-body)");
    else if (strlen(url) >= sizeof x->path)
        refuse(x, 404, "no such path");
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *m, const char *url, const char *method,
                                  const char *version, const char *data, size_t *size, void **state)
{
    aff_http *h = cls;
    aff_exchange *x = *state;
    if (!x) {
        *state = x = make_exchange(h, m, url, method);
        if (!x) return MHD_NO;
        check_header(x, url);
        if (!x->early) return MHD_YES;
        *size = 0;
    } else if (*size) {
        x->received += *size;
        if (x->received > h->o.max_body)
            aff__buf_free(&x->body); /* read to its end, or to the deadline, so that the answer can be sent */
        else if (aff__buf_put(&x->body, data, *size, NULL) != AFF_OK)
            return MHD_NO;
        *size = 0;
        return MHD_YES;
    } else if (!x->whole) {
        pthread_mutex_lock(&x->lock);
        x->whole = true;
        x->whole_at = aff__now_ns();
        pthread_mutex_unlock(&x->lock);
        if (x->received > h->o.max_body)
            refuse(x, 413, "the body is larger than this server takes (--max-body)");
        else
            h->o.handle(h->o.ctx, x);
        poke(h);
    }
    pthread_mutex_lock(&x->lock);
    const bool ready = x->begun && !x->queued && !x->gone, gone = x->gone;
    if (ready) {
        x->queued = true;
    } else if (!x->begun && !gone) {
        x->suspended = true;
        MHD_suspend_connection(m);
    }
    pthread_mutex_unlock(&x->lock);
    return ready ? queue_answer(x) : gone ? MHD_NO : MHD_YES;
}

static void log_request(const aff_exchange *x)
{
    FILE *f = x->h->o.log;
    char path[sizeof x->path], when[32];
    struct tm tm;
    const time_t now = time(NULL);
    if (!f) return;
    memcpy(path, x->path, sizeof path);
    path[80] = 0;
    for (char *p = path; *p; p++)
        if (*p <= ' ' || *p >= 127 || *p == '"') *p = '?';
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    fprintf(f, "%s %s %s %s %d %zu bytes %.1f ms%s\n", when, x->id, x->method, path, x->status, x->sent,
            (double)(aff__now_ns() - x->arrived) / 1e6, x->gone ? " client left" : "");
    fflush(f);
}

static void on_completed(void *cls, struct MHD_Connection *m, void **state, enum MHD_RequestTerminationCode code)
{
    aff_http *h = cls;
    aff_exchange *x = *state;
    if (!x) return;
    *state = NULL;
    pthread_mutex_lock(&h->lock);
    if (x->c) {
        x->c->x = NULL;
        x->c->since = aff__now_ns();
        x->c = NULL;
    }
    pthread_mutex_unlock(&h->lock);
    if (code != MHD_REQUEST_TERMINATED_COMPLETED_OK) leave(x);
    pthread_mutex_lock(&x->lock);
    log_request(x);
    pthread_mutex_unlock(&x->lock);
    aff__x_unref(x);
    pthread_mutex_lock(&h->lock);
    if (--h->pending == 0) pthread_cond_broadcast(&h->quiet);
    pthread_mutex_unlock(&h->lock);
}

static void on_connection(void *cls, struct MHD_Connection *m, void **context, enum MHD_ConnectionNotificationCode code)
{
    aff_http *h = cls;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *ci = MHD_get_connection_info(m, MHD_CONNECTION_INFO_CONNECTION_FD);
        conn *c = NULL;
        if (!ci || aff__calloc(&c, 1, sizeof *c, "connection", NULL) != AFF_OK) return;
        const int on = 1;
        c->fd = ci->connect_fd;
        c->since = aff__now_ns();
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        pthread_mutex_lock(&h->lock);
        c->serial = ++h->serial;
        c->next = h->first;
        if (c->next) c->next->prev = c;
        h->first = c;
        pthread_mutex_unlock(&h->lock);
        *context = c;
        return;
    }
    conn *c = *context;
    if (!c) return;
    *context = NULL;
    pthread_mutex_lock(&h->lock);
    if (c->next) c->next->prev = c->prev;
    if (c->prev)
        c->prev->next = c->next;
    else
        h->first = c->next;
    pthread_mutex_unlock(&h->lock);
    free(c);
}

/* ---- the watcher ---- */

static bool late(uint64_t now, uint64_t since, int ms)
{
    return since && now > since && now - since > (uint64_t)ms * 1000000u;
}

/* Whether the client is beyond a deadline, or has left (hung). Writes a heartbeat that is due. *watch: look for its
 * leaving. */
static bool examine(aff_http *h, conn *c, uint64_t now, bool hung, bool *watch)
{
    aff_exchange *x = c->x;
    *watch = !x && !c->dropped;
    if (!x) return !c->dropped && (hung || late(now, c->since, h->o.header_ms) || h->dropping);
    bool drop = false, resume = false;
    pthread_mutex_lock(&x->lock);
    if (!x->whole && !x->early) {
        drop = late(now, x->arrived, h->o.body_ms);
    } else if (x->begun && x->out.n > x->taken) {
        drop = late(now, x->read_on, h->o.write_ms);
    } else if (x->begun && !x->ended && x->heartbeat[0] && late(now, x->wrote, h->o.heartbeat_ms)) {
        x->taken = x->out.n = 0;
        aff__buf_puts(&x->out, x->heartbeat, NULL);
        x->wrote = x->read_on = now;
        resume = x->suspended;
        x->suspended = false;
    }
    *watch = !x->ended && !x->gone; /* while its body arrives too: the library would wait for the rest */
    if (hung && *watch) drop = true;
    if (h->dropping) drop = true;
    drop = drop && !x->gone;
    pthread_mutex_unlock(&x->lock);
    if (resume) MHD_resume_connection(x->mhd);
    return drop;
}

static int next_tick(const aff_http *h)
{
    int least = TICK_MS;
    const int all[] = {h->o.header_ms, h->o.body_ms, h->o.write_ms, h->o.heartbeat_ms};
    for (int i = 0; i < 4; i++)
        if (all[i] / 4 < least) least = all[i] / 4;
    return least > 0 ? least : 1;
}

/* One round over all connections; fills the set for the next poll. */
static int sweep(aff_http *h, struct pollfd *set, uint64_t *serial, int n_set)
{
    const uint64_t now = aff__now_ns();
    int n = 1;
    pthread_mutex_lock(&h->lock);
    for (conn *c = h->first; c;) {
        bool hung = false, watch;
        for (int i = 1; i < n_set && !hung; i++) {
            /* The descriptor may be another connection's by now: ask again, while it cannot be closed. */
            struct pollfd again = {.fd = c->fd, .events = POLLRDHUP};
            if (set[i].revents && serial[i] == c->serial) hung = poll(&again, 1, 0) > 0;
        }
        const bool drop = examine(h, c, now, hung, &watch);
        aff_exchange *x = c->x;
        if (drop) {
            shutdown(c->fd, SHUT_RDWR);
            if (x) aff__x_ref(x);
        } else if (watch && n <= h->o.max_connections) {
            set[n + h->o.max_connections + 1] = (struct pollfd){.fd = c->fd, .events = POLLRDHUP};
            serial[n + h->o.max_connections + 1] = c->serial;
            n++;
        }
        if (drop) {
            c->dropped = true;
            c->since = 0;
        }
        conn *next = c->next;
        if (drop && x) {
            pthread_mutex_unlock(&h->lock); /* the owner may take its time; then from the start, c may be gone */
            leave(x);
            aff__x_unref(x);
            pthread_mutex_lock(&h->lock);
            next = h->first;
            n = 1;
            n_set = 1;
        }
        c = next;
    }
    pthread_mutex_unlock(&h->lock);
    for (int i = 1; i < n; i++) {
        set[i] = set[i + h->o.max_connections + 1];
        serial[i] = serial[i + h->o.max_connections + 1];
    }
    return n;
}

static void *watch(void *ctx)
{
    aff_http *h = ctx;
    int n = 1;
    for (;;) {
        h->set[0] = (struct pollfd){.fd = h->wake, .events = POLLIN};
        poll(h->set, (nfds_t)n, next_tick(h));
        uint64_t drained;
        if (h->set[0].revents && read(h->wake, &drained, sizeof drained) < 0 && errno != EAGAIN) break;
        pthread_mutex_lock(&h->lock);
        const bool stop = h->stop;
        pthread_mutex_unlock(&h->lock);
        if (stop) break;
        n = sweep(h, h->set, h->set_serial, n);
    }
    return NULL;
}

/* ---- start and stop ---- */

static aff_status start_daemon(aff_http *h, aff_error *err)
{
    int fd;
    h->port = h->o.port;
    AFF_TRY(aff__listen(h->o.host, &h->port, h->o.socket_mode, &fd, err));
    const unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_PEDANTIC_CHECKS;
    h->daemon =
        MHD_start_daemon(flags, 0, NULL, NULL, on_request, h, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT,
                         (unsigned)h->o.max_connections, MHD_OPTION_CONNECTION_MEMORY_LIMIT, h->o.max_header,
                         MHD_OPTION_NOTIFY_COMPLETED, on_completed, h, MHD_OPTION_NOTIFY_CONNECTION, on_connection, h,
                         MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_END);
    if (h->daemon) return AFF_OK;
    aff__unlisten(h->o.host, fd);
    close(fd);
    return aff__fail(err, AFF_E_NOMEM, "server: cannot start libmicrohttpd");
}

aff_status aff__http_start(aff_http **out, const aff_http_options *o, aff_error *err)
{
    aff_http *h = NULL;
    *out = NULL;
    AFF_TRY(aff__calloc(&h, 1, sizeof *h, "server", err));
    h->o = *o;
    if (!h->o.max_body) h->o.max_body = 32u << 20;
    if (!h->o.max_header) h->o.max_header = 64u << 10;
    if (!h->o.socket_mode) h->o.socket_mode = 0600;
    if (!h->o.max_connections) h->o.max_connections = 256;
    if (!h->o.header_ms) h->o.header_ms = 30000;
    if (!h->o.body_ms) h->o.body_ms = 60000;
    if (!h->o.write_ms) h->o.write_ms = 60000;
    if (!h->o.heartbeat_ms) h->o.heartbeat_ms = 5000 - TICK_MS; /* so that one is out within 5 s */
    pthread_mutex_init(&h->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&h->quiet, &attr);
    pthread_condattr_destroy(&attr);
    h->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    const uint64_t cap = 2 * ((uint64_t)h->o.max_connections + 2);
    aff_status s = h->wake < 0 ? aff__fail_errno(err, "server: no event descriptor")
                               : aff__calloc(&h->set, cap, sizeof *h->set, "server", err);
    if (s == AFF_OK) s = aff__calloc(&h->set_serial, cap, sizeof *h->set_serial, "server", err);
    if (s == AFF_OK) s = start_daemon(h, err);
    if (s == AFF_OK && pthread_create(&h->watcher, NULL, watch, h) != 0)
        s = aff__fail(err, AFF_E_NOMEM, "server: cannot start a thread");
    h->watching = s == AFF_OK;
    if (s == AFF_OK)
        *out = h;
    else
        aff__http_stop(h);
    return s;
}

int aff__http_port(const aff_http *h)
{
    return h->port;
}

int aff__http_pending(aff_http *h)
{
    pthread_mutex_lock(&h->lock);
    const int n = h->pending;
    pthread_mutex_unlock(&h->lock);
    return n;
}

static void wait_quiet(aff_http *h, int ms)
{
    const uint64_t until = aff__now_ns() + (uint64_t)ms * 1000000u;
    const struct timespec t = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
    while (h->pending && pthread_cond_timedwait(&h->quiet, &h->lock, &t) == 0) {
    }
}

static void take_back_socket(aff_http *h)
{
    const int fd = MHD_quiesce_daemon(h->daemon);
    if (fd < 0) return; /* done before */
    aff__unlisten(h->o.host, fd);
    close(fd);
}

void aff__http_drain(aff_http *h, int ms)
{
    pthread_mutex_lock(&h->lock);
    h->draining = true;
    wait_quiet(h, ms);
    pthread_mutex_unlock(&h->lock);
    take_back_socket(h);
    pthread_mutex_lock(&h->lock);
    h->dropping = true;
    pthread_mutex_unlock(&h->lock);
    poke(h);
    pthread_mutex_lock(&h->lock);
    wait_quiet(h, 10000); /* they are resumed and told; the library closes them */
    pthread_mutex_unlock(&h->lock);
}

void aff__http_stop(aff_http *h)
{
    if (!h) return;
    pthread_mutex_lock(&h->lock);
    h->stop = true;
    pthread_mutex_unlock(&h->lock);
    if (h->watching) {
        poke(h);
        pthread_join(h->watcher, NULL);
    }
    if (h->daemon) {
        take_back_socket(h);
        MHD_stop_daemon(h->daemon);
    }
    if (h->wake >= 0) close(h->wake);
    pthread_cond_destroy(&h->quiet);
    pthread_mutex_destroy(&h->lock);
    free(h->set);
    free(h->set_serial);
    free(h);
}
