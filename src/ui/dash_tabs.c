/* dash_tabs.c - the panes of the dashboard besides the plane: layers, timing, the card. */
#include "experts/store.h"
#include "ui/dash_internal.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { LAYER_WIDTH = 44, LAYER_BAR = 10 };

/* ---- layers: where the experts of each are ---- */

static int layer_columns(int columns)
{
    return columns < 2 * LAYER_WIDTH ? 1 : columns / LAYER_WIDTH;
}

static void layers(const aff_dash_view *v, int y, int rows, int columns)
{
    const int E = v->s.experts, best = v->s.on_device ? AFF_TIER_CARD : AFF_TIER_HOST;
    aff__dash_rule(y, 0, columns,
                   v->s.on_device ? "Layers: experts on the card, in host memory, on disk"
                                  : "Layers: experts in host memory, on disk");
    for (int l = 0; l < v->s.layers; l++) {
        const int row = l % rows, x = 1 + l / rows * LAYER_WIDTH;
        int n[3] = {0};
        char text[64];
        if (x + LAYER_WIDTH > columns + 2) break; /* the window is too small for all of them */
        for (int e = 0; e < E; e++) n[v->tier[l * E + e]]++;
        snprintf(text, sizeof text, "%3d ", l);
        aff__dash_put_as(y + 1 + row, x, 4, AFF_PAIR_QUIET, false, text);
        aff__dash_bar(y + 1 + row, x + 4, LAYER_BAR, E ? (double)n[best] / E : 0);
        if (v->s.on_device)
            snprintf(text, sizeof text, " %3d card %3d host %3d disk", n[AFF_TIER_CARD], n[AFF_TIER_HOST],
                     n[AFF_TIER_DISK]);
        else
            snprintf(text, sizeof text, " %3d host %3d disk", n[AFF_TIER_HOST], n[AFF_TIER_DISK]);
        aff__dash_put(y + 1 + row, x + 4 + LAYER_BAR, LAYER_WIDTH - 4 - LAYER_BAR, text);
    }
}

/* ---- timing: passes by their rows ---- */

static int kinds_of_passes(const aff_dash_view *v)
{
    int n = 0;
    for (int r = 1; r <= AFF_PASS_ROWS; r++) n += v->s.draft.rows[r] > 0;
    return n;
}

static void timing(const aff_dash_view *v, int y, int rows, int columns)
{
    const aff_pass_counts *p = &v->s.passes;
    const aff_draft_stats *d = &v->s.draft;
    const double all = (double)(p->prompt_ns + p->decode_ns);
    char text[160];
    int row = 1;
    aff__dash_rule(y, 0, columns, "Timing");
    const struct {
        const char *what;
        int64_t n;
        uint64_t ns;
    } phases[] = {{"prompts", p->prompt_rows, p->prompt_ns}, {"answers", p->tokens, p->decode_ns}};
    for (int i = 0; i < 2 && row <= rows; i++, row++) {
        const double ns = (double)phases[i].ns;
        snprintf(text, sizeof text, "%s  %10" PRId64 " tokens  %9.3f ms each ", phases[i].what, phases[i].n,
                 phases[i].n ? ns / 1e6 / (double)phases[i].n : 0);
        const int x = 1 + aff__dash_put(y + row, 1, columns - 2, text);
        if (x + 24 < columns) aff__dash_bar(y + row, x, 20, all > 0 ? ns / all : 0);
        snprintf(text, sizeof text, " %.0f %% of %.1f s", all > 0 ? 100 * ns / all : 0, all / 1e9);
        if (x + 24 < columns) aff__dash_put_as(y + row, x + 20, columns - x - 21, AFF_PAIR_QUIET, false, text);
    }
    for (int r = 1; r <= AFF_PASS_ROWS && row <= rows; r++) {
        if (!d->rows[r]) continue;
        snprintf(text, sizeof text, "passes of %2d row%s %8" PRId64 "  %9.3f ms", r, r > 1 ? "s:" : ": ", d->rows[r],
                 d->times.verify[r] / 1e6);
        aff__dash_put(y + row++, 1, columns - 2, text);
    }
    for (int s = 1; s <= AFF_PASS_ROWS && row <= rows; s++) {
        if (!d->drafts[s]) continue;
        snprintf(text, sizeof text, "drafts for %2d:     %8" PRId64 "  %9.3f ms", s, d->drafts[s],
                 d->times.draft[s] / 1e6);
        aff__dash_put(y + row++, 1, columns - 2, text);
    }
}

/* ---- the card ---- */

static void share(const aff_device_view *d, int y, int columns, const char *what, uint64_t bytes)
{
    char text[64], amount[24];
    aff__dash_bytes(amount, sizeof amount, bytes);
    snprintf(text, sizeof text, "%-15s %10s ", what, amount);
    const int x = 1 + aff__dash_put(y, 1, columns - 2, text), w = columns - x - 10 < 60 ? columns - x - 10 : 60;
    aff__dash_bar(y, x, w, d->memory ? (double)bytes / (double)d->memory : 0);
    snprintf(text, sizeof text, " %5.1f %%", d->memory ? 100 * (double)bytes / (double)d->memory : 0);
    aff__dash_put_as(y, x + w, 9, AFF_PAIR_QUIET, false, text);
}

static void card(const aff_dash_view *v, int y, int rows, int columns)
{
    const aff_device_view *d = &v->s.device;
    char text[200];
    uint64_t own = 0;
    int row = 1;
    if (!v->s.on_device) {
        aff__dash_rule(y, 0, columns, "Card: none, the model runs on the host");
        return;
    }
    snprintf(text, sizeof text, "Card %s: %s, %s", d->id, d->name, d->arch);
    aff__dash_rule(y, 0, columns, text);
    for (int i = 0; i < AFF_USES; i++) {
        own += d->use[i];
        if (row <= rows) share(d, y + row++, columns, aff__device_use_names[i], d->use[i]);
    }
    const uint64_t taken = d->memory > d->free ? d->memory - d->free : 0;
    if (row <= rows) share(d, y + row++, columns, "other programs", taken > own ? taken - own : 0);
    if (row <= rows) share(d, y + row++, columns, "free", d->free);
    if (row <= rows) {
        int n = snprintf(text, sizeof text,
                         "passes recorded %d, of %" PRIu64 " passes of few rows %" PRIu64 " repeated one", d->records,
                         d->passes, d->repeated);
        if (d->link_gen) n += snprintf(text + n, sizeof text - (size_t)n, "   PCIe %d x%d", d->link_gen, d->link_width);
        if (d->link_rate) snprintf(text + n, sizeof text - (size_t)n, ", %.1f GB/s", (double)d->link_rate / 1e9);
        aff__dash_put(y + row++, 1, columns - 2, text);
    }
}

/* ---- all of them ---- */

int aff__dash_tab_rows(const aff_dash_view *v, int columns)
{
    switch (v->pane) {
    case AFF_TAB_LAYERS:
        return (v->s.layers + layer_columns(columns) - 1) / layer_columns(columns);
    case AFF_TAB_TIMING:
        return 4 + kinds_of_passes(v);
    case AFF_TAB_CARD:
        return v->s.on_device ? AFF_USES + 3 : 1;
    default:
        return 0;
    }
}

void aff__dash_tab(const aff_dash_view *v, int y, int rows, int columns)
{
    if (v->pane == AFF_TAB_LAYERS) layers(v, y, rows, columns);
    if (v->pane == AFF_TAB_TIMING) timing(v, y, rows, columns);
    if (v->pane == AFF_TAB_CARD) card(v, y, rows, columns);
}
