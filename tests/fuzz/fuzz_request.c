/* Bodies of requests by the decoder of every dialect (first byte). One that is accepted is in range throughout, and its
 * conversation renders or is refused with a reason; one that is refused says why. */
#include "server/ask.h"
#include "text/utf8.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { VOCAB = 4096 };

static void require(bool ok)
{
    if (!ok) abort();
}

static void check_accepted(const aff_ask *a)
{
    require(a->n >= 1 && a->n <= AFF_MAX_CHOICES && a->n_stop <= AFF_MAX_STOPS);
    require(a->max_tokens == -1 || a->max_tokens >= 1);
    require(a->sampling.top_p >= 0 && a->sampling.top_p <= 1 && a->sampling.top_k >= 0);
    require(a->top_logprobs >= 0 && a->top_logprobs <= AFF_MAX_TOP_LOGPROBS);
    require(aff__adjust_check(&a->adjust, VOCAB, NULL) == AFF_OK);
    for (int i = 0; i < a->n_stop; i++) require(a->stop[i].n && a->stop[i].n <= AFF_MAX_STOP_BYTES);
    for (int64_t i = 0; i < a->n_ids; i++) require(a->ids[i] >= 0 && a->ids[i] < VOCAB);
    for (size_t i = 0; i < a->ignored.n; i++) require(a->ignored.s[i] >= ' ' && a->ignored.s[i] < 127);
    if (a->dialect == AFF_COMPLETIONS) {
        require(a->prompt || a->ids);
        return;
    }
    require(json_is_array(a->messages));
    aff_chat_prompt p = {0};
    aff_error err = {0};
    const aff_status s = aff__ask_render(a, AFF_CHAT_AUTO, &p, &err);
    require(s == AFF_OK || (s == AFF_E_INVALID && err.msg[0]));
    if (s == AFF_OK) require(aff__utf8_valid_prefix((const uint8_t *)p.text, p.n) == p.n);
    if (s == AFF_OK) aff__chat_prompt_free(&p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    aff_ask a;
    aff_error err = {0};
    if (size < 1) return 0;
    const aff_status s = aff__ask_decode(&a, (aff_dialect)(data[0] & 3), (const char *)data + 1, size - 1, VOCAB, &err);
    if (s == AFF_OK)
        check_accepted(&a);
    else
        require(s == AFF_E_INVALID && err.msg[0]);
    aff__ask_free(&a);
    return 0;
}
