/* mathfn.h - exp and its relatives, written once: every build (scalar, SIMD, device) gives the same bits.
 * Only +, -, *, / , fmaf, sqrt, integer work; no libm calls whose last bit differs between libraries. */
#ifndef AFF_BACKEND_MATHFN_H
#define AFF_BACKEND_MATHFN_H
#include <math.h>
#include <stdint.h>
#include <string.h>

/* e^x: max error about 1 ulp; 0 below -104, +inf above 88.8, NaN stays NaN. */
float aff__expf(float x);
/* log1p(e^x) = softplus; equals x for x > 20. */
float aff__softplus(float x);
/* 1/(1+e^-x) */
float aff__sigmoid(float x);
#endif
