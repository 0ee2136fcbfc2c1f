#include "gpu_emu_body.h"
