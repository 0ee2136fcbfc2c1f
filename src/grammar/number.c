/* number.c - numbers between two bounds, digit by digit. */
#include "grammar/schema.h"
#include "format/json.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INT_DIGITS = 32, REAL_DIGITS = 16 /* before the point, where nothing says less */, MOST_FRAC = 2 * DEC_DIGITS };

/* ---- decimals ---- */

static bool from_text(dec *d, const char *s)
{
    long exponent = 0;
    char digit[400];
    int n = 0, point = -1;
    d->negative = *s == '-';
    if (*s == '-') s++;
    for (; (*s >= '0' && *s <= '9') || *s == '.'; s++) {
        if (*s == '.')
            point = n;
        else if (n < (int)sizeof digit)
            digit[n++] = *s;
        else
            return false;
    }
    if (*s == 'e' || *s == 'E') exponent = strtol(s + 1, NULL, 10);
    if (point < 0) point = n;
    if (exponent > 1000 || exponent < -1000) return false;
    point += (int)exponent;
    int first = 0;
    while (first < n && digit[first] == '0') first++;
    while (n > first && digit[n - 1] == '0') n--;
    d->n = d->n_frac = 0;
    if (first == n) {
        d->negative = false;
        return true;
    }
    if (point - first > DEC_DIGITS || n - point > DEC_DIGITS) return false;
    for (int i = first; i < point; i++) d->digit[d->n++] = i < n ? digit[i] : '0';
    for (int i = point < first ? point : first > point ? first : point; i < n; i++)
        d->frac[d->n_frac++] = i < first ? '0' : digit[i];
    return true;
}

bool dec_read(dec *d, const json_t *v)
{
    char text[400];
    size_t n;
    const char *literal = aff__json_literal(v, &n);
    if (literal) {
        if (n >= sizeof text) return false;
        memcpy(text, literal, n);
        text[n] = 0;
    } else if (json_is_integer(v)) {
        snprintf(text, sizeof text, "%lld", (long long)json_integer_value(v));
    } else if (json_is_real(v)) {
        for (int k = 15; k <= 17; k++) {
            snprintf(text, sizeof text, "%.*g", k, json_real_value(v));
            if (strtod(text, NULL) == json_real_value(v)) break;
        }
    } else {
        return false;
    }
    return from_text(d, text);
}

static int compare_size(const dec *a, const dec *b)
{
    if (a->n != b->n) return a->n < b->n ? -1 : 1;
    int c = memcmp(a->digit, b->digit, (size_t)a->n);
    if (!c) c = memcmp(a->frac, b->frac, (size_t)(a->n_frac < b->n_frac ? a->n_frac : b->n_frac));
    if (!c) c = a->n_frac - b->n_frac;
    return (c > 0) - (c < 0);
}

int dec_compare(const dec *a, const dec *b)
{
    if (a->negative != b->negative) return a->negative ? -1 : 1;
    return a->negative ? -compare_size(a, b) : compare_size(a, b);
}

/* ---- digits ---- */

/* Sizes from `low` to `high` (not given: endless). */
typedef struct range {
    g_builder *b;
    dec low, high;
    bool integer;
    int frac; /* digits after the point, at most */
    uint32_t next;
    uint32_t part[MOST_FRAC + 2][2][2]; /* fractions from digit k on, by whether low and high have been met so far */
    bool known[MOST_FRAC + 2][2][2];
} range;

static int digit_of(const char *s, int n, int k)
{
    return k < n ? s[k] - '0' : 0;
}

/* After k digits of the fraction; `tl`, `th`: the digits so far are those of low, of high. */
static uint32_t fraction(range *r, int k, bool tl, bool th)
{
    uint32_t at = G_FAIL;
    if (r->known[k][tl][th]) return r->part[k][tl][th];
    const bool above = !tl || (k >= r->low.n_frac && !r->low.exclusive),
               below = !th || k < r->high.n_frac || !r->high.exclusive;
    if (k && above && below) at = r->next;
    const int lo = tl ? digit_of(r->low.frac, r->low.n_frac, k) : 0,
              hi = th ? digit_of(r->high.frac, r->high.n_frac, k) : 9;
    if (k < r->frac && !tl && !th) {
        at = k ? g_digits(r->b, 0, (uint32_t)(r->frac - k), r->next) : g_digits(r->b, 1, (uint32_t)r->frac, r->next);
    } else if (k < r->frac && lo <= hi) {
        at = g_or(r->b, at,
                  g_range(r->b, (uint8_t)('0' + lo), (uint8_t)('0' + lo), fraction(r, k + 1, tl, th && lo == hi)));
        if (hi > lo + 1)
            at = g_or(r->b, at,
                      g_range(r->b, (uint8_t)('1' + lo), (uint8_t)('0' + hi - 1), fraction(r, k + 1, false, false)));
        if (hi > lo)
            at = g_or(r->b, at, g_range(r->b, (uint8_t)('0' + hi), (uint8_t)('0' + hi), fraction(r, k + 1, false, th)));
    }
    r->known[k][tl][th] = true;
    return r->part[k][tl][th] = at;
}

/* After the last digit before the point. */
static uint32_t whole(range *r, bool tl, bool th)
{
    const bool above = !tl || (!r->low.n_frac && !r->low.exclusive),
               below = !th || r->high.n_frac || !r->high.exclusive;
    const uint32_t at = above && below ? r->next : G_FAIL;
    return r->integer ? at : g_or(r->b, at, g_text(r->b, ".", fraction(r, 0, tl, th)));
}

/* Numbers of n digits before the point, from digit k on. */
static uint32_t digits(range *r, int k, int n, bool tl, bool th)
{
    if (k == n) return whole(r, tl, th);
    if (!tl && !th) {
        const uint32_t end = whole(r, false, false);
        if (k || n == 1) return g_digits(r->b, (uint32_t)(n - k), (uint32_t)(n - k), end);
        return g_range(r->b, '1', '9', g_digits(r->b, (uint32_t)n - 1, (uint32_t)n - 1, end));
    }
    const int least = k == 0 && n > 1 ? 1 : 0;
    /* zero has no digits of its own */
    int lo = tl ? digit_of(r->low.digit, r->low.n, k) : 0, hi = th ? digit_of(r->high.digit, r->high.n, k) : 9;
    uint32_t at = G_FAIL;
    const bool tight_low = tl && lo >= least;
    if (lo < least) lo = least;
    if (lo > hi) return G_FAIL;
    at = g_range(r->b, (uint8_t)('0' + lo), (uint8_t)('0' + lo), digits(r, k + 1, n, tight_low, th && lo == hi));
    if (hi > lo + 1)
        at = g_or(r->b, at,
                  g_range(r->b, (uint8_t)('1' + lo), (uint8_t)('0' + hi - 1), digits(r, k + 1, n, false, false)));
    if (hi > lo)
        at = g_or(r->b, at, g_range(r->b, (uint8_t)('0' + hi), (uint8_t)('0' + hi), digits(r, k + 1, n, false, th)));
    return at;
}

static uint32_t sizes(g_builder *b, const dec *low, const dec *high, bool integer, uint32_t next)
{
    range r = {.b = b, .low = *low, .high = *high, .integer = integer, .next = next};
    const int from = low->n ? low->n : 1, most = integer ? INT_DIGITS : REAL_DIGITS;
    const int to = high->given ? (high->n ? high->n : 1) : from + 1 > most ? from + 1 : most;
    uint32_t at = G_FAIL;
    const int least_frac = (low->n_frac > high->n_frac ? low->n_frac : high->n_frac) + 1;
    r.frac = 15 - (high->given ? to : from); /* all of them stay apart as doubles */
    if (r.frac < least_frac) r.frac = least_frac;
    if (from > to) return G_FAIL;
    at = digits(&r, 0, from, true, high->given && from == to);
    if (to > from && high->given) at = g_or(b, at, digits(&r, 0, to, false, true));
    const int last = high->given ? to - 1 : to;
    if (last > from) /* lengths between */
        at =
            g_or(b, at, g_range(b, '1', '9', g_digits(b, (uint32_t)from, (uint32_t)last - 1, whole(&r, false, false))));
    return at;
}

/* ---- both sides of zero ---- */

/* The size becomes one more, or one less. */
static void step(dec *d, bool up)
{
    int i = d->n - 1;
    if (up) {
        while (i >= 0 && d->digit[i] == '9') d->digit[i--] = '0';
        if (i >= 0) {
            d->digit[i]++;
        } else if (d->n < DEC_DIGITS) {
            memmove(d->digit + 1, d->digit, (size_t)d->n++);
            d->digit[0] = '1';
        }
        return;
    }
    while (i >= 0 && d->digit[i] == '0') d->digit[i--] = '9';
    if (i >= 0) d->digit[i]--;
    if (d->n && d->digit[0] == '0') memmove(d->digit, d->digit + 1, (size_t)--d->n);
}

/* The nearest integer that the bound allows; direction 1: of a lower bound. */
static void to_integer(dec *d, int direction)
{
    const bool move = d->n_frac || d->exclusive;
    const bool away = (direction > 0) != d->negative; /* the size grows */
    if (!d->given) return;
    if (move && d->n_frac)
        away ? step(d, true) : (void)0;
    else if (move && !away && !d->n) /* 0, exclusive: to the other side of it */
        *d = (dec){.given = true, .negative = direction < 0, .n = 1, .digit = "1"};
    else if (move)
        step(d, away);
    d->n_frac = 0;
    d->exclusive = false;
    if (!d->n) d->negative = false;
}

uint32_t number_range(g_builder *b, const dec *low, const dec *high, bool integer, uint32_t next)
{
    dec lo = *low, hi = *high;
    const dec none = {0}, zero = {.given = true}, beyond = {.given = true, .exclusive = true},
              one = {.given = true, .n = 1, .digit = "1"};
    uint32_t at = G_FAIL;
    if (integer) {
        to_integer(&lo, 1);
        to_integer(&hi, -1);
    }
    if (lo.given && hi.given && dec_compare(&lo, &hi) > 0) return G_FAIL;
    if (!hi.given || !hi.negative)
        at = sizes(b, lo.given && !lo.negative ? &lo : &zero, hi.given ? &hi : &none, integer, next);
    if (!lo.given || lo.negative) {
        dec a = hi.given && hi.negative ? hi : integer ? one : beyond, z = lo.given ? lo : none;
        at = g_or(b, at, g_text(b, "-", sizes(b, &a, &z, integer, next)));
    }
    return at;
}
