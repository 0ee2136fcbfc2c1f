/* mathfn.h - exp and its relatives, sine and cosine, written once: every build (scalar, SIMD, device) gives the same bits.
 * Only +, -, *, /, fmaf, fma and integer work; no libm calls whose last bit differs between libraries. SIMD forms repeat
 * these steps lane by lane. A NaN argument gives a NaN (its payload is not defined). */
#ifndef AFF_BACKEND_MATHFN_H
#define AFF_BACKEND_MATHFN_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef AFF__FN /* device builds set their own qualifiers */
#define AFF__FN static inline
#endif

/* Constants of e^x, shared with the SIMD forms: ln 2 in two parts, and q of e^r = 1 + r + r^2 q(r) on |r| <= ln(2)/2.
 */
#define AFF__EXP_HI  88.8f
#define AFF__EXP_LO  -104.0f
#define AFF__LOG2E   0x1.715476p+0f
#define AFF__LN2_HI  0x1.62e430p-1f
#define AFF__LN2_LO  -0x1.05c610p-29f
#define AFF__ROUNDER 0x1.8p+23f /* adding it rounds to an integer, nearest even, left in the low bits */
#define AFF__EXP_Q0  0.5f
#define AFF__EXP_Q1  0x1.5554dcp-3f
#define AFF__EXP_Q2  0x1.55551ap-5f
#define AFF__EXP_Q3  0x1.120b6ep-7f
#define AFF__EXP_Q4  0x1.6d110ap-10f

/* 2^n from its biased exponent; n in -126..127. */
AFF__FN float aff__pow2i(int32_t n)
{
    uint32_t u = ((uint32_t)n + 127u) << 23;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* e^x: max error about 1 ulp; 0 below -104, +inf above 88.8, NaN stays NaN. */
AFF__FN float aff__expf(float x)
{
    x = x > AFF__EXP_HI ? AFF__EXP_HI : x;
    x = x < AFF__EXP_LO ? AFF__EXP_LO : x;
    float t = fmaf(x, AFF__LOG2E, AFF__ROUNDER);
    float nf = t - AFF__ROUNDER;
    uint32_t bits;
    memcpy(&bits, &t, 4);
    int32_t n = (int32_t)(bits - 0x4b400000u);
    float r = fmaf(-nf, AFF__LN2_HI, x);
    r = fmaf(-nf, AFF__LN2_LO, r);
    float q = fmaf(AFF__EXP_Q4, r, AFF__EXP_Q3);
    q = fmaf(q, r, AFF__EXP_Q2);
    q = fmaf(q, r, AFF__EXP_Q1);
    q = fmaf(q, r, AFF__EXP_Q0);
    q = fmaf(q, r * r, r) + 1.0f;
    /* Two halves of 2^n, so that a subnormal result is rounded once and overflow gives infinity. */
    int32_t half = n >> 1;
    return q * aff__pow2i(half) * aff__pow2i(n - half);
}

/* log(1+e) for e in [0, 1], about 1 ulp: 2 atanh(e/(2+e)) with the quotient's remainder carried along. */
AFF__FN float aff__log1p01(float e)
{
    if (e < 0x1p-12f) return fmaf(-0.5f * e, e, e);
    float d = 2.0f + e, dl = e - (d - 2.0f); /* d + dl = 2 + e exactly */
    float s = e / d;
    float sl = (fmaf(-s, d, e) - s * dl) / d;
    float z = s * s;
    float q = fmaf(0x1.dba260p-4f, z, 0x1.bc8cf8p-4f);
    q = fmaf(q, z, 0x1.24c926p-3f);
    q = fmaf(q, z, 0x1.9998d4p-3f);
    q = fmaf(q, z, 0x1.555556p-2f);
    return fmaf(2.0f, s, fmaf(2.0f * s, z * q, 2.0f * sl));
}

/* log(1+e^x) = softplus; equals x for x > 20. */
AFF__FN float aff__softplus(float x)
{
    if (x > 20.0f) return x;
    float l = aff__log1p01(aff__expf(x < 0.0f ? x : -x));
    return x > 0.0f ? x + l : l;
}

/* 1/(1+e^-x), accurate in both tails: e = e^-|x|, then 1/(1+e) or e/(1+e). */
AFF__FN float aff__sigmoid(float x)
{
    float e = aff__expf(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* sin and cos of an angle below 2^20, rounded to float32 from an error of about 1e-16. The angle less the nearest multiple of pi/2,
 * in two parts (the first difference is exact), then the Taylor polynomials on |r| <= pi/4. */
AFF__FN void aff__sincos(double a, float *sn, float *cs)
{
    const double t = a * 0x1.45f306dc9c883p-1 + 0x1.8p52, k = t - 0x1.8p52; /* a / (pi/2), rounded; the integer is left in the low bits */
    double r = fma(-k, 0x1.921fb54442d18p+0, a);
    r = fma(-k, 0x1.1a62633145c07p-54, r);
    const double z = r * r;
    double s = 1.0 / 355687428096000.0, c = -1.0 / 6402373705728000.0; /* 1/17!, -1/18! */
    s = fma(s, z, -1.0 / 1307674368000.0);
    s = fma(s, z, 1.0 / 6227020800.0);
    s = fma(s, z, -1.0 / 39916800.0);
    s = fma(s, z, 1.0 / 362880.0);
    s = fma(s, z, -1.0 / 5040.0);
    s = fma(s, z, 1.0 / 120.0);
    s = fma(s, z, -1.0 / 6.0);
    s = fma(s * z, r, r);
    c = fma(c, z, 1.0 / 20922789888000.0);
    c = fma(c, z, -1.0 / 87178291200.0);
    c = fma(c, z, 1.0 / 479001600.0);
    c = fma(c, z, -1.0 / 3628800.0);
    c = fma(c, z, 1.0 / 40320.0);
    c = fma(c, z, -1.0 / 720.0);
    c = fma(c, z, 1.0 / 24.0);
    c = fma(c, z, -0.5);
    c = fma(c, z, 1.0);
    uint64_t bits;
    memcpy(&bits, &t, 8);
    const double x = bits & 1 ? c : s, y = bits & 1 ? s : c;
    *sn = (float)(bits & 2 ? -x : x);
    *cs = (float)((bits + 1) & 2 ? -y : y);
}
#endif
