/* aff-quantize: a checkpoint folder in, a container out. */
#include "backend/gpu/encode.h"
#include "base/options.h"
#include "quant/quantize.h"
#include "ui/progress.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>

static void say(void *ctx, const char *line)
{
    aff__progress_clear(ctx);
    puts(line);
    fflush(stdout);
}

static void warn(void *ctx, const char *line)
{
    aff__progress_clear(ctx);
    fprintf(stderr, "aff-quantize: %s\n", line);
}

/* The first SIGINT or SIGTERM ends the run at the next tensor or expert, ready for --resume; a second one at once. */
static volatile sig_atomic_t stop;

static void on_signal(int number)
{
    stop = 1;
    signal(number, SIG_DFL);
}

static bool progress(void *ctx, uint64_t done, uint64_t total)
{
    aff__progress_update(ctx, done, total);
    return !stop;
}

/* "A:B", "A:" or ":B"; an empty or negative B means all. */
static aff_status parse_range(const char *text, aff_quantize_options *o, aff_error *err)
{
    char *end;
    if (!text) return AFF_OK;
    o->range_from = *text == ':' ? 0 : strtoll(text, &end, 10);
    if (*text == ':') end = (char *)text;
    if (*end == ':') {
        const char *second = end + 1;
        o->range_to = *second ? strtoll(second, &end, 10) : 0;
        if (!*second) end = (char *)second;
        if (o->range_to < 0) o->range_to = 0;
        if (!*end && o->range_from >= 0 && (!*second || o->range_to > 0 || *second == '-')) return AFF_OK;
    }
    return aff__fail(err, AFF_E_INVALID, "--layer-range: expected A:B, the layers A to B-1, got '%s'", text);
}

int main(int argc, char **argv)
{
    aff_progress p;
    aff_quantize_options o = {.out = "model.aff", .ctx = &p, .say = say, .warn = warn, .progress = progress};
    const char *experts = "q2p875", *range = NULL, *device = "cpu";
    aff_device_spec spec;
    aff_encoder encoder = {0};
    int64_t threads = 0;
    const aff_option options[] = {
        {"src", 0, AFF_OPT_STR, &o.src, "DIR", "Checkpoint: config.json, model.safetensors.index.json and its shards.",
         "Files", 0, 0},
        {"out", 0, AFF_OPT_STR, &o.out, "FILE", "Container to write [model.aff].", NULL, 0, 0},
        {"dspark", 0, AFF_OPT_FLAG, &o.dspark, NULL,
         "Quantise the draft stages (mtp.*) into a companion container; needs --codebook.", "What", 0, 0},
        {"layers", 0, AFF_OPT_INT, &o.layers, "N", "Only the first N layers; the result is no usable model [all].",
         NULL, 1, 4096},
        {"experts", 0, AFF_OPT_STR, &experts, "FORMAT",
         "Routed experts: q2p875, 2.875 bits a weight, or mxfp4, the checkpoint's own 4.25 bits unchanged [q2p875].",
         NULL, 0, 0},
        {"imatrix", 0, AFF_OPT_STR, &o.imatrix, "FILE",
         "Importance of the columns, GGUF or llama.cpp's older .dat: codes, scales and codebook are chosen by it, and "
         "its counts "
         "become the popularity profile [every column alike].",
         NULL, 0, 0},
        {"codebook", 0, AFF_OPT_STR, &o.codebook, "FILE",
         "Take the codebook from this container instead of fitting one.", NULL, 0, 0},
        {"codebook-raw", 0, AFF_OPT_STR, &o.codebook_raw, "FILE",
         "Take the codebook from this raw file; wins over --codebook.", NULL, 0, 0},
        {"codebook-out", 0, AFF_OPT_STR, &o.codebook_out, "FILE", "Write the codebook to this raw file and stop.", NULL,
         0, 0},
        {"cb-spread", 0, AFF_OPT_FLAG, &o.cb_spread, NULL,
         "Fit the codebook on experts of all layers; the default except with --compat, which fits on layer 0.", NULL, 0,
         0},
        {"compat", 0, AFF_OPT_FLAG, &o.compat, NULL,
         "Write the earlier tool's file byte for byte: row-ordered experts, bf16 hyper-connection matrices, no "
         "provenance, no hashes.",
         NULL, 0, 0},
        {"experts-dir", 0, AFF_OPT_STR, &o.experts_dir, "DIR",
         "Encode only experts, one file a layer, into this folder; finished layers are kept. Needs --codebook-raw.",
         "Several machines", 0, 0},
        {"layer-range", 0, AFF_OPT_STR, &range, "A:B", "With --experts-dir: only layers A to B-1 [all].", NULL, 0, 0},
        {"experts-from", 0, AFF_OPT_STR, &o.experts_from, "DIR",
         "Make the container with the experts of such a folder, which must come from the same checkpoint, codebook, "
         "imatrix and "
         "program.",
         NULL, 0, 0},
        {"resume", 0, AFF_OPT_FLAG, &o.resume, NULL,
         "Go on where a run of the same command was killed, stopped or failed; the file is the same as of one run.", "Running", 0, 0},
        {"verify", 0, AFF_OPT_FLAG, &o.verify, NULL,
         "Decode every expert of the finished file again and compare its error with the table.", NULL, 0, 0},
        {"device", 0, AFF_OPT_STR, &device, "NAME",
         "What chooses the codes, with the same bytes as result: cpu, cuda:N, hip:N, or an emulated card, emu:SIZE [cpu].", NULL, 0, 0},
        {"report", 0, AFF_OPT_STR, &o.report, "FILE", "Write the errors of layers and experts as JSON.", NULL, 0, 0},
        {"threads", 0, AFF_OPT_INT, &threads, "N", "Worker threads; the result does not depend on it [one per CPU].",
         NULL, 1, 1024},
        {0},
    };
    const aff_usage usage = {"aff-quantize", "", "Turns a DeepSeek-V4 checkpoint into a container that affinity runs.",
                             options,        0,  0};
    int first, code = aff__options_main(&usage, argc, argv, &first);
    if (code >= 0) return code;
    aff_error err = {0};
    o.threads = (int)threads;
    o.mxfp4 = strcmp(experts, "mxfp4") == 0;
    aff_status s = parse_range(range, &o, &err);
    if (s == AFF_OK) s = aff__device_parse(&spec, device, &err);
    if (s == AFF_OK && spec.choice == AFF_DEVICE_RT) o.encoder = &encoder;
    if (s == AFF_OK)
        s = o.mxfp4 || strcmp(experts, "q2p875") == 0
                ? aff__quantize_check(&o, &err)
                : aff__fail(&err, AFF_E_INVALID, "--experts: expected q2p875 or mxfp4, got '%s'", experts);
    if (s != AFF_OK) {
        fprintf(stderr, "aff-quantize: %s\n", err.msg);
        return 2;
    }
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is then an error of the write */
    if (o.encoder && aff__gpu_encoder_create(&encoder, &spec, &err) != AFF_OK) {
        fprintf(stderr, "aff-quantize: %s\n", err.msg);
        return 1;
    }
    aff__progress_start(&p, stderr, "quantising");
    s = aff__quantize(&o, &err);
    aff__progress_clear(&p);
    aff__gpu_encoder_free(&encoder);
    if (s != AFF_OK) fprintf(stderr, "aff-quantize: %s\n", err.msg);
    return s == AFF_OK ? 0 : 1;
}
