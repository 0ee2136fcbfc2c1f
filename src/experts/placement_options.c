#include "experts/placement.h"
#include "experts/placement_flags.h"
#include <string.h>

static const char *const names[] = {"heat", "demand", "static"};

aff_status aff__placement_strategy_parse(const char *name, aff_placement_strategy *out, aff_error *err)
{
    for (int i = 0; i < 3; i++)
        if (!strcmp(name, names[i])) {
            *out = (aff_placement_strategy)i;
            return AFF_OK;
        }
    return aff__fail(err, AFF_E_INVALID, "--placement-strategy: expected heat, demand or static, got '%s'", name);
}

const char *aff__placement_strategy_name(aff_placement_strategy s)
{
    return s >= 0 && s <= AFF_PLACE_STATIC ? names[s] : "?";
}

void aff__placement_options_init(aff_placement_options *o)
{
    *o = (aff_placement_options){AFF_PLACE_HEAT, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
}

/* docs/placement.md has the measurements behind these. */
aff_placement_options aff__placement_options_resolve(const aff_placement_options *o, bool inclusive)
{
    aff_placement_options r = *o;
#define DEFAULT(field, value)                                                                                          \
    if (r.field < 0) r.field = value
    DEFAULT(moves, 8);
    DEFAULT(decay, inclusive ? 0.95 : 0.98);
    DEFAULT(hysteresis, inclusive ? 1.1 : 1.25);
    DEFAULT(min_gain, inclusive ? 0.5 : 1.5);
    DEFAULT(lead, 2);
    DEFAULT(shadow, 32);
    DEFAULT(disk_hysteresis, 1.1);
    DEFAULT(disk_min_gain, 0.5);
    DEFAULT(credit, 8);
    DEFAULT(prefill_credit, 100);
    DEFAULT(prefill_weight, 0.05);
    DEFAULT(prefill_decay, 0.5);
    DEFAULT(near, 0.1);
#undef DEFAULT
    return r;
}

aff_status aff__placement_options_check(const aff_placement_options *o, aff_error *err)
{
    const struct {
        const char *name;
        double value, least, most;
    } all[] = {{"--placement-moves", o->moves, 0, 4096},
               {"--placement-decay", o->decay, 0, 1},
               {"--placement-hysteresis", o->hysteresis, 0, 1000},
               {"--placement-min-gain", o->min_gain, 0, 1e6},
               {"--placement-lead", o->lead, 0, 127},
               {"--placement-shadow", o->shadow, 1, 4096},
               {"placement: hysteresis of the disk", o->disk_hysteresis, 0, 1000},
               {"placement: least gain of the disk", o->disk_min_gain, 0, 1e6},
               {"placement: credit", o->credit, 0, 1e6},
               {"placement: credit of a chunk", o->prefill_credit, 0, 1e6},
               {"placement: weight of chunks", o->prefill_weight, 0, 1000},
               {"placement: decay of chunks", o->prefill_decay, 0, 1},
               {"placement: credit of a near miss", o->near, 0, 1000}};
    if (o->strategy < 0 || o->strategy > AFF_PLACE_STATIC)
        return aff__fail(err, AFF_E_INVALID, "--placement-strategy: expected heat, demand or static, got number %d",
                         (int)o->strategy);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!(all[i].value < 0) && !(all[i].value >= all[i].least && all[i].value <= all[i].most))
            return aff__fail(err, AFF_E_INVALID, "%s: expected %g to %g, got %g", all[i].name, all[i].least,
                             all[i].most, all[i].value);
    return AFF_OK;
}

aff_status aff__placement_flags_apply(const aff_placement_flags *f, aff_placement_options *o, aff_error *err)
{
    if (f->strategy) AFF_TRY(aff__placement_strategy_parse(f->strategy, &o->strategy, err));
    if (f->moves >= 0) o->moves = f->moves > 4096 ? 4097 : (int)f->moves;
    if (f->lead >= 0) o->lead = f->lead > 127 ? 128 : (int)f->lead;
    if (f->shadow >= 0) o->shadow = f->shadow > 4096 ? 4097 : (int)f->shadow;
    if (!(f->decay < 0)) o->decay = f->decay;
    if (!(f->hysteresis < 0)) o->hysteresis = o->disk_hysteresis = f->hysteresis;
    if (!(f->min_gain < 0)) o->min_gain = o->disk_min_gain = f->min_gain;
    return aff__placement_options_check(o, err);
}
