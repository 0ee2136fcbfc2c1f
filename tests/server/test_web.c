/* server/web: the page's files and /snapshot over HTTP. What the page does in a browser is scripts/check page. */
#include "support/test.h"
#include "base/file.h"
#include "server/client.h"
#include <xxhash.h>

static const struct {
    const char *path, *file, *type;
} bundle[] = {{"/", "index.html", "text/html; charset=utf-8"},
              {"/style.css", "style.css", "text/css; charset=utf-8"},
              {"/app.js", "app.js", "text/javascript; charset=utf-8"},
              {"/markdown.js", "markdown.js", "text/javascript; charset=utf-8"},
              {"/machine.js", "machine.js", "text/javascript; charset=utf-8"},
              {"/icon.svg", "icon.svg", "image/svg+xml"}};
enum { FILES = sizeof bundle / sizeof bundle[0] };

static char *source(int i, size_t *n)
{
    char path[512], *text;
    aff_error err = {0};
    snprintf(path, sizeof path, "%s/src/server/web/%s", AFF_SOURCE_DIR, bundle[i].file);
    if (aff__read_file(path, 1 << 20, &text, n, &err) != AFF_OK) fail_msg("%s", err.msg);
    return text;
}

/* Each file is the source's bytes, needs no key, and has the headers that keep scripts of others out. */
static void files_are_the_sources(void **state)
{
    aff_server *s = serve((aff_server_options){.api_key = "secret"});
    for (int i = 0; i < FILES; i++) {
        size_t n;
        char *want = source(i, &n), line[128], match[160];
        answer a = call(s, "GET", bundle[i].path, "", "");
        assert_int_equal(a.status, 200);
        assert_string_equal(a.body, want);
        snprintf(line, sizeof line, "Content-Type: %s\r\n", bundle[i].type);
        assert_non_null(strstr(a.head, line));
        assert_non_null(strstr(a.head, "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; "));
        assert_null(strstr(a.head, "unsafe"));
        assert_non_null(strstr(a.head, "X-Content-Type-Options: nosniff"));
        assert_non_null(strstr(a.head, "Cache-Control: no-cache"));
        snprintf(line, sizeof line, "ETag: \"%016llx\"", (unsigned long long)XXH3_64bits(want, n));
        assert_non_null(strstr(a.head, line));
        done_with(&a);

        snprintf(match, sizeof match, "If-None-Match: \"x\", W/%s\r\n", line + 6);
        a = call(s, "GET", bundle[i].path, match, "");
        assert_int_equal(a.status, 304);
        assert_string_equal(a.body, "");
        done_with(&a);
        a = call(s, "HEAD", bundle[i].path, "", "");
        assert_int_equal(a.status, 200);
        assert_string_equal(a.body, "");
        done_with(&a);
        free(want);
    }
    answer a = call(s, "POST", "/", "x-api-key: secret\r\n", "{}");
    assert_int_equal(a.status, 404);
    done_with(&a);
    aff__server_stop(s, 0);
}

/* No other host, no inline script or style, no markup made of strings. */
static void files_are_self_contained(void **state)
{
    static const char *const never[] = {"<script>",  " style=", "onclick",     "onload",    "innerHTML", "outerHTML", "insertAdjacentHTML",
                                        "document.write", "eval(",   "new Function", "@import", "url(",      "import "};
    for (int i = 0; i < FILES; i++) {
        size_t n;
        char *text = source(i, &n);
        for (size_t k = 0; k < sizeof never / sizeof never[0]; k++)
            if (strstr(text, never[k])) fail_msg("%s has %s", bundle[i].file, never[k]);
        for (const char *p = strstr(text, "://"); p; p = strstr(p + 3, "://"))
            if (strncmp(p + 3, "www.w3.org/2000/svg\"", 20) != 0) fail_msg("%s names another host: %.40s", bundle[i].file, p - 5);
        free(text);
    }
    size_t n;
    char *html = source(0, &n);
    for (int i = 1; i < FILES; i++) {
        char name[64];
        snprintf(name, sizeof name, "\"%s\"", bundle[i].file);
        assert_non_null(strstr(html, name));
    }
    free(html);
}

static void snapshot_is_the_machine(void **state)
{
    aff_server *s = serve((aff_server_options){.api_key = "secret", .engine.slots = 3});
    answer a = call(s, "GET", "/snapshot", "", "");
    assert_int_equal(a.status, 401);
    done_with(&a);
    a = call(s, "GET", "/snapshot", "x-api-key: secret\r\n", "");
    assert_int_equal(int_at(a.json, "tokens"), 0);
    assert_int_equal(json_string_length(at(a.json, "plane.heat")), 6 * 16);
    assert_int_equal(strspn(text_at(a.json, "plane.heat"), "A"), 6 * 16); /* nothing ran */
    done_with(&a);

    a = call(s, "POST", "/v1/completions", "x-api-key: secret\r\n",
             "{\"prompt\": \"The capital of France is\", \"max_tokens\": 6, \"temperature\": 0, \"ignore_eos\": true}");
    assert_int_equal(a.status, 200);
    const long long prompt = int_at(a.json, "usage.prompt_tokens");
    done_with(&a);
    aff__server_wait_idle(s);
    a = call(s, "GET", "/snapshot", "x-api-key: secret\r\n", "");
    while (int_at(a.json, "tokens") < 6) { /* the answer ends inside the step whose end brings the snapshot */
        done_with(&a);
        a = call(s, "GET", "/snapshot", "x-api-key: secret\r\n", "");
    }
    assert_int_equal(int_at(a.json, "tokens"), 6);
    assert_int_equal(int_at(a.json, "prompt_rows"), prompt - 1);
    assert_true(json_number_value(at(a.json, "decode_seconds")) > 0);
    assert_int_equal(json_array_size(at(a.json, "slots")), 3);
    assert_string_equal(text_at(a.json, "slots.0.phase"), "idle");
    assert_int_equal(int_at(a.json, "plane.layers"), 6);
    assert_int_equal(int_at(a.json, "plane.experts"), 16);
    assert_int_equal(strspn(text_at(a.json, "plane.tier"), "hd"), 6 * 16); /* no card here */
    assert_non_null(strchr(text_at(a.json, "plane.heat"), '/'));           /* the hottest expert */
    assert_true(int_at(a.json, "host.resident") > 1 << 20 && int_at(a.json, "host.resident") <= int_at(a.json, "host.peak"));
    done_with(&a);
    aff__server_stop(s, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(files_are_the_sources), cmocka_unit_test(files_are_self_contained),
                                       cmocka_unit_test(snapshot_is_the_machine)};
    return cmocka_run_group_tests(tests, open_model, close_model);
}
