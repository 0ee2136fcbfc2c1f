/* server.h - the HTTP server over an engine: docs/server.md. */
#ifndef AFF_SERVER_SERVER_H
#define AFF_SERVER_SERVER_H
#include "engine/engine.h"
#include "server/http.h"
#include "text/chat.h"

typedef struct aff_server_options {
    aff_engine_options engine;
    aff_http_options http; /* handle, refuse and ctx are the server's own */
    const char *api_key;   /* NULL: none needed */
    const char *cors;      /* "*", or origins separated by commas; NULL: off */
    const char *model;     /* its name for clients; NULL: DeepSeek-V4-Flash */
    aff_chat_format format;
    int64_t max_tokens_floor;
    const char *replay_dir; /* where turns are kept for the next process (replay.h); NULL: nowhere */
    uint64_t replay_bytes;  /* bound on them; 0: 64 MiB */
    /* The engine's device has failed: requests get 503 from now on, and the server should end. On the engine thread. NULL allowed. */
    void (*failed)(void *ctx);
    void *failed_ctx;
} aff_server_options;

typedef struct aff_server aff_server;
/* Listens; every request gets 503 until aff__server_ready. Of the options, `engine` and `replay_dir` are those of the
 * latter. Strings of the options must live as long as the server. */
aff_status aff__server_listen(aff_server **out, const aff_server_options *o, aff_error *err);
/* Serves from now on. Net and tokenizer are borrowed. After a failure only aff__server_stop may follow. */
aff_status aff__server_ready(aff_server *s, const aff_net *net, const aff_tokenizer *tok, const aff_server_options *o,
                             aff_error *err);
/* Both. */
aff_status aff__server_start(aff_server **out, const aff_net *net, const aff_tokenizer *tok,
                             const aff_server_options *o, aff_error *err);
int aff__server_port(const aff_server *s);
aff_engine *aff__server_engine(aff_server *s); /* for displays, until the stop */
/* Waits until no request is at work. */
void aff__server_wait_idle(aff_server *s);
/* Lets requests in progress end for at most drain_ms, then ends everything. NULL allowed. */
void aff__server_stop(aff_server *s, int drain_ms);

/* affinity --serve: the whole program; returns its exit code. */
int aff__serve_main(int argc, char **argv);
#endif
