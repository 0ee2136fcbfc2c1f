/* client.h - a small HTTP client over loopback, and the server under test. */
#ifndef AFF_TEST_SERVER_CLIENT_H
#define AFF_TEST_SERVER_CLIENT_H
#include "base/buf.h"
#include "base/mem.h"
#include "engine/text.h"
#include "server/server.h"
#include <arpa/inet.h>
#include <jansson.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static aff_net *the_net;
static aff_tokenizer *the_tok;

static inline int open_model(void **state)
{
    aff_error err = {0};
    if (aff__net_open(&the_net, AFF_SOURCE_DIR "/models/tiny-v4", &(aff_net_options){.numerics = AFF_FAST}, &err) !=
            AFF_OK ||
        aff__tokenizer_open_for(&the_tok, AFF_SOURCE_DIR "/models/tiny-v4", aff__net_config(the_net), &err) != AFF_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return -1;
    }
    return 0;
}

static inline int close_model(void **state)
{
    aff__tokenizer_free(the_tok);
    aff__net_close(the_net);
    return 0;
}

static inline aff_server *serve(aff_server_options o)
{
    aff_server *s;
    aff_error err = {0};
    if (!o.engine.threads) o.engine.threads = 1;
    if (!o.engine.context) o.engine.context = 8192;
    if (aff__server_start(&s, the_net, the_tok, &o, &err) != AFF_OK) fail_msg("%s", err.msg);
    return s;
}

/* ---- raw ---- */

static inline int dial(const aff_server *s)
{
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    const struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)aff__server_port(s)), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

/* What the server does not want to read is no failure: it may answer and close before. */
static inline void send_all(int fd, const char *p, size_t n)
{
    while (n) {
        const ssize_t k = send(fd, p, n, MSG_NOSIGNAL);
        if (k <= 0) return;
        p += k;
        n -= (size_t)k;
    }
}

/* Reads until `until` is in b (NULL: until the end); false: the end came first. */
static inline bool read_until(int fd, aff_buf *b, const char *until)
{
    char part[4096];
    while (!until || !b->n || !strstr(b->s, until)) {
        const ssize_t k = recv(fd, part, sizeof part, 0);
        if (k <= 0) return !until;
        assert_int_equal(aff__buf_put(b, part, (size_t)k, NULL), AFF_OK);
    }
    return true;
}

/* One exchange of raw bytes; the answer until the server closes. Freed by the caller. */
static inline char *exchange(const aff_server *s, const char *bytes, size_t n)
{
    aff_buf b = {0};
    const int fd = dial(s);
    send_all(fd, bytes, n);
    read_until(fd, &b, NULL);
    close(fd);
    if (!b.s) assert_int_equal(aff__buf_puts(&b, "", NULL), AFF_OK);
    return b.s;
}

static inline void put_request(aff_buf *b, const char *method, const char *path, const char *headers, const char *body)
{
    char line[256];
    snprintf(line, sizeof line, "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %zu\r\n", method,
             path, strlen(body));
    aff__buf_puts(b, line, NULL);
    aff__buf_puts(b, headers, NULL);
    aff__buf_puts(b, "\r\n", NULL);
    aff__buf_puts(b, body, NULL);
}

typedef struct answer {
    char *all; /* owns */
    int status;
    const char *head; /* = all */
    char *body;       /* chunks joined */
    json_t *json;     /* of the body, NULL when it is none */
} answer;

static inline void join_chunks(char *body)
{
    char *to = body, *end;
    for (char *p = body;;) {
        const size_t n = strtoul(p, &end, 16);
        if (end == p || !n) break;
        memmove(to, end + 2, n);
        to += n;
        p = end + 2 + n + 2;
    }
    *to = 0;
}

static inline answer parse_answer(char *all)
{
    answer a = {.all = all, .head = all};
    char *gap = strstr(all, "\r\n\r\n");
    if (strncmp(all, "HTTP/1.1 ", 9) != 0 || !gap) return a;
    a.status = atoi(all + 9);
    a.body = gap + 4;
    *gap = 0;
    if (strstr(all, "Transfer-Encoding: chunked")) join_chunks(a.body);
    a.json = json_loads(a.body, JSON_ALLOW_NUL, NULL);
    return a;
}

static inline answer call(const aff_server *s, const char *method, const char *path, const char *headers,
                          const char *body)
{
    aff_buf b = {0};
    put_request(&b, method, path, headers, body);
    char *all = exchange(s, b.s, b.n);
    aff__buf_free(&b);
    return parse_answer(all);
}

static inline answer post(const aff_server *s, const char *path, const char *body)
{
    return call(s, "POST", path, "", body);
}

static inline void done_with(answer *a)
{
    json_decref(a->json);
    free(a->all);
    *a = (answer){0};
}

/* A value by a path like "choices.0.message.content"; fails when there is none. */
static inline json_t *at(const json_t *v, const char *path)
{
    char key[64];
    const char *p = path;
    while (*p) {
        const size_t n = strcspn(p, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, p);
        v = json_is_array(v) ? json_array_get(v, (size_t)atoi(key)) : json_object_get(v, key);
        if (!v) fail_msg("%s: no '%s'", path, key);
        p += n + (p[n] == '.');
    }
    return (json_t *)(uintptr_t)v;
}

static inline const char *text_at(const json_t *v, const char *path)
{
    return json_string_value(at(v, path));
}
static inline long long int_at(const json_t *v, const char *path)
{
    return json_integer_value(at(v, path));
}

/* Sends a request for an answer that goes on; returns when `until` has arrived. */
static inline int begin_at(const aff_server *s, const char *path, const char *body, const char *until, aff_buf *got)
{
    aff_buf b = {0};
    const int fd = dial(s);
    put_request(&b, "POST", path, "", body);
    send_all(fd, b.s, b.n);
    aff__buf_free(&b);
    assert_true(read_until(fd, got, until));
    return fd;
}

/* The data of the i-th event of a stream as JSON; NULL: there is none, or it is no JSON ([DONE]). */
static inline json_t *event_at(const char *body, int i)
{
    for (const char *p = strstr(body, "data: "); p;
         p = strstr(p + 6, "\ndata: ") ? strstr(p + 6, "\ndata: ") + 1 : NULL)
        if (!i--) return json_loadb(p + 6, strcspn(p + 6, "\n"), 0, NULL);
    return NULL;
}
static inline long long metric(const aff_server *s, const char *name)
{
    char line[128];
    answer a = call(s, "GET", "/metrics", "", "");
    assert_int_equal(a.status, 200);
    snprintf(line, sizeof line, "\n%s ", name);
    const char *p = strstr(a.body, line);
    assert_non_null(p);
    const long long v = atoll(p + strlen(line));
    done_with(&a);
    return v;
}

static inline char *repeat(const char *before, char c, size_t n, const char *after)
{
    char *b = malloc(strlen(before) + n + strlen(after) + 1);
    assert_non_null(b);
    char *p = b + sprintf(b, "%s", before);
    memset(p, c, n);
    strcpy(p + n, after);
    return b;
}

/* Splits a line of the tool set into the parts of its prompt. */
static inline json_t *tool_request(const json_t *row, bool stream)
{
    const char *system = text_at(row, "prompt"), *user = strstr(system, "<｜User｜>"),
               *tools = strstr(system, "\n\n## Tools"), *reply = strstr(system, "<｜Assistant｜>");
    assert_true(tools && user && reply);
    json_t *list = json_array(), *t;
    size_t i;
    json_array_foreach(at(row, "tools"), i, t)
        json_array_append_new(list, json_pack("{s:s,s:O}", "type", "function", "function", t));
    user += strlen("<｜User｜>");
    return json_pack("{s:[{s:s,s:s%},{s:s,s:s%}],s:o,s:i,s:b,s:{s:s}}", "messages", "role", "system", "content", system,
                     (size_t)(tools - system), "role", "user", "content", user, (size_t)(reply - user), "tools", list,
                     "temperature", 0, "stream", stream, "thinking", "type",
                     strstr(reply, "</think>") ? "disabled" : "enabled");
}

#endif
