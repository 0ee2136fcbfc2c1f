#define GK_LAYOUT_AMD
#include "gpu_emu_body.h"
