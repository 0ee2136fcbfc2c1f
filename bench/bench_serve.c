/* bench_serve TOKENIZER - what the server costs: the network is a pretence that costs next to nothing and always writes
 * the same text, so the process's CPU time is that of HTTP, parser, dialects and the engine's loop. a stream:
 * microseconds of CPU per token, for 1 and 8 clients, chat and messages a prompt: milliseconds to read, render and
 * tokenise a conversation of 25,000 tokens with 20 tools TOKENIZER as in bench_text. The clients are another process.
 * Floor: 1 % of a 10 ms token is 100 us. */
#include "base/mem.h"
#include "engine/engine.h"
#include "server/ask.h"
#include "server/server.h"
#include "text/tokenizer.h"
#include "../tests/support/scripted_net.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CONTEXT = 1 << 20, TOKENS = 4000 };

/* ---- measuring ---- */

static void die(const char *what)
{
    fprintf(stderr, "bench_serve: %s\n", what);
    exit(1);
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void *client(void *arg)
{
    const char *const *request = arg;
    const struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(request[1])), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    static char sink[64][65536];
    static int used;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    char *buf = sink[used++ % 64];
    pthread_mutex_unlock(&lock);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (const struct sockaddr *)&a, sizeof a) != 0) _exit(1);
    if (write(fd, request[0], strlen(request[0])) < 0) _exit(1);
    while (read(fd, buf, sizeof sink[0]) > 0) {
    }
    close(fd);
    return NULL;
}

/* `n` clients in a process of their own, each of which reads one answer to its end. */
static void run_clients(int port, const char *path, const char *body, int n)
{
    char request[4096], number[16];
    snprintf(request, sizeof request,
             "POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n%s", path, strlen(body),
             body);
    snprintf(number, sizeof number, "%d", port);
    const char *arg[] = {request, number};
    const pid_t pid = fork();
    if (pid < 0) die("cannot fork");
    if (pid == 0) {
        pthread_t t[64];
        for (int i = 0; i < n; i++)
            if (pthread_create(&t[i], NULL, client, arg) != 0) _exit(1);
        for (int i = 0; i < n; i++) pthread_join(t[i], NULL);
        _exit(0);
    }
    int status;
    if (waitpid(pid, &status, 0) != pid || status != 0) die("a client failed");
}

static double stream(int port, const char *name, const char *path, const char *body, int n)
{
    run_clients(port, path, body, n);
    double best = 1e9;
    for (int i = 0; i < 3; i++) {
        const double from = cpu_seconds();
        run_clients(port, path, body, n);
        const double each = (cpu_seconds() - from) * 1e6 / TOKENS / n;
        if (each < best) best = each;
    }
    printf("%-36s %7.1f us of CPU a token\n", name, best);
    fflush(stdout);
    return best;
}

/* The engine's own share: the same tokens without a server. */
static double engine_alone(void)
{
    aff_engine *e;
    aff_error err = {0};
    const int32_t prompt[] = {0, 1000, 1001};
    aff_request r = {
        .prompt = prompt, .n_prompt = 3, .n_predict = TOKENS, .ignore_eos = true, .adjust = {.repetition = 1}};
    aff_sampling_init(&r.sampling);
    r.sampling.temperature = 0;
    if (aff__engine_create(&e, &scripted, &(aff_engine_options){.threads = 1, .context = CONTEXT}, &err) != AFF_OK)
        die(err.msg);
    double best = 1e9;
    for (int i = 0; i < 3; i++) {
        aff_outcome o;
        const double from = cpu_seconds();
        if (aff__engine_run(e, &r, &(aff_events){0}, &o, &err) != AFF_OK) die(err.msg);
        const double each = (cpu_seconds() - from) * 1e6 / TOKENS;
        if (each < best) best = each;
    }
    aff__engine_free(e);
    printf("%-36s %7.1f us of CPU a token: logits of a pretended network and the choice\n", "engine without a server",
           best);
    return best;
}

/* A conversation as agents send it: tools, then calls and results until there are about 25,000 tokens. */
static void make_conversation(aff_buf *b)
{
    char line[512];
    aff__buf_puts(b, "{\"tools\": [", NULL);
    for (int i = 0; i < 20; i++) {
        snprintf(line, sizeof line,
                 "%s{\"type\": \"function\", \"function\": {\"name\": \"tool_%d\", \"description\": \"Does one thing "
                 "to a file and says what "
                 "came of it.\", \"parameters\": {\"type\": \"object\", \"properties\": {\"path\": {\"type\": "
                 "\"string\"}, \"line\": {\"type\": "
                 "\"integer\"}}, \"required\": [\"path\"]}}}",
                 i ? ", " : "", i);
        aff__buf_puts(b, line, NULL);
    }
    aff__buf_puts(b, "], \"messages\": [{\"role\": \"user\", \"content\": \"Please look at the project.\"}", NULL);
    for (int i = 0; b->n < 100000; i++) {
        snprintf(line, sizeof line,
                 ", {\"role\": \"assistant\", \"content\": \"I will read it.\", \"tool_calls\": [{\"id\": \"call_%d\", "
                 "\"type\": \"function\", "
                 "\"function\": {\"name\": \"tool_%d\", \"arguments\": \"{\\\"path\\\": \\\"src/main_%d.c\\\", "
                 "\\\"line\\\": %d}\"}}]}",
                 i, i % 20, i, i);
        aff__buf_puts(b, line, NULL);
        snprintf(line, sizeof line, ", {\"role\": \"tool\", \"tool_call_id\": \"call_%d\", \"content\": \"", i);
        aff__buf_puts(b, line, NULL);
        for (int k = 0; k < 12; k++) {
            snprintf(line, sizeof line, "    if (count[%d] > limit) return fail(err, \\\"line %d: too many\\\");\\n", k,
                     i * 12 + k);
            aff__buf_puts(b, line, NULL);
        }
        aff__buf_puts(b, "\"}", NULL);
    }
    aff__buf_puts(b, "]}", NULL);
}

static double prompt(const aff_tokenizer *tok)
{
    aff_buf body = {0};
    size_t tokens = 0;
    double best = 1e9;
    make_conversation(&body);
    for (int i = 0; i < 5; i++) {
        aff_ask ask;
        aff_chat_prompt p;
        aff_ids ids = {0};
        aff_error err = {0};
        const double from = cpu_seconds();
        if (aff__ask_decode(&ask, AFF_CHAT_COMPLETIONS, body.s, body.n, scripted.cfg.vocab, &err) != AFF_OK ||
            aff__ask_render(&ask, AFF_CHAT_0731, &p, &err) != AFF_OK ||
            aff__tokenizer_encode_segments(tok, p.seg, p.n_seg, &ids, &err) != AFF_OK)
            die(err.msg);
        const double s = (cpu_seconds() - from) * 1e3;
        if (s < best) best = s;
        tokens = ids.n;
        aff__ids_free(&ids);
        aff__chat_prompt_free(&p);
        aff__ask_free(&ask);
    }
    printf("%-36s %7.2f ms: %zu bytes of JSON, %zu tokens\n", "a prompt, read to ids", best, body.n, tokens);
    aff__buf_free(&body);
    return best;
}

int main(int argc, char **argv)
{
    static const char
        chat[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"stream\": true, \"max_tokens\": 4000, "
                 "\"ignore_eos\": true, \"temperature\": 0, \"tools\": [{\"type\": \"function\", \"function\": "
                 "{\"name\": \"write\"}}]}",
        messages[] =
            "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"stream\": true, \"max_tokens\": 4000, "
            "\"ignore_eos\": true, \"temperature\": 0}";
    static const char text[] =
        "The engine reads one token after the other, and each of them becomes an event of a stream; `code` too: for "
        "(int i = "
        "0; i < n; i++) sum += x[i];\n\n* a list, and numbers like 12345 or 3.14\n* \"quotes\" and 你好\n";
    aff_tokenizer *tok;
    aff_server *s;
    aff_error err = {0};
    if (argc < 2) die("usage: bench_serve TOKENIZER");
    if (aff__tokenizer_open(&tok, argv[1], 0, &err) != AFF_OK ||
        aff__tokenizer_encode(tok, text, strlen(text), false, &script, &err) != AFF_OK)
        die(err.msg);
    scripted.cfg = (aff_config){.vocab = (int)aff__tokenizer_size(tok), .max_positions = CONTEXT, .bos = 0, .eos = 1};
    script_again = true;
    const double ms = prompt(tok), alone = engine_alone();
    if (aff__server_start(
            &s, &scripted, tok,
            &(aff_server_options){.engine = {.threads = 1, .context = CONTEXT, .slots = 8}, .http = {.log = NULL}},
            &err) != AFF_OK)
        die(err.msg);
    const int port = aff__server_port(s);
    double worst = stream(port, "chat, 1 client", "/v1/chat/completions", chat, 1);
    const double more[] = {stream(port, "chat, 8 clients", "/v1/chat/completions", chat, 8),
                           stream(port, "messages, 1 client", "/v1/messages", messages, 1),
                           stream(port, "messages, 8 clients", "/v1/messages", messages, 8)};
    for (int i = 0; i < 3; i++)
        if (more[i] > worst) worst = more[i];
    const double token = worst - alone, turn = token + ms * 1e3 / 500;
    printf("the server's share: %.1f us a token; with that prompt over an answer of 500 tokens %.1f us, %.2f %% of 10 "
           "ms\n",
           token, turn, turn / 100);
    aff__server_stop(s, 0);
    aff__ids_free(&script);
    aff__tokenizer_free(tok);
    return 0;
}
