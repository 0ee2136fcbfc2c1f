/* aff-info from the outside: what it prints, and its exit codes. */
#define _GNU_SOURCE
#include "format/sample.h"
#include <fcntl.h>
#include <jansson.h>
#include <sys/wait.h>

static char output[1 << 16];

static const char *errors_to = "2>&1";

/* Runs aff-info with the arguments; stdout and stderr together in `output` unless errors_to says otherwise. Returns the
 * exit code. */
static int info(const char *args)
{
    char cmd[512];
    snprintf(cmd, sizeof cmd, "%s/aff-info %s %s", AFF_BIN_DIR, args, errors_to);
    FILE *f = popen(cmd, "r");
    assert_non_null(f);
    size_t n = fread(output, 1, sizeof output - 1, f);
    output[n] = 0;
    int rc = pclose(f);
    assert_true(WIFEXITED(rc));
    return WEXITSTATUS(rc);
}

static int info_file(const char *flags)
{
    char args[160];
    snprintf(args, sizeof args, "%s %s", flags, path);
    return info(args);
}

static void has(const char *text)
{
    if (!strstr(output, text)) fail_msg("'%s' is not in:\n%s", text, output);
}

static void damage(long at)
{
    int fd = open(path, O_RDWR);
    char b;
    assert_int_equal(pread(fd, &b, 1, at), 1);
    b ^= 4;
    assert_int_equal(pwrite(fd, &b, 1, at), 1);
    close(fd);
}

static void text_output(void **state)
{
    write_worked(false, "{\"tool\":\"sample\"}");
    assert_int_equal(info_file("--experts"), 0);
    has("size         2.02 MiB (2113648 bytes)");
    has("flags        none");
    has("hashes       XXH3-64 of 3 tensors and 2 experts, identity ");
    has("metadata     23 bytes\n{\"num_hidden_layers\":1}\n");
    has("provenance   17 bytes\n{\"tool\":\"sample\"}\n");
    has("w                                               128        128  fp8_e4m3              16385             "
        "9728\n");
    has("3 tensors, 24.02 KiB: f32 2 (8.02 KiB) fp8_e4m3 1 (16.00 KiB)");
    has("expert pool  16.00 KiB at 2097152 (2MiB)");
    has("    0        2           64           64 q2p875q4     q2p875q4             8192    16.00 KiB\n");
    has("2 experts in 1 layers, 5.3333 bits per weight (2.8750 without row scales and padding)"); /* 8192*8/12288;
                                                                                                     1472*8/4096 */
    has("up   scales     at         4096           192 bytes");
    has("codebook     2048 entries, ");
    has("exponent fields 1 to 7, XXH3 ");
    has("verdict      ok: structure checked; --verify would");
    assert_int_equal(info_file("--verify"), 0);
    has("verdict      ok: structure and every hash checked");
}

static void verdicts(void **state)
{
    write_worked(false, NULL);
    damage(2097152 + 100);
    assert_int_equal(info_file(""), 0);
    assert_int_equal(info_file("--verify"), 1);
    has("verdict      BAD: ");
    has("damaged: layer 0 expert 0: expected hash ");
    write_worked(true, NULL);
    assert_int_equal(info_file(""), 0);
    has("this file has no hashes");
    assert_int_equal(info_file("--verify"), 1);
    has("verdict      cannot be verified: ");
    damage(3);
    assert_int_equal(info_file(""), 1);
    has("error: ");
    has("does not begin with 'AFFINITY'");
    assert_int_equal(info(dir), 1);
    has("a folder, not a container");
    assert_int_equal(info("/nonexistent.aff"), 1);
    has("error: /nonexistent.aff: cannot open: No such file or directory\n");
}

static void usage_errors(void **state)
{
    assert_int_equal(info(""), 2);
    has("expected FILE, got 0 arguments");
    assert_int_equal(info("a b"), 2);
    assert_int_equal(info("--frobnicate a"), 2);
    has("unknown or ambiguous option '--frobnicate'");
    assert_int_equal(info("--help"), 0);
    has("--experts");
    has("--json");
    has("--verify");
    assert_int_equal(info("--version"), 0);
    has("aff-info ");
}

static void json_output(void **state)
{
    size_t n;
    uint8_t *p = tiny(&n);
    assert_int_equal(info_file("--json --verify"), 0);
    json_t *j = json_loads(output, 0, NULL);
    assert_non_null(j);
    assert_true(json_is_true(json_object_get(j, "ok")) && json_is_true(json_object_get(j, "verified")));
    assert_int_equal(json_integer_value(json_object_get(j, "size")), n);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(j, "provenance"), "a")), 1);
    assert_true(json_is_null(json_object_get(j, "codebook")));
    const json_t *layer = json_array_get(json_object_get(j, "layers"), 0);
    assert_string_equal(json_string_value(json_object_get(layer, "dtype")), "mxfp4");
    assert_true(json_real_value(json_object_get(layer, "profile_max")) == 0.75);
    assert_int_equal(json_integer_value(json_object_get(json_array_get(json_object_get(j, "tensors"), 1), "offset")),
                     1280);
    json_decref(j);
    damage(1300);
    errors_to = "2>/dev/null";
    assert_int_equal(info_file("--json --verify"), 1);
    errors_to = "2>&1";
    j = json_loads(output, 0, NULL);
    assert_true(json_is_false(json_object_get(j, "ok")));
    assert_non_null(strstr(json_string_value(json_object_get(j, "error")), "tensor 'm'"));
    json_decref(j);
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(text_output), cmocka_unit_test(verdicts),
                                       cmocka_unit_test(usage_errors), cmocka_unit_test(json_output)};
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
