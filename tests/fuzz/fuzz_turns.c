/* Records of kept turns. The first byte: 0, the rest is a file's records; else it is one record's contents, to which
 * size and checksum are added. What is read is written back as the same bytes; a broken one is refused and leaves the
 * place alone. */
#include "server/replay.h"
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok) abort();
}

static void read_all(const char *bytes, size_t n)
{
    size_t at = 0;
    for (;;) {
        aff_turn t;
        aff_buf again = {0};
        const size_t from = at;
        if (!aff__turn_read(&t, bytes, n, &at)) {
            require(at == from && !t.call && !t.ids);
            return;
        }
        require(at > from && at <= n);
        require(aff__turn_write(&again, &t, NULL) == AFF_OK);
        require(again.n == at - from && memcmp(again.s, bytes + from, again.n) == 0);
        aff__buf_free(&again);
        aff__turn_free(&t);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    aff_buf b = {0};
    if (size < 1) return 0;
    const char *rest = (const char *)data + 1;
    if (data[0]) {
        const uint64_t sum = XXH3_64bits(rest, size - 1);
        char head[12];
        for (int i = 0; i < 4; i++) head[i] = (char)((size - 1) >> 8 * i);
        for (int i = 0; i < 8; i++) head[4 + i] = (char)(sum >> 8 * i);
        require(aff__buf_put(&b, head, sizeof head, NULL) == AFF_OK);
    }
    require(aff__buf_put(&b, rest, size - 1, NULL) == AFF_OK);
    read_all(b.s, b.n);
    aff__buf_free(&b);
    return 0;
}
