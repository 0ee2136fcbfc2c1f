/* http.h - HTTP/1.1 in front of libmicrohttpd: limits, deadlines, answers that may come late or in pieces, and clients
 * that leave. One thread of the library reads and writes; a watcher thread keeps the deadlines (a client that sends its
 * header byte by byte outlives the library's own), writes heartbeats, and sees a client leave while its connection
 * waits, which the library does not look at. */
#ifndef AFF_SERVER_HTTP_H
#define AFF_SERVER_HTTP_H
#include "base/buf.h"
#include <stdio.h>

typedef struct aff_http aff_http;
typedef struct aff_exchange aff_exchange; /* a request and its answer; counted references */

typedef struct aff_http_options {
    const char *host;            /* as in listen.h */
    int port;                    /* 0: any free one */
    unsigned socket_mode;        /* permissions of a Unix socket; 0: 0600 */
    size_t max_body, max_header; /* bytes; 0: 32 MiB, 64 KiB */
    int max_connections;         /* 0: 256 */
    /* Milliseconds, 0: 30000, 60000, 60000, 5000. header: from the connection's begin, or the end of the last answer,
     * to the end of the next request's header; body: from there to its end; write: an answer that waits for the client
     * to read on. */
    int header_ms, body_ms, write_ms, heartbeat_ms;
    FILE *log; /* one line per request, without content; NULL: none */
    void *ctx;
    /* A request has arrived whole. On the library's thread: answer now, or keep a reference and answer later. */
    void (*handle)(void *ctx, aff_exchange *x);
    /* A request is refused before `handle` (400, 413): its answer, through aff__x_respond. */
    void (*refuse)(void *ctx, aff_exchange *x, int status, const char *message);
} aff_http_options;

aff_status aff__http_start(aff_http **out, const aff_http_options *o, aff_error *err);
int aff__http_port(const aff_http *h);
/* Returns when every answer is out, or after `ms`; until then new requests come in, which `handle` should refuse. Then
 * the socket is closed and clients are dropped (their `gone` is called). */
void aff__http_drain(aff_http *h, int ms);
/* After a drain, and when nobody answers any more. Frees h. */
void aff__http_stop(aff_http *h);
int aff__http_pending(aff_http *h); /* requests not answered to their end */

/* ---- the request; until its last reference goes ---- */
const char *aff__x_method(const aff_exchange *x);
const char *aff__x_path(const aff_exchange *x);          /* without the query */
const char *aff__x_id(const aff_exchange *x);            /* header x-request-id of the answer */
const char *aff__x_authorization(const aff_exchange *x); /* header Authorization, "" if none */
const char *aff__x_api_key(const aff_exchange *x);       /* header x-api-key */
const char *aff__x_origin(const aff_exchange *x);        /* header Origin */
const char *aff__x_if_none_match(const aff_exchange *x); /* header If-None-Match */
const aff_buf *aff__x_body(const aff_exchange *x);
void aff__x_release_body(aff_exchange *x); /* it is not needed any more */
void aff__x_ref(aff_exchange *x);
void aff__x_unref(aff_exchange *x);

/* ---- the answer; from any thread, one at a time ---- */
/* Calls gone(user), at most once, when the client leaves before the answer's end. false: it has left, gone will not be
 * called. */
bool aff__x_on_gone(aff_exchange *x, void (*gone)(void *user), void *user);
/* No more. false: there was nothing to forget, the call was made or is on its way. */
bool aff__x_forget_gone(aff_exchange *x);
bool aff__x_is_gone(aff_exchange *x);
/* A header of the answer, before it begins; what is no printable ASCII is left out of the value. */
void aff__x_header(aff_exchange *x, const char *name, const char *value);
/* The whole answer. The body is copied. */
void aff__x_respond(aff_exchange *x, int status, const char *type, const char *body, size_t n);
/* An answer in pieces. What aff__x_heartbeat said last, if anything, is written when nothing else was for a while. */
void aff__x_begin(aff_exchange *x, int status, const char *type);
void aff__x_heartbeat(aff_exchange *x, const char *s); /* at most 127 bytes */
/* false: the client is gone or reads too slowly (8 MiB wait for it), nobody will see it. */
bool aff__x_write(aff_exchange *x, const char *s, size_t n);
void aff__x_end(aff_exchange *x);
#endif
