/* The file of a saved conversation: any bytes are refused or taken, and what was taken saves. */
#include "ui/talk.h"
#include "format/json.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    aff_talk t = {0};
    aff_error err = {0};
    aff_buf out = {0};
    if (aff__talk_init(&t, &err) != AFF_OK) abort();
    if (aff__talk_parse(&t, (const char *)data, size, "input", &err) == AFF_OK) {
        if (!json_is_array(t.messages) || aff__json_dump_python(&out, t.messages, &err) != AFF_OK) abort();
    } else if (!err.msg[0] || json_array_size(t.messages)) {
        abort();
    }
    aff__buf_free(&out);
    aff__talk_free(&t);
    return 0;
}
