/* An importance matrix from memory, GGUF or legacy, for a model of 2 layers, 3 experts, widths 4 and 2: what is
 * accepted must give finite weights of mean 1. */
#include "quant/imatrix.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const aff_im_shape shape = {2, 3, 4, 2};
    aff_imatrix *m;
    aff_error err = {0};
    uint8_t *copy = malloc(size ? size : 1); /* exact, so that a read past the end shows */
    if (!copy) return 0;
    if (size) memcpy(copy, data, size);
    if (aff__imatrix_open_memory(&m, copy, size, "fuzz", &shape, &err) == AFF_OK) {
        for (uint32_t i = 0; i < 18; i++) {
            float w[4];
            double sum = 0;
            const aff_im_part part = (aff_im_part)(i % 3);
            const int cols = part == AFF_IM_DOWN ? 2 : 4;
            aff__imatrix_weights(m, i / 9, i / 3 % 3, part, w);
            for (int j = 0; j < cols; j++) {
                if (!isfinite(w[j]) || w[j] < 0) abort();
                sum += (double)w[j];
            }
            if (fabs(sum / cols - 1) > 1e-5) abort();
        }
        for (uint32_t i = 0; i < 18; i++) { /* a triangle of 10 or 3 finite floats */
            const uint8_t *t = aff__imatrix_moments(m, i / 9, i / 3 % 3, (aff_im_part)(i % 3));
            for (int k = 0; t && k < (i % 3 == 2 ? 3 : 10); k++) {
                float f;
                memcpy(&f, t + 4 * k, 4);
                if (!isfinite(f)) abort();
            }
        }
        const float *p = aff__imatrix_profile(m);
        for (int i = 0; p && i < 6; i++)
            if (!(p[i] >= 0)) abort();
        aff__imatrix_close(m);
    } else if (!err.msg[0]) {
        abort();
    }
    free(copy);
    return 0;
}
