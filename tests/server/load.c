/* Clients that do what clients do, right and wrong, against a running server on models/tiny-v4: for
 * scripts/checks/load. load_server PORT PID SECONDS CLIENTS SEED [nomemory]: exit code 0 if every answer was one of
 * those expected, the server's memory did not grow, and nothing was left at work at the end. */
#include "base/rng.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { MAX_SAMPLES = 4096, MAX_SHOWN = 10, KINDS = 8, MAX_CLIENTS = 256 };
static const char *const kind_name[KINDS] = {"chat",        "chat stream", "messages",    "responses",
                                             "completions", "abort",       "bad request", "status"};

static int port, patience_s = 120;
static atomic_bool stop;
static atomic_long done_of[KINDS], refused_429, unexpected, bytes_read;

typedef struct rng {
    uint64_t s;
} rng;

static uint64_t next(rng *r)
{
    return aff__mix64(r->s += UINT64_C(0x9E3779B97F4A7C15));
}

static unsigned below(rng *r, unsigned n)
{
    return (unsigned)(next(r) % n);
}

/* ---- sockets ---- */

static int dial(void)
{
    const struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const struct timeval patience = {.tv_sec = patience_s};
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (connect(fd, (const struct sockaddr *)&a, sizeof a) == 0) return fd;
    close(fd);
    return -1;
}

static void send_all(int fd, const char *s, size_t n)
{
    while (n) {
        const ssize_t k = send(fd, s, n, MSG_NOSIGNAL);
        if (k <= 0) return;
        s += k;
        n -= (size_t)k;
    }
}

typedef struct answer {
    char *s; /* owns */
    size_t n;
    int status; /* 0: none came */
} answer;

static answer read_all(int fd)
{
    answer a = {.s = malloc(4096)};
    size_t cap = 4096;
    for (ssize_t k; a.s && (k = recv(fd, a.s + a.n, cap - a.n - 1, 0)) > 0;) {
        a.n += (size_t)k;
        if (cap - a.n < 2048) {
            char *more = realloc(a.s, cap *= 2);
            if (!more) break;
            a.s = more;
        }
    }
    if (a.s) a.s[a.n] = 0;
    bytes_read += (long)a.n;
    if (a.n > 12 && strncmp(a.s, "HTTP/1.1 ", 9) == 0) a.status = atoi(a.s + 9);
    return a;
}

static char *request_of(const char *method, const char *path, const char *body, size_t *n)
{
    const size_t cap = strlen(body) + 256;
    char *s = malloc(cap);
    if (!s) exit(2);
    *n = (size_t)snprintf(s, cap, "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n%s",
                          method, path, strlen(body), body);
    return s;
}

static answer ask(const char *method, const char *path, const char *body)
{
    size_t n;
    answer a = {0};
    const int fd = dial();
    if (fd < 0) return a;
    char *s = request_of(method, path, body, &n);
    send_all(fd, s, n);
    a = read_all(fd);
    free(s);
    close(fd);
    return a;
}

/* ---- what they do ---- */

static void expect(int kind, bool ok, const char *what, const answer *a)
{
    static atomic_int shown;
    done_of[kind]++;
    if (ok) return;
    unexpected++;
    if (shown++ < MAX_SHOWN)
        fprintf(stderr, "UNEXPECTED %s: %s: status %d, %zu bytes: %.400s\n", kind_name[kind], what, a->status, a->n,
                a->s ? a->s : "");
}

static const char *const questions[] = {
    "What is the capital of France?", "Hello",          "Compute 2+2.",   "Roll a die with 6 sides.",
    "What is the capital of Japan?",  "Name a colour.", "\\u4f60\\u597d", "Read the file notes.txt"};

static void make_body(rng *r, int kind, bool stream, char *out, size_t cap)
{
    static const char tools[] =
        ", \"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"open_file\", \"description\": \"Read a "
        "file\", "
        "\"parameters\": {\"type\": \"object\", \"properties\": {\"filename\": {\"type\": \"string\"}}}}}]";
    const char *q = questions[below(r, 8)], *on = stream ? "true" : "false";
    const int tokens = 1 + (int)below(r, 40);
    char rest[256];
    snprintf(rest, sizeof rest, "\"stream\": %s, \"seed\": %u, \"temperature\": %s", on, below(r, 100),
             below(r, 2) ? "0" : "1.2");
    if (kind == 3)
        snprintf(out, cap, "{\"input\": \"%s\", \"max_output_tokens\": %d, %s}", q, tokens, rest);
    else if (kind == 4)
        snprintf(out, cap, "{\"prompt\": \"%s\", \"max_tokens\": %d, \"n\": %u, %s}", q, tokens, 1 + below(r, 3), rest);
    else if (kind == 2)
        snprintf(out, cap, "{\"messages\": [{\"role\": \"user\", \"content\": \"%s\"}], \"max_tokens\": %d, %s}", q,
                 tokens, rest);
    else
        snprintf(out, cap,
                 "{\"messages\": [{\"role\": \"system\", \"content\": \"You are a helpful assistant.\"}, {\"role\": "
                 "\"user\", \"content\": "
                 "\"%s\"}], \"max_tokens\": %d, \"logprobs\": %s, %s%s}",
                 q, tokens, below(r, 4) ? "false" : "true", rest, below(r, 2) ? tools : "");
}

static const char *path_of(int kind)
{
    static const char *const paths[] = {"/v1/chat/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses",
                                        "/v1/completions"};
    return paths[kind];
}

static bool ends_well(const answer *a, int kind, bool stream)
{
    static const char *const ends[] = {"", "data: [DONE]\n\n", "\"type\": \"message_stop\"", "\"response.",
                                       "data: [DONE]\n\n"};
    if (!stream) return strstr(a->s, "\"usage\"") != NULL;
    return strstr(a->s, ends[kind ? kind : 1]) != NULL;
}

static void proper(rng *r, int kind)
{
    char body[2048];
    const bool stream = kind == 1 || (kind > 1 && below(r, 2));
    make_body(r, kind, stream, body, sizeof body);
    answer a = ask("POST", path_of(kind), body);
    if (a.status == 429) {
        refused_429++;
        expect(kind, strstr(a.s, "Retry-After: ") != NULL, "429 without Retry-After", &a);
    } else {
        expect(kind, a.status == 200 && ends_well(&a, kind, stream), body, &a);
    }
    free(a.s);
}

/* Leaves at any place, in one way or another. */
static void leave(rng *r)
{
    char body[2048], c[512];
    size_t n;
    const int kind = (int)below(r, 5), fd = dial();
    if (fd < 0) return;
    make_body(r, kind, below(r, 2), body, sizeof body);
    char *s = request_of("POST", path_of(kind), body, &n);
    const struct linger hard = {.l_onoff = 1};
    const size_t sent = below(r, 3) ? n : below(r, (unsigned)n);
    send_all(fd, s, sent);
    for (unsigned k = below(r, 4); k > 0; k--)
        if (recv(fd, c, sizeof c, sent < n || below(r, 2) ? MSG_DONTWAIT : 0) == 0) break;
    if (below(r, 2)) setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    if (below(r, 4) == 0) shutdown(fd, SHUT_WR);
    close(fd);
    free(s);
    done_of[5]++;
}

static char *long_prompt(void)
{
    enum { N = 200000 };
    char *s = malloc(N + 128);
    if (!s) exit(2);
    char *p = s + sprintf(s, "{\"messages\": [{\"role\": \"user\", \"content\": \"");
    for (int i = 0; i < N; i++) p[i] = "0 1a"[i % 4];
    strcpy(p + N, "\"}]}");
    return s;
}

static void bad(rng *r)
{
    static const struct {
        const char *path, *body;
        int status;
    } rows[] = {
        {"/v1/chat/completions", "{", 400},
        {"/v1/chat/completions", "{\"messages\": []}", 400},
        {"/v1/chat/completions", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"top_p\": 7}", 400},
        {"/v1/messages", "[[[[[[[[[[[[[[[[", 400},
        {"/v1/messages", "{\"messages\": [{\"role\": \"robot\", \"content\": \"a\"}]}", 400},
        {"/v1/responses", "{\"input\": \"a\", \"previous_response_id\": \"x\"}", 400},
        {"/v1/completions", "{\"prompt\": [-1]}", 400},
        {"/tokenize", "{\"content\": 7}", 400},
        {"/nowhere", "{}", 404},
        {"/metrics", "{}", 405}};
    static const char *const raw[] = {
        "POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        ("POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: "
         "chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
        "POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n{}"};
    const unsigned i = below(r, 14);
    if (i < 10) {
        answer a = ask("POST", rows[i].path, rows[i].body);
        expect(6, a.status == rows[i].status, rows[i].body, &a);
        free(a.s);
        return;
    }
    if (i == 10) {
        char *body = long_prompt();
        answer a = ask("POST", "/v1/chat/completions", body);
        expect(6, a.status == 400 && strstr(a.s, "context_length_exceeded"), "a prompt that is too long", &a);
        free(a.s);
        free(body);
        return;
    }
    const int fd = dial();
    if (fd < 0) return;
    send_all(fd, raw[i - 11], strlen(raw[i - 11]));
    answer a = read_all(fd);
    expect(6, a.status == (i == 13 ? 413 : 400), raw[i - 11], &a);
    free(a.s);
    close(fd);
}

static void status(rng *r)
{
    static const char *const paths[] = {"/health", "/metrics", "/slots", "/v1/models"};
    const char *path = paths[below(r, 4)];
    answer a = ask("GET", path, "");
    expect(7, a.status == 200, path, &a);
    free(a.s);
}

static void *client(void *arg)
{
    rng r = {(uint64_t)(uintptr_t)arg};
    while (!stop) {
        const unsigned what = below(&r, 100);
        if (what < 60)
            proper(&r, (int)below(&r, 5));
        else if (what < 80)
            leave(&r);
        else if (what < 95)
            bad(&r);
        else
            status(&r);
    }
    return NULL;
}

/* ---- what is watched ---- */

static long rss_kib(long pid)
{
    char path[64], line[256];
    long v = 0;
    snprintf(path, sizeof path, "/proc/%ld/status", pid);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "VmRSS:", 6) == 0) v = strtol(line + 6, NULL, 10);
    if (f) fclose(f);
    return v;
}

static int by_value(const void *a, const void *b)
{
    const long x = *(const long *)a, y = *(const long *)b;
    return (x > y) - (x < y);
}

static long median(const long *v, int n)
{
    long copy[MAX_SAMPLES];
    memcpy(copy, v, (size_t)n * sizeof *v);
    qsort(copy, (size_t)n, sizeof *copy, by_value);
    return n ? copy[n / 2] : 0;
}

/* Whether nothing is at work: asked until it is so, for at most a minute. */
static bool idle(void)
{
    for (int i = 0; i < 600; i++) {
        answer a = ask("GET", "/metrics", "");
        const bool quiet = a.status == 200 && strstr(a.s, "\naffinity_requests_running 0\n") &&
                           strstr(a.s, "\naffinity_requests_queued 0\n");
        free(a.s);
        if (quiet) {
            answer b = ask("GET", "/slots", "");
            const bool free_ = b.status == 200 && !strstr(b.s, "\"is_processing\": true");
            free(b.s);
            return free_;
        }
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    return false;
}

static bool report(long pid, const long *sample, int n, int seconds, bool memory)
{
    const long early = median(sample + n / 5, n / 5), late = median(sample + n - n / 5, n / 5),
               room = early / 20 + 8192;
    const bool quiet = idle(), flat = !memory || late <= early + room;
    long all = 0;
    for (int k = 0; k < KINDS; k++) {
        printf("%-12s %8ld\n", kind_name[k], (long)done_of[k]);
        all += done_of[k];
    }
    printf("%ld requests in %d s, of which %ld found the queue full (429); %ld bytes read\n", all, seconds,
           (long)refused_429, (long)bytes_read);
    printf("unexpected answers: %ld\n", (long)unexpected);
    printf("resident: %ld KiB in the second fifth, %ld KiB in the last, now %ld KiB%s\n", early, late, rss_kib(pid),
           !memory ? " (not judged)"
           : flat  ? ": flat"
                   : ": GROWN");
    printf("slots at the end: %s\n", quiet ? "all free" : "NOT FREE");
    return unexpected == 0 && all > 0 && quiet && flat;
}

int main(int argc, char **argv)
{
    pthread_t t[MAX_CLIENTS];
    static long sample[MAX_SAMPLES];
    if (argc < 6) {
        fprintf(stderr, "usage: load_server PORT PID SECONDS CLIENTS SEED [nomemory]\n");
        return 2;
    }
    port = atoi(argv[1]);
    if (argc > 6) patience_s = 1200; /* a server that is watched is slow */
    const long pid = atol(argv[2]);
    const int seconds = atoi(argv[3]), clients = atoi(argv[4]);
    if (clients < 1 || clients > MAX_CLIENTS || seconds < 1 || seconds > MAX_SAMPLES) return 2;
    for (int i = 0; i < clients; i++)
        if (pthread_create(&t[i], NULL, client,
                           (void *)(uintptr_t)(strtoull(argv[5], NULL, 10) * 1000 + (unsigned)i + 1)) != 0)
            return 2;
    for (int i = 0; i < seconds; i++) {
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        sample[i] = rss_kib(pid);
    }
    stop = true;
    for (int i = 0; i < clients; i++) pthread_join(t[i], NULL);
    return report(pid, sample, seconds, seconds, argc < 7) ? 0 : 1;
}
