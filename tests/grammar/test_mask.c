/* grammar: masks against every token tried byte by byte; walks under masks end in values that other code takes for
 * right; what a budget does; calls in their markup. */
#include "support/test.h"
#include "format/json.h"
#include "base/rng.h"
#include "support/v4_tokenizer.h"
#include "text/parse.h"
#include "grammar/program.h"
#include "words.h"

static uint64_t seed = 7;
static uint32_t roll(uint32_t n)
{
    return (uint32_t)((aff__mix64(seed += 0x9E3779B97F4A7C15u) >> 32) * (uint64_t)n >> 32);
}

static json_t *parse(const char *text)
{
    json_t *v = NULL;
    aff_error err = {0};
    if (aff__json_parse_exact(&v, text, strlen(text), "schema", false, 64, &err) != AFF_OK)
        fail_msg("%s: %s", text, err.msg);
    return v;
}

static aff_grammar *compile(const aff_vocab *v, const aff_grammar_request *r)
{
    aff_grammar *g;
    aff_error err = {0};
    if (aff__grammar_compile(&g, v, r, &err) != AFF_OK) fail_msg("%s", err.msg);
    return g;
}

static aff_matcher *matcher(const aff_grammar *g)
{
    aff_matcher *m;
    aff_error err = {0};
    if (aff__matcher_create(&m, g, &err) != AFF_OK) fail_msg("%s", err.msg);
    return m;
}

#define TOOLS                                                                                                          \
    "[{\"type\": \"function\", \"function\": {\"name\": \"look\", \"strict\": true, \"parameters\": {\"type\": "       \
    "\"object\", \"properties\": {\"name\": {\"type\": "                                                               \
    "\"string\"}, \"age\": {\"type\": [\"integer\", \"null\"]}, \"tags\": {\"type\": \"array\", \"items\": "           \
    "{\"type\": \"string\", \"maxLength\": 4}}}, "                                                                     \
    "\"required\": [\"name\"], \"additionalProperties\": false}}}, {\"type\": \"function\", \"function\": {\"name\": " \
    "\"run\", \"parameters\": {\"type\": "                                                                             \
    "\"object\", \"properties\": {\"code\": {\"type\": \"string\", \"minLength\": 2, \"maxLength\": 9}, \"x\": {}}, "  \
    "\"required\": [\"code\"]}}}, {\"type\": "                                                                         \
    "\"function\", \"function\": {\"name\": \"stop\"}}]"

static const char *const schemas[] = {
    "true",
    "{\"type\": \"object\"}",
    "{\"type\": \"string\", \"minLength\": 3, \"maxLength\": 7}",
    "{\"type\": \"array\", \"items\": {\"type\": \"string\", \"maxLength\": 12}, \"minItems\": 1, \"maxItems\": 5}",
    "{\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\"}, \"age\": {\"type\": \"integer\", "
    "\"minimum\": 0, \"maximum\": 130}, \"ab\": {\"enum\": [\"abc\", \"abd\", 12, null]}}, \"required\": [\"age\"]}",
    "{\"anyOf\": [{\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\"}}, \"additionalProperties\": "
    "false, \"required\": [\"name\"]}, {\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\", "
    "\"pattern\": \"^a+b?$\"}, \"age\": true}, \"additionalProperties\": false, \"required\": [\"name\", \"age\"]}]}",
    "{\"$defs\": {\"t\": {\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\", \"maxLength\": 3}, "
    "\"l\": {\"type\": \"array\", \"items\": {\"$ref\": \"#/$defs/t\"}}}, \"required\": [\"name\", \"l\"], "
    "\"additionalProperties\": false}}, \"$ref\": \"#/$defs/t\"}",
    "{\"type\": \"array\", \"items\": {\"type\": \"number\", \"minimum\": -1.5, \"maximum\": 20}}",
    "{\"type\": \"string\", \"format\": \"date-time\"}",
    "{\"type\": \"array\", \"minItems\": 3, \"items\": {\"type\": \"string\", \"pattern\": \"^\\\\S+( \\\\S+)*$\", "
    "\"maxLength\": 40}}",
    "{\"type\": \"string\", \"pattern\": \"^[^,]*(, ?[a-z\\u00e9]+)*$\", \"minLength\": 20, \"maxLength\": 45}",
    "{\"type\": \"string\", \"pattern\": \"^(ab|\\u00e9|\\n)*c?$\", \"minLength\": 30}",
};
enum { N_SCHEMAS = sizeof schemas / sizeof *schemas };

typedef struct kind {
    const char *schema;
    aff_calls calls;
    bool thinking, one_call, v41;
} kind;
static const kind kinds[] = {{NULL, AFF_CALLS_FREE},
                             {NULL, AFF_CALLS_REQUIRED},
                             {NULL, AFF_CALLS_REQUIRED, true, true},
                             {NULL, AFF_CALLS_REQUIRED, false, false, true},
                             {"{\"type\": \"object\"}", AFF_CALLS_FREE},
                             {"{\"type\": \"object\"}", AFF_CALLS_FREE, true},
                             {"{\"type\": \"integer\"}", AFF_CALLS_NONE, true}};
enum { N_KINDS = sizeof kinds / sizeof *kinds, N_CASES = N_SCHEMAS + N_KINDS };

static aff_grammar *case_of(const aff_vocab *v, int i)
{
    json_t *tools = parse(TOOLS), *schema = NULL;
    aff_grammar_request r = {0};
    if (i < N_SCHEMAS) {
        schema = parse(schemas[i]);
        r.schema = schema;
    } else {
        const kind *k = &kinds[i - N_SCHEMAS];
        if (k->schema) schema = parse(k->schema);
        r = (aff_grammar_request){.schema = schema,
                                  .calls = k->calls,
                                  .tools = tools,
                                  .thinking = k->thinking,
                                  .one_call = k->one_call,
                                  .v41 = k->v41};
    }
    aff_grammar *g = compile(v, &r);
    json_decref(schema);
    json_decref(tools);
    return g;
}

/* A token of the mask, the end of sequence rather later. */
static int32_t pick(const aff_vocab *v, const uint64_t *w)
{
    int32_t found = -1;
    uint32_t n = 0;
    for (int32_t id = 0; id < v->n; id++)
        if (in_mask(w, id) && (id != v->eos || !n) && roll(++n) == 0) found = id;
    return found;
}

static void compare(aff_matcher *m, const aff_vocab *v, aff_match s, int64_t left)
{
    const uint64_t *w;
    aff_error err = {0};
    uint32_t least = UINT32_MAX;
    bool any = false;
    if (aff__matcher_mask(m, s, left, &w, &err) != AFF_OK) fail_msg("%s", err.msg);
    uint64_t *copy = malloc((size_t)v->words * sizeof *w);
    assert_non_null(copy);
    memcpy(copy, w, (size_t)v->words * sizeof *w);
    for (int32_t id = 0; id < v->n; id++) {
        const aff_match to = aff__matcher_step(m, s, id);
        const uint32_t need = to ? aff__matcher_need(m, to) : UINT32_MAX;
        if (id != v->eos && to && need < least) least = need;
        any |= to && (id == v->eos || need <= left - 1);
    }
    const uint32_t bound = any ? (uint32_t)(left - 1) : least;
    for (int32_t id = 0; id < v->n; id++) {
        const aff_match to = aff__matcher_step(m, s, id);
        const bool want = to && (id == v->eos || aff__matcher_need(m, to) <= bound);
        if (want != in_mask(copy, id))
            fail_msg("token %d of state %u, %lld left: %s", (int)id, s, (long long)left,
                     want ? "missing" : "not allowed");
    }
    free(copy);
}

static void brute_force(void **state)
{
    for (int marker = 0; marker < 2; marker++) {
        aff_vocab *v = words(marker);
        for (int c = 0; c < N_CASES; c++) {
            aff_grammar *g = case_of(v, c);
            aff_matcher *m = matcher(g);
            for (int walk = 0; walk < 6; walk++) {
                aff_match s = aff__matcher_start(m);
                for (int n = 0; n < 60 && s; n++) {
                    const uint64_t *w;
                    compare(m, v, s, 1 << 20);
                    compare(m, v, s, 1 + roll(40));
                    assert_int_equal(aff__matcher_mask(m, s, 1 << 20, &w, NULL), AFF_OK);
                    const int32_t id = pick(v, w);
                    assert_true(id >= 0); /* no way is a dead end */
                    if (id == v->eos) break;
                    s = aff__matcher_step(m, s, id);
                    assert_true(s);
                }
            }
            aff__matcher_free(m);
            aff__grammar_free(g);
        }
        aff__vocab_free(v);
    }
}

/* ---- walks ---- */

/* Checks a value against the few keywords that the schemas above use, by other means than theirs. */
static bool valid(const json_t *root, const json_t *schema, const json_t *v)
{
    const json_t *x, *one;
    const char *key;
    json_t *p;
    size_t i;
    if (json_is_true(schema)) return true;
    if ((x = json_object_get(schema, "$ref")))
        return valid(root, json_object_get(json_object_get(root, "$defs"), "t"), v);
    if ((x = json_object_get(schema, "anyOf"))) {
        json_array_foreach(x, i, one)
        {
            if (valid(root, one, v)) return true;
        }
        return false;
    }
    if ((x = json_object_get(schema, "enum"))) {
        json_array_foreach(x, i, one)
        {
            if (json_equal(one, v)) return true;
        }
        return false;
    }
    const char *type = json_string_value(json_object_get(schema, "type"));
    static const char *const names[] = {"object", "array", "string", "integer", "number", "boolean", "boolean", "null"};
    if (strcmp(names[json_typeof(v)], type) != 0 && !(json_is_integer(v) && strcmp(type, "number") == 0) &&
        !aff__json_literal(v, &(size_t){0}))
        return false;
    if (json_is_string(v)) {
        long chars = 0;
        for (const char *s = json_string_value(v); *s; s++) chars += ((uint8_t)*s & 0xC0) != 0x80;
        if ((x = json_object_get(schema, "minLength")) && chars < json_integer_value(x)) return false;
        if ((x = json_object_get(schema, "maxLength")) && chars > json_integer_value(x)) return false;
    }
    if (json_is_number(v)) {
        if ((x = json_object_get(schema, "minimum")) && json_number_value(v) < json_number_value(x)) return false;
        if ((x = json_object_get(schema, "maximum")) && json_number_value(v) > json_number_value(x)) return false;
    }
    if (json_is_array(v)) {
        if ((x = json_object_get(schema, "minItems")) && (json_int_t)json_array_size(v) < json_integer_value(x))
            return false;
        if ((x = json_object_get(schema, "maxItems")) && (json_int_t)json_array_size(v) > json_integer_value(x))
            return false;
        json_array_foreach(v, i, one)
        {
            if ((x = json_object_get(schema, "items")) && !valid(root, x, one)) return false;
        }
    }
    if (json_is_object(v)) {
        json_array_foreach(json_object_get(schema, "required"), i, one)
        {
            if (!json_object_get(v, json_string_value(one))) return false;
        }
        json_object_foreach((json_t *)(uintptr_t)v, key, p)
        {
            x = json_object_get(json_object_get(schema, "properties"), key);
            if (!x && json_is_false(json_object_get(schema, "additionalProperties"))) return false;
            if (x && !valid(root, x, p)) return false;
        }
    }
    return true;
}

/* A random answer under a budget; false if it was used up. */
static bool walk(aff_matcher *m, const aff_vocab *v, int64_t budget, aff_buf *out)
{
    aff_match s = aff__matcher_start(m);
    out->n = 0;
    for (int64_t left = budget; left > 0; left--) {
        const uint64_t *w;
        size_t n;
        aff_error err = {0};
        if (aff__matcher_mask(m, s, left, &w, &err) != AFF_OK) fail_msg("%s", err.msg);
        const int32_t id = pick(v, w);
        assert_true(id >= 0);
        if (id == v->eos) return true;
        s = aff__matcher_step(m, s, id);
        assert_true(s);
        const char *text = word(v, id, &n);
        assert_int_equal(aff__buf_put(out, text, n, NULL), AFF_OK);
        assert_int_equal(aff__matcher_keep(m, &s, NULL), AFF_OK);
    }
    return false;
}
static void walks(void **state)
{
    aff_vocab *v = words(true);
    aff_buf out = {0};
    for (int c = 0; c < N_SCHEMAS; c++) {
        json_t *schema = parse(schemas[c]);
        aff_grammar *g = case_of(v, c);
        for (int i = 0; i < 100; i++) {
            aff_matcher *m = matcher(g);
            json_t *value = NULL;
            aff_error err = {0};
            if (!walk(m, v, 60 + roll(200), &out)) fail_msg("%s: not closed: %s", schemas[c], out.s);
            if (aff__json_parse_exact(&value, out.s, out.n, "answer", false, 256, &err) != AFF_OK)
                fail_msg("%s: %s", out.s, err.msg);
            if (!valid(schema, schema, value)) fail_msg("%s does not fit %s", out.s, schemas[c]);
            json_decref(value);
            aff__matcher_free(m);
        }
        aff__grammar_free(g);
        json_decref(schema);
    }
    aff__buf_free(&out);
    aff__vocab_free(v);
}

typedef struct parsed {
    int calls;
    aff_buf text, args, names;
} parsed;

static aff_status on_event(void *ctx, const aff_parse_event *e, aff_error *err)
{
    parsed *p = ctx;
    if (e->kind == AFF_PARSE_TEXT) return aff__buf_put(&p->text, e->s, e->n, err);
    if (e->kind == AFF_PARSE_CALL) return aff__buf_put(&p->names, e->s, e->n, err);
    if (e->kind == AFF_PARSE_ARGS) return aff__buf_put(&p->args, e->s, e->n, err);
    assert_int_not_equal(e->kind, AFF_PARSE_CALL_DROP);
    if (e->kind != AFF_PARSE_CALL_END) return AFF_OK;
    json_t *args = NULL, *tools = parse(TOOLS), *tool;
    size_t i;
    if (aff__json_parse_exact(&args, p->args.s, p->args.n, "arguments", true, 256, err) != AFF_OK)
        fail_msg("%s", p->args.s);
    bool found = false;
    json_array_foreach(tools, i, tool)
    {
        const json_t *f = json_object_get(tool, "function"), *schema = json_object_get(f, "parameters");
        if (strcmp(json_string_value(json_object_get(f, "name")), p->names.s) != 0) continue;
        found = true;
        if (i == 0) { /* its types are more than valid() knows */
            const json_t *age = json_object_get(args, "age"), *tags = json_object_get(args, "tags");
            assert_true(json_is_string(json_object_get(args, "name")));
            assert_true(!age || json_is_null(age) || json_is_integer(age) || aff__json_literal(age, &(size_t){0}));
            assert_true(!tags || json_is_array(tags));
        } else if (schema && !valid(schema, schema, args)) {
            fail_msg("%s: %s", p->names.s, p->args.s);
        }
        if (i == 2) assert_int_equal(json_object_size(args), 0);
    }
    if (!found) fail_msg("called %s", p->names.s);
    json_decref(args);
    json_decref(tools);
    p->calls++;
    p->args.n = p->names.n = 0;
    return AFF_OK;
}

/* What the grammar of calls lets through, the parser of the server reads as calls and nothing else. */
static void call_walks(void **state)
{
    aff_buf out = {0};
    for (int marker = 0; marker < 2; marker++) {
        aff_vocab *v = words(marker);
        for (int c = 0; c < N_KINDS; c++) {
            if (kinds[c].calls != AFF_CALLS_REQUIRED) continue;
            aff_grammar *g = case_of(v, N_SCHEMAS + c);
            for (int i = 0; i < 150; i++) {
                aff_matcher *m = matcher(g);
                json_t *tools = parse(TOOLS);
                parsed p = {0};
                aff_parser *parser;
                if (!walk(m, v, 300 + roll(100), &out)) fail_msg("not closed: %s", out.s);
                assert_int_equal(aff__parser_create(&parser, kinds[c].thinking, tools, on_event, &p, NULL), AFF_OK);
                assert_int_equal(aff__parser_feed(parser, out.s, out.n, NULL), AFF_OK);
                assert_int_equal(aff__parser_end(parser, true, NULL), AFF_OK);
                if (p.calls < 1 || p.text.n || (kinds[c].one_call && p.calls != 1))
                    fail_msg("%d calls, text %s: %s", p.calls, p.text.n ? p.text.s : "", out.s);
                aff__parser_free(parser);
                aff__buf_free(&p.text);
                aff__buf_free(&p.args);
                aff__buf_free(&p.names);
                json_decref(tools);
                aff__matcher_free(m);
            }
            aff__grammar_free(g);
        }
        aff__vocab_free(v);
    }
    aff__buf_free(&out);
}

/* ---- single texts of calls ---- */

static bool takes(const aff_grammar *g, const char *text)
{
    aff_matcher *m = matcher(g);
    const aff_match s = follow(m, aff__matcher_start(m), text, strlen(text), true);
    const bool ok = s && aff__matcher_complete(m, s);
    aff__matcher_free(m);
    return ok;
}
#define OPEN               "\n\n<" DSML "tool_calls>\n"
#define CLOSE              "\n</" DSML "tool_calls>"
#define INVOKE(name, body) "<" DSML "invoke name=\"" name "\">\n" body "\n</" DSML "invoke>"
#define PARAM(key, string, value)                                                                                      \
    "<" DSML "parameter name=\"" key "\" string=\"" string "\">" value "</" DSML "parameter>"

static void calls(void **state)
{
    aff_vocab *v = words(true);
    static const struct {
        const char *text;
        bool ok;
    } cases[] = {
        {OPEN INVOKE("stop", "") CLOSE, true},
        {OPEN INVOKE("look", PARAM("name", "true", "a \"b\"\n<c> </d> & \\")) CLOSE, true},
        {OPEN INVOKE("look", PARAM("name", "true", "x") "\n" PARAM("age", "false", "null") "\n" PARAM(
                                 "tags", "false", "[\"a\", \"b\"]")) CLOSE,
         true},
        {OPEN INVOKE("look", PARAM("name", "true", "x")) "\n" INVOKE("stop", "") CLOSE, true},
        {OPEN INVOKE("run", PARAM("code", "true", "<<//<") "\n" PARAM("x", "true", "")) CLOSE, true},
        {OPEN INVOKE("run", PARAM("code", "true", "abcdefghi") "\n" PARAM("other", "false", "{\"a\": 1}")) CLOSE, true},
        {"", false},
        {"text", false},
        {OPEN CLOSE, false},
        {OPEN INVOKE("look", "") CLOSE, false},
        {OPEN INVOKE("lok", "") CLOSE, false},
        {OPEN INVOKE("look", PARAM("name", "false", "\"x\"")) CLOSE, false},
        {OPEN INVOKE("look", PARAM("name", "true", "x") "\n" PARAM("age", "true", "3")) CLOSE, false},
        {OPEN INVOKE("look", PARAM("name", "true", "x") "\n" PARAM("tags", "false", "[\"abcde\"]")) CLOSE, false},
        {OPEN INVOKE("look", PARAM("name", "true", "x") "\n" PARAM("other", "true", "3")) CLOSE, false},
        {OPEN INVOKE("run", PARAM("code", "true", "a")) CLOSE, false},
        {OPEN INVOKE("run", PARAM("code", "true", "abcdefghij")) CLOSE, false},
        {OPEN INVOKE("stop", PARAM("a", "true", "")) CLOSE, false},
        {OPEN INVOKE("stop", "") CLOSE "\n", false}};
    aff_grammar *g = case_of(v, N_SCHEMAS + 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (takes(g, cases[i].text) != cases[i].ok) fail_msg("%s", cases[i].text);
    aff_matcher *m = matcher(g); /* the marker as text is none, and no text may pretend to be it */
    assert_true(follow(m, aff__matcher_start(m), "\n\n<", 3, false));
    assert_false(follow(m, aff__matcher_start(m), "\n\n<" DSML, 3 + sizeof DSML - 1, false));
    static const char value[] =
        OPEN "<" DSML "invoke name=\"look\">\n<" DSML "parameter name=\"name\" string=\"true\">";
    const aff_match s = follow(m, aff__matcher_start(m), value, sizeof value - 1, true);
    assert_true(s);
    assert_true(follow(m, s, "a " DSML, 2 + sizeof DSML - 1, false));
    assert_true(follow(m, s, "<x" BAR, 2 + sizeof BAR - 1, false));
    assert_false(follow(m, s, "<" BAR, sizeof BAR, false));
    assert_false(follow(m, s, "</" BAR, 1 + sizeof BAR, false));
    assert_false(aff__matcher_step(m, s, W_USER));
    aff__matcher_free(m);
    aff__grammar_free(g);
    g = case_of(v, N_SCHEMAS + 2); /* one call, behind reasoning */
    assert_true(takes(g, "so \xFF < </thin k></think>" OPEN INVOKE("stop", "") CLOSE));
    assert_true(takes(g, "so\n\n<" DSML "tool_calls>\n" INVOKE("stop", "") CLOSE));
    assert_false(takes(g, "so" OPEN INVOKE("stop", "") "\n" INVOKE("stop", "") CLOSE));
    assert_false(takes(g, "so</think>"));
    assert_false(takes(g, "so"));
    aff__grammar_free(g);
    g = case_of(v, N_SCHEMAS + 3);
    assert_true(
        takes(g, "\n\n<" DSML " calls>\n<" DSML " invoke name=\"stop\">\n\n</" DSML " invoke>\n</" DSML " calls>"));
    aff__grammar_free(g);
    g = case_of(v, N_SCHEMAS); /* free */
    assert_true(takes(g, "any <b>text</b>"));
    assert_true(takes(g, ""));
    assert_true(takes(g, "text " OPEN INVOKE("stop", "") CLOSE));
    assert_false(takes(g, "text <" DSML));
    assert_false(takes(g, "text <" DSML "invoke"));
    aff__grammar_free(g);
    g = case_of(v, N_SCHEMAS + 4); /* an object or calls */
    assert_true(takes(g, "{\"a\": 1}"));
    assert_true(takes(g, OPEN INVOKE("stop", "") CLOSE));
    assert_false(takes(g, "[]"));
    aff__grammar_free(g);
    aff__vocab_free(v);
}

/* ---- the real vocabulary ---- */

static void full_size(void **state)
{
    aff_tokenizer *tok = aff_test_v4_tokenizer();
    aff_vocab *v;
    aff_error err = {0};
    if (aff__vocab_of(&v, tok, 1, &err) != AFF_OK) fail_msg("%s", err.msg);
    assert_int_equal(v->n, 129280);
    assert_true(v->marked);
    assert_false(v->spelled);
    for (int c = 0; c < N_CASES; c += 3) {
        aff_grammar *g = case_of(v, c);
        aff_matcher *m = matcher(g);
        aff_match s = aff__matcher_start(m);
        for (int n = 0; n < 12 && s; n++) {
            const uint64_t *w;
            compare(m, v, s, n % 2 ? 1 << 20 : 30);
            assert_int_equal(aff__matcher_mask(m, s, 1 << 20, &w, NULL), AFF_OK);
            const int32_t id = pick(v, w);
            assert_true(id >= 0);
            if (id == v->eos) break;
            s = aff__matcher_step(m, s, id);
        }
        aff__matcher_free(m);
        aff__grammar_free(g);
    }
    aff__vocab_free(v);
    aff__tokenizer_free(tok);
}

static aff_match by_bytes(aff_matcher *m, const aff_vocab *v, aff_match s, const char *text, size_t n)
{
    for (size_t i = 0; i < n && s; i++) s = aff__matcher_step(m, s, v->all.node[v->first[(uint8_t)text[i]]].token);
    return s;
}

/* Patterns with a length in the real vocabulary, along a text that comes to both bounds. */
static void lengths(void **state)
{
    static const char *const forms[] = {
        "{\"type\": \"string\", \"pattern\": \"^\\\\S+( \\\\S+)*$\", \"maxLength\": 200}",
        "{\"type\": \"string\", \"pattern\": \"^[^,]+(, [^,]+)*$\", \"minLength\": 150, \"maxLength\": 220}"};
    static const int at[] = {0, 1, 2, 60, 61, 139, 148, 149, 150, 151, 170, 190, 196, 197, 198, 199, 200};
    static const char piece[] = "so it goes, on and on \xE4\xBD\xA0 ";
    aff_tokenizer *tok = aff_test_v4_tokenizer();
    aff_vocab *v;
    assert_int_equal(aff__vocab_of(&v, tok, 1, NULL), AFF_OK);
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
        json_t *schema = parse(forms[f]);
        aff_grammar *g = compile(v, &(aff_grammar_request){.schema = schema});
        aff_matcher *m = matcher(g);
        aff_match s = by_bytes(m, v, aff__matcher_start(m), "\"", 1);
        assert_true(g->n_alike > 0);
        size_t i = 0;
        for (int chars = 0, k = 0; k < (int)(sizeof at / sizeof *at); chars++) {
            assert_true(s);
            if (chars == at[k]) {
                compare(m, v, s, 1 << 20);
                compare(m, v, s, 40);
                k++;
            }
            const size_t n = (uint8_t)piece[i] < 0x80 ? 1 : 3;
            s = by_bytes(m, v, s, piece + i, n);
            i = (i + n) % (sizeof piece - 1);
        }
        aff__matcher_free(m);
        aff__grammar_free(g);
        json_decref(schema);
    }
    aff__vocab_free(v);
    aff__tokenizer_free(tok);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(brute_force), cmocka_unit_test(walks),
                                       cmocka_unit_test(calls),       cmocka_unit_test(call_walks),
                                       cmocka_unit_test(full_size),   cmocka_unit_test(lengths)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
