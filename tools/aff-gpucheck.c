/* aff-gpucheck - a device's ops, experts and layers against the CPU. */
#include "backend/gpu/check.h"
#include "backend/gpu/gpu.h"
#include "base/options.h"
#include "model/check.h"
#include "model/synthetic.h"
#include <stdio.h>
#include <string.h>

static struct {
    const char *device, *model, *synthetic;
    int64_t rounds, seed, rows, threads, layers, experts;
    bool dq, list;
} opt = {.device = "auto", .rounds = 8, .seed = 1, .rows = 160};

static const aff_option options[] = {
    {"device", 0, AFF_OPT_STR, &opt.device, "NAME",
     "auto (the first card), cuda:N, hip:N, emu:[Nx]SIZE or emu-amd:[Nx]SIZE; default auto", "Device"},
    {"list", 'l', AFF_OPT_FLAG, &opt.list, NULL, "list the devices and stop"},
    {"model", 'm', AFF_OPT_STR, &opt.model, "PATH",
     "also experts and layers of this container or checkpoint, which must fit into the device's memory", "Checks"},
    {"synthetic", 0, AFF_OPT_STR, &opt.synthetic, "flash|tiny", "the same of a model of that shape whose weights are generated"},
    {"layers", 0, AFF_OPT_INT, &opt.layers, "N", "of a synthetic model: the first N layers; default all", NULL, 1, 43},
    {"experts", 0, AFF_OPT_INT, &opt.experts, "N", "of a synthetic model: routed experts a layer; default all", NULL, 1, 256},
    {"dq", 0, AFF_OPT_FLAG, &opt.dq, NULL, "also the decoding of every code, by bits"},
    {"rounds", 0, AFF_OPT_INT, &opt.rounds, "N", "random cases of each op; default 8", NULL, 1, 10000},
    {"rows", 0, AFF_OPT_INT, &opt.rows, "N", "positions that the layers run over; default 160", NULL, 1, 4096},
    {"seed", 0, AFF_OPT_INT, &opt.seed, "N", "of the random operands; default 1", NULL, 0, 4294967295.0},
    {"threads", 't', AFF_OPT_INT, &opt.threads, "N", "of the CPU's side; default one per CPU", NULL, 0, 4096},
    {0}};

static const aff_usage usage = {"aff-gpucheck",
                                "",
                                "Compares a device's results with the CPU's: every op on random shapes with tails, "
                                "then (-m) routed experts and every layer of a model. "
                                "Exit code 0: all within their bounds, or no device (SKIP); 1: a result is wrong or "
                                "the device fails; 2: wrong usage.",
                                options,
                                0,
                                0};

static int wrong;

static void show(void *ctx, const aff_check_row *r)
{
    printf("%-34s %5d %11lld %9lld %10.2g %9.1g  %s\n", r->op, r->cases, (long long)r->values, (long long)r->differ,
           r->error, r->allowed, r->ok ? "ok" : "WRONG");
    if (*r->note) printf("    %s\n", r->note);
    fflush(stdout);
    wrong += !r->ok;
}

static void describe(const aff_rt_info *i)
{
    static const char *const kind[] = {"cuda", "hip", "emu"};
    printf("%s:%d  %s, %s, %.1f GiB", kind[i->kind], i->index, i->name, i->arch, (double)i->memory / (1 << 30));
    if (i->link_gen) printf(", PCIe %d x%d (%.1f GB/s)", i->link_gen, i->link_width, (double)i->link_rate * 1e-9);
    printf("\n");
}

static int list(void)
{
    for (int k = AFF_RT_CUDA; k <= AFF_RT_HIP; k++) {
        const char *why;
        const int n = aff__rt_count((aff_rt_kind)k, &why);
        if (!n) printf("%s: none: %s\n", k == AFF_RT_CUDA ? "cuda" : "hip", why);
        for (int i = 0; i < n; i++) {
            aff_rt_info info;
            aff_error err;
            if (aff__rt_describe((aff_rt_kind)k, i, &info, &err) == AFF_OK)
                describe(&info);
            else
                printf("%s\n", err.msg);
        }
    }
    return 0;
}

/* auto: the first card there is. False: none, said why. */
static bool choose(aff_device_spec *spec)
{
    const char *why[2] = {NULL, NULL};
    if (spec->choice == AFF_DEVICE_RT) {
        if (spec->kind == AFF_RT_EMU || aff__rt_count(spec->kind, &why[0])) return true;
        printf("SKIP: %s\n", why[0]);
        return false;
    }
    for (int k = AFF_RT_CUDA; k <= AFF_RT_HIP; k++)
        if (aff__rt_count((aff_rt_kind)k, &why[k])) {
            *spec = (aff_device_spec){.choice = AFF_DEVICE_RT, .kind = (aff_rt_kind)k, .count = 1};
            return true;
        }
    printf("SKIP: no device (cuda: %s; hip: %s)\n", why[0], why[1]);
    return false;
}

static aff_status checks(const aff_device_spec *spec, aff_error *err)
{
    aff_backend *cpu, *dev;
    AFF_TRY(aff__gpu_backend(&dev, spec, AFF_FAST, err));
    aff_status s = aff__cpu_backend(&cpu, AFF_FAST, (int)opt.threads, err);
    if (s != AFF_OK) {
        dev->free(dev);
        return s;
    }
    describe(aff__gpu_info(dev));
    printf("%-34s %5s %11s %9s %10s %9s\n", "op", "cases", "values", "differ", "error", "allowed");
    s = aff__check_ops(cpu, dev, (int)opt.rounds, (uint64_t)opt.seed, show, NULL, err);
    if (s == AFF_OK && opt.dq) s = aff__check_decode(cpu, dev, (uint64_t)opt.seed, show, NULL, err);
    cpu->free(cpu);
    if (s != AFF_OK || (!opt.model && !opt.synthetic)) {
        dev->free(dev);
        return s;
    }
    const aff_synthetic made = {.geometry = opt.synthetic, .layers = (int)opt.layers, .experts = (int)opt.experts, .seed = (uint64_t)opt.seed};
    return aff__check_model(opt.model, opt.synthetic ? &made : NULL, dev, (int)opt.rows, (int)opt.threads, (uint64_t)opt.seed, show, NULL, err);
}

int main(int argc, char **argv)
{
    aff_device_spec spec;
    aff_error err = {0};
    int first;
    const int code = aff__options_main(&usage, argc, argv, &first);
    if (code >= 0) return code;
    if (opt.list) return list();
    if ((opt.model && opt.synthetic) || (!opt.synthetic && (opt.layers || opt.experts))) {
        fprintf(stderr, "aff-gpucheck: %s\n", opt.model && opt.synthetic ? "--model and --synthetic: expected one of them, got both"
                                                                        : "--layers, --experts: expected --synthetic with them");
        return 2;
    }
    if (aff__device_parse(&spec, opt.device, &err) != AFF_OK || spec.choice == AFF_DEVICE_CPU) {
        fprintf(stderr, "aff-gpucheck: %s\n",
                spec.choice == AFF_DEVICE_CPU ? "--device cpu: the CPU is what a device is compared with" : err.msg);
        return 2;
    }
    if (!choose(&spec)) return 0;
    if (checks(&spec, &err) != AFF_OK) {
        fprintf(stderr, "aff-gpucheck: %s\n", err.msg);
        return 1;
    }
    printf(wrong ? "%d of the checks failed\n" : "all checks passed\n", wrong);
    return wrong ? 1 : 0;
}
