#include "ui/locale.h"
#include <langinfo.h>
#include <locale.h>
#include <string.h>

void aff__use_utf8(void)
{
    setlocale(LC_CTYPE, "");
    if (strcmp(nl_langinfo(CODESET), "UTF-8") != 0) setlocale(LC_CTYPE, "C.UTF-8");
}
