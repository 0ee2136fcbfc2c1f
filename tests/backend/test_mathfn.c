/* mathfn.h: against the C library in double precision. */
#include "support/test.h"
#include "backend/mathfn.h"

/* Error of `got` in units of the last place of the float nearest to `want`. */
static double ulps(float got, double want)
{
    float f = (float)fabs(want);
    int e;
    frexpf(f < 0x1p-126f ? 0x1p-126f : f, &e);
    return fabs((double)got - want) / ldexp(1.0, e - 24);
}

typedef struct sweep {
    float (*f)(float);
    double (*ref)(double);
    double lo, hi, allowed;
} sweep;

static float exp_f(float x)
{
    return aff__expf(x);
}
static float softplus_f(float x)
{
    return aff__softplus(x);
}
static float sigmoid_f(float x)
{
    return aff__sigmoid(x);
}
static double softplus_d(double x)
{
    return log1p(exp(x));
}
static double sigmoid_d(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static void dense_sweeps_stay_within_the_stated_error(void **state)
{
    (void)state;
    const sweep s[] = {{exp_f, exp, -103.9, 88.722, 1.1},
                       {exp_f, exp, -0.01, 0.01, 1.1},
                       {softplus_f, softplus_d, -100.0, 20.0, 2.0},
                       {sigmoid_f, sigmoid_d, -87.0, 40.0, 2.5}};
    for (size_t i = 0; i < sizeof s / sizeof *s; i++) {
        double worst = 0, at = 0;
        const int steps = 1500000;
        for (int k = 0; k <= steps; k++) {
            float x = (float)(s[i].lo + (s[i].hi - s[i].lo) * k / steps);
            double u = ulps(s[i].f(x), s[i].ref((double)x));
            if (!(u <= worst)) worst = u, at = (double)x;
        }
        print_message("sweep %zu: worst %.3f ulp at %.9g\n", i, worst, at);
        assert_true(worst <= s[i].allowed);
    }
}

static void edges(void **state)
{
    (void)state;
    assert_true(aff__expf(0.0f) == 1.0f);
    assert_true(aff__expf(-0.0f) == 1.0f);
    assert_true(aff__expf(1.0f) == 0x1.5bf0a8p+1f);
    assert_true(aff__expf(88.72283f) == (float)exp((double)88.72283f)); /* the last finite one */
    assert_true(isinf(aff__expf(88.8f)));
    assert_true(isinf(aff__expf(INFINITY)));
    assert_true(aff__expf(-103.9f) == 0x1p-149f);
    assert_true(aff__expf(-104.0f) == 0.0f);
    assert_true(aff__expf(-INFINITY) == 0.0f);
    assert_true(isnan(aff__expf(NAN)));
    assert_true(aff__softplus(0.0f) == 0x1.62e430p-1f);
    assert_true(aff__softplus(20.5f) == 20.5f);
    assert_true(aff__softplus(INFINITY) == INFINITY);
    assert_true(aff__softplus(-INFINITY) == 0.0f);
    assert_true(isnan(aff__softplus(NAN)));
    assert_true(aff__sigmoid(0.0f) == 0.5f);
    assert_true(aff__sigmoid(INFINITY) == 1.0f);
    assert_true(aff__sigmoid(-INFINITY) == 0.0f);
    assert_true(isnan(aff__sigmoid(NAN)));
}

/* Angles as rope makes them: float32 products up to a million. */
static void sine_and_cosine_are_rounded_right(void **state)
{
    (void)state;
    double worst = 0;
    for (int i = 0; i < 1000000; i++) {
        const double a = (double)((float)(i * 1.05) * (i % 3 == 0 ? 1.0f : i % 3 == 1 ? 0.687656022f : 5.68052904e-7f));
        float s, c;
        aff__sincos(a, &s, &c);
        const double u = fmax(ulps(s, sin(a)), ulps(c, cos(a)));
        if (!(u <= worst)) worst = u;
    }
    print_message("sine and cosine: worst %.9f ulp\n", worst);
    assert_true(worst <= 0.5 + 1e-6); /* near a multiple of pi the reference's own error shows */
    float s, c;
    aff__sincos(0.0, &s, &c);
    assert_true(s == 0.0f && c == 1.0f);
    aff__sincos(-1.0, &s, &c);
    assert_true(s == (float)-0.84147098480789650665 && c == (float)0.54030230586813971740);
    aff__sincos(4.0, &s, &c);
    assert_true(s == (float)-0.75680249530792825137 && c == (float)-0.65364362086361191464);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_sweeps_stay_within_the_stated_error),
        cmocka_unit_test(edges),
        cmocka_unit_test(sine_and_cosine_are_rounded_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
