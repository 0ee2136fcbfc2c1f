/* AMD devices: the HIP runtime, libamdhip64. The architecture comes from the kernel driver's topology: the runtime's own struct of
 * device properties changes with its version. */
#include "backend/gpu/rt_driver.h"
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { COOPERATIVE = 10, UNITS = 63, SHARED = 74 };
#define TOPOLOGY "/sys/class/kfd/kfd/topology/nodes"

static aff_driver driver;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load(void)
{
    static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", NULL};
    if (aff__gfx1200_image_size + aff__gfx1201_image_size == 0)
        driver.why = "this build holds no AMD code (it was made without clang-19)";
    else
        aff__driver_load(&driver, names, true);
}

int aff__rt_hip_count(const char **why)
{
    pthread_once(&once, load);
    *why = driver.why;
    return driver.devices;
}

/* gfx_target_version of the node at a PCI address, 0 if there is none: 120001 is gfx1201. */
static long node_version(const char *node, unsigned domain, unsigned location)
{
    char path[320], key[64];
    long value, version = 0;
    bool there = false, same_domain = domain == 0;
    snprintf(path, sizeof path, TOPOLOGY "/%s/properties", node);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    while (fscanf(f, "%63s %ld", key, &value) == 2) {
        if (!strcmp(key, "location_id")) there = value == (long)location;
        if (!strcmp(key, "domain")) same_domain = value == (long)domain;
        if (!strcmp(key, "gfx_target_version")) version = value;
    }
    fclose(f);
    return there && same_domain ? version : 0;
}

static long target_version(const char *pci)
{
    unsigned domain, bus, slot, fn;
    long version = 0;
    if (sscanf(pci, "%x:%x:%x.%x", &domain, &bus, &slot, &fn) != 4) return 0;
    DIR *d = opendir(TOPOLOGY);
    for (struct dirent *e; d && !version && (e = readdir(d));)
        if (e->d_name[0] != '.') version = node_version(e->d_name, domain, bus << 8 | slot << 3 | fn);
    if (d) closedir(d);
    return version;
}

aff_status aff__rt_hip_describe(int index, aff_rt_info *out, aff_error *err)
{
    int dev;
    char pci[32];
    AFF_TRY(aff__driver_describe(&driver, index, UNITS, COOPERATIVE, out, err));
    if (driver.device(&dev, index)) return aff__fail(err, AFF_E_DEVICE, "hip:%d: hipDeviceGet failed", index);
    aff__driver_pci(&driver, dev, pci);
    const long v = target_version(pci);
    if (!v) return aff__fail(err, AFF_E_UNSUPPORTED, "hip:%d (%s, %s): not in " TOPOLOGY ": its architecture is unknown", index, out->name, pci);
    snprintf(out->arch, sizeof out->arch, "gfx%ld%lx%lx", v / 10000, v / 100 % 100, v % 100);
    out->shared_bytes = aff__driver_attribute(&driver, SHARED, dev);
    if (out->shared_bytes > 65536) out->shared_bytes = 65536;
    out->fragment_columns = 16;
    if (!out->cooperative) return aff__fail(err, AFF_E_UNSUPPORTED, "hip:%d (%s): the driver has no cooperative launches", index, out->name);
    return AFF_OK;
}

aff_status aff__rt_hip_open(aff_rt **out, int index, aff_error *err)
{
    aff_rt_info info;
    AFF_TRY(aff__rt_hip_describe(index, &info, err));
    const bool k1200 = !strcmp(info.arch, "gfx1200"), k1201 = !strcmp(info.arch, "gfx1201");
    if (!(k1200 && aff__gfx1200_image_size) && !(k1201 && aff__gfx1201_image_size))
        return aff__fail(err, AFF_E_UNSUPPORTED, "hip:%d (%s): this build holds no kernels for %s", index, info.name, info.arch);
    return aff__driver_open(out, &driver, &info, k1200 ? aff__gfx1200_image : aff__gfx1201_image, err);
}
