/* The server's life: loading, serving, faults, stopping; its socket; what waiting clients hear; who reads requests. */
#define _XOPEN_SOURCE 700 /* mkdtemp */
#include "support/test.h"
#include "server/client.h"
#include "server/lanes.h"
#include "server/listen.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/un.h>

#define CHAT "/v1/chat/completions"
#define PLAIN                                                                                                          \
    "\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}], \"temperature\": 0, "      \
    "\"thinking\": {\"type\": \"disabled\"}"
static const char paris[] = "The capital of France is Paris.";

static void expect_health(const aff_server *s, int status, const char *message)
{
    answer a = call(s, "GET", "/health", "", "");
    assert_int_equal(a.status, status);
    if (status == 200) {
        assert_string_equal(text_at(a.json, "status"), "ok");
    } else {
        assert_int_equal(int_at(a.json, "error.code"), 503);
        assert_string_equal(text_at(a.json, "error.type"), "unavailable_error");
        assert_string_equal(text_at(a.json, "error.message"), message);
        assert_non_null(strstr(a.head, "Retry-After: "));
    }
    done_with(&a);
}

static void expect_503(const aff_server *s, const char *path, const char *type)
{
    answer a = post(s, path, "{" PLAIN "}");
    assert_int_equal(a.status, 503);
    assert_string_equal(text_at(a.json, "error.type"), type);
    assert_non_null(strstr(a.head, "Retry-After: "));
    done_with(&a);
}

/* ---- phases ---- */

static void loading(void **state)
{
    aff_server *s;
    aff_error err = {0};
    const aff_server_options o = {.engine = {.threads = 1, .context = 4096}, .api_key = "k"};
    assert_int_equal(aff__server_listen(&s, &o, &err), AFF_OK);
    expect_health(s, 503, "Loading model");
    answer a = call(s, "POST", CHAT, "", "{}"); /* the key comes first */
    assert_int_equal(a.status, 401);
    done_with(&a);
    a = call(s, "POST", "/v1/messages", "x-api-key: k\r\n", "{}");
    assert_int_equal(a.status, 503);
    assert_string_equal(text_at(a.json, "error.type"), "overloaded_error");
    done_with(&a);
    const char *const paths[] = {"/v1/models", "/metrics", "/slots", "/v1/models/x"};
    for (int i = 0; i < 4; i++) {
        a = call(s, "GET", paths[i], "x-api-key: k\r\n", "");
        assert_int_equal(a.status, i < 3 ? 503 : 404);
        done_with(&a);
    }
    assert_int_equal(aff__server_ready(s, the_net, the_tok, &o, &err), AFF_OK);
    expect_health(s, 200, NULL);
    a = call(s, "POST", CHAT, "x-api-key: k\r\n", "{" PLAIN "}");
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    done_with(&a);
    aff__server_stop(s, 0);
    assert_int_equal(aff__server_listen(&s, &o, &err), AFF_OK); /* a model that cannot be loaded */
    aff__server_stop(s, 1000);
}

static void *stopper(void *s)
{
    aff__server_stop(s, 600000);
    return NULL;
}

/* Answers in progress go on, new requests and load balancers hear that it is over. */
static void draining(void **state)
{
    aff_server *s = serve((aff_server_options){0});
    aff_buf got = {0};
    pthread_t t;
    const int fd =
        begin_at(s, CHAT, "{" PLAIN ", \"stream\": true, \"ignore_eos\": true, \"max_tokens\": 3000}", "\"The\"", &got);
    assert_int_equal(pthread_create(&t, NULL, stopper, s), 0);
    answer a = {0};
    do {
        done_with(&a);
        a = call(s, "GET", "/health", "", "");
    } while (a.status == 200);
    done_with(&a);
    expect_health(s, 503, "Stopping");
    expect_503(s, CHAT, "unavailable_error");
    expect_503(s, "/v1/messages", "overloaded_error");
    assert_true(read_until(fd, &got, "[DONE]"));
    assert_non_null(strstr(got.s, "\"finish_reason\": \"length\""));
    pthread_join(t, NULL);
    close(fd);
    aff__buf_free(&got);
}

static atomic_int broken;

static aff_status restore(void *ctx, aff_seq *seq, const int32_t *ids, int64_t n, int64_t most, int64_t *matched, aff_error *err)
{
    return broken ? aff__fail(err, AFF_E_IO, "expert 7: cannot read: Input/output error") : AFF_OK;
}

static void fault(void **state)
{
    aff_server *s = serve((aff_server_options){.engine = {.cache = {.restore = restore}}});
    broken = 1;
    answer a = post(s, CHAT, "{" PLAIN "}");
    assert_int_equal(a.status, 500);
    assert_string_equal(text_at(a.json, "error.type"), "server_error");
    done_with(&a);
    expect_health(s, 503, "expert 7: cannot read: Input/output error");
    a = post(s, "/v1/messages",
             "{" PLAIN ", \"stream\": true, \"max_tokens\": 9}"); /* in a stream the error is an event */
    assert_non_null(strstr(a.body, "event: error\ndata: {\"type\": \"error\""));
    done_with(&a);
    assert_int_equal(metric(s, "affinity_choices_failed_total"), 2);
    broken = 0;
    a = post(s, CHAT, "{" PLAIN ", \"top_p\": 2}"); /* says nothing about the engine */
    assert_int_equal(a.status, 400);
    done_with(&a);
    expect_health(s, 503, "expert 7: cannot read: Input/output error");
    a = post(s, CHAT, "{" PLAIN "}");
    assert_int_equal(a.status, 200);
    done_with(&a);
    expect_health(s, 200, NULL);
    aff__server_stop(s, 0);
}

/* ---- what clients hear ---- */

static void progress(void **state)
{
    aff_server *s = serve((aff_server_options){.engine = {.slots = 1, .chunk = 4}, .http = {.heartbeat_ms = 1}});
    aff_buf got[3] = {0};
    char *body = repeat(
        "{\"stream\": true, \"ignore_eos\": true, \"temperature\": 0, \"max_tokens\": 8000, \"messages\": [{\"role\": "
        "\"user\", \"content\": \"",
        '7', 3000, "\"}]}");
    const int first = begin_at(s, CHAT, body, ": prompt, ", &got[0]), /* while its prompt is read */
        second = begin_at(s, "/v1/messages", body, "event: ping\ndata: {\"type\": \"ping\"}\n\n", &got[1]),
              third = begin_at(s, "/v1/responses", "{\"stream\": true, \"input\": \"a\"}", ": queued, place 2\n\n",
                               &got[2]);
    assert_non_null(strstr(got[1].s, ": queued, place 1\nevent: ping\n"));
    assert_true(read_until(first, &got[0], " tokens\n\n"));
    const char *p = strstr(got[0].s, ": prompt, ");
    assert_true(atoi(p + 10) < atoi(strstr(p, " of ") + 4));
    close(first); /* the others move up */
    assert_true(read_until(third, &got[2], ": queued, place 1\n\n"));
    /* while text is written nothing else has to be: a stop string keeps it all back here, which is silence */
    close(second);
    close(third);
    aff__server_wait_idle(s);
    aff_buf b = {0};
    const int held =
        begin_at(s, CHAT, "{" PLAIN ", \"stream\": true, \"ignore_eos\": true, \"logit_bias\": {\"1\": -100}}",
                 " tokens\n\n", &b);
    close(held);
    aff__buf_free(&b);
    for (int i = 0; i < 3; i++) aff__buf_free(&got[i]);
    free(body);
    aff__server_stop(s, 0);
}

static void warns_of_cold_thinking(void **state)
{
    static const struct {
        const char *rest;
        bool warns;
    } rows[] = {{"", false},
                {", \"temperature\": 0.5", true},
                {", \"temperature\": 0.8", false},
                {", \"temperature\": 0, \"thinking\": {\"type\": \"disabled\"}", false}};
    aff_server *s = serve((aff_server_options){0});
    for (size_t i = 0; i < 4; i++) {
        char body[256];
        snprintf(body, sizeof body, "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"max_tokens\": 1%s}",
                 rows[i].rest);
        answer a = post(s, CHAT, body);
        assert_int_equal(a.status, 200);
        assert_int_equal(strstr(a.head, "x-affinity-warning: ") != NULL, rows[i].warns);
        done_with(&a);
    }
    aff__server_stop(s, 0);
}

/* ---- the socket ---- */

static int dial_unix(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    if (connect(fd, (const struct sockaddr *)&a, sizeof a) == 0) return fd;
    close(fd);
    return -1;
}

static void unix_socket(void **state)
{
    char dir[] = "/tmp/aff-socket-XXXXXX", host[64], long_host[256];
    const char *path = host + 5;
    struct stat st;
    aff_error err = {0};
    aff_server *s;
    int port = 7, fd;
    assert_non_null(mkdtemp(dir));
    snprintf(host, sizeof host, "unix:%s/s", dir);
    /* a socket that a killed process left */
    assert_int_equal(aff__listen(host, &port, 0600, &fd, &err), AFF_OK);
    assert_int_equal(port, 0);
    close(fd);
    assert_int_equal(stat(path, &st), 0);
    s = serve((aff_server_options){.http = {.host = host, .socket_mode = 0640}});
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0640);
    aff_buf b = {0}, got = {0};
    put_request(&b, "POST", CHAT, "", "{" PLAIN "}");
    fd = dial_unix(path);
    assert_true(fd >= 0);
    send_all(fd, b.s, b.n);
    read_until(fd, &got, NULL);
    close(fd);
    answer a = parse_answer(got.s);
    assert_string_equal(text_at(a.json, "choices.0.message.content"), paris);
    done_with(&a);
    aff__buf_free(&b);
    /* one that is in use, a file of another kind, names that cannot be */
    assert_int_equal(aff__listen(host, &port, 0600, &fd, &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, "another process listens there"));
    aff__server_stop(s, 0);
    assert_int_equal(stat(path, &st), -1);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fclose(f);
    assert_int_equal(aff__listen(host, &port, 0600, &fd, &err), AFF_E_IO);
    assert_non_null(strstr(err.msg, "another kind of file"));
    assert_int_equal(stat(path, &st), 0);
    unlink(path);
    assert_int_equal(aff__listen("unix:", &port, 0600, &fd, &err), AFF_E_INVALID);
    memset(long_host, 'a', sizeof long_host);
    memcpy(long_host, "unix:", 5);
    long_host[sizeof long_host - 1] = 0;
    assert_int_equal(aff__listen(long_host, &port, 0600, &fd, &err), AFF_E_INVALID);
    assert_int_equal(aff__listen("unix:/nowhere/at/all", &port, 0600, &fd, &err), AFF_E_IO);
    assert_int_equal(rmdir(dir), 0);
}

static void ipv6(void **state)
{
    int port = 0, fd;
    aff_error err = {0};
    if (aff__listen("::1", &port, 0, &fd, &err) != AFF_OK) skip(); /* a machine without it */
    close(fd);
    aff_server *s = serve((aff_server_options){.http = {.host = "::1"}});
    const struct sockaddr_in6 a = {
        .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)aff__server_port(s)), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    static const char get[] = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    aff_buf got = {0};
    fd = socket(AF_INET6, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&a, sizeof a), 0);
    send_all(fd, get, strlen(get));
    read_until(fd, &got, NULL);
    assert_non_null(strstr(got.s, "200 OK"));
    close(fd);
    aff__buf_free(&got);
    aff__server_stop(s, 0);
}

/* ---- lanes ---- */

/* The large request ends only when the small one that came after it has: with one lane this would wait for ever. */
typedef struct rendezvous {
    pthread_mutex_t lock;
    pthread_cond_t met;
    bool large_begun, small_done;
    aff_lanes *lanes;
} rendezvous;

static void work(void *ctx, aff_exchange *x)
{
    rendezvous *r = ctx;
    const bool large = aff__x_body(x)->n > AFF_LANE_BORDER;
    pthread_mutex_lock(&r->lock);
    if (large) r->large_begun = true;
    pthread_cond_broadcast(&r->met);
    while (large ? !r->small_done : !r->large_begun) pthread_cond_wait(&r->met, &r->lock);
    if (!large) r->small_done = true;
    pthread_cond_broadcast(&r->met);
    pthread_mutex_unlock(&r->lock);
    aff__x_respond(x, 200, "text/plain", large ? "large" : "small", 5);
}

static void handle(void *ctx, aff_exchange *x)
{
    rendezvous *r = ctx;
    assert_true(aff__lanes_put(r->lanes, x));
}

static int begin_raw(int port, size_t n)
{
    char line[160];
    const struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    char *body = repeat("", 'a', n, "");
    assert_int_equal(connect(fd, (const struct sockaddr *)&a, sizeof a), 0);
    snprintf(line, sizeof line, "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n", n);
    send_all(fd, line, strlen(line));
    send_all(fd, body, n);
    free(body);
    return fd;
}

static void large_requests_hold_up_nobody(void **state)
{
    rendezvous r = {.lock = PTHREAD_MUTEX_INITIALIZER, .met = PTHREAD_COND_INITIALIZER};
    aff_http *h;
    aff_error err = {0};
    aff_buf got[2] = {0};
    assert_int_equal(aff__lanes_start(&r.lanes, work, &r, &err), AFF_OK);
    assert_int_equal(aff__http_start(&h, &(aff_http_options){.ctx = &r, .handle = handle}, &err), AFF_OK);
    const int large = begin_raw(aff__http_port(h), AFF_LANE_BORDER + 1), small = begin_raw(aff__http_port(h), 10);
    read_until(small, &got[0], NULL);
    read_until(large, &got[1], NULL);
    assert_non_null(strstr(got[0].s, "\r\n\r\nsmall"));
    assert_non_null(strstr(got[1].s, "\r\n\r\nlarge"));
    close(small);
    close(large);
    aff__http_drain(h, 1000);
    aff__lanes_stop(r.lanes);
    aff__http_stop(h);
    aff__buf_free(&got[0]);
    aff__buf_free(&got[1]);
}

/* Ten megabytes of prompt: refused for its length, and a stream goes on meanwhile. */
static void a_prompt_of_ten_megabytes(void **state)
{
    aff_server *s = serve((aff_server_options){.http = {.heartbeat_ms = 1}});
    aff_buf got = {0};
    char *body = repeat("{\"messages\": [{\"role\": \"user\", \"content\": \"", 'x', 10 << 20, "\"}]}");
    const int fd = begin_at(s, CHAT, "{" PLAIN ", \"stream\": true, \"ignore_eos\": true}", "\"The\"", &got);
    answer a = post(s, CHAT, body);
    assert_int_equal(a.status, 400);
    assert_string_equal(text_at(a.json, "error.code"), "context_length_exceeded");
    assert_true(int_at(a.json, "error.n_prompt_tokens") > 1000000);
    done_with(&a);
    got.n = 0;
    assert_true(read_until(fd, &got, "\"content\": "));
    close(fd);
    aff__buf_free(&got);
    free(body);
    aff__server_stop(s, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(loading),
                                       cmocka_unit_test(draining),
                                       cmocka_unit_test(fault),
                                       cmocka_unit_test(progress),
                                       cmocka_unit_test(warns_of_cold_thinking),
                                       cmocka_unit_test(unix_socket),
                                       cmocka_unit_test(ipv6),
                                       cmocka_unit_test(large_requests_hold_up_nobody),
                                       cmocka_unit_test(a_prompt_of_ten_megabytes)};
    return cmocka_run_group_tests(tests, open_model, close_model);
}
